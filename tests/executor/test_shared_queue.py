"""`aiopar.executor._shared_queue`: no call is forgotten, and none waits while a worker is idle."""

import threading
from collections import deque
from concurrent.futures import Future
from typing import Any

import pytest
import torch

import aiopar
from aiopar.executor._call import FutureCall
from aiopar.executor._shared_queue import Member, SharedQueue
from aiopar.testing import Gate


def _call() -> FutureCall[str]:
    return FutureCall(str, ())


class _Queue:
    """A shared queue with workers that only note who was woken."""

    def __init__(self, workers: int) -> None:
        self.queue = SharedQueue(torch.device("cpu"))
        self.woken: list[int] = []
        self.counts = [deque[None]() for _ in range(workers)]
        self.members = [self._join(index) for index in range(workers)]

    def _join(self, index: int) -> Member:
        return self.queue.join(self.counts[index], lambda: self.woken.append(index))

    def put(self, count: int) -> list[FutureCall[str]]:
        calls = [_call() for _ in range(count)]
        for call in calls:
            self.queue.put(call)
        return calls

    def run(self, index: int) -> FutureCall[str] | None:
        """What a worker does that was woken, up to the call."""
        member = self.members[index]
        member.woken()
        call = self.queue.take(self.counts[index])
        if call is not None and member.idle:
            member.busy()
        assert call is None or isinstance(call, FutureCall)
        return call


def test_each_call_wakes_one_idle_worker_the_first_one_first() -> None:
    shared = _Queue(3)
    calls = shared.put(5)
    assert shared.woken == [0, 1, 2]
    assert [shared.run(0), shared.run(1)] == calls[:2], "oldest first"
    assert [shared.queue.take(shared.counts[2]) for _ in range(4)] == [*calls[2:], None]


def test_who_became_idle_last_is_woken_first() -> None:
    shared = _Queue(3)
    shared.put(3)
    for index in (1, 2, 0):
        shared.run(index)
        assert shared.members[index].stand_by()
        assert not shared.members[index].stand_by(), "once is enough"
    shared.woken.clear()
    shared.put(3)
    assert shared.woken == [0, 2, 1]


def test_a_worker_with_something_else_to_do_has_another_woken() -> None:
    shared = _Queue(2)
    [call] = shared.put(1)
    assert shared.woken == [0]
    # Before it comes to that, it finds a call that is for it alone.
    shared.members[0].busy()
    assert shared.woken == [0, 1]
    assert shared.run(1) is call


def test_a_worker_that_leaves_unwoken_is_not_woken_any_more() -> None:
    shared = _Queue(2)
    shared.members[0].busy()
    shared.put(2)
    assert shared.woken == [1]


def test_a_wake_that_comes_late_does_not_end_a_later_rest() -> None:
    shared = _Queue(1)
    [member] = shared.members
    shared.put(1)
    assert shared.queue.take(shared.counts[0]) is not None, "it came by itself"
    member.busy()
    assert member.stand_by()
    member.woken()  # for the call that it has run long ago
    assert member.idle
    shared.put(1)
    assert shared.woken == [0, 0]
    member.woken()
    assert not member.idle


def test_a_worker_that_joins_is_woken_for_what_waits() -> None:
    shared = _Queue(1)
    shared.put(2)
    woken: list[str] = []
    shared.queue.join(deque(), lambda: woken.append("late"))
    assert not woken, "before its worker has all its parts"
    shared.queue.pass_on()
    assert woken == ["late"]


def test_a_worker_that_cannot_be_woken_stays_idle() -> None:
    shared = _Queue(1)
    failing = True

    def wake() -> None:
        if failing:
            raise RuntimeError("can't start new thread")
        shared.woken.append(1)

    shared.put(1)
    shared.queue.join(deque(), wake)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        shared.put(1)
    shared.queue.pass_on()  # by a busy worker, which goes on
    failing = False
    shared.put(1)
    assert shared.woken == [0, 1]


def test_cancelled_calls_are_passed_over_and_not_counted() -> None:
    shared = _Queue(2)
    first, second, third = shared.put(3)
    first.cancel()
    assert sum(member.queued for member in shared.members) == 2
    assert shared.run(0) is second
    shared.queue.cancel_queued()
    assert third.future.cancelled()
    assert not second.future.cancelled()
    assert shared.run(1) is None


def test_what_waits_is_counted_for_the_least_loaded() -> None:
    shared = _Queue(3)
    shared.counts[0].extend([None] * 2)
    shared.counts[2].append(None)
    for waiting, expected in enumerate(([0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 2, 1], [1, 2, 1])):
        assert [member.queued for member in shared.members] == expected, waiting
        shared.put(1)


def test_a_woken_worker_that_finds_a_call_for_it_alone_has_another_woken() -> None:
    shared = _Queue(2)
    [call] = shared.put(1)
    shared.members[0].woken()
    shared.queue.pass_on()
    assert shared.woken == [0, 1]
    assert shared.run(1) is call
    shared.queue.pass_on()
    assert shared.woken == [0, 1], "nothing waits"


def test_a_call_for_the_worker_that_was_woken_for_another_does_not_delay_that() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as first, Gate() as gate:
        handed_in: Future[list[aiopar.Future[Any]]] = Future()

        def hand_in(_: object) -> None:
            # In the worker's own thread, which is down as idle by now: it finds the token, and
            # behind it the call that it has to take.
            shared = executor.submit(abs, -1)
            handed_in.set_result([shared, executor.on(worker=0).submit(gate)])

        future = executor.on(worker=0).submit(first)
        first.wait_entered()
        future.add_done_callback(hand_in)
        first.open()
        shared, pinned = handed_in.result(30)
        gate.wait_entered()
        assert shared.result(30) == 1
        gate.open()
        pinned.result(30)


@pytest.mark.parametrize("workers", [2, 3])
def test_no_call_waits_behind_one_that_is_for_its_worker_alone(workers: int) -> None:
    with aiopar.DeviceExecutor(["cpu"] * workers) as executor:
        for round_number in range(200):
            with Gate() as gate:
                # The worker may be on its way to sleep, asleep, or woken for the other call.
                pinned = executor.on(worker=round_number % workers).submit(gate)
                assert executor.submit(abs, -round_number).result(30) == round_number
                gate.open()
                pinned.result(30)


def test_threads_that_hand_in_at_once_lose_no_call() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 3) as executor:
        results: list[list[int]] = []

        def hand_in(start: int) -> None:
            futures = [executor.submit(abs, -n) for n in range(start, start + 300)]
            pinned = [executor.on(worker=n % 3).submit(abs, -n) for n in range(30)]
            results.append([future.result(60) for future in futures])
            assert [future.result(60) for future in pinned] == list(range(30))

        threads = [threading.Thread(target=hand_in, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [list(range(start, start + 300)) for start in range(8)]
        assert sum(worker.completed for worker in executor.stats().workers) == 8 * 330


def test_workers_share_with_those_of_their_own_device_alone() -> None:
    with aiopar.DeviceExecutor(["meta", "cpu", "meta"]) as executor:

        def thread_name(_: int) -> str:
            return threading.current_thread().name

        for device in ("meta", "cpu"):
            names = set(executor.on(device).map(thread_name, range(200)))
            assert all(name.startswith(f"aiopar-{device}-") for name in names)
        assert len(list(executor.map(thread_name, range(200)))) == 200
