"""`Scheduler`: what loops and workers do at the same time, one step after the other."""

import math
from collections.abc import Sequence
from typing import Any

import anyio.lowlevel
import pytest

import aiopar
from aiopar._base.collate import collate
from aiopar.futures._wakeup import awaiter_here
from aiopar.serve._outcomes import Part
from aiopar.serve._request import Request
from aiopar.serve._scheduler import Scheduler
from aiopar.serve._settings import BatcherSettings

from .stand_ins import Loop, Waiting


class ByHand:
    """A runner whose worker the test is."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.executor = aiopar.get_executor()
        self.in_service = True
        self.began = 0.0
        self.batch: Sequence[Request] = ()
        self.starts = 0
        self.cancelled = 0
        self._scheduler = scheduler

    def start(self) -> None:
        self.starts += 1

    def fail(self, error: BaseException) -> None:
        self.in_service = False

    def cancel(self) -> None:
        self.cancelled += 1

    def take(self) -> list[Any]:
        """The items of the next batch."""
        return [request.item for request in self._scheduler.take(self)]

    def end(self) -> bool:
        """It has run; each item is its own output."""
        batch, self.batch = self.batch, ()
        parts = [Part(batch, [request.item for request in batch], unbatched=True)] if batch else []
        more = self._scheduler.ended(self, batch, parts)
        if not more:
            self._scheduler.told()
        return more

    def lose(self, error: BaseException) -> None:
        """Its replica has failed under its batch."""
        batch, self.batch = self.batch, ()
        self._scheduler.lost(self, batch, error)


def settings_with(**options: Any) -> BatcherSettings:
    names = ("max_wait", "concurrency", "unbatch_fn", "batch_key", "cost", "max_batch_cost")
    return BatcherSettings(
        **{
            **dict.fromkeys([*names, "timeout"]),
            "collate_fn": collate,
            "max_batch_size": 4,
            "max_queue_delay": 0.0,
            "max_pending": 8,
            "padded": False,
            **options,
        }
    )


def runners_for(scheduler: Scheduler, count: int = 1) -> list[ByHand]:
    found = [ByHand(scheduler) for _ in range(count)]
    scheduler.add_runners(found)
    return found


def scheduler_with(runners: int = 1, **options: Any) -> tuple[Scheduler, list[ByHand]]:
    scheduler = Scheduler(settings_with(**options))
    return scheduler, runners_for(scheduler, runners)


def put(scheduler: Scheduler, *items: Any, **attributes: Any) -> list[Request]:
    """Queue items; in an event loop."""
    found = []
    for item in items:
        awaiter = awaiter_here()
        assert awaiter is not None
        request = Request(item, awaiter)
        vars(request).update(attributes)
        scheduler.put(request)
        found.append(request)
    return found


async def delivered() -> None:
    """What was posted to this loop is delivered."""
    await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()


pytestmark = pytest.mark.asyncio


# Who is started.


async def test_as_few_runners_are_started_as_there_are_batches() -> None:
    scheduler, runners = scheduler_with(3)
    put(scheduler, *range(4))
    assert sum(runner.starts for runner in runners) == 1
    put(scheduler, 4)
    assert sum(runner.starts for runner in runners) == 2
    first, second = [runner for runner in runners if runner.starts]
    assert [len(first.take()), len(second.take())] == [4, 1]
    assert not first.end()
    assert not second.end()
    assert [runner.starts for runner in runners].count(1) == 2


async def test_what_a_full_batch_leaves_over_waits_for_its_own_to_fill() -> None:
    scheduler, runners = scheduler_with(2, max_queue_delay=1000.0)
    put(scheduler, *range(5))
    assert [runner.starts for runner in runners] == [1, 1]
    assert [runner.take() for runner in runners] == [[0, 1, 2, 3], []]
    assert scheduler.stats().queued == 1


async def test_the_latest_to_be_free_is_the_next_to_go() -> None:
    scheduler, runners = scheduler_with(3)
    for _ in range(3):
        put(scheduler, 1)
        [busy_one] = [runner for runner in runners if runner.starts]
        busy_one.take()
        busy_one.end()
        assert busy_one.starts in (1, 2, 3)
    assert sorted(runner.starts for runner in runners) == [0, 0, 3]


async def test_who_takes_less_than_was_thought_has_another_started() -> None:
    """Here, as that key has run out of memory before."""
    scheduler, [first, second] = scheduler_with(2)
    requests = put(scheduler, *range(4))
    scheduler.out_of_memory(requests)
    [called] = [one for one in (first, second) if one.starts]
    assert called.take() == [0, 1]
    assert first.starts == second.starts == 1


async def test_who_finds_nothing_left_is_idle_again() -> None:
    scheduler, [runner] = scheduler_with()
    [request] = put(scheduler, 1)
    assert runner.starts == 1
    request.abandon()
    assert scheduler.discard(request)
    assert runner.take() == []
    assert not runner.end()
    put(scheduler, 2)
    assert runner.starts == 2
    assert runner.take() == [2]


async def test_a_runner_that_has_ended_gets_the_next_batch_at_once() -> None:
    scheduler, [runner] = scheduler_with()
    put(scheduler, 1)
    assert runner.take() == [1]
    put(scheduler, 2)
    assert runner.starts == 1
    assert runner.end()
    assert runner.take() == [2]


# Who has gone, or is late.


async def test_a_deadline_that_has_passed_is_not_computed_though_its_timer_is_late() -> None:
    scheduler, [runner] = scheduler_with()
    late, in_time = put(scheduler, 1, deadline=-math.inf) + put(scheduler, 2)
    assert runner.take() == [2]
    assert late not in scheduler._queue
    late.expire(in_queue=scheduler.discard(late))
    with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
        late.outcome()
    assert not in_time.done


async def test_when_all_are_late_the_next_batch_is_taken() -> None:
    scheduler, [runner] = scheduler_with()
    put(scheduler, *range(4), deadline=-math.inf)
    put(scheduler, 5)
    assert runner.take() == [5]
    assert scheduler.stats().in_flight == 1


async def test_who_leaves_in_the_moment_it_is_taken_is_not_computed() -> None:
    scheduler, [runner] = scheduler_with()
    leaving, _ = put(scheduler, 1, 2)
    leaving.abandon()  # and is about to be discarded
    assert runner.take() == [2]
    assert not scheduler.discard(leaving)


# Replicas.


async def test_a_batch_whose_replica_fails_is_given_back_and_goes_first() -> None:
    scheduler, [first, second] = scheduler_with(2)
    put(scheduler, 1, 2)
    [lost] = [one for one in (first, second) if one.starts]
    [other] = {first, second} - {lost}
    lost.take()
    put(scheduler, 3)
    assert other.take() == [3]
    put(scheduler, 4)
    lost.lose(RuntimeError("broken"))
    assert other.end()
    assert other.take() == [1, 2, 4]


async def test_it_is_given_back_once() -> None:
    scheduler, [first, second] = scheduler_with(2)
    [request] = put(scheduler, 1)
    for _ in range(2):
        [called] = [one for one in (first, second) if one.in_service and one.starts]
        assert called.take() == [1]
        called.lose(ValueError("broken"))
    await delivered()
    with pytest.raises(ValueError, match="broken"):
        request.outcome()


async def test_given_back_it_goes_to_who_is_idle_though_the_replica_was_out_before() -> None:
    """Another call had failed on it, so that nobody tells of it again."""
    scheduler, [first, second] = scheduler_with(2)
    put(scheduler, 1)
    [lost] = [one for one in (first, second) if one.starts]
    [other] = {first, second} - {lost}
    lost.take()
    lost.in_service = False
    scheduler.runners_changed()
    assert other.starts == 0
    lost.lose(RuntimeError("broken"))
    assert other.starts == 1
    assert other.take() == [1]


async def test_a_replica_that_is_back_before_its_batch_is_given_back_runs_again() -> None:
    scheduler, [runner] = scheduler_with()
    put(scheduler, 1)
    runner.take()
    batch, runner.batch = runner.batch, ()
    runner.fail = lambda error: None  # type: ignore[method-assign]
    scheduler.lost(runner, batch, RuntimeError("broken"))
    assert runner.starts == 2
    assert runner.take() == [1]


async def test_with_the_last_replica_all_who_wait_get_an_error() -> None:
    scheduler, [runner] = scheduler_with()
    requests = put(scheduler, 1, 2)
    runner.take()
    requests += put(scheduler, 3)
    runner.lose(ValueError("broken"))
    await delivered()
    for request in requests:
        with pytest.raises(aiopar.ReplicaUnavailable, match="failed with ValueError: broken"):
            request.outcome()
    with pytest.raises(aiopar.ReplicaUnavailable):
        put(scheduler, 4)
    assert not scheduler.in_service
    runner.in_service = True
    scheduler.runners_changed()
    assert scheduler.in_service
    put(scheduler, 5)
    assert runner.take() == [5]


async def test_lost_with_nobody_left_who_waits_it_is_drained() -> None:
    scheduler, runners = scheduler_with(2)
    requests = put(scheduler, 1, 2)
    [runner] = [one for one in runners if one.starts]
    runner.take()
    for request in requests:
        request.abandon()
    scheduler.close()
    assert not scheduler.drained.done()
    runner.lose(RuntimeError("broken"))
    assert scheduler.drained.done()


# Closing.


async def test_what_was_just_taken_is_found_when_it_is_closed() -> None:
    """Between queue and worker nobody is overlooked."""
    scheduler, [runner] = scheduler_with()
    [running] = put(scheduler, 1)
    runner.take()  # and its worker has not gone on
    [waiting] = put(scheduler, 2)
    scheduler.close(error=aiopar.ServiceClosed("closed"), running=True)
    await delivered()
    for request in (running, waiting):
        with pytest.raises(aiopar.ServiceClosed):
            request.outcome()
    assert runner.cancelled == 1
    assert not scheduler.drained.done()
    assert not runner.end()
    assert scheduler.drained.done()


async def test_drained_when_all_have_run_or_left() -> None:
    scheduler, [runner] = scheduler_with()
    put(scheduler, 1)
    runner.take()
    [waiting] = put(scheduler, 2)
    scheduler.close()
    waiting.abandon()
    scheduler.discard(waiting)
    assert not scheduler.drained.done()
    assert not runner.end()
    assert scheduler.drained.done()


async def test_an_executor_without_threads_fails_who_waits_and_no_other() -> None:
    scheduler, [runner] = scheduler_with()
    [request] = put(scheduler, 1)
    scheduler.refused(runner, RuntimeError("no threads"))
    await delivered()
    with pytest.raises(RuntimeError, match="no threads"):
        request.outcome()
    put(scheduler, 2)
    assert runner.starts == 2
    assert runner.take() == [2]


# Estimates.


async def test_estimates_count_keys_and_runners() -> None:
    scheduler, runners = scheduler_with(2, max_batch_size=2, max_pending=5)
    put(scheduler, 0)
    [first] = [one for one in runners if one.starts]
    first.take()
    first.end()
    seconds = scheduler.tally.batch_seconds
    assert seconds > 0
    for key in "ab":
        put(scheduler, 0, key=key)
    for runner in runners:
        runner.take()
        runner.began = -math.inf  # for so long that they are estimated to end now
    put(scheduler, 1, 2, 3, key="a")
    put(scheduler, 4, 5, key="b")
    for key, before in [("a", 2), ("b", 3), ("c", 3)]:
        with pytest.raises(aiopar.Overloaded) as caught:
            put(scheduler, 6, key=key)
        assert caught.value.estimated_wait == pytest.approx(before * seconds / 2)
    assert scheduler.stats().queued == 5
    assert scheduler.stats().rejected == {"queue_full": 3}


async def test_estimates_know_who_goes_first_and_how_many_fit() -> None:
    scheduler, [runner] = scheduler_with(max_batch_size=4, max_wait=0.0, max_pending=99)
    put(scheduler, 0)
    runner.take()
    runner.end()
    seconds = scheduler.tally.batch_seconds
    put(scheduler, 1)
    runner.take()
    runner.began = -math.inf  # for so long that it is estimated to end now
    waiting = put(scheduler, 2, 3, priority=1)
    waiting += put(scheduler, 4, priority=0)
    with pytest.raises(aiopar.Overloaded) as caught:
        put(scheduler, *range(5, 9), priority=2)
    assert caught.value.estimated_wait == pytest.approx(seconds)
    assert scheduler.stats().queued == 4
    scheduler.out_of_memory([*waiting, *waiting[:1]])  # four of them
    with pytest.raises(aiopar.Overloaded) as caught:
        put(scheduler, 9, priority=2)
    assert caught.value.estimated_wait == pytest.approx(2 * seconds)


async def test_who_is_lost_with_a_loop_that_was_closed_does_not_wait_for_the_lock() -> None:
    """The garbage collector may find the caller, cancelled and queued, in who has that lock."""
    scheduler, [runner] = scheduler_with()
    put(scheduler, 0)
    assert runner.take() == [0]
    loop = Loop()
    lost = Request(1, Waiting(loop))
    scheduler.put(lost)
    put(scheduler, 2)
    loop.closed = True
    lost.abandon()
    with scheduler._lock:
        assert not scheduler.discard(lost)
    assert runner.end()
    assert runner.take() == [2]
