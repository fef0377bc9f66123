"""The page, in a real Chromium."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from .service import PATIENCE, Service

pytestmark = pytest.mark.timeout(140)


@pytest.fixture
def page(browser: Browser, service: Service) -> Iterator[Page]:
    page = browser.new_page()
    page.set_default_timeout(PATIENCE * 1000)
    page.goto(service.url)
    yield page
    page.close()


@pytest.fixture
def complaints(page: Page) -> list[str]:
    """What the browser says on its console, and errors that nobody caught."""
    said: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.reload()
    return said


def test_search_compare_and_stream(page: Page, complaints: list[str]) -> None:
    expect(page).to_have_title("Sentence embeddings")
    page.get_by_label("A question").fill("Which error is raised when a name is not found?")
    page.get_by_role("button", name="Search").click()
    hits = page.locator("#hits > li")
    expect(hits).to_have_count(5)
    # In every version of Python whose documentation this is.
    expect(hits.first).to_contain_text("UnboundLocalError")

    page.get_by_label("Sentences, one per line").fill("A kitten rests on a rug.\n\nShares fell.\n")
    page.get_by_role("button", name="Compare").click()
    scores = page.locator("#scores > li")
    expect(scores).to_have_count(2)
    expect(scores.nth(1)).to_contain_text("Shares fell.")
    near, far = (float(text) for text in page.locator("#scores b").all_inner_texts())
    assert near > 0.5 > far

    page.get_by_role("button", name="Embed the lines above").click()
    vectors = page.locator("#vectors > li")
    expect(vectors).to_have_count(2)
    expect(vectors.first).to_contain_text("A kitten rests on a rug.")
    expect(vectors.first).to_contain_text("(384)")
    assert complaints == []


def test_a_form_sent_again_shows_the_last_answer_alone(page: Page, complaints: list[str]) -> None:
    page.get_by_label("Sentences, one per line").fill("\n".join(f"line {n}" for n in range(200)))
    page.get_by_role("button", name="Embed the lines above").click()
    page.get_by_label("Sentences, one per line").fill("just this")
    page.get_by_role("button", name="Embed the lines above").click()
    expect(page.locator("#vectors")).to_have_attribute("aria-busy", "false")
    expect(page.locator("#vectors > li")).to_have_count(1)
    expect(page.locator("#vectors > li")).to_contain_text("just this")
    assert complaints == []


def test_what_is_refused_is_said(page: Page) -> None:
    page.get_by_label("A question").fill("x" * 10_001)
    with page.expect_console_message() as said:  # the browser's own, of every such status
        page.get_by_role("button", name="Search").click()
    assert "422" in said.value.text
    expect(page.locator("#hits > .error")).to_have_text(
        "422: String should have at most 10000 characters"
    )
    page.get_by_label("A question").fill("What is a dictionary?")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#hits > li")).to_have_count(5)


def test_errors_of_others_and_late_ones_are_said_too(page: Page) -> None:
    page.route("**/search", lambda route: route.fulfill(status=502, body="<h1>Bad Gateway</h1>"))
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#hits > .error")).to_have_text("502: Bad Gateway")

    lines = '{"index": 0, "embedding": [1, 2, 3, 4]}\n{"detail": "no result in 30 s"}\n'
    page.route("**/stream", lambda route: route.fulfill(body=lines))
    page.get_by_role("button", name="Embed the lines above").click()
    expect(page.locator("#vectors > li")).to_have_count(2)
    expect(page.locator("#vectors > .error")).to_have_text("no result in 30 s")


def test_nothing_is_sent_for_a_field_that_is_empty(page: Page, complaints: list[str]) -> None:
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.get_by_label("A question").fill("")
    page.get_by_role("button", name="Search").click()
    assert page.locator("#query:invalid").count() == 1
    assert requests == complaints == []


def test_texts_are_shown_as_text(page: Page, complaints: list[str]) -> None:
    html = "<img src=x onerror=console.error('run')><b>bold</b>"
    page.get_by_label("Sentences, one per line").fill(html)
    page.get_by_role("button", name="Compare").click()
    expect(page.locator("#scores > li")).to_contain_text(html)
    assert page.locator("#scores img").count() == 0
    assert complaints == []


def test_scripts_that_are_not_the_pages_own_do_not_run(page: Page) -> None:
    with page.expect_console_message() as said:
        page.evaluate(
            """() => {
                const script = document.createElement("script");
                script.textContent = "document.title = 'taken over'";
                document.body.append(script);
            }"""
        )
    assert "Content Security Policy" in said.value.text
    expect(page).to_have_title("Sentence embeddings")


def test_every_field_has_a_name_and_every_result_is_announced(page: Page) -> None:
    assert page.locator("html").get_attribute("lang") == "en"
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    for name in ("Search Python's manual", "Compare sentences", "Stream embeddings"):
        expect(page.get_by_role("form", name=name)).to_have_count(1)
    fields = page.locator("input, textarea")
    assert page.get_by_role("textbox").count() == fields.count() == 3
    for field in fields.all():
        assert page.locator(f"label[for={field.get_attribute('id')}]").count() == 1
    assert page.locator("[aria-live=polite]").count() == 3
