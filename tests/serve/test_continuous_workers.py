"""`ContinuousBatcher` on threads, processes, Ray and pools; lost workers and replicas."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import nn

import aiopar
from aiopar.serve import ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome, place
from tests.workers import Workers

from .batches import Bad, current_executor, outcomes_in, outcomes_of, until
from .replicas import BadInput, Fragile, Scale, break_copy, in_service, open_pool
from .steppers import Counting, Item, Resuming, State
from .streams import ENDLESS, Readers, idle, read_all, reading

pytestmark = pytest.mark.anyio

ON_RAY = True


class Unpicklable(Exception):
    """No other process can have it."""

    def __init__(self) -> None:
        super().__init__("unpicklable")
        self.lock = asyncio.Lock()
        self.pid = lambda: None


class Placed(Counting):
    """Its requests' results are where it runs; it raises for some names."""

    def _advance(self, state: State) -> Any:
        result = super()._advance(state)
        if state.name == "unpicklable error":
            return Unpicklable()
        if isinstance(result, aiopar.Done):
            return aiopar.Done(place(), result.part)
        return result


async def test_states_stay_on_one_worker(workers: Workers) -> None:
    with aiopar.use_executor(workers):
        async with aiopar.ContinuousBatcher(Placed(), max_batch_size=4) as batcher:
            places = await outcomes_of(batcher, [Item(number) for number in range(12)])
            assert len(set(places)) == 1
            parts = [part async for part in batcher.stream(Item("a", 5))]
            assert parts == Item("a", 5).parts()


async def test_errors_come_from_any_worker(workers: Workers) -> None:
    batcher: Any = aiopar.ContinuousBatcher(Placed())
    with aiopar.use_executor(workers):
        async with batcher:
            names = ["unpicklable error", "good"]
            failed, good = await outcomes_of(batcher, [Item(name) for name in names])
            assert isinstance(failed, Exception)
            assert "unpicklable" in str(failed)
            assert not isinstance(good, Exception)
            with pytest.raises(TypeError, match="not an item") as caught:
                await batcher("no item")
            assert "the request did not start; item: str" in caught.value.__notes__


class Locked:
    """An item that no other process can have."""

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a lock")


async def test_an_item_that_cannot_be_sent_fails_alone(make_workers: Any, workers: Workers) -> None:
    gate = Gate()
    with aiopar.use_executor(workers), gate:
        batcher: Any = aiopar.ContinuousBatcher(Counting(AtHome(lambda _: gate())))
        async with reading(batcher) as readers:
            readers.read(Item("first", 4))
            await gate.entered()
            readers.read(Locked(), Item("second"))
            await until(lambda: readers.batcher.stats().queued == 2)
            gate.open()
        assert readers.parts[Item("first", 4)] == Item("first", 4).parts()
        assert readers.parts[Item("second")] == Item("second").parts()
        [error] = [error for error in readers.outcomes.values() if error is not None]
        assert isinstance(error, TypeError)


# Lost processes.


@asynccontextmanager
async def one_process() -> AsyncIterator[aiopar.DeviceExecutor]:
    async with aiopar.ProcessExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            yield executor


async def kill(executor: aiopar.DeviceExecutor) -> None:
    [stats] = executor.stats().workers
    assert stats.host is not None
    os.kill(stats.host.pid, signal.SIGKILL)


@pytest.mark.parametrize("resumes", [False, True])
async def test_a_killed_process(resumes: bool) -> None:
    """Requests whose parts nobody has seen start again; others fail, or go on."""
    gate = Gate()
    make = Resuming if resumes else Counting
    batcher: Any = aiopar.ContinuousBatcher(make(AtHome(lambda _: gate())))
    async with one_process() as executor:
        async with reading(batcher) as readers:
            with gate:
                seen, unseen, awaited = Item("seen", 6), Item("unseen", 4, prompt=3), Item("w", 5)
                readers.read(seen)
                await gate.entered()
                gate.let_on()
                await gate.entered(2)
                results: list[Any] = []

                async def call() -> None:
                    results.append(await readers.batcher(awaited))

                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(call)
                    readers.read(unseen)
                    await until(lambda: readers.batcher.stats().queued == 2)
                    gate.let_on(2)
                    await gate.entered(4)
                    await until(lambda: len(readers.parts[seen]) == 3)
                    await kill(executor)
                    gate.open()
        assert results == ["w done"]
        assert readers.parts[unseen] == unseen.parts()
        assert readers.outcomes[unseen] is None
        if resumes:
            assert readers.parts[seen] == seen.parts()
            assert readers.outcomes[seen] is None
        else:
            assert readers.parts[seen] == seen.parts(3)
            assert isinstance(readers.outcomes[seen], aiopar.WorkerLost)
        stats = readers.batcher.stats()
        assert (stats.queued, stats.in_flight) == (0, 0)
        counted = {"answered": 3} if resumes else {"answered": 2, "failed": 1}
        assert outcomes_in(stats) == counted, "a request that runs again counts once"


