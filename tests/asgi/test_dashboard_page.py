"""The live page in a real Chromium: under load, and with samples whose numbers are known."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from .program import serve_failing, serve_under_load
from .served import Served


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
        expect(page.get_by_role("status")).to_have_text("Ready, but requests fail and are refused")
        for title in ("Answered", "Failed", "Refused"):
            # A number, and not 0: few fail.
            expect(_card(page, title).locator(".value")).to_have_text(re.compile(r"^[\d.]*[1-9]"))
        expect(_card(page, "Busy workers").locator(".value")).to_have_text(
            re.compile(r"^[1-4](\.\d)? of 4$")
        )
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
        "concurrency": 1,
        "queued": 0,
        "in_flight": 0,
        "submitted": 0,
        "answered": 0,
        "failed": 0,
        "refused": {},
        "expired": 0,
        "cancelled": 0,
        "errors": [],
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
        "time": 1_700_000_000 + at,
        "pid": 7,
        "parent": None,
        "unready": None,
        "dead": None,
        "loop_delay": 0.0012,
        "batchers": [],
        "pools": [],
        "stores": [],
        "executors": [],
    } | changes


def _events(*samples: dict[str, Any]) -> str:
    return f"data: {json.dumps(samples)}\n\n"


def _show(page: Page, served: Served, *samples: dict[str, Any]) -> None:
    _answer(page, served, _events(*samples))


def _answer(page: Page, served: Served, *connections: str) -> None:
    """Open a page whose connections get these events, one after the other."""
    answers = [f"retry: 100\n\n{events}" for events in connections]
    answers[-1] = f"retry: 1000000\n\n{connections[-1]}"
    page.route(
        "**/events",
        lambda route: route.fulfill(body=answers.pop(0), content_type="text/event-stream"),
    )
    page.goto(f"http://127.0.0.1:{served.port}/aiopar")
    expect(page.locator(".tiles")).to_be_visible()


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
        expired=2,
        cancelled=1,
        batch_sizes={"1": 20, "4": 15},
    )
    _show(page, served, _sample(10, batchers=[before]), _sample(12, batchers=[after]))
    expect(_card(page, "Answered").locator(".value")).to_have_text("30")
    # Of 68 requests that have ended, without the one whose caller left.
    expect(_card(page, "Failed")).to_have_text(re.compile(r"0\.5per second, 1\s% of all$"))
    expect(_card(page, "Refused")).to_have_text(re.compile(r"2\.5per second, 7\s% of all$"))
    expect(_card(page, "Expired")).to_have_text(re.compile(r"1per second, 3\s% of all$"))
    expect(page.get_by_role("status")).to_have_text(
        "Ready, but requests fail, are refused, and expire"
    )
    expect(_card(page, "Waiting").locator(".value")).to_have_text("3")
    expect(_card(page, "Loop delay").locator(".value").first).to_have_text("1.2 ms")
    assert _card(page, "Requests").locator(".value").all_inner_texts() == [
        "30/s",
        "0.5/s",
        "2.5/s",
        "1/s",
    ]
    assert _card(page, "Requests").locator("li").all_inner_texts() == [
        "4 failed so far",
        "9 refused so far: the queue was full",
        "1 refused so far: they would have waited longer than max_wait",
        "2 expired so far",
        "1 cancelled so far: the callers left",
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


def test_failures_are_shown_at_once_and_stay_in_the_history(browser: Browser) -> None:
    """Every request of a batcher raises, and nobody looks; a page is opened later."""
    with Served(serve_failing) as served:
        page = browser.new_page(viewport={"width": 390, "height": 844})
        assert [served.post("/call").status_code for _ in range(3)] == [500, 500, 500]
        page.goto(f"http://127.0.0.1:{served.port}/aiopar")
        expect(page.get_by_role("status")).to_have_text("Ready, but requests fail")
        failed = _card(page, "Failed")
        expect(failed.locator(".value.bad")).to_have_text(re.compile(r"^[\d.]*[1-9]$"))
        expect(failed).to_contain_text(re.compile(r"per second, 100\s% of all"))
        error = page.locator(".errors li")
        expect(error).to_have_count(1)
        expect(error).to_have_text(re.compile(r"^3 failed, the latest .*: ValueError: <b>no</b>$"))
        assert error.locator("span b").count() == 0
        expect(_card(page, "Requests")).to_contain_text("3 failed so far")
        line = _card(page, "Requests").locator("path.bad")
        expect(line).to_have_attribute("d", re.compile("M.*L"))
        assert _width(page) == 390

        # The failures are over, and the page still shows them; another page does too.
        expect(page.get_by_role("status")).to_have_text("Ready")
        expect(failed.locator(".value")).to_have_text("0")
        expect(line).to_have_attribute("d", re.compile("M.*L"))
        page.reload()
        expect(line).to_have_attribute("d", re.compile("M.*L"))
        expect(error).to_contain_text(" s ago (")
        page.close()


def test_each_kind_of_error_is_shown_the_latest_first(page: Page, served: Served) -> None:
    errors = [
        {"text": "ArithmeticError: out of range", "count": 1200, "time": 1_700_000_010},
        {"text": "RuntimeError: shapes", "count": 1, "time": 1_700_000_001},
    ]
    _show(page, served, _sample(11, batchers=[_batcher(failed=1201, errors=errors)]))
    clock = r"\(\d+:\d\d:\d\d .*\)"
    expect(page.locator(".errors li")).to_have_text(
        [
            re.compile(f"^1,200 failed, the latest 1 s ago {clock}: ArithmeticError: out of range"),
            re.compile(f"^1 failed, the latest 10 s ago {clock}: RuntimeError: shapes"),
        ]
    )


@pytest.mark.parametrize(
    ("busy", "cause", "executors", "hinted"),
    [
        (2.0, "queue_full", 1, True),
        (3.9, "queue_full", 1, False),
        (2.0, "max_batch_cost", 1, False),
        (2.0, "queue_full", 2, False),
    ],
    ids=["a worker is idle", "no worker is idle", "the queue is not full", "whose worker is idle"],
)
def test_a_full_queue_beside_an_idle_worker_is_explained(
    page: Page, served: Served, busy: float, cause: str, executors: int, hinted: bool
) -> None:
    def sample(at: float, refused: int, busy: float) -> dict[str, Any]:
        workers = [_worker("cpu", busy_seconds=busy / 2) for _ in range(2)]
        batcher = _batcher(max_pending=16, refused={cause: refused})
        pools = [{"name": "aiopar", "workers": workers}] * executors
        return _sample(at, batchers=[batcher], executors=pools)

    _show(page, served, sample(10, 3, 0.0), sample(12, 4, busy))
    expect(page.get_by_text("Now: 1 batch at a time (concurrency)")).to_be_visible()
    hint = page.get_by_text("but workers were idle: this batcher runs 1 batch at a time")
    expect(hint).to_be_visible(visible=hinted)


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


def test_another_process_shows_its_own_history(page: Page, served: Served) -> None:
    first = _sample(10, batchers=[_batcher(answered=100)])
    other = _sample(12, pid=8, parent=6, batchers=[_batcher(answered=160)])
    _answer(page, served, _events(first), _events(other))
    expect(page.locator("#process")).to_contain_text("process 8, a child of process 6: if that has")
    expect(_card(page, "Answered").locator(".value")).to_have_text("\u2013")


def test_requests_of_all_processes(page: Page, served: Served) -> None:
    def event(at: float, **outcomes: float) -> str:
        found = {"at": at, "processes": 3, "answered": 0, "failed": 0, "refused": 0, "expired": 0}
        return f"event: all\ndata: {json.dumps(found | outcomes)}\n\n"

    totals = event(10, answered=5) + event(12, answered=105, failed=9)
    _answer(page, served, _events(_sample(10), _sample(12)) + totals)
    expect(page.locator("#process")).to_contain_text("process 7 of 3: another one may answer")
    card = _card(page, "Requests of all processes")
    expect(card.locator(".value").first).to_have_text("50/s")
    expect(card.locator(".value").nth(1)).to_have_text("4.5/s")


@pytest.mark.parametrize(
    "changes",
    [{}, {"expired": 1}, {"expired": 1, "refused": {"closed": 1}}],
    ids=["5 tiles", "6 tiles", "7 tiles"],
)
def test_no_tile_is_alone_in_its_row(page: Page, served: Served, changes: dict[str, Any]) -> None:
    after = _sample(12, batchers=[_batcher(**changes)])
    _show(page, served, _sample(10, batchers=[_batcher()]), after)
    tiles = page.locator(".tiles > *")
    expect(tiles).to_have_count(5 + len(changes))
    for width in (390, 768, 1280):
        page.set_viewport_size({"width": width, "height": 844})
        rows = tiles.evaluate_all("all => all.map((one) => one.offsetTop)")
        assert rows.count(rows[-1]) > 1
        assert _width(page) == width


def test_tiles_are_averages_of_the_latest_seconds(page: Page, served: Served) -> None:
    def sample(at: float, answered: int, busy: float) -> dict[str, Any]:
        workers = [_worker("cpu", completed=answered, busy_seconds=busy), _worker("cpu")]
        executors = [{"name": "aiopar", "workers": workers}]
        return _sample(at, batchers=[_batcher(answered=answered)], executors=executors)

    _show(
        page,
        served,
        sample(10, 0, 0),
        sample(20, 900, 9),
        sample(26, 960, 9.6),
        sample(30, 1000, 12),
    )
    # In the latest 10 seconds no worker was busy when a sample was taken.
    expect(_card(page, "Answered").locator(".value")).to_have_text("10")
    expect(_card(page, "Busy workers").locator(".value")).to_have_text("0.3 of 2")


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
        "2 in flight now",
        "failed calls: 1",
    ]
    expect(_card(page, "Replica 1, cuda:0")).to_contain_text("Being rebuilt")
    expect(_card(page, "Replica 1, cuda:0")).to_contain_text("rebuilt 2 times")
    expect(_card(page, "Replica 2, cuda:1")).to_contain_text("Device lost")
    for title, share in (("Worker 0, process:0/cpu", "0"), ("Worker 1, cpu", "100")):
        expect(_card(page, title).locator(".value")).to_have_text(re.compile(rf"^{share}\s%$"))
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
