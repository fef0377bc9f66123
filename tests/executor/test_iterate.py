"""`DeviceExecutor.iterate`: a generator on a worker, its steps and its state."""

import copy
import gc
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.generators import VARIABLE, Recorder, thread_state


@pytest.mark.anyio
async def test_it_yields_what_the_generator_yields(devices: tuple[torch.device, ...]) -> None:
    async with aiopar.DeviceExecutor(devices) as executor:
        assert [n async for n in executor.iterate(range, 100)] == list(range(100))
        assert [n async for n in executor.iterate(range, 0)] == []
        async with executor.iterate(enumerate, "ab") as stream:
            assert [pair async for pair in stream] == [(0, "a"), (1, "b")]
            assert [pair async for pair in stream] == [], "it has ended"


@pytest.mark.anyio
@pytest.mark.parametrize("buffer", [0, 1, 5])
async def test_its_consumer_awaits_calls_of_the_only_worker(buffer: int) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        squares = [
            await executor.run_sync(pow, n, 2)
            async for n in executor.iterate(range, 20, buffer=buffer)
        ]
    assert squares == [n * n for n in range(20)]


@pytest.mark.anyio
@pytest.mark.parametrize("buffer", [0, 1, 3])
async def test_buffer_is_how_many_items_are_ready_before_they_are_read(buffer: int) -> None:
    recorder = Recorder(10)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async with executor.iterate(recorder, buffer=buffer) as stream:
            await _settled(executor, buffer)
            assert recorder.begun == 0, "nothing begins before the first read"
            for n in range(6):
                assert await anext(stream) == n
                await _settled(executor, buffer)
                assert recorder.begun == n + 1 + buffer
        assert recorder.closed.is_set()


async def _settled(executor: aiopar.DeviceExecutor, buffer: int) -> None:
    # Each step queues the next when it ends, so behind whoever asked meanwhile.
    for _ in range(buffer + 2):
        await executor.run_sync(str)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "enter",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", dtype=torch.float16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "device"],
)
async def test_what_the_generator_enters_stays_inside_and_persists(
    enter: Callable[[], AbstractContextManager[object]],
) -> None:
    def generate() -> Iterator[tuple[Any, ...]]:
        with enter():
            VARIABLE.set(1)
            yield thread_state()
            VARIABLE.set(2)
            yield thread_state()
        yield thread_state()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        outside = await executor.run_sync(thread_state)
        own = thread_state()
        async with executor.iterate(generate, buffer=0) as stream:
            inside = []
            async for state in stream:
                inside.append(state)
                assert await executor.run_sync(thread_state) == outside, "other calls do not see it"
                assert thread_state() == own, "nor does the loop"
        assert await executor.run_sync(thread_state) == outside
    # Compared without what a step differs in from a call that has a fresh thread's state: it runs
    # in an autocast block of its own, so that one of the generator's is not the outermost.
    first, second, after = ((*modes, variable) for *modes, _, variable in inside)
    *modes, _, variable = outside
    assert first[:-1] == second[:-1] != tuple(modes)
    assert after == (*modes, 2)
    assert (first[-1], second[-1], variable) == (1, 2, 0)


@pytest.mark.anyio
async def test_the_generator_has_the_state_of_who_called_iterate_not_of_who_reads() -> None:
    def generate() -> Iterator[tuple[bool, bool, int]]:
        while True:
            yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), VARIABLE.get()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        token = VARIABLE.set(7)
        with torch.no_grad():
            stream = executor.iterate(generate, buffer=0)
        VARIABLE.reset(token)
        async with stream:
            for _ in range(2):
                assert await anext(stream) == (False, False, 7)
            with torch.autocast("cpu"), torch.device("meta"):
                read = stream.__anext__()
                assert await read == (False, False, 7)


@pytest.mark.anyio
async def test_what_the_generator_undoes_of_its_callers_state_stays_undone() -> None:
    def generate() -> Iterator[tuple[bool, int]]:
        with torch.autocast("cpu", enabled=False):
            for _ in range(3):
                yield torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack()
        yield torch.is_autocast_enabled("cpu"), torch._C._len_torch_function_stack()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with torch.autocast("cpu"), torch.device("meta"):
            stream = executor.iterate(generate)
        assert [state async for state in stream] == [(False, 1)] * 3 + [(True, 1)]


@pytest.mark.anyio
async def test_an_error_comes_after_the_items_before_it_and_ends_it() -> None:
    def generate() -> Iterator[int]:
        yield 1
        yield 2
        raise LookupError("mine")

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = executor.iterate(generate, buffer=5)
        assert [await anext(stream), await anext(stream)] == [1, 2]
        with pytest.raises(LookupError, match="mine"):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.anyio
async def test_an_error_that_means_the_end_is_raised_as_another() -> None:
    def generate() -> Iterator[int]:
        yield 1
        raise StopAsyncIteration

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = executor.iterate(generate)
        assert await anext(stream) == 1
        with pytest.raises(RuntimeError, match="the generator raised StopAsyncIteration"):
            await anext(stream)


@pytest.mark.anyio
async def test_what_is_no_generator_function_fails_at_the_first_read() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with pytest.raises(TypeError, match="not iterable"):
            await anext(executor.iterate(lambda: 3))  # type: ignore[arg-type,return-value]
        with pytest.raises(ZeroDivisionError):
            await anext(executor.iterate(lambda: [1 // 0]))


@pytest.mark.anyio
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_it_can_no_more_be_copied_than_a_generator(
    copied: Callable[[object], object],
) -> None:
    """The copy would close the generator when it is collected."""
    async with aiopar.DeviceExecutor(["cpu"]) as executor, executor.iterate(range, 3) as stream:
        assert await anext(stream) == 0
        with pytest.raises(TypeError, match="Iteration"):
            copied(stream)
        gc.collect()
        assert [number async for number in stream] == [1, 2]


@pytest.mark.anyio
async def test_a_cancelled_read_loses_no_item() -> None:
    gate = Gate()

    def generate() -> Iterator[int]:
        for n in range(3):
            gate()
            yield n

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with gate:
            stream = executor.iterate(generate)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(stream.__anext__)
                    await gate.entered()
                    scope.cancel()
            assert scope.cancelled_caught
            assert len(stream._ahead[0]._done_callbacks) == 1, "its own, and none of the read's"
            gate.open()
            assert [n async for n in stream] == [0, 1, 2]


@pytest.mark.parametrize(
    ("buffer", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_buffer_is_a_natural_number(buffer: Any, error: type[Exception]) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, pytest.raises(error, match="buffer must"):
        executor.iterate(range, 3, buffer=buffer)