async def test_a_process_that_is_lost_while_nobody_reads() -> None:
    """A newcomer that has begun on the new process does not pay for the old one."""
    async with one_process() as executor, aiopar.ContinuousBatcher(Counting()) as batcher:
        async with batcher.stream(Item("old", 9), buffer=1) as old:
            await anext(old)
            await until(lambda: batcher.stats().parts == 2)
            await executor.run_sync(str)
            await kill(executor)
            assert await read_all(batcher.stream(Item("new"))) == Item("new").parts()
            await anext(old)
            with pytest.raises(aiopar.WorkerLost):
                await read_all(old)
        await idle(batcher)


async def test_an_item_that_kills_its_process_fails_in_the_end() -> None:
    def on_step(names: list[str]) -> None:
        if "deadly" in names:
            os.kill(os.getpid(), signal.SIGKILL)

    async with one_process(), aiopar.ContinuousBatcher(Counting(on_step)) as batcher:
        outcomes = await outcomes_of(batcher, [Item("deadly"), Item("a"), Item("b")])
        assert isinstance(outcomes[0], aiopar.WorkerLost)
        assert outcomes[1:] == ["a done", "b done"]


# Pools.


class Multiplying:
    """A stepper of a replica: each step multiplies by its weight."""

    resumable = True

    def __init__(self, module: Scale) -> None:
        self.module = module

    def start(self, item: tuple[float, int]) -> list[Any]:
        return [torch.tensor(item[0]), item[1]]

    def step(self, states: list[list[Any]]) -> list[Any]:
        first, second = self.module(torch.stack([state[0] for state in states]))
        assert torch.equal(first, second)
        results: list[Any] = []
        for state, value in zip(states, first, strict=True):
            state[:] = value, state[1] - 1
            results.append(value.item() if state[1] else aiopar.Done(value.item(), value.item()))
        return results


async def test_replicas_share_the_load(workers: Workers) -> None:
    gate = Gate()
    module = Scale(2.0, lambda _: gate())
    async with open_pool(module, executor=workers) as pool, reading_pool(pool, Multiplying) as read:
        with gate:
            for number in range(6):
                read.read((float(number), 2))
            await gate.entered(2)
            assert [one.in_flight for one in pool.stats().replicas] == [1, 1]
            gate.open()
        await idle(read.batcher)
        assert max(read.batcher.stats().batch_sizes) <= 3, "nobody takes more than its share"
    for number in range(6):
        assert read.parts[float(number), 2] == [number * 2, number * 4]


@asynccontextmanager
async def reading_pool(pool: ReplicaPool[Any], make: Any, **options: Any) -> AsyncIterator[Readers]:
    batcher: Any = aiopar.ContinuousBatcher(pool, stepper=make, **options)
    async with reading(batcher) as readers:
        yield readers


async def test_streams_keep_their_weights_when_the_pool_has_new_ones() -> None:
    gate = Gate()
    module = Scale(2.0)
    async with open_pool(module, on=["cpu"]) as pool, reading_pool(pool, Multiplying) as readers:
        module.on_call.append(lambda _: gate())
        with gate:
            readers.read((1.0, 6))
            await gate.entered()
            async with anyio.create_task_group() as tasks:
                newer = Scale(3.0)
                tasks.start_soon(pool.swap, newer)
                await until(lambda: readers.batcher is not None and gate.held == 1)
                gate.open()
            readers.read((5.0, 2))
    assert readers.parts[1.0, 6] == [2.0**n for n in range(1, 7)]
    assert readers.parts[5.0, 2] == [15.0, 45.0]


