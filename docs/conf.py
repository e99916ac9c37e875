"""Sphinx: ``sphinx-build -W --keep-going -b html docs docs/_build/html`` from the root of the repository."""

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.append(str(Path(__file__).parent))  # which has `mathml`

project = "lightning_spectral"
copyright = "the lightning_spectral authors, Apache-2.0"
release = version = installed_version("lightning-spectral")

extensions = [
    "mathml",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = [  # besides what is built: pages that others include
    "_build",
    "*_tables.md",
    "paper/*.md",
]
default_role = "py:obj"  # a name in single backticks links to its entry in the reference, if it has one

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_default_options = {"member-order": "bysource"}
autodoc_mock_imports = ["flwr"]  # an extra that needs an environment of its own
autodoc_inherit_docstrings = False  # Lightning's docstrings are Lightning's
autodoc_typehints_format = "short"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = (
    True  # attributes of a dataclass are documented once, in its docstring
)
napoleon_use_rtype = False
napoleon_custom_sections = ["Reference", "Shape"]

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = "lightning_spectral"
