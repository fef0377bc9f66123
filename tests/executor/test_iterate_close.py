"""`DeviceExecutor.iterate`: how a generator ends, whoever closes it and whenever."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections.abc import Iterator

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests import programs
from tests.cancelling import cancel_while_held
from tests.generators import Recorder, thread_state


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
        before = thread_state()
        if collected:
            del stream
            gc.collect()
        else:
            await stream.aclose()
        assert thread_state() == before
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


def test_a_ctrl_c_under_which_it_is_closed() -> None:
    program = """
        closing, interrupted, closed = threading.Event(), threading.Event(), threading.Event()

        def generate():
            try:
                yield 1
                closing.wait()
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                interrupted.wait()
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
            interrupted.set()
            print(closed.wait(60))
    """
    assert programs.run(program) == (0, "1\nTrue\n", "")


class Numbers:
    """An iterator that is held at one place, and tells how often it was closed."""

    def __init__(self, held_at: int, gate: Gate) -> None:
        self.held_at = held_at
        self.gate = gate
        self.taken = self.closed = 0

    def __iter__(self) -> "Numbers":
        if self.held_at == 0:
            self.gate()
        return self

    def __next__(self) -> int:
        self.taken += 1
        if self.taken == self.held_at:
            self.gate()
        return self.taken

    def close(self) -> None:
        self.closed += 1


@pytest.mark.asyncio
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("held_at", [0, 1, 2])
async def test_cancelled_while_async_with_is_left_it_ends_all_the_same(
    held_at: int, times: int
) -> None:
    gate = Gate()
    numbers = Numbers(held_at, gate)

    async def leave() -> None:
        executor = aiopar.DeviceExecutor(["cpu"])
        async with executor, executor.iterate(lambda: numbers) as items:
            reading = asyncio.create_task(anext(items))
            await gate.entered()
            reading.cancel()

    await cancel_while_held(leave(), gate, times)
    assert numbers.closed == 1


@pytest.mark.asyncio
async def test_so_does_an_executor() -> None:
    gate, executor = Gate(), aiopar.DeviceExecutor(["cpu"])

    async def leave() -> None:
        async with executor:
            executor.submit(gate)

    await cancel_while_held(leave(), gate, 3)
    assert not executor._dispatcher.pool.alive
