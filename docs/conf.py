"""Sphinx: Markdown pages and an API reference from docstrings. `make docs` builds it, warnings are errors."""

import importlib.metadata

project = "grass-torch"
author = "the grass-torch authors"
copyright = author
release = importlib.metadata.version(project)

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
]
exclude_patterns = ["build"]
html_theme = "furo"
html_title = project

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Errors", "params_style")]
