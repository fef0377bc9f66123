"""The site, built as `make docs` does: its links as text, the rest in a real Chromium."""

import html
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal
from urllib.parse import unquote, urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect

import aiopar

ROOT = Path(__file__).resolve().parent.parent
PHONE_WIDTH = 390


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the built site; a warning is an error."""
    target = tmp_path_factory.mktemp("site")
    options = ["--fail-on-warning", "--keep-going", "--quiet", "-d", str(target / ".doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, "docs", str(target / "html")]
    built = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, check=False)
    assert built.returncode == 0, built.stderr
    return target / "html"


def _pages(site: Path) -> list[Path]:
    """All pages but those that show the source of a module."""
    return [page for page in sorted(site.rglob("*.html")) if "_modules" not in page.parts]


@cache
def _attributes(page: Path, pattern: str) -> list[str]:
    """The values of the attributes of a page's tags that match `tag attribute`."""
    tag, attribute = pattern.split()
    found = re.findall(rf'<(?:{tag})\b[^>]*?\s(?:{attribute})="([^"]*)"', page.read_text())
    return [html.unescape(value) for value in found]


def _broken_links(page: Path) -> Iterator[str]:
    for link in _attributes(page, "a href"):
        url = urlsplit(link)
        if url.scheme:
            continue
        target = (page.parent / unquote(url.path)).resolve() if url.path else page
        anchor = unquote(url.fragment)
        if not target.is_file() or (anchor and anchor not in _attributes(target, r"\w+ id")):
            yield f"{page.name}: {link}"


def test_every_link_and_anchor_of_the_site_resolves(site: Path) -> None:
    pages = _pages(site)
    assert len(pages) > 30
    assert [link for page in pages for link in _broken_links(page)] == []


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    loads = "link|script|img|object|iframe src|href|data"
    loaded = {url for page in site.rglob("*.html") for url in _attributes(page, loads)}
    assert any(url.startswith("_static/site.css") for url in loaded)
    assert [url for url in loaded if urlsplit(url).netloc] == []


def test_every_guide_has_a_picture(site: Path) -> None:
    guides = {page.stem for page in (ROOT / "docs" / "guides").glob("*.md")}
    drawn = {
        page.stem for page in (site / "guides").glob("*.html") if "<svg id=" in page.read_text()
    }
    assert guides == drawn


def test_public_names_are_linked_to_their_source(site: Path) -> None:
    source = "../_modules/aiopar/serve/_batcher.html#Batcher"
    assert source in _attributes(site / "api" / "batcher.html", "a href")


def test_classes_in_a_guide_are_linked_to_the_api(site: Path) -> None:
    links = _attributes(site / "guides" / "serving.html", "a href")
    assert {"../api/batcher.html#aiopar.Batcher", "../api/errors.html#aiopar.InvalidInput"} <= {
        *links
    }


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    page = browser.new_page()
    yield page
    page.close()


def test_search_finds_an_argument_of_a_class(page: Page, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    page.get_by_role("textbox", name="Search").fill("max_batch_size")
    page.keyboard.press("Enter")
    results = page.locator("#search-results li")
    expect(results.filter(has_text="Tuning batching")).not_to_have_count(0)
    results.get_by_role("link", name="Batcher", exact=True).click()
    expect(page.locator("[id='aiopar.Batcher']")).to_contain_text("max_batch_size")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("503", "errors"),
        ("499", "errors"),
        ("queue full", "guides/overload"),
        ("kill -9", "guides/resume"),
        ("resume", "guides/resume"),
        ("Overloaded", "errors"),
        ("security", "security"),
        ("pickle", "security"),
        ("shared memory", "footprint"),
        ("progress bar", "guides/streaming_inference"),
        ("why requests fail", "guides/operations"),
    ],
)
def test_search_puts_the_page_first_or_second(
    page: Page, site: Path, words: str, name: str
) -> None:
    page.goto(f"{(site / 'search.html').as_uri()}?q={words}")
    found = page.locator(f"#search-results li:nth-child(-n+2) a[href^='{name}.html']")
    expect(found).not_to_have_count(0)


def _wider_than_their_box(page: Page, site: Path, width: int, selector: str) -> list[str]:
    """The elements of all pages that do not show all that they have, in a window this wide."""
    page.set_viewport_size({"width": width, "height": 844})
    found = []
    for file in _pages(site):
        page.goto(file.as_uri())
        elements = page.locator(selector).evaluate_all(
            "all => all.filter(one => one.scrollWidth > one.clientWidth)"
            ".map(one => one.textContent.trim().slice(0, 60))"
        )
        found += [f"{file.relative_to(site)}: {text}" for text in elements]
    return found


def test_no_page_and_no_diagram_is_wider_than_a_phone(page: Page, site: Path) -> None:
    assert _wider_than_their_box(page, site, PHONE_WIDTH, "html, .diagram") == []


@pytest.mark.parametrize(("width", "name"), [(PHONE_WIDTH, "aiopar_narrow"), (1280, "aiopar")])
def test_the_diagram_of_the_home_page_has_the_shape_of_the_window(
    page: Page, site: Path, width: int, name: str
) -> None:
    page.set_viewport_size({"width": width, "height": 844})
    page.goto((site / "index.html").as_uri())
    shown = page.get_by_role("img", name="Tasks await a batcher")
    expect(shown).to_have_js_property("currentSrc", (site / "_static" / f"{name}.svg").as_uri())
    assert shown.evaluate("image => image.naturalWidth") > 0


def test_code_fits_into_its_box(page: Page, site: Path) -> None:
    assert _wider_than_their_box(page, site, 1280, "pre") == []


def test_a_button_copies_code_without_prompts(page: Page, site: Path) -> None:
    page.goto((site / "api" / "testing.html").as_uri())
    example = page.locator(".doctest").first
    example.hover()
    example.get_by_role("button", name="Copy").click()
    search = page.get_by_role("textbox", name="Search")
    search.press("Control+V")
    expect(search).to_have_value(re.compile("^import "))
    assert ">>>" not in search.input_value()


def test_no_class_has_an_empty_list_of_bases(site: Path) -> None:
    pages = [page.read_text() for page in (site / "api").glob("*.html")]
    assert any("<p>Bases: " in page for page in pages)
    assert not any("<p>Bases:</p>" in page for page in pages)


def test_pages_show_the_version_and_an_icon(page: Page, site: Path) -> None:
    page.goto((site / "index.html").as_uri())
    expect(page.locator(".sidebar-brand-text")).to_have_text(f"aiopar {aiopar.__version__}")
    links = _attributes(site / "index.html", "link href")
    [icon] = [link for link in links if "favicon" in link]
    assert (site / icon).is_file()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_plot_of_the_benchmarks_is_as_dark_as_the_page(
    page: Page, site: Path, scheme: Literal["light", "dark"]
) -> None:
    page.emulate_media(color_scheme=scheme)
    page.goto((site / "_images" / "benchmarks.svg").as_uri())
    paper = page.locator("#patch_1 path")
    expect(paper).to_have_css(
        "fill", {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]
    )


def test_a_dark_page_is_dark_and_so_are_its_diagrams(page: Page, site: Path) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto((site / "design.html").as_uri())
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(map(int, background.removeprefix("rgb(").removesuffix(")").split(","))) < 60
    expect(page.locator(".diagram svg").first).to_have_css(
        "filter", "invert(0.93) hue-rotate(180deg)"
    )
