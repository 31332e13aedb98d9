"""Settings of the documentation site: `make docs` builds it into `build/site`."""

from kvd.version import __version__

project = "kvd"
release = version = __version__
root_doc = "docs/contents"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**", "deploy/README.md"]
exclude_patterns = [".*", "build", "dist", "tests", "kvd", "cli", "benchmarks", "examples"]

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "docs.reference.extension"]
myst_heading_anchors = 4
suppress_warnings = ["ref.python"]  # several classes have a member of the same name: the text then stays without a link
default_role = "py:obj"
autodoc_default_options = {
    "members": True,
    "imported-members": True,
    "inherited-members": (  # of bases other than these
        "object, tuple, str, dict, BaseException, Exception, OSError, KvdError, "
        "Module, Sampler, Optimizer, Schedule, Layer"
    ),
    "show-inheritance": True,
}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True  # one line for each attribute

html_theme = "furo"
html_title = f"kvd {__version__}"
html_extra_path = ["start"]  # leads from the folder to the first page
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
