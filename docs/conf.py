"""Build these pages as a site: ``make docs``.

The pages are plain Markdown, so that they can be read without the site. What only Sphinx understands is added here
while it reads them: the tree of pages, from the links of the index pages, and the API, from the headings of its page.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

project = "hiddenlab"
author = "the authors of hiddenlab"
html_title = "hiddenlab"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/examples", "results/tables"]

# Anchors as code hosts make them of headings, so that a link is right in both places.
myst_heading_anchors = 4
# Tables that `hiddenlab eval` writes begin with a heading of the second level.
suppress_warnings = ["myst.header"]

html_theme = "furo"
html_copy_source = False
html_show_sphinx = False
# Sphinx would take a block without a language for Python.
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
# Attributes stand in the table of their class alone, also where the class defines them as properties.
napoleon_use_ivar = True
python_maximum_signature_line_length = 88

# Pages whose links are the tree: the sections of the root are captions, the others list what is below them.
INDEXES = ("README", "log/README", "reference/README", "results/README")
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)#\s]+)\.md\)")
API = "reference/api"
ENTRY = re.compile(r"^## `hiddenlab\.(\w+)`\n\n<!-- (class|function|module) -->\n\n.*$", re.M)


def add_tree(app: Sphinx, name: str, source: list[str]) -> None:
    """Append the table of contents of an index page."""
    if name not in INDEXES:
        return
    folder = Path(app.srcdir, name).parent
    placed: set[str] = set()
    sections = re.split(r"^## ", source[0], flags=re.M)
    for section in sections[1:] if name == root_doc else sections:
        caption = section.partition("\n")[0] if name == root_doc else ""
        targets = []
        for target in LINK.findall(section):
            path = (folder / f"{target}.md").resolve()
            inside = path.is_relative_to(app.srcdir) and path.is_file()
            if inside and target not in placed and (name == root_doc or "/" not in target):
                targets.append(target)
                placed.add(target)
        if targets:
            lines = [
                "```{toctree}",
                ":hidden:",
                *([f":caption: {caption}"] if caption else []),
                "",
                *targets,
                "```",
            ]
            source[0] += "\n" + "\n".join(lines) + "\n"


def add_api(app: Sphinx, name: str, source: list[str]) -> None:
    """Put what the code says of each public name below its heading."""
    if name == API:
        source[0] = ENTRY.sub(_directive, source[0])


def _directive(match: re.Match[str]) -> str:
    public, kind = match.groups()
    lines = [f"## `hiddenlab.{public}`", "", "```{eval-rst}", f".. auto{kind}:: hiddenlab.{public}"]
    return "\n".join([*lines, *(["   :members:"] if kind == "class" else []), "```"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the two additions."""
    app.connect("source-read", add_tree)
    app.connect("source-read", add_api)
    return {"parallel_read_safe": True}