async def test_a_batcher_that_is_reopened_while_it_closes_hears_of_new_weights() -> None:
    async with open_pool(Scale(2.0), on=["cpu"]) as pool:
        batcher: Any = aiopar.ContinuousBatcher(pool, stepper=Multiplying)
        async with batcher, anyio.create_task_group() as tasks:
            tasks.start_soon(batcher.aclose)
            await until(lambda: batcher.closed)
            async with batcher:
                await anyio.wait_all_tasks_blocked()
                await pool.swap(Scale(3.0))
                with anyio.fail_after(20):
                    assert await batcher((5.0, 1)) == 15.0


async def test_nobody_waits_for_a_replica_that_is_busy_with_another_call(workers: Workers) -> None:
    module, gate = Scale(2.0), Gate()
    async with (
        open_pool(module, executor=workers) as pool,
        reading_pool(pool, Multiplying) as readers,
        anyio.create_task_group() as tasks,
    ):
        with gate:
            tasks.start_soon(workers.on(worker=1).run_sync, AtHome(gate))
            await gate.entered()
            items = [(float(number), 2) for number in range(4)]
            assert await outcomes_of(readers.batcher, items) == [0.0, 4.0, 8.0, 12.0]


class Applying:
    """A stepper of a replica that applies its module twice."""

    def __init__(self, module: Fragile) -> None:
        self.module = module

    def start(self, item: torch.Tensor) -> list[Any]:
        return [item, 2]

    def step(self, states: list[list[Any]]) -> list[Any]:
        outputs = self.module(torch.stack([item for item, _ in states]))
        results: list[Any] = []
        for state, output in zip(states, outputs, strict=True):
            state[1] -= 1
            results.append(None if state[1] else aiopar.Done(output))
        return results


async def test_requests_of_a_broken_replica_go_to_another_one(workers: Workers) -> None:
    model, good = Fragile(), torch.ones(2)
    async with open_pool(model, executor=workers, warmup=torch.ones(1, 2)) as pool:
        batcher: Any = aiopar.ContinuousBatcher(pool, stepper=Applying)
        async with batcher:
            break_copy(model, 0)
            outputs = await outcomes_of(batcher, [good] * 9)
            with torch.no_grad():
                expected = model.linear(good)
            assert all(torch.allclose(output, expected) for output in outputs)
            await until(lambda: in_service(pool) == [0, 1])
            [error] = await outcomes_of(batcher, [-good])
            assert isinstance(error, BadInput)
            assert any("in replica" in note for note in error.__notes__)


@pytest.mark.parametrize("error", [Bad("no stepper"), None])
async def test_a_factory_that_fails(error: Exception | None) -> None:
    def make(module: nn.Module) -> Any:
        if error is not None:
            raise error
        return module

    async with open_pool(Scale(2.0)) as pool:
        batcher: Any = aiopar.ContinuousBatcher(pool, stepper=make)
        async with batcher:
            with pytest.raises(Bad if error else TypeError) as raised:
                await batcher(1)
            assert (await pool(torch.ones(1)))[0].tolist() == [2.0], "the pool serves on"
    if error is None:
        assert "start" in str(raised.value)


# Workers that have other work too.


async def test_other_calls_run_between_two_steps() -> None:
    async with (
        current_executor(["cpu"]) as executor,
        aiopar.ContinuousBatcher(Counting()) as batcher,
        batcher.stream(Item("endless", ENDLESS), buffer=ENDLESS) as stream,
    ):
        for _ in range(5):
            assert await executor.run_sync(str) == ""
        await anext(stream)


async def test_a_worker_may_wait_for_an_item_of_its_own_batcher() -> None:
    batcher: Any = aiopar.ContinuousBatcher(Counting())
    async with current_executor(["cpu"]) as executor, batcher:

        def nested() -> Any:
            return aiopar.wait(batcher(Item("nested")))

        with anyio.fail_after(20):
            assert await executor.run_sync(nested) == "nested done"


async def test_a_closed_executor_fails_running_streams() -> None:
    executor = aiopar.DeviceExecutor(["cpu"])
    batcher: Any = aiopar.ContinuousBatcher(Counting())
    with aiopar.use_executor(executor):
        async with batcher:
            stream = batcher.stream(Item("endless", ENDLESS), buffer=ENDLESS)
            await anext(stream)
            executor.shutdown(wait=False, cancel_futures=True)
            with pytest.raises(aiopar.ExecutorShutdown):
                await read_all(stream)
