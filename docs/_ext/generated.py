"""What is made when the pages are built, so that no number and no table is typed by hand.

`<!-- generated: NAME -->` is replaced by what `MAKERS[NAME]` makes, and `<!-- printed -->` by what the Python block
above it prints. The Python blocks of a page run in order, in one namespace; one under `<!-- not run: why -->` does not.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import re
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path

from measured import performance, where_it_ran
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.ext.napoleon import GoogleDocstring

from mla import registry
from mla.cli.capability_table import capability_table
from mla.cli.tables import Table, markdown
from mla.dispatch import AUTO_ORDER
from mla.testing import PROPERTIES

MARK = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.M)
STEP = re.compile(r"^(?:<!-- not run: (?P<why>.*) -->\n)?```python\n(?P<code>.*?)^```$|^<!-- printed -->$", re.M | re.S)


BESIDE = re.compile(r"\[([^\[\]]+)\]\((?:\./)?([\w-]+)\.ipynb\)")
"""A link from a notebook to another."""


def run_blocks(text: str, name: str) -> str:
    """The page with each `<!-- printed -->` replaced by what was printed since the last one."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = io.StringIO()

    def step(match: re.Match[str]) -> str:
        if match["code"] is None:
            shown = printed.getvalue()
            printed.seek(0)
            printed.truncate()
            return f"```text\n{shown}```"
        code = compile(match["code"], name, "exec")
        if match["why"] is None:
            try:
                with contextlib.redirect_stdout(printed):
                    exec(code, namespace)
            except Exception as error:
                raise ExtensionError(f"a Python block of {name} raised {type(error).__name__}: {error}") from error
        return match[0].partition(" -->\n")[2] if match["why"] else match[0]

    return STEP.sub(step, text)


def capabilities(app: Sphinx) -> str:
    return markdown(capability_table())


def auto_order(app: Sphinx) -> str:
    """The table of backend="auto": chips with one order share a row."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for (major, minor), order in AUTO_ORDER.items():
        rows.setdefault(order, []).append(f"sm_{major}{minor}")
    cells = [(", ".join(chips), ", ".join(f"`{name}`" for name in order)) for order, chips in rows.items()]
    return markdown(Table("", ("device", "tried in this order"), [*cells, ("a CPU and anything else", "`reference`")]))


def signatures(app: Sphinx) -> str:
    """What each released signature has that the one before it does not have, and where."""
    data = json.loads(Path(app.srcdir, "_ext", "flashinfer_signatures.json").read_text())
    rows, before = [], list[str]()
    for row in data["rows"]:
        names = row["after_max_seq_len"]
        new = [name for name in names if name not in before]
        places = [
            f"`{name}`" + (f" before `{names[names.index(name) + 1]}`" if inserted(name, names, before) else "")
            for name in new
        ]
        rows.append((row["versions"], str(9 + len(names)), ", ".join(places)))
        before = names
    return markdown(Table("", ("FlashInfer", "parameters", "new behind `max_seq_len`"), rows))


def inserted(name: str, names: list[str], before: list[str]) -> bool:
    """Whether an older parameter follows at once, so that its position moved."""
    after = names[names.index(name) + 1 :][:1]
    return bool(before) and after != [] and after[0] in before


def toctree(names: Iterable[str], caption: str = "") -> str:
    head = f":caption: {caption}\n" if caption else ""
    return "```{toctree}\n:maxdepth: 1\n" + head + "\n" + "".join(f"{name}\n" for name in names) + "```"


def ahead_of_time(app: Sphinx) -> str:
    pages = sorted(name for name in app.env.found_docs if name.startswith("aot_"))
    if not pages:
        return "The tables of machine code are not in this tree yet."
    return toctree(pages)


def backend_pages(app: Sphinx) -> str:
    """The page that a backend has of its own, where it has one."""
    names = [name.replace("-", "_") for name in registry.BUILT_IN]
    found = [name for name in names if name in app.env.found_docs]
    return toctree(found) if found else ""


def other_pages(app: Sphinx) -> str:
    """Pages of this folder that no list names: they must not be lost."""
    text = Path(app.srcdir, "index.md").read_text()
    listed = {name for block in re.findall(r"^```{toctree}\n(.*?)^```", text, re.M | re.S) for name in block.split()}
    listed |= {"index", *(name.replace("-", "_") for name in registry.BUILT_IN)}
    others = sorted(name for name in app.env.found_docs if not re.match("aot_|notebooks/", name) and name not in listed)
    return toctree(others, "More") if others else ""


def notebooks(app: Sphinx) -> str:
    found = sorted(name for name in app.env.found_docs if name.startswith("notebooks/"))
    return toctree(found, "Notebooks") if found else ""


def properties(app: Sphinx) -> str:
    """What `judge_kernel` asks, in its order."""
    rows = [(one.name, one.sentence, str(len(one.cases)), "yes" if one.gpu_only else "") for one in PROPERTIES]
    return markdown(Table("", ("property", "what holds", "cases", "needs a GPU"), rows))


def backends_function(app: Sphinx) -> str:
    """`mla.backends` is a package that can be called, which autodoc cannot know."""
    text = str(GoogleDocstring(inspect.cleandoc(registry.backends.__doc__ or ""), app.config))
    head = ".. py:function:: mla.backends() -> dict[str, mla.BackendInfo]"
    return f"```{{eval-rst}}\n{head}\n\n{textwrap.indent(text, '   ')}\n```"


MAKERS: dict[str, Callable[[Sphinx], str]] = {
    "backends-function": backends_function,
    "capabilities": capabilities,
    "auto-order": auto_order,
    "signatures": signatures,
    "ahead-of-time": ahead_of_time,
    "backend-pages": backend_pages,
    "notebooks": notebooks,
    "other-pages": other_pages,
    "properties": properties,
    "performance": performance,
    "where-it-ran": where_it_ran,
}


def beside(app: Sphinx, match: re.Match[str]) -> str:
    """Notebooks are read through a link, docs/notebooks, which a path would resolve to a place outside the site."""
    name = f"notebooks/{match[2]}"
    return f"{{doc}}`{match[1]} </{name}>`" if name in app.env.found_docs else match[0]


def fill(app: Sphinx, docname: str, content: list[str]) -> None:
    """Replace the marks of a page."""
    if docname.startswith("notebooks/"):
        content[0] = BESIDE.sub(lambda match: beside(app, match), content[0])
        return
    text = run_blocks(content[0], docname)
    content[0] = MARK.sub(lambda match: MAKERS[match[1]](app), text)


def marked(app: Sphinx, env: object, added: set[str], changed: set[str], removed: set[str]) -> list[str]:
    """Pages with marks are always made anew: what they show may have changed where Sphinx does not look."""
    pages = Path(app.srcdir).glob("*.md")
    return [path.stem for path in pages if re.search("<!-- (generated: .*|printed) -->", path.read_text())]


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", fill)
    app.connect("env-get-outdated", marked)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
