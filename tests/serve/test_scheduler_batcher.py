"""The `Scheduler` of a `Batcher`: re-entered by the garbage collector, without threads, idle."""

import asyncio
import gc
import threading
from typing import Any

import pytest

import aiopar
from aiopar.serve import Batcher

from .batches import Recorder, busy, until

pytestmark = pytest.mark.asyncio


async def test_the_garbage_collector_may_close_a_call_that_was_left_behind() -> None:
    """While a thread is in the scheduler, at any allocation: there it must not wait for itself."""

    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            if lock.locked():
                gc.collect()
            return True

    lock = threading.Lock()
    gone: list[str] = []

    async def left_behind(batcher: Batcher) -> None:
        try:
            await batcher("left behind")
        finally:
            gone.append("left behind")

    async with busy(batch_key=lambda item: Key()) as callers:
        gc.disable()
        try:
            coroutine: Any = left_behind(callers.batcher)
            coroutine.send(None)
            callers.batcher._scheduler._queue.clear()  # as a batch of it would have
            cycle = [coroutine]
            cycle.append(cycle)
            del coroutine, cycle
            lock = callers.batcher._scheduler._lock
            await callers.queue("next")
            await callers.queue("after next")
        finally:
            gc.enable()
        assert gone == ["left behind"]


async def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(recorder, collate_fn=list) as batcher:
                with monkeypatch.context() as patched:
                    patched.setattr("threading.Thread.start", start)
                    for item in (1, 2):
                        with pytest.raises(RuntimeError, match="can't start new thread"):
                            await batcher(item)
                assert batcher.stats().queued == 0
                assert await batcher(3) == "3"
    assert recorder.runs == [[3]]


async def test_an_idle_batcher_is_really_idle() -> None:
    """No timer, no task, no call of an executor."""
    loop = asyncio.get_running_loop()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            before = len(asyncio.all_tasks())
            async with Batcher(Recorder(), collate_fn=list, max_queue_delay=0.001) as batcher:
                await batcher(1, timeout=1000)
                with pytest.raises(aiopar.DeadlineExceeded):
                    async with asyncio.timeout(30):
                        await batcher(2, timeout=1e-6)
                await until(lambda: not batcher._scheduler._delay._timers)
                [worker] = executor.stats().workers
                assert (worker.queued, worker.running) == (0, 0)
                assert len(asyncio.all_tasks()) == before
                timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
                assert [timer for timer in timers if not timer.cancelled()] == []
