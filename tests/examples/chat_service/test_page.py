"""The page, in a real Chromium."""

import itertools
import re
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, Locator, Page, Request, Route, expect

from tests.examples.served_example import PATIENCE, ServedExample

ANSWERS = "**/v1/chat/completions"


@pytest.fixture
def page(browser: Browser, service: ServedExample) -> Iterator[Page]:
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


def chat_of(page: Page, number: int) -> Locator:
    return page.locator("article").nth(number - 1)


def body_of(request: Request) -> dict[str, Any]:
    body = request.post_data_json
    assert isinstance(body, dict)
    return body


def short(route: Route) -> None:
    """Sends the question on, for a short answer that is always the same."""
    route.continue_(post_data=body_of(route.request) | {"max_tokens": 8, "temperature": 0})


def test_conversations_are_answered_side_by_side(page: Page, complaints: list[str]) -> None:
    page.route(ANSWERS, short)
    page.get_by_role("button", name="Ask all").click()
    chats = page.locator("article")
    expect(chats).to_have_count(4)
    for chat in chats.all():
        expect(chat.locator(".note")).to_have_text(
            re.compile(r"First token after \d+ ms\. 8 tokens, \d+\.\d per second")
        )
        expect(chat.locator(".user")).to_have_count(1)
        expect(chat.get_by_role("button", name="Ask")).to_have_count(1)
        expect(chat.locator("ol")).to_have_attribute("aria-busy", "false")
    first = chats.first
    expect(first.locator(".assistant")).to_have_text("The capital of France is Paris.")

    # The conversation goes on: the answer to the second question knows the first one.
    with page.expect_request(ANSWERS) as asked:
        page.get_by_label("Question 1").fill("And of Italy?")
        page.keyboard.press("Enter")
    roles = [message["role"] for message in body_of(asked.value)["messages"]]
    assert roles == ["user", "assistant", "user"]
    expect(first.locator(".assistant")).to_have_count(2)
    expect(first.locator(".assistant").last).to_contain_text("Rome")
    assert complaints == []


def test_a_long_answer_is_in_the_batch_until_it_is_stopped(
    page: Page, complaints: list[str]
) -> None:
    chat = chat_of(page, 2)
    chat.get_by_role("button", name="Ask").click()
    expect(page.locator("#running")).to_have_text("1")
    expect(chat.locator(".assistant")).not_to_be_empty()
    chat.get_by_role("button", name="Stop").click()
    expect(page.locator("#running")).to_have_text("0")
    expect(page.locator("#waiting")).to_have_text("0")
    written = re.search(r"(\d+) tokens", chat.locator(".note").inner_text())
    assert written is not None
    assert int(written[1]) < 250  # the most that the page asks for
    expect(chat.get_by_role("button", name="Ask")).to_have_count(1)
    expect(chat.locator(".error")).to_have_count(0)
    expect(chat.locator(".assistant")).not_to_be_empty()
    chat.get_by_role("button", name="Clear").click()
    expect(chat.locator("li")).to_have_count(0)
    assert complaints == []


def test_the_batch_is_shown_as_the_service_counts_it(page: Page, complaints: list[str]) -> None:
    numbers = itertools.count(1)

    def counted(route: Route) -> None:
        number = next(numbers)
        counts = {
            "max_batch_size": 16,
            "queued": 7,
            "in_flight": 12,
            "steps": 2 * number,
            "parts": 1_000 * number,
            "batch_sizes": {"4": number, "16": number},
            "compute": {"p50": 0.0312},
        }
        route.fulfill(json=counts)

    page.route("**/batch", counted)
    expect(page.locator("#sizes")).to_have_attribute(
        "aria-label", "The latest steps had 10.0 conversations"
    )
    expect(page.locator("#running")).to_have_text("12")
    expect(page.locator("#waiting")).to_have_text("7")
    expect(page.locator("#step")).to_have_text("31")
    expect(page.locator("#rate")).to_have_text(re.compile(r"[1-9]\d+"))
    assert complaints == []


