"""The page, in a real Chromium."""

import re
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from tests.examples.served_example import PATIENCE

from .conftest import corpus
from .service import CORPUS_SIZE, Service


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
    text, module = corpus()[5]
    page.get_by_label("A question").fill(text[:80])
    page.get_by_role("button", name="Search").click()
    hits = page.locator("#hits > li")
    expect(hits).to_have_count(5)
    expect(hits.first).to_contain_text(text)
    expect(hits.first.locator("small")).to_have_text(module)
    # Nobody else is there.
    alone = r"Answered in \d+ ms, alone in its batch, which took \d+ ms\. "
    searched = rf"The nearest of {CORPUS_SIZE} paragraphs:"
    expect(page.locator("#search-cost")).to_have_text(re.compile(alone + searched))

    texts = "Shares fell.\n\nA kitten rests on a rug.\n"
    page.get_by_label("Sentences, one per line").fill(texts)
    page.get_by_role("button", name="Compare").click()
    scores = page.locator("#scores > li")
    expect(scores).to_have_count(2)
    expect(scores.first).to_contain_text("A kitten rests on a rug.")
    near, far = (float(text) for text in page.locator("#scores b").all_inner_texts())
    assert near > 0.5 > far
    batches = re.compile(r"Answered in \d+ ms, in (a batch of 3 texts|2 batches of 2, 1 texts)")
    expect(page.locator("#compare-cost")).to_have_text(batches)

    page.get_by_role("button", name="Embed the lines above").click()
    vectors = page.locator("#vectors > li")
    expect(vectors).to_have_count(2)
    expect(vectors.nth(1)).to_contain_text("A kitten rests on a rug.")
    expect(vectors.first).to_contain_text("(384)")
    assert complaints == []


def _facts(stage: Locator) -> dict[str, float]:
    names, values = stage.locator("dt").all_inner_texts(), stage.locator("dd").all_inner_texts()
    return {name: float(value) for name, value in zip(names, values, strict=True)}


def test_batches_grow_with_the_load(page: Page, complaints: list[str]) -> None:
    page.get_by_role("button", name="Start the load").click()
    expect(page.get_by_role("button", name="Stop the load")).to_have_count(1)
    expect(page.get_by_role("button", name="Start the load")).to_have_count(1)  # it has ended
    result = re.compile(r"With 64 texts at a time the service answers [\d.]+ times as many")
    expect(page.locator("#load-result")).to_have_text(result)
    stages = page.locator("figure")
    expect(stages.locator("figcaption")).to_have_text(
        ["1 text at a time", "4 texts at a time", "16 texts at a time", "64 texts at a time"]
    )
    sizes = [_facts(stage)["texts per batch"] for stage in stages.all()]
    assert sizes[0] == 1 < sizes[2] < sizes[3]
    for stage in stages.all():
        # Two replicas, so that no stage has all of its texts in one batch.
        assert all(value > 0 for value in _facts(stage).values())
        columns = stage.locator(".batch").count()
        told = stage.locator("svg").get_attribute("aria-label") or ""
        assert 0 < columns == len(re.findall(r"\d+", told)) <= 24
    assert complaints == []


def test_a_load_can_be_stopped_and_started_again(page: Page, complaints: list[str]) -> None:
    page.get_by_role("button", name="Start the load").click()
    expect(page.locator("figure").first.locator(".batch")).not_to_have_count(0)
    page.get_by_role("button", name="Stop the load").click()
    expect(page.get_by_role("button", name="Start the load")).to_have_count(1)
    expect(page.locator("#load-result")).to_have_text("")
    expect(page.locator("figure").last.locator(".batch")).to_have_count(0)
    page.get_by_role("button", name="Start the load").click()
    expect(page.locator("figure").nth(1).locator(".batch")).not_to_have_count(0)
    page.get_by_role("button", name="Stop the load").click()
    assert complaints == []


def test_an_error_ends_the_load(page: Page) -> None:
    error = {"error": {"message": "the queue is full"}}
    page.route("**/v1/embeddings", lambda route: route.fulfill(status=503, json=error))
    page.get_by_role("button", name="Start the load").click()
    expect(page.locator("#load-result.error")).to_have_text("503: the queue is full")
    expect(page.get_by_role("button", name="Start the load")).to_have_count(1)


def test_it_says_how_a_program_calls_it(page: Page, service: Service) -> None:
    expect(page.locator("#program")).to_contain_text(f'OpenAI(base_url="{service.url}/v1"')
    expect(page.locator("#command")).to_contain_text(f"curl -i {service.url}/v1/embeddings")


def test_the_api_is_documented_without_the_internet(browser: Browser, service: Service) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{service.url}/docs")
    expect(page.locator(".opblock-summary-path")).not_to_have_count(0)
    expect(page.get_by_text("/v1/embeddings").first).to_be_visible()
    assert [url for url in asked if not url.startswith((service.url, "data:"))] == []
    page.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(
    browser: Browser, service: Service, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    page.goto(service.url)
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#hits > li")).to_have_count(5)
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 128) == (scheme == "dark")
    page.close()


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
    for name in (
        "Search Python's documentation",
        "Watch the batches grow",
        "Compare sentences",
        "Stream embeddings",
    ):
        expect(page.get_by_role("form", name=name)).to_have_count(1)
    fields = page.locator("input, textarea")
    assert page.get_by_role("textbox").count() == fields.count() == 3
    for field in fields.all():
        assert page.locator(f"label[for={field.get_attribute('id')}]").count() == 1
    assert page.locator("[aria-live=polite]").count() == 6
