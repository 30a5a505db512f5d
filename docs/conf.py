"""How Sphinx makes the site of these pages and of the docstrings: `make docs`."""

import re
import sys
import tomllib
from pathlib import Path
from unittest.mock import MagicMock

from docutils import nodes

import blockcell

# Documenting `blockcell.torch` takes no PyTorch, only something to derive its classes from.
torch = MagicMock()
torch.nn.Module, torch.nn.modules.rnn.RNNBase, torch.nn.modules.rnn.RNNCellBase, torch.autograd.Function = (
    type(name, (), {}) for name in ("Module", "RNNBase", "RNNCellBase", "Function")
)
sys.modules |= {"torch": torch, "torch.autograd": torch.autograd, "torch.fx": torch.fx, "torch.nn": torch.nn}
sys.modules |= {"torch.nn.modules.rnn": torch.nn.modules.rnn, "torch.nn.utils.rnn": torch.nn.utils.rnn}
sys.modules |= {"torch.overrides": torch.overrides}
sys.modules["keras"] = MagicMock(__version__="3.0")  # nor `blockcell.keras` Keras

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]

project = "blockcell"
author = copyright = "the blockcell developers"
version = release = blockcell.__version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_templates"]
suppress_warnings = ["config.cache"]
default_role = "autolink"  # single backticks in docstrings: a link if it is a name, else italic, such as an argument

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
copybutton_exclude = ".linenos, .gp, .go"

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings have them, in words
autosummary_generate_overwrite = True
numpydoc_show_class_members = False  # the template of classes does that
numpydoc_xref_param_type = False

templates_path = ["_templates"]
html_theme = "pydata_sphinx_theme"
html_title = f"blockcell {version}"
html_static_path = ["_static"]
html_css_files = ["blockcell.css"]
html_sidebars = {name: [] for name in ("index", "install", "tutorial")}  # they are no section
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "logo": {"text": "blockcell"},
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "footer_start": ["copyright"],
    "footer_end": [],
    "icon_links": [
        {"name": name, "url": url, "icon": "fa-solid fa-code-branch"} for name, url in PROJECT.get("urls", {}).items()
    ],
}


def setup(app):
    # Fields of named tuples, of which Python has only to say that they are fields; the `self` of compiled methods.
    field = type(blockcell.LSTMState.cs)
    app.connect("autodoc-skip-member", lambda app, kind, name, member, skip, options: isinstance(member, field) or None)
    app.connect("autodoc-process-signature", without_self)
    app.connect("doctree-resolved", name_pages)
    app.connect("doctree-resolved", link_names)


def without_self(app, kind, name, member, options, signature, returned):
    """Return a signature without `self`, and the annotation of the result as it was."""
    return (signature or "").replace("(self, ", "(").replace("(self)", "()") or None, returned


def name_pages(app, doctree, docname):
    """Show the title of a page in links whose text is a file's name, such as `quantization.md`."""
    for link in doctree.findall(nodes.reference):
        file = re.fullmatch(r"(?:docs/)?([\w/-]+)\.md", link.astext())
        names = [name for name in app.env.titles if file and f"/{name}".lower().endswith(f"/{file[1]}".lower())]
        if names:
            link.clear()
            link += nodes.inline("", app.env.titles[min(names, key=len)].astext())


def link_names(app, doctree, docname):
    """Link names with a dot in pages, such as `optim.adam` or `blockcell.load(path)`, to the reference."""
    known = app.env.domains["py"].objects
    for code in [*doctree.findall(nodes.literal)]:
        name = re.sub(r"\(.*", "", code.astext())
        target = next((full for full in (name, f"blockcell.{name}") if "." in name and full in known), None)
        if target and not isinstance(code.parent, nodes.reference | nodes.title):
            address = app.builder.get_relative_uri(docname, known[target].docname) + f"#{known[target].node_id}"
            link = nodes.reference("", "", internal=True, refuri=address)
            code.replace_self(link)
            link += code
