"""How the documentation is built: `make docs`, or `sphinx-build -W -n docs build/docs`. Nothing is fetched."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE / "_ext")]
if (ROOT / "mla").is_dir():  # the tree beside these pages, not another version that happens to be installed
    sys.path[:0] = [str(ROOT)]

import mla  # noqa: E402

project = "mla"
author = "The mla authors"
project_copyright = "2026, The mla authors"
version = release = mla.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "myst_nb",
    "generated",  # what stands in _ext: tables and pictures that are made when the pages are built
    "formulas",  # formulas as MathML: no script, no font, no network
    "public_names",  # references to `mla.problem.Problem` lead to `mla.Problem`
]
exclude_patterns = ["_ext", "_static", "notebooks/*.md", "**.ipynb_checkpoints"]
nitpicky = True
# Other projects' names are links only where their inventories can be read, which needs a network: MLA_DOCS_ONLINE=1.
intersphinx_mapping = (
    {"python": ("https://docs.python.org/3", None), "torch": ("https://docs.pytorch.org/docs/stable", None)}
    if os.environ.get("MLA_DOCS_ONLINE") == "1"
    else {}
)
nitpick_ignore_regex = [("py:.*", r"(torch|collections|typing)\..*")]
nitpick_ignore = [("py:class", "mla.testing.emulate.State"), ("py:class", "mla.testing.layouts.Watch")]  # not public

default_role = "code"  # in docstrings `name` is code
maximum_signature_line_length = 80
add_module_names = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_custom_sections = [("Source", "notes")]

myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 4
nb_execution_mode = "off"  # notebooks are shown as they were saved; a test runs them

copybutton_exclude = ".linenos, .gp, .go"
html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"mla {release}"
html_static_path = ["_static"]
html_css_files = ["mla.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#005a9c", "color-brand-content": "#005a9c"},
    "dark_css_variables": {"color-brand-primary": "#7cc4ff", "color-brand-content": "#7cc4ff"},
}
