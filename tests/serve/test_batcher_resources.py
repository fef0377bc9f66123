"""`Batcher`: the garbage collector, threads that cannot start, and what an idle batcher holds."""

import asyncio
import gc
from typing import Any

import pytest

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate

from .batches import Recorder, until

pytestmark = pytest.mark.asyncio


async def test_the_garbage_collector_may_close_a_forgotten_call_at_any_time() -> None:
    """It may run while its thread holds the queue's lock, and must not wait for it."""
    gate = Gate()
    closed: list[str] = []

    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            gc.collect()
            return True

    def fn(items: list[str]) -> list[str]:
        gate()
        return items

    async def call(batcher: Batcher[Any, Any], item: str) -> None:
        try:
            await batcher(item)
        finally:
            closed.append(item)

    async with (
        Batcher(fn, collate_fn=list, batch_key=lambda _: Key()) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        with gate:
            forgotten: Any = call(batcher, "forgotten")
            forgotten.send(None)
            await gate.entered()
            gc.disable()
            try:
                cycle = [forgotten]
                cycle.append(cycle)
                del forgotten, cycle
                for item in ("next", "after next"):
                    tasks.create_task(call(batcher, item))
                await until(lambda: batcher.stats().queued == 2)
            finally:
                gc.enable()
            assert closed == ["forgotten"]


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


def idle_worker(executor: aiopar.DeviceExecutor) -> bool:
    [worker] = executor.stats().workers
    return worker.queued == worker.running == 0


async def test_an_idle_batcher_is_really_idle() -> None:
    """It has no timer, no task, and no call in an executor."""
    loop = asyncio.get_running_loop()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            before = len(asyncio.all_tasks())
            async with Batcher(Recorder(), collate_fn=list, max_queue_delay=0.001) as batcher:
                await batcher(1, timeout=1000)
                with pytest.raises(aiopar.DeadlineExceeded):
                    async with asyncio.timeout(30):
                        await batcher(2, timeout=1e-6)
                await until(lambda: idle_worker(executor))
                assert len(asyncio.all_tasks()) == before
                timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
                assert [timer for timer in timers if not timer.cancelled()] == []
