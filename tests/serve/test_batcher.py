"""`Batcher`: when items go, with whom, in what order, and who is refused."""

import asyncio
import math
import threading
from collections import Counter
from time import monotonic
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar._default import _DefaultExecutor
from aiopar.serve import Batcher, BatcherStats
from tests import simdevice

from .batches import Busy, Callers, Recorder, busy, outcomes_of, until

LONG = 1000.0
"""Seconds that no test lasts."""

pytestmark = pytest.mark.anyio


# When items go.


async def test_a_lone_item_goes_at_once() -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list) as batcher:
        assert [await batcher(item) for item in (1, 2)] == ["1", "2"]
    assert recorder.runs == [[1], [2]]


async def test_what_waits_goes_together_as_soon_as_a_worker_is_free() -> None:
    async with busy() as callers:
        await callers.queue(1, 2, 3)
        assert callers.runs == []
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 4)
        assert callers.runs == [[1, 2, 3]]
        assert callers.outcomes == {"first": "first", 1: "1", 2: "2", 3: "3"}


async def test_a_batch_has_at_most_max_batch_size() -> None:
    async with busy(max_batch_size=2) as callers:
        await callers.queue(1, 2, 3, 4, 5)
    assert callers.runs == [[1, 2], [3, 4], [5]]


async def test_as_many_batches_run_at_once_as_concurrency_says() -> None:
    executor = aiopar.DeviceExecutor(["cpu"] * 3)
    async with executor:
        with aiopar.use_executor(executor):
            async with busy(always=True, concurrency=2) as callers:
                callers.call(1)
                await callers.gate.entered(2)
                await callers.queue(2, 3)
                assert callers.gate.held == 2
                callers.gate.let_on()
                await callers.gate.entered(3)
    assert callers.runs == [[1], [2, 3]]


async def test_the_default_executor_grows_for_them() -> None:
    executor = _DefaultExecutor()  # one like it: the process's own would stay as large
    count = len(executor.devices) + 2
    async with executor:
        with aiopar.use_executor(executor):
            async with busy(always=True, concurrency=count, max_batch_size=1) as callers:
                for item in range(1, count):
                    callers.call(item)
                await callers.gate.entered(count)
                callers.gate.open()
    assert len(executor.devices) == count


async def test_max_queue_delay_waits_for_a_full_batch() -> None:
    recorder = Recorder()
    async with Batcher(
        recorder, collate_fn=list, max_batch_size=3, max_queue_delay=LONG
    ) as batcher:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue(1, 2)
            callers.call(3)
        assert recorder.runs == [[1, 2, 3]]


async def test_a_full_queue_waits_for_no_more() -> None:
    options: dict[str, Any] = {"max_batch_size": 4, "max_queue_delay": LONG, "max_pending": 3}
    async with Batcher(Recorder(), collate_fn=list, **options) as batcher:
        assert await outcomes_of(batcher, range(3)) == ["0", "1", "2"]


async def test_max_queue_delay_is_the_longest_wait_for_others() -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list, max_queue_delay=0.01) as batcher:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                callers.call(1)
                callers.call(2)
            assert sorted(recorder.runs.pop()) == [1, 2]
            assert recorder.runs == []
        assert batcher.stats().queue_wait.p50 > 0.005


async def test_a_full_batch_does_not_wait_for_another_to_fill() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_batch_size": 2, "batch_key": str.lower}
    async with (
        Batcher(recorder, collate_fn=list, max_queue_delay=LONG, **options) as batcher,
        anyio.create_task_group() as tasks,
    ):
        callers = Callers(batcher, tasks)
        await callers.queue("a", priority=-1)
        await callers.queue("b")
        callers.call("B")
        await until(lambda: "B" in callers.outcomes)
        assert recorder.runs == [["b", "B"]]
        callers.call("A")
    assert recorder.runs == [["b", "B"], ["a", "A"]]


async def test_once_the_delay_has_passed_an_item_goes_when_a_worker_is_free() -> None:
    async with busy(max_queue_delay=0.01) as callers:
        await callers.queue(1)
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher("much later", timeout=0.05)
        await callers.queue(2)
    assert callers.runs == [[1, 2]]


async def test_who_leaves_while_a_batch_fills_is_not_in_it() -> None:
    recorder = Recorder()
    options: dict[str, Any] = {"max_batch_size": 2, "max_queue_delay": LONG}
    async with Batcher(recorder, collate_fn=list, **options) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher(1, timeout=0.01)
        assert recorder.runs == []
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue(2)
            callers.call(3)
        assert recorder.runs == [[2, 3]]


