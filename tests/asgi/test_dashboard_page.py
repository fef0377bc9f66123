"""The live page in a real Chromium: under load, and with samples whose numbers are known."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from .program import serve_under_load
from .served import Served

pytestmark = pytest.mark.timeout(140)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that may load nothing but the service, and whose console stays empty."""
    page = browser.new_page()
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    page.close()
    assert complaints == []


def _card(page: Page, title: str) -> Locator:
    """The first card with this title."""
    heading = page.get_by_role("heading", name=title, exact=True)
    return page.locator(".card").filter(has=heading).first


def _width(page: Page) -> int:
    width: int = page.evaluate("document.documentElement.scrollWidth")
    return width


# Under load.


def test_page_shows_a_service_under_load_until_its_end(browser: Browser) -> None:
    with Served(serve_under_load, drain_delay=3.0) as served:
        url = f"http://127.0.0.1:{served.port}/aiopar"
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        expect(page.get_by_role("status")).to_have_text("Ready")
        for title in ("Answered", "Failed", "Refused"):
            expect(_card(page, title).locator(".value")).to_have_text(re.compile("^[1-9]"))
        expect(page.get_by_role("heading", name="Batcher classifier")).to_be_visible()
        expect(_card(page, "Batch size")).to_contain_text(re.compile(r"\d per batch, at most 8"))
        expect(_card(page, "Queue")).to_contain_text("At 16 it is full")
        expect(_card(page, "Waiting time").locator(".value").last).to_have_text(re.compile("ms$"))
        expect(_card(page, "Requests")).to_contain_text("refused so far: the queue was full")
        expect(page.get_by_role("heading", name="Batcher writer")).to_be_visible()
        expect(_card(page, "Parts")).to_contain_text(re.compile(r"[1-9]\S*/s made"))
        expect(_card(page, "Step size")).to_contain_text(re.compile(r"\d per step, at most 4"))
        for title in ("Time to first part", "Time between parts", "Step time"):
            expect(_card(page, title).locator(".value").last).to_have_text(re.compile("m?s$"))
        for index in range(2):
            expect(_card(page, f"Replica {index}, cpu")).to_contain_text("In service")
            worker = _card(page, f"Worker {index}, cpu")
            expect(worker.locator(".value")).to_have_text(re.compile(r"^[1-9]\d*\s%$"))
        # A line of the chart, and its values under the pointer.
        line = _card(page, "Requests").locator("path.one")
        expect(line).to_have_attribute("d", re.compile("M.*L"))
        _card(page, "Requests").locator("svg").hover()
        expect(_card(page, "Requests").locator(".tip")).to_contain_text("/s answered")
        assert asked == [url, f"{url}/events"]

        served.terminate()
        expect(page.get_by_role("status")).to_have_text("Shutting down")
        expect(page.get_by_role("status")).to_have_text("No connection")
        page.close()
        served.ended()


# With known samples.

_SECONDS = {"p50": 0.0005, "p90": 0.02, "p99": 1.5}


def _batcher(**changes: Any) -> dict[str, Any]:
    return {
        "name": "model",
        "max_batch_size": 32,
        "max_pending": 1000,
        "queued": 0,
        "in_flight": 0,
        "answered": 0,
        "failed": 0,
        "refused": {},
        "batch_sizes": {},
        "queue_wait": _SECONDS,
        "compute": _SECONDS,
    } | changes


def _continuous(**changes: Any) -> dict[str, Any]:
    times = {"first_part": _SECONDS, "between_parts": _SECONDS}
    return _batcher(name="lm") | {"steps": 0, "parts": 0, "preempted": 0} | times | changes


def _replica(index: int, **changes: Any) -> dict[str, Any]:
    counts = {"in_flight": 0, "completed": 0, "failed": 0, "rebuilds": 0, "busy_seconds": 0.0}
    return {"index": index, "device": "cuda:0", "state": "ready"} | counts | changes


def _worker(label: str, **changes: Any) -> dict[str, Any]:
    counts = {"queued": 0, "running": 0, "completed": 0, "failed": 0, "busy_seconds": 0.0}
    return {"label": label, "host": None} | counts | changes


def _sample(at: float, **changes: Any) -> dict[str, Any]:
    return {
        "at": at,
        "pid": 7,
        "unready": None,
        "dead": None,
        "loop_delay": 0.0012,
        "batchers": [],
        "pools": [],
        "stores": [],
        "executors": [],
    } | changes


