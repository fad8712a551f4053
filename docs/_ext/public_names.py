"""A type in a signature carries the module that defines it; readers are led to `mla.NAME` or `mla.testing.NAME`."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject

PUBLIC = ("mla", "mla.testing")
ALIASES = {"Scale": "float | torch.Tensor", "Sinks": "torch.Tensor | Sequence[torch.Tensor]"}


def lead_to_the_public_name(app: Sphinx, env: Any, node: Any, content: nodes.TextElement) -> nodes.reference | None:
    if node.get("refdomain") != "py" or not node["reftarget"].startswith("mla."):
        return None
    leaf = node["reftarget"].rpartition(".")[2]
    domain = env.get_domain("py")
    for package in PUBLIC:
        name = f"{package}.{leaf}"
        if name in domain.objects:
            found: nodes.reference | None = domain.resolve_xref(
                env, node["refdoc"], app.builder, "obj", name, node, content
            )
            return found
    return None


def spell_out(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, result: str | None
) -> tuple[str | None, str | None]:
    """`warmup` and `explain` have the call's signature as text, with names that only the code knows."""
    for alias, meaning in ALIASES.items():
        signature = signature and re.sub(rf"\b{alias}\b", meaning, signature)
    return signature, result


def setup(app: Sphinx) -> dict[str, bool]:
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("missing-reference", lead_to_the_public_name)
    app.connect("autodoc-process-signature", spell_out)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
