"""`DeviceExecutor.iterate`: the steps of a generator on a worker, its state, and its end."""

import asyncio
import contextlib
import copy
import functools
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
from tests import programs
from tests.cancelling import cancel_while_held
from tests.generators import VARIABLE, Recorder, thread_state
from tests.interruptions import at_every_point


@pytest.mark.anyio
async def test_yields_the_items_of_the_generator(devices: tuple[torch.device, ...]) -> None:
    async with aiopar.DeviceExecutor(devices) as executor:
        assert [n async for n in executor.iterate(range, 100)] == list(range(100))
        assert [n async for n in executor.iterate(range, 0)] == []
        async with executor.iterate(enumerate, "ab") as stream:
            assert [pair async for pair in stream] == [(0, "a"), (1, "b")]
            assert [pair async for pair in stream] == [], "it has ended"


@pytest.mark.anyio
@pytest.mark.parametrize("buffer", [0, 1, 5])
async def test_the_worker_is_free_between_steps(buffer: int) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        squares = [
            await executor.run_sync(pow, n, 2)
            async for n in executor.iterate(range, 20, buffer=buffer)
        ]
    assert squares == [n * n for n in range(20)]


@pytest.mark.anyio
@pytest.mark.parametrize("buffer", [0, 1, 3])
async def test_buffer_items_are_ready_before_they_are_read(buffer: int) -> None:
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
    # The end of a step queues the next step, behind this call.
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
async def test_state_that_the_generator_enters_stays_inside(
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
    # Without the number of autocast blocks: a step with switched state runs in one of its own.
    first, second, after = ((*modes, variable) for *modes, _, variable in inside)
    *modes, _, variable = outside
    assert first[:-1] == second[:-1] != tuple(modes)
    assert after == (*modes, 2)
    assert (first[-1], second[-1], variable) == (1, 2, 0)


@pytest.mark.anyio
async def test_a_generator_has_the_state_of_the_caller_and_may_change_it() -> None:
    def state() -> tuple[bool, bool, int, int]:
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        return *modes, torch._C._len_torch_function_stack(), VARIABLE.get()

    def generate() -> Iterator[tuple[bool, bool, int, int]]:
        with torch.autocast("cpu", enabled=False):
            for _ in range(3):
                yield state()
        yield state()

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        token = VARIABLE.set(7)
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            stream = executor.iterate(generate)
        VARIABLE.reset(token)
        with torch.inference_mode():
            first = await anext(stream)
        states = [first, *[state async for state in stream]]
    assert states == [(False, False, 1, 7)] * 3 + [(False, True, 1, 7)]


def failing(error: BaseException) -> Iterator[int]:
    yield 1
    yield 2
    raise error


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fn", "items", "error", "message"),
    [
        (lambda: failing(LookupError("mine")), [1, 2], LookupError, "mine"),
        (
            lambda: failing(StopAsyncIteration()),
            [1, 2],
            RuntimeError,
            "the generator raised StopAsyncIteration",
        ),
        (lambda: 3, [], TypeError, "not iterable"),
        (lambda: [1 // 0], [], ZeroDivisionError, "zero"),
    ],
)
async def test_an_error_comes_after_the_items_before_it(
    fn: Callable[[], Any], items: list[int], error: type[Exception], message: str
) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        stream = executor.iterate(fn, buffer=5)
        assert [await anext(stream) for _ in items] == items
        with pytest.raises(error, match=message):
            await anext(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


@pytest.mark.anyio
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
async def test_cannot_be_copied_or_pickled(
    copied: Callable[[object], object],
) -> None:
    """A copy would close the generator when it is collected."""
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
            gate.open()
            assert [n async for n in stream] == [0, 1, 2]


@pytest.mark.parametrize(
    ("buffer", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)]
)
def test_bad_buffers(buffer: Any, error: type[Exception]) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, pytest.raises(error, match="buffer must"):
        executor.iterate(range, 3, buffer=buffer)


@pytest.mark.anyio
@pytest.mark.parametrize("read", [False, True])
async def test_leaving_async_with_closes_a_generator_that_has_begun(read: bool) -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async with executor.iterate(recorder) as stream:
            if read:
                await anext(stream)
        assert recorder.closed_in == ("aiopar-cpu-0" if read else None)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        executor.iterate(recorder)  # never read
        gc.collect()
    assert bool(recorder.begun) == read


@pytest.mark.anyio
async def test_break_closes_the_generator_when_it_is_collected() -> None:
    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        async for _ in executor.iterate(recorder):
            break
        gc.collect()
        await executor.run_sync(str)  # after the step ahead, which keeps the stream
        gc.collect()
        await executor.run_sync(str)
        assert recorder.closed_in == "aiopar-cpu-0"


@pytest.mark.anyio
@pytest.mark.parametrize("collected", [False, True])
async def test_close_after_a_shutdown_leaks_no_state(collected: bool) -> None:
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
        before = thread_state()
        if collected:
            del stream
            gc.collect()
        else:
            await stream.aclose()
        assert thread_state() == before
    assert recorder.closed.is_set()


@pytest.mark.parametrize("shut_down", [False, True])
def test_read_and_close_in_a_worker(shut_down: bool) -> None:
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
async def test_an_error_of_closing_is_raised_or_logged(caplog: pytest.LogCaptureFixture) -> None:
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
async def test_close_while_another_task_reads() -> None:
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


def test_ctrl_c_during_close() -> None:
    program = """
        closing, interrupted, closed = threading.Event(), threading.Event(), threading.Event()

        def generate():
            try:
                yield 1
                closing.wait()
                # Again if it came just before the main thread blocked, which does not see it then.
                while not interrupted.is_set():
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                    interrupted.wait(1)
                yield 2
            finally:
                closed.set()

        async def read(numbers):
            print(await anext(numbers))
            closing.set()
            await numbers.aclose()

        numbers = aiopar.get_executor().iterate(generate, buffer=1)
        try:
            aiopar.wait(read(numbers))
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            interrupted.set()
            print(closed.wait(60))
    """
    assert programs.run(program) == (0, "1\nTrue\n", "")


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("held_at", [0, 1])
async def test_a_cancelled_close_waits_for_the_end(held_at: int, times: int) -> None:
    gate = Gate()
    closed: list[bool] = []

    def generate() -> Iterator[int]:
        try:
            for n in range(3):
                if n == held_at:
                    gate()
                yield n
        finally:
            closed.append(True)

    async def leave() -> None:
        executor = aiopar.DeviceExecutor(["cpu"])
        async with executor, executor.iterate(generate) as items:
            reading = asyncio.create_task(anext(items))
            await gate.entered()
            reading.cancel()

    await cancel_while_held(leave(), gate, times)
    assert closed == [True]


@pytest.mark.asyncio
async def test_a_destructor_may_cancel_the_steps_at_any_point_of_a_close() -> None:
    for interruption in at_every_point():
        executor = aiopar.DeviceExecutor(["cpu"])
        with Gate() as gate:
            executor.submit(gate)
            iteration = executor.iterate(range, 3)
            read = iteration.__anext__()
            read.send(None)  # its step is queued
            close = iteration.aclose()
            shutdown = functools.partial(executor.shutdown, wait=False, cancel_futures=True)
            with interruption.by(shutdown), contextlib.suppress(StopIteration):
                close.send(None)
            read.close()
            close.close()
            executor.shutdown(wait=False, cancel_futures=True)
        await executor.aclose()
