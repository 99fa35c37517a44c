"""Sphinx: MyST pages in the furo theme. `make docs` treats warnings as errors."""

from importlib.metadata import version as version_of

project = "lazymerge"
author = "The lazymerge authors"
copyright = author
version = release = version_of("lazymerge")

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3  # so that pages can link to headings

exclude_patterns = ["_build"]
nitpicky = True  # a reference that leads nowhere is an error

html_theme = "furo"
html_title = f"lazymerge {release}"