# Who goes with whom, and in what order.


async def test_only_items_with_equal_keys_go_together() -> None:
    async with busy(max_batch_size=2, batch_key=str.lower) as callers:
        await callers.queue("a", "b", "A", "B", "a1", "a ", "A ")
    assert callers.runs == [["a", "A"], ["b", "B"], ["a1"], ["a ", "A "]]


async def test_items_near_in_cost_go_together() -> None:
    async with busy(max_batch_size=2, cost=len) as callers:
        await callers.queue("a", "b" * 50, "cc", "d" * 48)
    assert callers.runs == [["a", "cc"], ["b" * 50, "d" * 48]]


async def test_a_batch_costs_at_most_max_batch_cost() -> None:
    async with busy(cost=len, max_batch_cost=8) as callers:
        await callers.queue("aaa", "bbb", "ccc", "d" * 8)
        with pytest.raises(aiopar.InvalidInput, match=r"costs 9, .* at most 8"):
            await callers.batcher("e" * 9)
    assert callers.runs == [["aaa", "bbb"], ["ccc"], ["d" * 8]]


async def test_a_far_cost_does_not_wait_for_ever() -> None:
    async with busy(max_batch_size=2, cost=len) as callers:
        await callers.queue("a" * 100, *(f"{n:02}" for n in range(8)))
    assert callers.runs[0][0] == "a" * 100


async def test_lower_priority_goes_first_and_equal_ones_as_they_came() -> None:
    async with busy(max_batch_size=2) as callers:
        for item, priority in enumerate([0, 5, -3, 0, 5, -3]):
            await callers.queue(item, priority=priority)
    assert callers.runs == [[2, 5], [0, 3], [1, 4]]


async def test_nobody_starves() -> None:
    async with busy(max_batch_size=1) as callers:
        await callers.queue("patient", priority=9)
        await callers.queue(*range(40))
    assert callers.runs.index(["patient"]) == 32


# Deadlines and cancellations.


async def test_a_deadline_that_passes_in_the_queue() -> None:
    async with busy() as callers:
        with pytest.raises(aiopar.DeadlineExceeded, match=r"no result after .* in the queue") as e:
            await callers.batcher("late", timeout=0.01)
        assert isinstance(e.value, TimeoutError)
        assert callers.batcher.stats().queued == 0
        await callers.queue("in time")
    assert callers.runs == [["in time"]], "it is never computed"


@pytest.mark.parametrize("seconds", [0, -1, -math.inf])
async def test_a_deadline_that_has_passed_already(seconds: float) -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
            await batcher("late", timeout=seconds)
        assert await batcher("in time") == "in time"
    assert recorder.runs == [["in time"]], "not even by an idle worker"


async def test_a_deadline_that_passes_in_a_running_batch() -> None:
    async with busy(always=True) as callers:
        await callers.queue("a")
        callers.call("late", timeout=0.05)
        await until(lambda: callers.batcher.stats().queued == 2)
        callers.gate.let_on()
        await callers.gate.entered(2)
        await until(lambda: "late" in callers.outcomes)
        assert callers.gate.held == 1, "raised at the deadline, not when the batch ends"
        assert "a" not in callers.outcomes
    late = callers.outcomes.pop("late")
    assert isinstance(late, aiopar.DeadlineExceeded)
    assert callers.outcomes == {"first": "first", "a": "a"}
    # On a busy machine the deadline may have passed in the queue.
    assert callers.runs == [["a", "late"]] if "running" in str(late) else [["a"]]


async def test_a_callers_timeout_is_instead_of_the_batchers() -> None:
    async with busy(timeout=0.01) as callers:
        with pytest.raises(aiopar.DeadlineExceeded):
            await callers.batcher(1)
        await callers.queue(2, timeout=LONG)
    assert callers.runs == [[2]]
    assert callers.outcomes[2] == "2"


