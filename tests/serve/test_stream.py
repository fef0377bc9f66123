"""`Batcher.stream`: its parts, its steps, its queue, and what it refuses."""

import contextvars
import functools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests import simdevice

from .batches import current_executor, until
from .streams import (
    ENDLESS,
    Counting,
    Readers,
    counted,
    full,
    held,
    idle,
    one_worker,
    reading,
    settled,
)

pytestmark = pytest.mark.anyio


# Parts.


async def test_each_reads_its_own_part_of_each_step(kind: str) -> None:
    counting = Counting(40)
    async with Batcher(counting.of(kind), **full(3)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("a", "b", "c")
        assert readers.parts == {item: counted(item, 40) for item in "abc"}
        assert readers.outcomes == dict.fromkeys("abc"), "the generator's end is that of all"
    assert list(map(sorted, counting.batches)) == [["a", "b", "c"]]
    assert len(counting.steps) == 40
    assert len(counting.closed) == 1


@pytest.mark.sim
async def test_without_synchronization_parts_are_ordered_after() -> None:
    simdevice.set_kernel_latency(0.01)

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            batch = batch + 1
            yield batch

    async with current_executor(["sim:0"], synchronize=False), Batcher(generate) as batcher:
        parts = batcher.stream(torch.zeros(2, device="sim:0"))
        assert [part.tolist() async for part in parts] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.sim
async def test_a_part_is_complete_on_its_device() -> None:
    launched: list[Tensor] = []

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            batch = batch + 1
            launched.append(batch)
            yield batch

    async with (
        current_executor(["sim:0"]),
        Batcher(generate) as batcher,
        anyio.create_task_group() as tasks,
    ):
        readers = Readers(batcher, tasks)
        with simdevice.paused("sim:0"):
            readers.read(torch.zeros(2, device="sim:0"))
            await until(lambda: bool(launched))
            await anyio.wait_all_tasks_blocked()
            assert list(readers.parts.values()) == [[]]
            assert len(launched) == 1, "nor is the next step made"
    [parts] = readers.parts.values()
    assert [part.tolist() for part in parts] == [[1, 1], [2, 2], [3, 3]]


async def test_unbatch_fn_takes_each_step_apart() -> None:
    batcher = Batcher(Counting(2).generate, **full(2), unbatch_fn=lambda parts: parts[::-1])
    async with reading(batcher) as readers:
        readers.read("a", "b")
    assert readers.parts == {"a": counted("b", 2), "b": counted("a", 2)}


async def test_a_generator_without_steps(kind: str) -> None:
    async with Batcher(Counting(0).of(kind), collate_fn=list) as batcher:
        assert [part async for part in batcher.stream("a")] == []
        await idle(batcher)
        assert batcher.stats().answered == 1


async def test_callable_objects_modules_and_partials_stream() -> None:
    class Function:
        def __call__(self, batch: list[str]) -> Iterator[list[str]]:
            yield batch

    class Module(torch.nn.Module):
        async def forward(self, batch: list[str]) -> AsyncIterator[list[str]]:
            yield batch

    def generate(_: int, batch: list[str]) -> Iterator[list[str]]:
        yield batch

    for fn in (Function(), Module(), functools.partial(generate, 1)):
        async with Batcher(fn, collate_fn=list) as batcher:
            assert [part async for part in batcher.stream("a")] == ["a"]


# The queue: as for `await batcher(item)`.


async def test_a_full_queue_refuses_on_entering_or_at_the_first_read(kind: str) -> None:
    options: dict[str, Any] = {"collate_fn": list, "max_pending": 1}
    async with Batcher(Counting().of(kind), **options) as batcher, held(batcher):
        async with batcher.stream("waits"):
            with pytest.raises(aiopar.Overloaded):
                await batcher.stream("refused").__aenter__()
            stream = batcher.stream("refused")
            with pytest.raises(aiopar.Overloaded):
                await anext(stream)
            assert [part async for part in stream] == []
        assert batcher.stats().refused == {"queue_full": 2}


async def test_a_lower_priority_goes_first(kind: str) -> None:
    counting = Counting(1)
    async with reading(Batcher(counting.of(kind), **full(1))) as readers, held(readers.batcher):
        await readers.queue("later")
        await readers.queue("sooner", priority=-1)
    assert counting.batches[1:] == [["sooner"], ["later"]]


# Refusals.


async def test_a_batcher_that_streams_is_not_awaited(kind: str) -> None:
    async with Batcher(Counting().of(kind)) as batcher:
        with pytest.raises(TypeError, match=r"an? .*generator function: use `async for .*stream"):
            await batcher("a")


async def test_one_that_does_not_is_not_streamed() -> None:
    with pytest.raises(TypeError, match="use `await batcher"):
        Batcher(str).stream("a")


async def test_arguments_are_checked_at_once() -> None:
    batcher = Batcher(Counting().generate)
    with pytest.raises(TypeError, match="buffer must be an int, not float"):
        batcher.stream("a", buffer=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer must be at least 1, got 0"):
        batcher.stream("a", buffer=0)
    with pytest.raises(TypeError, match="timeout must be a number, not str"):
        batcher.stream("a", timeout="1")  # type: ignore[arg-type]


async def test_one_task_reads_at_a_time(kind: str) -> None:
    async with Batcher(Counting().of(kind), **full(2)) as batcher:
        async with batcher.stream("a") as stream, anyio.create_task_group() as tasks:
            found: list[Any] = []

            async def read() -> None:
                found.extend([part async for part in stream])
                found.append("end")

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="by another task"):
                await anext(stream)
            assert found == []
            await stream.aclose()
        assert found == ["end"], "it has come to who was reading"
        assert batcher.stats().queued == 0


# The state, the worker and the task of each step.


def _thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.empty(0).device.type,
        _VARIABLE.get(),
    )


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def test_a_generators_state_is_its_own_and_that_of_who_made_the_batcher() -> None:
    seen: list[tuple[Any, ...]] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        seen.append(_thread_state())
        with torch.device("meta"):
            _VARIABLE.set(2)
            yield batch
            seen.append(_thread_state())
            yield batch

    async with one_worker() as executor:
        _VARIABLE.set(1)
        with torch.no_grad():
            batcher = Batcher(generate, collate_fn=list)
        _VARIABLE.set(0)
        async with batcher, batcher.stream("a") as stream:
            async for _ in stream:
                assert await executor.run_sync(_thread_state) == (True, False, "cpu", 0)
    assert seen == [(False, False, "cpu", 1), (False, False, "meta", 2)]


