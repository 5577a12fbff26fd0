"""Settings of Sphinx for the site. `python docs/site/build.py` copies this file beside the pages."""

from importlib.metadata import version as installed_version

project = "Clearhead"
version = release = installed_version("clearhead")
author = "the authors of Clearhead"
extensions = ["myst_parser"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline", "html_image"]
myst_url_schemes = ("http", "https", "mailto")
root_doc = "docs/index"
exclude_patterns = ["out"]
smartquotes = False  # "cuda" is a string to copy
html_theme = "furo"
html_title = "Clearhead"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False
html_copy_source = False
suppress_warnings = ["myst.header", "misc.highlighting_failure"]  # pages that start below h1; text that looks like code