async def test_who_is_cancelled_in_the_queue_is_not_computed() -> None:
    async with busy() as callers:
        await callers.queue(1, 2, 3)
        callers.cancel(2)
        await until(lambda: callers.batcher.stats().queued == 2)
    assert callers.runs == [[1, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_who_is_cancelled_in_a_running_batch_is_noticed_by_nobody() -> None:
    async with busy(always=True) as callers:
        await callers.queue(1, 2, 3)
        callers.gate.let_on()
        await callers.gate.entered(2)
        callers.cancel(2)
        await anyio.wait_all_tasks_blocked()
    assert callers.runs == [[1, 2, 3]]
    assert callers.outcomes == {"first": "first", 1: "1", 3: "3"}


async def test_all_may_leave_a_running_batch() -> None:
    async with busy() as callers:
        callers.cancel("first")
        await callers.queue(1)
    assert callers.outcomes == {1: "1"}


async def test_cancelled_before_it_was_called() -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list) as batcher:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await batcher(1)
        assert await batcher(2) == "2"
        assert batcher.stats().queued == batcher.stats().in_flight == 0
    assert [2] in recorder.runs


# Overload.


async def test_a_full_queue_refuses_at_once() -> None:
    async with busy(max_batch_size=2, max_pending=3) as callers:
        await callers.queue(1, 2, 3)
        for _ in range(2):
            with pytest.raises(aiopar.Overloaded, match="3 items wait, max_pending=3") as caught:
                await callers.batcher(4)
            assert isinstance(caught.value, aiopar.QueueFull)
            assert isinstance(caught.value, asyncio.QueueFull)
        callers.cancel(2)
        await until(lambda: callers.batcher.stats().queued == 2)
        await callers.queue(5)
        assert callers.batcher.stats().rejected == {"queue_full": 2}
    assert callers.runs == [[1, 3], [5]]


async def test_at_ten_times_its_capacity_most_are_refused_and_none_of_them_waits() -> None:
    async with busy(max_batch_size=4, max_pending=8) as callers:
        for item in range(8):
            await callers.queue(item)
        for item in range(8, 80):
            call = callers.batcher(item)
            with pytest.raises(aiopar.Overloaded):
                call.send(None)  # in its first step: it has not waited for anything
        assert callers.batcher.stats().queued == 8
    assert callers.runs == [[0, 1, 2, 3], [4, 5, 6, 7]], "the next two batches are theirs"
    assert callers.batcher.stats().rejected == {"queue_full": 72}


async def timed_once(callers: Busy) -> float:
    """The seconds that a batch takes, when one has run and the next is held."""
    await callers.queue("second")
    callers.gate.let_on()
    await callers.gate.entered(2)
    return callers.batcher.stats().compute.p50


async def test_the_estimated_wait_is_that_of_the_batches_before() -> None:
    async with busy(always=True, max_batch_size=2, max_pending=5) as callers:
        seconds = await timed_once(callers)
        await callers.queue(1, 2, 3, 4, 5)
        with pytest.raises(aiopar.Overloaded) as caught:
            await callers.batcher(6)
        # Two full batches; and what is left of the one that runs, which is at most one more.
        assert 2 * seconds <= caught.value.estimated_wait <= 3 * seconds


async def test_too_long_a_wait_is_refused_at_once() -> None:
    async with busy(always=True, max_batch_size=2, max_wait=0.0) as callers:
        seconds = await timed_once(callers)
        # Until it has taken as long as the one before: what is left is estimated as nothing then.
        overdue = monotonic() + seconds
        await until(lambda: monotonic() > overdue)
        await callers.queue(1, 2)
        with pytest.raises(aiopar.Overloaded, match="max_wait=0 s") as caught:
            await callers.batcher(3)
        assert caught.value.estimated_wait == pytest.approx(seconds)
        assert callers.batcher.stats().queued == 2
        assert callers.batcher.stats().rejected == {"max_wait": 1}
    assert callers.runs == [["second"], [1, 2]]


async def test_a_wait_that_is_short_enough_is_none_to_refuse() -> None:
    async with busy(always=True, max_batch_size=1, max_wait=LONG) as callers:
        await timed_once(callers)
        await callers.queue(1, 2, 3)
    assert callers.runs == [["second"], [1], [2], [3]]


async def test_nobody_waits_for_an_idle_worker() -> None:
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list, max_wait=0.0) as batcher:
        for item in range(10):
            await batcher(item)
    assert len(recorder.runs) == 10


# What comes and goes.


async def test_tensors_are_stacked_and_outputs_unbound_by_default(
    devices: tuple[torch.device, ...],
) -> None:
    device = devices[0]
    if device.type == "sim":
        simdevice.set_kernel_latency(0.001)
    with torch.no_grad():
        network = nn.Linear(3, 2).to(device)
        items = list(torch.randn(40, 3, device=device).unbind())
        batcher = Batcher(network, max_batch_size=8)
        expected = network(torch.stack(items)).tolist()
    outputs: list[Any] = [None] * len(items)

    async def call(index: int) -> None:
        output = await batcher(items[index])
        outputs[index] = output.tolist()  # complete: it blocks nobody

    async with aiopar.DeviceExecutor(devices) as executor:
        with aiopar.use_executor(executor):
            async with batcher, anyio.create_task_group() as tasks:
                for index in range(len(items)):
                    tasks.start_soon(call, index)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output == pytest.approx(wanted, abs=1e-5)


