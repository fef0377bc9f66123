"""`max_queue_delay` and deadlines: who waits for company, and until when."""

import math
from typing import Any

import anyio
import pytest

from aiopar.serve import Batcher, _scheduler as _queue_delay
from aiopar.serve._queue import RequestQueue
from aiopar.serve._request import Request
from aiopar.serve._scheduler import QueueDelay
from aiopar.serve._stats import Tally

from .batches import LONG, Recorder, outcomes_of
from .stand_ins import Loop, Waiting


class Bench:
    """A queue whose clock the test sets."""

    def __init__(self, patch: pytest.MonkeyPatch, delay: float) -> None:
        self.now = 0.0
        self.loop = Loop()
        self.queue: RequestQueue[Request] = RequestQueue(max_batch_size=9)
        self.tally = Tally()
        self.delay = QueueDelay(delay, self.queue, self.tally)
        patch.setattr(_queue_delay, "monotonic", lambda: self.now)

    def put(self, timeout: float = math.inf, loop: Loop | None = None) -> float | None:
        """Queue one now; when a timer is asked for."""
        request = Request(0, Waiting(loop or self.loop))
        request.arrived, request.deadline = self.now, self.now + timeout
        self.queue.push(request)
        return self.delay.put(request)

    def fired(self, at: float) -> float | None:
        self.now = at
        return self.delay.fired(self.loop, at)


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch, delay=8.0)


@pytest.mark.anyio
async def test_a_lone_item_does_not_wait_until_its_deadline() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_queue_delay": LONG, "timeout": 2}
    async with Batcher(recorder, collate_fn=list, **options) as batcher:
        assert await batcher(1) == "1"
        assert await outcomes_of(batcher, [2, 3]) == ["2", "3"]
    assert [sorted(run) for run in recorder.runs] == [[1], [2, 3]]


@pytest.mark.anyio
async def test_who_has_no_deadline_goes_with_who_has() -> None:
    recorder = Recorder()
    async with (
        Batcher(recorder, collate_fn=list, max_queue_delay=LONG) as batcher,
        anyio.create_task_group() as tasks,
    ):
        for timeout in (None, 2, 1000):
            tasks.start_soon(lambda given: batcher(0, timeout=given), timeout)
    assert recorder.runs == [[0, 0, 0]]


def test_without_deadlines_there_is_one_timer(bench: Bench) -> None:
    assert bench.put() == 8
    bench.now = 3
    assert bench.put() is None
    bench.now = 8
    assert bench.delay.is_due()
    bench.queue.pop_batch()
    bench.now = 9
    bench.put()
    assert not bench.delay.is_due()


@pytest.mark.parametrize(
    ("timeout", "batch_seconds", "at"),
    [(4, 0.0, 2), (4, 0.5, 2), (4, 1.5, 1), (4, 3.0, None), (100, 0.0, 8), (100, 47, 6)],
)
def test_when_one_is_due(
    bench: Bench, timeout: float, batch_seconds: float, at: float | None
) -> None:
    bench.tally.batch_seconds = batch_seconds
    assert bench.put(timeout) == at
    if at is not None:
        bench.now = at - 0.01
        assert not bench.delay.is_due()
        bench.now = at
    assert bench.delay.is_due()


def test_an_earlier_timer_takes_the_place_of_a_later_one(bench: Bench) -> None:
    assert bench.put() == 8
    assert bench.put(4) == 2
    assert bench.put(5) is None
    assert bench.put(loop=Loop()) == 8, "another loop has its own"
    assert bench.fired(2) == 2.5, "the next, should no runner be free"
    assert bench.fired(2.5) == 8
    assert bench.fired(8) == 16


def test_a_timer_that_was_replaced_sets_no_other(bench: Bench) -> None:
    bench.put()
    bench.put(4)
    bench.now = 2
    assert bench.delay.fired(bench.loop, 8) is None
    assert bench.fired(2) == 8


def test_who_has_left_is_not_waited_for(bench: Bench) -> None:
    bench.put()
    bench.put(4)
    bench.queue.discard([*bench.queue][1])
    bench.now = 2
    assert not bench.delay.is_due()
    assert bench.fired(2) == 8


def test_whose_deadline_has_passed_does_not_make_the_others_go(bench: Bench) -> None:
    bench.put()
    assert bench.put(0) is None
    assert not bench.delay.is_due()


def test_who_is_put_back_waits_no_more(bench: Bench) -> None:
    """A timer that went off meanwhile was the last."""
    bench.put(4)
    taken = bench.queue.pop_batch()
    bench.put()
    assert not bench.delay.is_due()
    bench.queue.push_front(taken)
    bench.delay.put_back()
    assert bench.delay.is_due()
    bench.queue.clear()
    bench.put()
    assert not bench.delay.is_due()
