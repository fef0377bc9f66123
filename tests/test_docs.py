"""README and docs/ as text: the index of names is complete, and links lead somewhere.

That their code runs is tested by sybil (conftest.py).
"""

import re
from pathlib import Path

import pytest

import aiopar
import aiopar.asgi
import aiopar.fastapi
import aiopar.nn
import aiopar.ray
import aiopar.testing

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "docs" / "api.md"
MODULES = (
    aiopar,
    aiopar.asgi,
    aiopar.data,
    aiopar.fastapi,
    aiopar.nn,
    aiopar.ray,
    aiopar.serve,
    aiopar.testing,
)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _indexed_names() -> set[str]:
    """The names in the first column of the tables of docs/api.md."""
    rows = re.findall(r"^\| (`[^|]*) \|", API.read_text(), flags=re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _links(page: Path) -> list[tuple[str, Path, str]]:
    """Each relative link of a page: as it is written, its target, and the anchor in it."""
    links = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if not re.match(r"[a-z]+:", link):  # https:, mailto:
            path, _, anchor = link.partition("#")
            links.append((link, (page.parent / path).resolve() if path else page, anchor))
    return links


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_has_every_public_name_and_no_other() -> None:
    public = [set(module.__all__) for module in MODULES]
    assert _indexed_names() == set.union(*public)


def test_nn_exports_nothing_that_the_package_does_not() -> None:
    assert set(aiopar.nn.__all__) <= set(aiopar.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = [
        link
        for link, target, anchor in _links(page)
        if not target.exists() or (anchor and anchor not in _anchors(target))
    ]
    assert not broken


def test_every_page_is_linked_from_another() -> None:
    linked = {target for page in PAGES for _, target, _ in _links(page) if target != page}
    assert set(PAGES) - linked <= {ROOT / "README.md"}