def _show(page: Page, served: Served, *samples: dict[str, Any]) -> None:
    events = "".join(f"data: {json.dumps(sample)}\n\n" for sample in samples)
    page.route(
        "**/events",
        lambda route: route.fulfill(
            body=f"retry: 1000000\n\n{events}", content_type="text/event-stream"
        ),
    )
    page.goto(f"http://127.0.0.1:{served.port}/aiopar")


def test_rates_are_the_differences_of_two_samples(page: Page, served: Served) -> None:
    before = _batcher(
        answered=100, failed=3, refused={"queue_full": 5}, batch_sizes={"1": 10, "4": 5}
    )
    after = _batcher(
        queued=3,
        in_flight=8,
        answered=160,
        failed=4,
        refused={"queue_full": 9, "max_wait": 1},
        batch_sizes={"1": 20, "4": 15},
    )
    _show(page, served, _sample(10, batchers=[before]), _sample(12, batchers=[after]))
    expect(_card(page, "Answered").locator(".value")).to_have_text("30")
    expect(_card(page, "Failed").locator(".value")).to_have_text("0.5")
    expect(_card(page, "Refused").locator(".value")).to_have_text("2.5")
    expect(_card(page, "Waiting").locator(".value")).to_have_text("3")
    expect(_card(page, "Loop delay").locator(".value").first).to_have_text("1.2 ms")
    assert _card(page, "Requests").locator(".value").all_inner_texts() == ["30/s", "0.5/s", "2.5/s"]
    assert _card(page, "Requests").locator("li").all_inner_texts() == [
        "4 failed so far",
        "9 refused so far: the queue was full",
        "1 refused so far: they would have waited longer than max_wait",
    ]
    assert _card(page, "Queue").locator(".value").all_inner_texts() == ["3", "8"]
    expect(_card(page, "Batch size").locator(".value")).to_have_text("2.5")  # 10 of 1, 10 of 4
    expect(_card(page, "Batches by size").locator(".value")).to_have_text("20")
    _card(page, "Batches by size").locator("rect").nth(3).hover()
    expect(_card(page, "Batches by size").locator(".tip")).to_have_text(
        re.compile(r"4 requests\s10 batches, 50\s%")
    )
    times = ["0.5 ms", "20 ms", "1.5 s"]
    assert _card(page, "Waiting time").locator(".value").all_inner_texts() == times
    assert _card(page, "Batch time").locator(".value").all_inner_texts() == times


def test_steps_of_a_continuous_batcher(page: Page, served: Served) -> None:
    before = _continuous(steps=10, parts=20, batch_sizes={"1": 5, "3": 5})
    after = _continuous(
        queued=2,
        in_flight=16,
        steps=20,
        parts=70,
        batch_sizes={"1": 5, "3": 5, "9": 10},
        preempted=3,
    )
    _show(page, served, _sample(10, batchers=[before]), _sample(12, batchers=[after]))
    assert _card(page, "Queue").locator(".value").all_inner_texts() == ["2", "16"]
    expect(_card(page, "Queue")).to_contain_text("running")
    expect(_card(page, "Parts").locator(".value")).to_have_text("25/s")
    expect(_card(page, "Step size").locator(".value")).to_have_text("9")
    assert _card(page, "Requests").locator("li").all_inner_texts() == [
        "3 had to leave the batch for a while: it held too much"
    ]
    for title in ("Time to first part", "Time between parts", "Waiting time", "Step time"):
        times = _card(page, title).locator(".value").all_inner_texts()
        assert times == ["0.5 ms", "20 ms", "1.5 s"], title
    expect(_card(page, "Steps by size")).to_contain_text("steps in the time of the charts")


def test_counts_of_another_process_make_no_rates(page: Page, served: Served) -> None:
    first = _sample(10, batchers=[_batcher(answered=100)])
    _show(page, served, first, _sample(12, pid=8, batchers=[_batcher(answered=160)]))
    expect(page.locator("#process")).to_contain_text("process 8")
    expect(_card(page, "Answered").locator(".value")).to_have_text("\u2013")