def test_what_is_cleared_is_not_answered(page: Page, complaints: list[str]) -> None:
    chat = chat_of(page, 2)
    chat.get_by_role("button", name="Ask").click()
    expect(chat.locator(".assistant")).not_to_be_empty()
    chat.get_by_role("button", name="Clear").click()
    expect(chat.get_by_role("button", name="Ask")).to_have_count(1)
    expect(chat.locator("li")).to_have_count(0)
    page.route(ANSWERS, short)
    with page.expect_request(ANSWERS) as asked:
        page.get_by_label("Question 2").fill("Who are you?")
        page.keyboard.press("Enter")
    assert len(body_of(asked.value)["messages"]) == 1
    expect(chat.get_by_role("button", name="Ask")).to_have_count(1)
    assert complaints == []


def test_errors_are_said(page: Page) -> None:
    chat = chat_of(page, 1)
    ask = chat.get_by_role("button", name="Ask")
    error = {"message": "the queue is full"}
    page.route(ANSWERS, lambda route: route.fulfill(status=503, json={"error": error}))
    ask.click()
    expect(chat.locator(".error")).to_have_text("503: the queue is full")

    begun = 'data: {"choices": [{"delta": {"content": "So"}}]}\n\n'
    for body, message in (
        (begun + 'data: {"error": {"message": "no result in 120 s"}}\n\n', "no result in 120 s"),
        (begun, "The answer was cut off"),
    ):
        page.route(ANSWERS, partial(Route.fulfill, body=body))
        page.get_by_label("Question 1").fill("Why?")
        ask.click()
        expect(chat.locator(".error").last).to_have_text(message)
        expect(chat.locator(".assistant").last).to_have_text("So")

    page.route("**/batch", lambda route: route.abort())
    expect(page.locator("#trouble")).to_have_text("The service does not answer")
    page.unroute("**/batch")
    expect(page.locator("#trouble")).to_be_empty()


def test_texts_are_shown_as_text(page: Page, complaints: list[str]) -> None:
    html = "<img src=x onerror=console.error('run')><b>bold</b>"
    chunk = 'data: {"choices": [{"delta": {"content": "<b>bold</b>"}}]}\n\ndata: [DONE]\n\n'
    page.route(ANSWERS, lambda route: route.fulfill(body=chunk))
    page.get_by_label("Question 1").fill(html)
    page.keyboard.press("Enter")
    expect(page.locator(".user")).to_have_text(html)
    expect(page.locator(".assistant")).to_have_text("<b>bold</b>")
    assert page.locator("article b, article img").count() == 0
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone(
    browser: Browser, service: ServedExample, scheme: Literal["light", "dark"]
) -> None:
    page = browser.new_page(viewport={"width": 360, "height": 640}, color_scheme=scheme)
    page.goto(service.url)
    expect(page.locator("#running")).to_have_text("0")
    assert page.evaluate("document.documentElement.scrollWidth") == 360
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 3 * 128) == (scheme == "dark")
    page.close()


def test_it_says_how_a_program_calls_it(page: Page, service: ServedExample) -> None:
    expect(page.locator("#program")).to_contain_text(f'OpenAI(base_url="{service.url}/v1"')
    expect(page.locator("#command")).to_contain_text(f"curl {service.url}/v1/completions")


def test_every_field_has_a_name_and_nothing_comes_from_elsewhere(
    browser: Browser, service: ServedExample
) -> None:
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("/docs", "/"):
        page.goto(service.url + path)
    expect(page).to_have_title("Chats in one batch")
    assert [url for url in asked if not url.startswith((service.url, "data:"))] == []
    assert page.locator("html").get_attribute("lang") == "en"
    expect(page.get_by_role("main")).to_have_count(1)
    expect(page.get_by_role("heading", level=1)).to_have_count(1)
    expect(page.get_by_role("log")).to_have_count(4)
    for number in range(1, 5):
        expect(page.get_by_label(f"Question {number}")).to_have_count(1)
        expect(page.get_by_role("log", name=f"Conversation {number}")).to_have_count(1)
    page.close()
