"""`max_pending`: bounded queues, who waits for room, and that no room is ever lost."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator
from typing import Any

import anyio
import pytest
import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import aiopar
from aiopar._base.operator_threads import CoreShares
from aiopar.executor._backpressure import Admission, Grant
from aiopar.executor._call import FutureCall
from aiopar.executor._shared_queue import SharedQueue
from aiopar.executor._worker import ThreadWorker, Worker
from aiopar.testing import Gate


@pytest.fixture
def full() -> Iterator[tuple[aiopar.DeviceExecutor, Gate]]:
    """An executor whose two workers are held, with one more call in the queue of each."""
    with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=1) as executor, Gate() as gate:
        for count in (1, 2):
            executor.submit(gate)
            gate.wait_entered(count)
        for _ in range(2):
            executor.submit(gate)
        yield executor, gate


def test_submit_raises_when_every_queue_is_full(full: tuple[aiopar.DeviceExecutor, Gate]) -> None:
    executor, gate = full
    with pytest.raises(aiopar.QueueFull, match="each of 2 workers has max_pending=1") as caught:
        executor.submit(str)
    assert isinstance(caught.value, asyncio.QueueFull)
    with pytest.raises(aiopar.QueueFull, match="each of 1 workers"):
        executor.on(worker=1).submit(str)
    gate.open()


@pytest.mark.anyio
async def test_run_sync_waits_for_room_in_order(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    one = executor.on(worker=0)
    ran: list[int] = []
    async with anyio.create_task_group() as tasks:
        for n in range(5):
            tasks.start_soon(one.run_sync, ran.append, n)
            await anyio.wait_all_tasks_blocked()
        assert executor.stats().workers[0].queued == 1
        gate.open()
    assert ran == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_a_cancelled_wait_for_room_takes_none(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    ran: list[int] = []
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            for n in range(3):
                tasks.start_soon(executor.run_sync, ran.append, n)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    gate.open()
    await executor.run_sync(ran.append, 3)
    assert ran == [3]


@pytest.mark.anyio
async def test_a_cancelled_queued_call_gives_its_room_back(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    gate.let_on()
    await gate.entered(3)  # one queue has room now
    queued = executor.submit(str)
    with pytest.raises(aiopar.QueueFull):
        executor.submit(str)
    queued.cancel()
    assert executor.submit(str).cancel()
    gate.open()


@pytest.mark.anyio
async def test_calls_made_by_a_call_are_exempt() -> None:
    async with aiopar.DeviceExecutor(["cpu"], max_pending=1) as executor:

        def nested() -> list[int]:
            futures = [executor.submit(pow, 2, n) for n in range(10)]
            return [future.wait() for future in futures] + [aiopar.wait(executor.run_sync(int))]

        assert await executor.run_sync(nested) == [2**n for n in range(10)] + [0]


@pytest.mark.anyio
async def test_a_gang_waits_until_every_worker_can_take_it(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    barrier = threading.Barrier(2)
    arrived: list[aiopar.Future[Any]] = executor.submit_all([barrier.wait, barrier.wait])
    gate.let_on()
    await gate.entered(3)
    # One queue has room: the gang keeps it, and nobody who came later passes.
    with pytest.raises(aiopar.QueueFull):
        executor.submit(str)
    assert not any(future.running() for future in arrived)
    gate.open()
    assert sorted([await future for future in arrived]) == [0, 1]


@pytest.mark.anyio
async def test_a_gang_cancelled_while_it_waits_lets_the_next_pass(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    gang: list[aiopar.Future[Any]] = executor.submit_all([str, str])
    gate.let_on()
    await gate.entered(3)
    queued = anyio.Event()

    class Watch(aiopar.ExecutorObserver):
        def enqueue(self, call: aiopar.CallInfo) -> None:
            queued.set()

    async with anyio.create_task_group() as tasks:
        executor.add_observer(Watch())
        tasks.start_soon(_run, executor)
        await anyio.wait_all_tasks_blocked()
        assert not queued.is_set()
        assert gang[0].cancel()
        await queued.wait()
        assert [worker.queued for worker in executor.stats().workers] == [1, 1]
        gate.open()
    with pytest.raises(concurrent.futures.CancelledError):
        await gang[1]
    for _ in range(3):  # no room went with it
        await executor.run_sync(str)


@pytest.mark.anyio
async def test_a_full_worker_does_not_hold_up_the_others() -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=1) as executor:
        first, second = executor.on(worker=0), executor.on(worker=1)
        with Gate() as gate:
            first.submit(gate)
            await gate.entered()
            first.submit(gate)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_run, first)
                await anyio.wait_all_tasks_blocked()
                assert await second.run_sync(pow, 2, 5) == 32
                assert await second.submit(pow, 2, 6) == 64
                gate.open()


async def _run(executor: aiopar.DeviceExecutor) -> None:
    await executor.run_sync(str)


@pytest.mark.anyio
async def test_closing_takes_in_the_gang_that_waits_and_nobody_else(
    full: tuple[aiopar.DeviceExecutor, Gate],
) -> None:
    executor, gate = full
    gang: list[aiopar.Future[Any]] = executor.submit_all([(pow, 2, 5), (pow, 2, 6)])
    async with anyio.create_task_group() as tasks:

        async def refused() -> None:
            with pytest.raises(aiopar.ExecutorShutdown):
                await executor.run_sync(str)

        tasks.start_soon(refused)
        await anyio.wait_all_tasks_blocked()
        executor.shutdown(wait=False)
    gate.open()
    assert [await future for future in gang] == [32, 64]


@pytest.mark.anyio
async def test_many_tasks_share_little_room() -> None:
    results: dict[int, int] = {}
    most: list[int] = []

    async with aiopar.DeviceExecutor(["cpu"] * 2, max_pending=2) as executor:

        async def one(n: int) -> None:
            results[n] = await executor.run_sync(pow, n, 2)
            most.append(max(worker.queued for worker in executor.stats().workers))

        async with anyio.create_task_group() as tasks:
            for n in range(200):
                tasks.start_soon(one, n)
    assert results == {n: n * n for n in range(200)}
    assert max(most) <= 2


def test_a_call_cancelled_before_its_room_was_given_gives_it_back_once() -> None:
    workers = _workers(1)
    admission = Admission(1)
    for cancelled_before in (True, False):
        call = FutureCall(str, ())
        [worker] = admission.request([workers]).result()
        if cancelled_before:
            call.cancel()
        admission.admit(call, worker)
        call.cancel()
        assert admission.request_now(workers) is worker
        with pytest.raises(aiopar.QueueFull):
            admission.request_now(workers)
        admission.leave(worker)


def test_threads_that_come_and_go_lose_no_room() -> None:
    workers = _workers(2)
    admission = Admission(1)

    def use(first: int) -> None:
        for n in range(first, first + 300):
            granted = admission.request([workers] if n % 3 else [workers, workers])
            if n % 2 and admission.give_up(granted):
                continue
            for worker in granted.result(30):
                admission.leave(worker)

    threads = [threading.Thread(target=use, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert admission.request([workers, workers]).done(), "all room is there again"


def _workers(count: int) -> tuple[Worker, ...]:
    device, shares = torch.device("cpu"), CoreShares(None)
    return tuple(
        ThreadWorker(device, k, f"idle-{k}", shares, SharedQueue(device)) for k in range(count)
    )


class AdmissionMachine(RuleBasedStateMachine):
    """Whoever may come in is in, whoever waits keeps its workers from those behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.max_pending = 2
        self.workers = _workers(3)
        self.admission = Admission(self.max_pending)
        self.waiting: list[tuple[list[tuple[Worker, ...]], Grant]] = []
        self.inside: list[Worker] = []

    def room(self) -> dict[Worker, int]:
        return {w: self.max_pending - self.inside.count(w) for w in self.workers}

    def settle(self) -> None:
        """Move who was let in; who is left waits."""
        for request in tuple(self.waiting):
            groups, granted = request
            if granted.done():
                self.waiting.remove(request)
                workers = granted.value()
                assert len(set(workers)) == len(groups)
                assert all(w in group for w, group in zip(workers, groups, strict=True))
                self.inside += workers

    def could_pass(self, groups: list[tuple[Worker, ...]], before: int) -> bool:
        """Whether there is room for `groups` that nobody of the first `before` waits for."""
        kept = {w for wanted, _ in self.waiting[:before] for group in wanted for w in group}
        free = [w for w, room in self.room().items() if room and w not in kept]
        used: set[Worker] = set()
        for group in groups:
            found = next((w for w in group if w in free and w not in used), None)
            if found is None:
                return False
            used.add(found)
        return True

    def request(self, groups: list[tuple[Worker, ...]]) -> None:
        passes = self.could_pass(groups, len(self.waiting))
        granted = self.admission.request(groups)
        assert granted.done() == passes
        self.waiting.append((groups, granted))
        self.settle()

    @rule(mask=st.integers(1, 7))
    def one_call(self, mask: int) -> None:
        self.request([tuple(w for w in self.workers if mask >> w.index & 1)])

    @rule(count=st.integers(2, 3))
    def a_gang(self, count: int) -> None:
        self.request([self.workers] * count)

    @rule(mask=st.integers(1, 7))
    def one_that_cannot_wait(self, mask: int) -> None:
        group = tuple(w for w in self.workers if mask >> w.index & 1)
        if self.could_pass([group], len(self.waiting)):
            self.inside.append(self.admission.request_now(group))
        else:
            with pytest.raises(aiopar.QueueFull):
                self.admission.request_now(group)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        worker = self.inside.pop(data.draw(st.integers(0, len(self.inside) - 1)))
        self.admission.leave(worker)
        self.settle()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def give_up(self, data: st.DataObject) -> None:
        _, granted = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.admission.give_up(granted)
        self.settle()

    @invariant()
    def no_queue_is_over_its_bound(self) -> None:
        assert min(self.room().values()) >= 0

    @invariant()
    def nobody_waits_who_could_pass(self) -> None:
        assert not any(
            self.could_pass(groups, place) for place, (groups, _) in enumerate(self.waiting)
        )


TestAdmission = AdmissionMachine.TestCase
TestAdmission.settings = settings(max_examples=100, stateful_step_count=40)