def test_replicas_and_workers_show_their_states(page: Page, served: Served) -> None:
    replicas = [
        _replica(0, in_flight=2, completed=50, failed=1),
        _replica(1, state="rebuilding", rebuilds=2),
        _replica(2, state="retired", device="cuda:1"),
    ]
    host = {"name": "process:0/cpu", "node": "alpha", "pid": 4242}
    workers = [
        _worker("process:0/cpu", host=host, queued=4),
        _worker("cpu", running=1),  # one call that takes long
    ]
    idle = [_worker("process:0/cpu"), _worker("cpu", running=1)]
    _show(
        page,
        served,
        _sample(
            10,
            pools=[{"name": "m", "replicas": [_replica(index) for index in range(3)]}],
            executors=[{"name": "aiopar", "workers": idle}],
        ),
        _sample(
            17,
            unready="not ready: ReplicaPool (resource 0)",
            pools=[{"name": "m", "replicas": replicas}],
            executors=[{"name": "aiopar", "workers": workers}],
        ),
    )
    expect(page.get_by_role("status")).to_have_text("Not ready: ReplicaPool (resource 0)")
    expect(_card(page, "Busy workers").locator(".value")).to_have_text("1 of 2")
    first = _card(page, "Replica 0, cuda:0")
    expect(first).to_contain_text("In service")
    # 51 calls in 7 seconds
    assert first.locator(".facts span").all_inner_texts() == [
        "7.3/s calls",
        "2 in flight",
        "1 failed",
    ]
    expect(_card(page, "Replica 1, cuda:0")).to_contain_text("Being rebuilt")
    expect(_card(page, "Replica 1, cuda:0")).to_contain_text("rebuilt 2 times")
    expect(_card(page, "Replica 2, cuda:1")).to_contain_text("Device lost")
    for title, share in (("Worker 0, process:0/cpu", "0"), ("Worker 1, cpu", "100")):
        expect(_card(page, title).locator(".value")).to_have_text(re.compile(rf"^{share}\s%$"))
        expect(_card(page, title)).to_contain_text("Idle" if share == "0" else "Busy")
    expect(_card(page, "Worker 0, process:0/cpu")).to_contain_text("process 4242 on alpha")


def test_models_of_a_store(page: Page, served: Served) -> None:
    models = [
        {"name": "ant", "state": "ready", "bytes": 98_400_000, "users": 1},
        {"name": "bee", "state": "loading", "bytes": 0, "users": 3},
    ]
    store = {"name": "zoo", "models": models, "loads": 4, "failed_loads": 1, "evictions": 2}
    first = _sample(10, stores=[store], batchers=[_batcher(name="cat"), _batcher(name="ant")])
    _show(page, served, first, _sample(11, stores=[store], batchers=[_batcher(name="ant")]))
    expect(page.get_by_role("heading", name="Models of store zoo")).to_be_visible()
    expect(page.get_by_text("Loads so far: 4; failed: 1; evicted to make room: 2")).to_be_visible()
    expect(_card(page, "Model ant")).to_contain_text("Loaded")
    assert _card(page, "Model ant").locator(".facts span").all_inner_texts() == [
        "98\u00a0MB",
        "1 use",
    ]
    expect(_card(page, "Model bee")).to_contain_text("Loading")
    # The batcher of an evicted model goes, and the charts of the others stay.
    expect(page.get_by_role("heading", name="Batcher cat")).to_have_count(0)
    assert "L" in (_card(page, "Queue").locator("path.one").get_attribute("d") or "")


def test_names_are_shown_as_text(page: Page, served: Served) -> None:
    name = "<img src=x onerror=console.error('run')>" + "long" * 40
    page.set_viewport_size({"width": 390, "height": 844})
    pools = [{"name": name, "replicas": [_replica(0, device=name)]}]
    executors = [{"name": name, "workers": [_worker(name)]}]
    batchers = [_batcher(name=name), _continuous()]
    sample = _sample(10, batchers=batchers, pools=pools, executors=executors)
    _show(page, served, sample)
    expect(page.get_by_role("heading", name=f"Batcher {name}")).to_be_visible()
    assert page.locator("img").count() == 0
    assert _width(page) == 390


def test_service_that_must_be_restarted_says_so(page: Page, served: Served) -> None:
    _show(page, served, _sample(10, dead="never to serve again: ReplicaPool (resource 0)"))
    expect(page.get_by_role("status")).to_have_text(
        "Restart it: never to serve again: ReplicaPool (resource 0)"
    )
    expect(page.get_by_text("There is no batcher, replica pool, store or executor")).to_be_visible()


def test_page_finds_the_service_again(browser: Browser, served: Served) -> None:
    page = browser.new_page()
    page.route("**/events", lambda route: route.fulfill(status=502))
    page.goto(f"http://127.0.0.1:{served.port}/aiopar")
    expect(page.get_by_role("status")).to_have_text("No connection")
    page.unroute("**/events")
    expect(page.get_by_role("status")).to_have_text("Ready")
    page.close()
