"""How Sphinx builds the site: `make docs`.

Pages are Markdown, as on GitHub. The API comes from the docstrings. The built site is a folder of
files that loads nothing from elsewhere: it works from a disk.
"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Generic

import mermaidx
from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.ext.autosummary import import_by_name
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective
from sphinx.util.nodes import make_refnode

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiopar

SUBMODULES = ("asgi", "data", "fastapi", "nn", "ray", "serve", "testing")
MODULES = [aiopar, *(import_module(f"aiopar.{name}") for name in SUBMODULES)]
PUBLIC = {name: getattr(module, name) for module in MODULES for name in module.__all__}

project = author = "aiopar"
version = release = aiopar.__version__
html_title = f"{project} {version}"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
nitpicky = True
# Type variables, and private types in signatures. All other names of aiopar must be public ones.
nitpick_ignore_regex = [("py:class", r"aiopar\..*\b_.*")]

# Code has a button that copies it, without prompts and outputs. What programs print has none.
copybutton_prompt_text = r">>> |\.\.\. "
copybutton_prompt_is_regexp = True
copybutton_selector = "div:not(.highlight-text) > div.highlight > pre"

# Markdown: anchors as GitHub makes them, and its diagrams.
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]

# Docstrings: single backticks are code, and a link if they name something of aiopar.
default_role = "py:obj"
napoleon_use_rtype = False
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_typehints_format = "short"
autodoc_default_options = {
    "members": True,
    "special-members": "__call__",
    # Members of private base classes are shown too, but not those of these:
    "inherited-members": "BaseException, BaseModel, DataParallel, DeviceExecutor, Executor, Future,"
    " Module, StrEnum, tuple",
}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"  # furo's own underlines names of modules, as if they were links
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).with_name("search_scorer.js"))
html_favicon = "_static/favicon.svg"
html_copy_source = html_show_sphinx = html_show_copyright = False


# Close together, so that a whole diagram can be read on a phone.
MERMAID = {
    "themeVariables": {"edgeLabelBackground": "#fff"},  # the page shows behind labels of lines
    "flowchart": {"nodeSpacing": 20, "rankSpacing": 30, "padding": 8, "diagramPadding": 4},
    "sequence": {"actorMargin": 16, "width": 100, "diagramMarginX": 4, "messageMargin": 28},
}


class Mermaid(SphinxDirective):
    """A diagram. It is drawn while the site is built: no script draws it in the browser."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        try:
            svg = mermaidx.render("\n".join(self.content), config=MERMAID).svg()
        except RuntimeError as error:
            raise self.error(str(error)) from error  # names the page and the line
        svg = svg.replace("my-svg", f"diagram-{self.lineno}")  # ids are unique on a page
        return [nodes.raw("", f'<div class="diagram">{svg}</div>', format="html")]


class PublicNames(SphinxDirective):
    """One public name per line: a table of their first sentences, then all of their docstrings."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        names = list(self.content)
        table = [".. autosummary::", "   :nosignatures:", "", *(f"   {name}" for name in names), ""]
        entries = [entry for name in names for entry in documented(name)]
        return self.parse_text_to_nodes("\n".join(["```{eval-rst}", *table, *entries, "```"]))


def documented(name: str) -> list[str]:
    """The directive of autodoc for a public name. Bases are shown if there are any."""
    found = import_by_name(name)[1]
    entry = [f".. auto{kind_of(found)}:: {name}"]
    if isinstance(found, type) and public_bases(found):
        entry += ["   :show-inheritance:", ""]
    return entry


def kind_of(found: object) -> str:
    """What Sphinx calls this kind of object."""
    if isinstance(found, type):
        return "exception" if issubclass(found, BaseException) else "class"
    return "function" if callable(found) else "data"


def link_name(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.TextElement
) -> nodes.Element | None:
    """Link a name as docstrings and signatures have it: `Batcher.stream`, `aiopar.nn._x.Split`.

    Code and names of other projects stay without a link. A name in `aiopar` that is not public is
    left to `nitpicky`.
    """
    if node["refdomain"] != "py":
        return None
    name = re.sub(r"^aiopar\.([a-z_]+\.)*", "", node["reftarget"])
    for module in MODULES:
        for found, entry, *_ in env.domains.python_domain.find_obj(
            env, module.__name__, "", name, None
        ):
            return make_refnode(app.builder, node["refdoc"], entry[0], entry[1], shown, found)
    return None if re.fullmatch(r"aiopar\.[\w.]+", node["reftarget"]) else shown


def hide_overloads(app: Sphinx) -> None:
    """Show the signatures of the functions themselves: overloads are for type checkers."""
    for name in [name for name in sys.modules if name.startswith("aiopar.")]:
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        analyzer.overloads.clear()


def link_code(app: Sphinx, doctree: nodes.document) -> None:
    """Link code in pages that names a class (`Batcher`, `Batcher.stream`) or an `aiopar.name`."""
    for code in list(doctree.findall(nodes.literal)):
        found = re.fullmatch(r"aiopar\.(\w+)|([A-Z]\w+)(\.\w+)?", code.astext())
        if not found or not PUBLIC.get(found[1] or found[2]):
            continue
        if isinstance(code.parent, nodes.paragraph | nodes.entry | nodes.strong):
            ref = {"refdomain": "py", "reftype": "obj", "reftarget": code.astext()}
            code.replace_self(pending_xref("", code.deepcopy(), refdoc=app.env.docname, **ref))


def public_bases(kind: type) -> list[type]:
    """The bases of a class; in place of a private base class, its bases."""

    def shown(base: type) -> list[type]:
        if base in PUBLIC.values() or not base.__module__.startswith("aiopar"):
            return [base]
        return [found for above in base.__bases__ for found in shown(above)]

    found = [base for above in kind.__bases__ for base in shown(above)]
    return [base for base in dict.fromkeys(found) if base not in (object, Generic)]


def show_public_bases(app: Sphinx, name: str, obj: type, options: Any, bases: list[Any]) -> None:
    bases[:] = public_bases(obj)


def setup(app: Sphinx) -> None:
    app.add_directive("mermaid", Mermaid)
    app.add_directive("public-names", PublicNames)
    app.connect("builder-inited", hide_overloads)
    app.connect("doctree-read", link_code)
    app.connect("missing-reference", link_name)
    app.connect("autodoc-process-bases", show_public_bases)
