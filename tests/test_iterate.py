"""`DeviceExecutor.iterate`: a generator on a worker, its steps, its state and its end."""

import asyncio
import contextlib
import contextvars
import copy
import gc
import logging
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def _nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _state() -> tuple[Any, ...]:
    """Everything of a thread that a generator may leave behind."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(0).device.type,
        _nesting(),
        _VARIABLE.get(),
    )


class Recorder:
    """A generator function that notes what happens to its generator, and in which thread."""

    def __init__(self, items: int = 3) -> None:
        self.items = items
        self.begun = 0
        self.closed_in: str | None = None
        self.closed = threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for n in range(self.items):
                self.begun += 1
                yield n
        finally:
            self.closed_in = threading.current_thread().name
            self.closed.set()


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
            _VARIABLE.set(1)
            yield _state()
            _VARIABLE.set(2)
            yield _state()
        yield _state()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        outside = await executor.run_sync(_state)
        own = _state()
        async with executor.iterate(generate, buffer=0) as stream:
            inside = []
            async for state in stream:
                inside.append(state)
                assert await executor.run_sync(_state) == outside, "other calls do not see it"
                assert _state() == own, "nor does the loop"
        assert await executor.run_sync(_state) == outside
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
            yield torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), _VARIABLE.get()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        token = _VARIABLE.set(7)
        with torch.no_grad():
            stream = executor.iterate(generate, buffer=0)
        _VARIABLE.reset(token)
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
async def test_leaving_async_with_closes_the_generator_on_its_worker() -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async with executor.iterate(recorder) as stream:
            async for _ in stream:
                break
        assert recorder.closed_in == "aiopar-cpu-0"
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.anyio
async def test_a_loop_broken_off_closes_the_generator_when_it_is_collected() -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async for _ in executor.iterate(recorder):
            break
        gc.collect()
        await executor.run_sync(str)  # behind the step ahead, which may have kept it
        gc.collect()
        await executor.run_sync(str)
        assert recorder.closed_in == "aiopar-cpu-0"


@pytest.mark.asyncio
@pytest.mark.parametrize("during", ["a step", "its end, which waits for the worker"])
async def test_a_cancellation_of_asyncios_own_leaves_the_end_to_the_worker(during: str) -> None:
    gate, closed = Gate(), threading.Event()
    where: list[str] = []

    def generate() -> Iterator[int]:
        try:
            yield 1
            gate()
            yield 2
        finally:
            where.append(threading.current_thread().name)
            closed.set()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        items = executor.iterate(generate, buffer=int(during == "a step"))
        assert await anext(items) == 1
        with gate:
            held = None if during == "a step" else executor.submit(gate)
            await gate.entered()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await items.aclose()
            assert where == []
            gate.open()
        await anyio.to_thread.run_sync(closed.wait, 30)
        assert where == ["aiopar-cpu-0"]
        if held is not None:
            await held


@pytest.mark.anyio
async def test_one_that_never_began_has_nothing_to_close() -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async with executor.iterate(recorder):
            pass
        executor.iterate(recorder)
        gc.collect()
        assert sum(worker.completed for worker in executor.stats().workers) == 0
    assert recorder.begun == 0


@pytest.mark.anyio
@pytest.mark.parametrize("collected", [False, True])
async def test_closed_after_its_executor_it_leaks_nothing(collected: bool) -> None:
    def generate() -> Iterator[int]:
        with torch.no_grad():
            yield from recorder()

    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = executor.iterate(generate, buffer=0)
        await anext(stream)
    with pytest.raises(aiopar.ExecutorShutdown):
        await anext(stream)
    with torch.inference_mode():
        before = _state()
        if collected:
            del stream
            gc.collect()
        else:
            await stream.aclose()
        assert _state() == before
    assert recorder.closed.is_set()


@pytest.mark.parametrize("shut_down", [False, True])
def test_read_and_closed_in_a_worker(shut_down: bool) -> None:
    async def read() -> list[int]:
        async with inner.iterate(recorder) as stream:
            numbers = [await anext(stream)]
            if shut_down:
                inner.shutdown()
            return numbers

    recorder = Recorder()
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        inner = aiopar.DeviceExecutor(["cpu"]) if shut_down else executor
        assert executor.submit(lambda: aiopar.wait(read())).result(10) == [0]
        assert recorder.closed.is_set()


@pytest.mark.anyio
async def test_errors_of_closing_are_raised_or_logged(caplog: pytest.LogCaptureFixture) -> None:
    def generate() -> Iterator[int]:
        with contextlib.suppress(ZeroDivisionError):
            try:
                yield 1
            finally:
                raise LookupError("at the end")

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = executor.iterate(generate, buffer=0)
        await anext(stream)
        with pytest.raises(LookupError, match="at the end"):
            await stream.aclose()
        stream = executor.iterate(generate, buffer=0)
        await anext(stream)
        with caplog.at_level(logging.ERROR, "aiopar"):
            del stream
            gc.collect()
            await executor.run_sync(str)
    assert "a generator failed when it was closed" in caplog.text
    assert "at the end" in caplog.text


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


@pytest.mark.anyio
async def test_closed_while_another_task_reads() -> None:
    gate = Gate()
    closed = threading.Event()

    def generate() -> Iterator[int]:
        try:
            yield gate(1)
        finally:
            closed.set()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with gate:
            stream = executor.iterate(generate)
            async with anyio.create_task_group() as tasks:

                async def read() -> None:
                    with pytest.raises(StopAsyncIteration):
                        await anext(stream)

                tasks.start_soon(read)
                await gate.entered()
                with pytest.raises(RuntimeError, match="read by another task"):
                    await anext(stream)
                tasks.start_soon(stream.aclose)
                await anyio.wait_all_tasks_blocked()
                assert not closed.is_set(), "it waits for the step that runs"
                gate.open()
    assert closed.is_set()


@pytest.mark.parametrize(
    ("buffer", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_buffer_is_a_natural_number(buffer: Any, error: type[Exception]) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, pytest.raises(error, match="buffer must"):
        executor.iterate(range, 3, buffer=buffer)