@asynccontextmanager
async def occupied(worker: aiopar.DeviceExecutor) -> AsyncIterator[None]:
    """Hold a worker."""
    with Gate() as gate:
        held_up = worker.submit(gate)
        await gate.entered()
        yield
    await held_up


async def test_each_step_is_a_call_of_its_own_on_one_worker() -> None:
    counting = Counting(ENDLESS)
    async with current_executor(["cpu", "cpu"]) as executor:
        batcher = Batcher(counting.generate, collate_fn=list)
        async with batcher, batcher.stream("a", buffer=1) as stream:
            await anext(stream)
            [thread] = set(counting.steps)
            own, other = (executor.on(worker=n ^ int(thread[-1])) for n in (0, 1))
            async with occupied(other):
                for n in range(20):  # the worker is free between steps
                    assert await executor.run_sync(str, n) == str(n)
                    await anext(stream)
            async with occupied(own):
                made = len(counting.steps)
                await anext(stream)
                await settled(executor)
                assert len(counting.steps) == made, "no other worker makes them"
            await until(lambda: len(counting.steps) == made + 1)
            async with occupied(own):
                await stream.aclose()
                await settled(executor)
                assert counting.closed == [], "nor closes the generator"
    assert set(counting.steps) == set(counting.closed) == {thread}


async def test_an_async_generator_runs_in_one_task_from_its_first_step_to_its_end() -> None:
    async def generate(batch: list[str]) -> AsyncIterator[list[str]]:
        # A cancel scope raises if it is left in another task than it was entered in.
        with anyio.CancelScope():
            async with anyio.create_task_group():
                yield batch
                yield batch

    async with Batcher(generate, collate_fn=list) as batcher:
        assert [part async for part in batcher.stream("a")] == ["a", "a"]
        async with batcher.stream("b") as stream:
            assert await anext(stream) == "b"