async def test_nested_items_and_outputs() -> None:
    def fn(batch: dict[str, Any]) -> tuple[Tensor, list[str]]:
        return batch["x"] * batch["n"][:, None], batch["name"]

    async with Batcher(fn, max_batch_size=2, max_queue_delay=LONG) as batcher:
        outputs: dict[str, Any] = {}

        async def call(name: str, n: int) -> None:
            item = {"x": torch.ones(2), "n": n, "name": name}
            outputs[name] = await batcher(item)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "a", 2)
            tasks.start_soon(call, "b", 3)
    assert {name: (x.tolist(), other) for name, (x, other) in outputs.items()} == {
        "a": ([2.0, 2.0], "a"),
        "b": ([3.0, 3.0], "b"),
    }


async def test_unbatch_fn_is_run_on_the_worker_and_the_default_on_the_loop() -> None:
    threads: dict[str, threading.Thread] = {}

    class Outputs(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
            if func is Tensor.unbind:
                threads["default"] = threading.current_thread()
            return Tensor.__torch_function__.__func__(cls, func, *args, **kwargs)  # type: ignore[attr-defined]

    def fn(batch: Tensor) -> Tensor:
        threads["fn"] = threading.current_thread()
        return batch.as_subclass(Outputs)

    def unbatch_fn(outputs: Tensor) -> list[Any]:
        threads["unbatch_fn"] = threading.current_thread()
        return outputs.tolist()

    async with Batcher(fn) as batcher:
        assert (await batcher(torch.tensor(1))).item() == 1
    assert threads["default"] is threading.current_thread()
    assert threads["fn"] is not threading.current_thread()
    async with Batcher(fn, unbatch_fn=unbatch_fn) as batcher:
        assert await batcher(torch.tensor(1)) == 1
    assert threads["unbatch_fn"] is threads["fn"]


async def test_a_function_runs_under_the_state_of_who_made_the_batcher() -> None:
    def fn(items: list[int]) -> list[bool]:
        return [torch.is_grad_enabled()] * len(items)

    with torch.no_grad():
        batcher = Batcher(fn, collate_fn=list)
    async with batcher:
        assert not await batcher(1)
        with torch.inference_mode():
            call = batcher(2)
        assert not await call


async def test_a_function_may_wait_for_other_calls() -> None:
    def fn(items: list[int]) -> list[int]:
        return aiopar.wait_all([aiopar.fork(pow, item, 2) for item in items])

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(fn, collate_fn=list) as batcher:
                assert await outcomes_of(batcher, range(10)) == [n * n for n in range(10)]


# Numbers.


async def test_stats() -> None:
    none = aiopar.serve.Percentiles(0.0, 0.0, 0.0)
    assert Batcher(str).stats() == BatcherStats(0, 0, 0, {}, {}, none, none)
    async with busy(always=True, max_batch_size=3) as callers:
        await callers.queue(*range(4))
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.completed) == (4, 1, 0)
        callers.gate.let_on()
        await callers.gate.entered(2)
        stats = callers.batcher.stats()
        assert (stats.queued, stats.in_flight, stats.completed) == (1, 3, 1)
        assert stats.compute.p50 == stats.compute.p99 > 0
    stats = callers.batcher.stats()
    assert (stats.queued, stats.in_flight, stats.completed) == (0, 0, 5)
    assert stats.batch_sizes == {1: 2, 3: 1}
    assert 0 < stats.queue_wait.p50 <= stats.queue_wait.p90 <= stats.queue_wait.p99


async def test_concurrent_tasks_each_get_their_own() -> None:
    outcomes: list[tuple[int, str]] = []
    recorder = Recorder()
    async with Batcher(recorder, collate_fn=list, max_batch_size=7, concurrency=2) as batcher:

        async def call(item: int) -> None:
            outcomes.append((item, await batcher(item)))

        async with anyio.create_task_group() as tasks:
            for item in range(200):
                tasks.start_soon(call, item)
    assert sorted(outcomes) == [(item, str(item)) for item in range(200)]
    assert Counter(item for run in recorder.runs for item in run) == Counter(range(200))
    assert max(map(len, recorder.runs)) <= 7
