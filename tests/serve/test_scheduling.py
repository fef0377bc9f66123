"""`Batcher`: which runner takes the next batch, and when; batches that are given back."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate

from .batches import LONG, Bad, Recorder, busy, outcomes_of, until
from .replicas import Scale, X, open_pool

pytestmark = pytest.mark.anyio


async def test_an_item_with_a_deadline_waits_at_most_half_of_it_for_others() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_queue_delay": LONG, "timeout": 1}
    async with Batcher(recorder, collate_fn=list, **options) as batcher:
        assert await batcher(1) == "1"
        assert await outcomes_of(batcher, [2, 3]) == ["2", "3"]
    assert [sorted(run) for run in recorder.runs] == [[1], [2, 3]]


async def test_items_without_a_deadline_leave_with_an_item_that_has_one() -> None:
    recorder = Recorder()
    async with (
        Batcher(recorder, collate_fn=list, max_queue_delay=LONG) as batcher,
        anyio.create_task_group() as tasks,
    ):
        for timeout in (None, 2, 1000):
            tasks.start_soon(lambda given: batcher(0, timeout=given), timeout)
    assert recorder.runs == [[0, 0, 0]]


async def test_items_of_two_keys_run_on_two_runners_at_once() -> None:
    async with busy(always=True, concurrency=2, batch_key=lambda item: item[0]) as callers:
        callers.call("a")
        await callers.gate.entered(2)
        await callers.queue("a3", "b3", "a4", "b4")
        callers.gate.let_on(2)
        await callers.gate.entered(4)
    assert sorted(callers.runs) == [["a"], ["a3", "a4"], ["b3", "b4"]]


class Key:
    """A key that calls a function when it is hashed and compared."""

    def __init__(self, called: Callable[[], object]) -> None:
        self._called = called

    def __hash__(self) -> int:
        self._called()
        return 1

    def __eq__(self, other: object) -> bool:
        self._called()
        return True


@pytest.mark.may_block("a comparison of keys waits for another thread")
async def test_no_lock_is_held_while_keys_are_compared() -> None:
    with ThreadPoolExecutor(1) as thread:

        def key(item: str) -> Key | None:
            if item == "first":
                return None
            return Key(lambda: thread.submit(callers.batcher.stats).result(30))

        async with busy(batch_key=key) as callers:
            await callers.queue("a", "b")
            callers.gate.open()
            await until(lambda: len(callers.outcomes) == 3)
    assert callers.runs == [["a", "b"]]


async def test_a_key_that_cannot_be_compared_fails_its_own_item_only() -> None:
    compared: list[object] = []

    def compare() -> None:
        compared.append(None)
        if fails:
            raise Bad

    fails = False
    async with busy(batch_key=lambda item: item if item == "first" else Key(compare)) as callers:
        await callers.queue("a")
        fails = True
        with pytest.raises(Bad):
            await callers.batcher("bad")
        fails = False
        await callers.queue("b")
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 3)
    assert callers.runs == [["a", "b"]]


async def test_a_call_that_waits_for_the_worker_runs_before_the_next_batch() -> None:
    events: list[Any] = []
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        busy(events.append, workers=executor) as callers,
    ):
        await callers.queue("next")
        call = executor.submit(events.append, "call")
        callers.gate.open()
        await call
    assert events == ["first", "call", "next"]


async def test_each_batch_is_one_call_of_the_executor() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(list, collate_fn=list) as batcher:
                for item in range(3):
                    await batcher(item)
        await executor.aclose()
        [worker] = executor.stats().workers
        assert (worker.completed, worker.queued, worker.running) == (3, 0, 0)


async def test_a_batch_that_fails_while_its_executor_shuts_down_is_still_split() -> None:
    def check(item: str) -> str:
        if item == "bad":
            raise Bad
        return item

    async with aiopar.DeviceExecutor(["cpu"]) as executor, busy(check, workers=executor) as callers:
        await callers.queue("good", "bad", "better")
        callers.gate.open()
        await until(lambda: len(callers.outcomes) > 1)
        executor.shutdown(wait=False)
    assert callers.outcomes["good"] == "good"
    assert isinstance(callers.outcomes["bad"], Bad)
    assert callers.outcomes["better"] == "better"


async def test_collate_fn_may_wait_for_the_outcome_of_the_batch_before() -> None:
    with Gate() as told:

        def collate_fn(items: list[str]) -> list[str]:
            if items != ["first"]:
                told()
            return items

        async with busy(collate_fn=collate_fn) as callers:
            await callers.queue("next")
            callers.gate.open()
            await until(lambda: "first" in callers.outcomes)
            told.open()
    assert callers.outcomes == {"first": "first", "next": "next"}


async def test_an_item_is_given_back_once() -> None:
    """The item itself may have caused the failure after which it was given back."""
    zeros: list[torch.Tensor] = []

    def check(x: torch.Tensor) -> None:
        zeros.extend(x[x == 0])
        if zeros:  # its replica is broken, and so are all others
            raise Bad

    async with (
        aiopar.DeviceExecutor(["cpu"] * 3) as executor,
        open_pool(Scale(1.0, check), on=None, executor=executor, warmup=X + 1) as pool,
        Batcher(pool, max_batch_size=1) as batcher,
    ):
        with pytest.raises(Bad):
            await batcher(torch.zeros(1))
        assert len(zeros) == 2
        zeros.clear()
        assert (await batcher(torch.ones(1)))[0].item() == 1
