"""`Batcher` over coroutine functions and `DataParallel`: awaited on an event loop."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher
from tests import simdevice

from .batches import LONG, Callers, Held, current_executor, double, on_asyncio, outcomes_of, until
from .streams import full

pytestmark = pytest.mark.anyio


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


# Functions that are awaited.


class Double:
    async def __call__(self, batch: Tensor) -> Tensor:
        return await double(batch)

    async def method(self, batch: Tensor) -> Tensor:
        return await double(batch)


class Module(nn.Module):
    async def forward(self, batch: Tensor) -> Tensor:
        return await double(batch)


async def scaled(scale: int, batch: Tensor) -> Tensor:
    return await double(batch) / 2 * scale


class Doubling(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return batch * 2


KINDS: dict[str, Any] = {
    "function": double,
    "object": Double(),
    "method": Double().method,
    "module": Module(),
    "partial": functools.partial(scaled, 2),
    "DataParallel": aiopar.DataParallel(Doubling(), device_ids=["cpu", "cpu"]),
    "partial of one": functools.partial(aiopar.DataParallel(Doubling(), device_ids=["cpu"])),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_callables_that_are_awaited(kind: str) -> None:
    async with Batcher(KINDS[kind], max_batch_size=3, max_queue_delay=LONG) as batcher:
        items = [torch.full((2,), float(n)) for n in range(3)]
        outcomes = await outcomes_of(batcher, items)
        assert [outcome.tolist() for outcome in outcomes] == [[0, 0], [2, 2], [4, 4]]
        assert batcher.stats().batch_sizes == {3: 1}


async def test_the_function_runs_on_the_loop_and_collate_fn_on_workers() -> None:
    threads: dict[str, threading.Thread] = {}

    def note(name: str, value: Any) -> Any:
        threads[name] = threading.current_thread()
        return value

    async def fn(batch: list[Any]) -> list[Any]:
        await anyio.lowlevel.checkpoint()
        return note("fn", batch)  # type: ignore[no-any-return]

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(
                fn,
                collate_fn=lambda items: note("collate", items),
                unbatch_fn=lambda outputs: note("unbatch", outputs),
            ) as batcher:
                assert await batcher(1) == 1
        worker = await executor.run_sync(threading.current_thread)
    assert threads == {"collate": worker, "fn": threading.current_thread(), "unbatch": worker}


async def test_the_function_runs_under_the_state_of_the_code_that_made_the_batcher() -> None:
    seen: list[Any] = []

    async def fn(batch: list[Any]) -> list[Any]:
        for _ in range(2):
            seen.append((torch.is_grad_enabled(), _VARIABLE.get()))
            await anyio.lowlevel.checkpoint()
        _VARIABLE.set(9)  # for this batch alone
        return batch

    _VARIABLE.set(1)
    with torch.no_grad():
        batcher = Batcher(fn, collate_fn=list)
    _VARIABLE.set(2)
    async with batcher:
        for _ in range(2):
            await batcher(0)
            seen.append((torch.is_grad_enabled(), _VARIABLE.get()))
    assert seen == [(False, 1), (False, 1), (True, 2)] * 2


# As with a plain function.


@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_as_many_batches_run_at_once_as_concurrency_says(concurrency: int) -> None:
    held = Held()
    options: dict[str, Any] = {"max_batch_size": 1, "concurrency": concurrency}
    batcher = Batcher(held, collate_fn=list, **options)
    async with batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        for n in range(5):
            callers.call(n)
        await until(lambda: len(held.runs) == concurrency)
        await anyio.wait_all_tasks_blocked()
        stats = batcher.stats()
        assert (stats.in_flight, stats.queued) == (concurrency, 5 - concurrency)
        while len(callers.outcomes) < 5:
            held.let_on()
            await anyio.lowlevel.checkpoint()
    assert len(held.runs) == 5


@pytest.mark.sim
async def test_a_batch_is_collated_after_the_kernels_of_its_callers() -> None:
    simdevice.set_kernel_latency(0.02)

    async def fn(batch: Tensor) -> Tensor:
        return batch

    async with current_executor(["sim:0"]), Batcher(fn) as batcher:
        with torch.Stream(device="sim:0"):
            item = torch.zeros(2, device="sim:0") + 1
            call = batcher(item)  # its task may begin later, under another stream
        assert (await call).tolist() == [1, 1]


# `aclose`: which batches it awaits, and which it cancels.


async def test_aclose_cancels_after_its_timeout_and_waits() -> None:
    held = Held()
    async with anyio.create_task_group() as tasks:
        batcher = Batcher(held, collate_fn=list)
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        await batcher.aclose(timeout=0.01)
        assert held.ended == [[1]]
    assert batcher.stats().in_flight == 0
    assert {type(error) for error in callers.outcomes.values()} == {aiopar.ServiceClosed}
    assert held.runs == [[1]]


@on_asyncio
async def test_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double, concurrency=2) as batcher:
        await batcher(torch.ones(1))
    async with Batcher(Held(), collate_fn=list) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher(1, timeout=0.01)
        await batcher.aclose(timeout=0.01)
    assert asyncio.all_tasks() == before


@pytest.mark.may_block("the other loop is held up")
def test_aclose_does_not_wait_for_another_loop() -> None:
    runs: list[list[str]] = []
    blocked, may_go_on = threading.Event(), threading.Event()

    async def fn(batch: list[str]) -> list[str]:
        runs.append(sorted(batch))
        await anyio.sleep_forever()
        return batch

    batcher = Batcher(fn, **full(2))

    async def block() -> None:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await callers.queue("there")
            blocked.set()
            await until(lambda: bool(runs))
            may_go_on.wait(30)  # of all that is posted to this loop, nothing is seen yet
        assert isinstance(callers.outcomes["there"], aiopar.ServiceClosed)

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            await until(blocked.is_set)
            callers.call("here")
            await until(lambda: bool(runs))
            await batcher.aclose(timeout=0.01)
        assert isinstance(callers.outcomes["here"], aiopar.ServiceClosed)

    with ThreadPoolExecutor(1) as threads:
        other = threads.submit(asyncio.run, block())
        asyncio.run(main())
        may_go_on.set()
        other.result(30)
    assert runs == [["here", "there"]]


# Functions that fail or are cancelled, and functions that only look like one.


# As with a plain function.


# Other parties that may end the task.


@on_asyncio
async def test_a_batch_cancelled_by_another_party_runs_once_more() -> None:
    held = Held()
    before = asyncio.all_tasks()
    async with Batcher(held, collate_fn=list) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        (task,) = (task for task in asyncio.all_tasks() - before if "drive" in repr(task))
        task.cancel()
        await until(lambda: len(held.runs) == 2)
        held.let_on()
    assert callers.outcomes == {1: "1"}


@on_asyncio
async def test_a_batch_cancelled_before_it_begins_is_begun_again() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double) as batcher:
        call = asyncio.ensure_future(batcher(torch.ones(1)))
        await asyncio.sleep(0)
        (task,) = asyncio.all_tasks() - before - {call}
        task.cancel()
        assert await call == 2
        assert batcher.stats().batch_sizes == {1: 1}


@on_asyncio
async def test_an_item_for_which_the_function_raises_a_cancellation_fails_alone() -> None:
    async def fn(batch: list[Any]) -> list[Any]:
        if "bad" in batch:
            part = asyncio.ensure_future(asyncio.sleep(0))
            part.cancel()
            await part
        return batch

    items = ["good", "bad", "fine"]
    async with Batcher(fn, **full(3)) as batcher:
        good, bad, fine = await outcomes_of(batcher, items)
    assert (good, fine) == ("good", "fine")
    assert isinstance(bad, RuntimeError)
    assert "raised a cancellation" in str(bad)
    assert isinstance(bad.__cause__, asyncio.CancelledError)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_errors_that_only_end_threads_reach_the_callers(error: type[BaseException]) -> None:
    async def fn(batch: list[Any]) -> list[Any]:
        if batch == [1]:
            raise error
        return batch

    async with Batcher(fn, collate_fn=list) as batcher:
        with pytest.raises(error):
            await batcher(1)
        assert await batcher(2) == 2


@pytest.mark.parametrize("unbatch_fn", [None, list])
async def test_outputs_that_do_not_match_the_batch(unbatch_fn: Any) -> None:
    async def fn(batch: list[int]) -> list[int]:
        return batch[1:]

    async with Batcher(fn, **full(3), unbatch_fn=unbatch_fn) as batcher:
        for error in await outcomes_of(batcher, range(3)):
            with pytest.raises(aiopar.OutputMismatch, match=r"returned 2 outputs .* of 3 items"):
                raise error


# Functions that do not look asynchronous.


async def _async_generator(batch: Tensor) -> AsyncIterator[Tensor]:
    yield batch


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda batch: double(batch), "a coroutine"),  # noqa: PLW0108  # a plain function
        (lambda batch: (row for row in batch), "a generator"),
        (lambda batch: _async_generator(batch), "an async generator"),  # noqa: PLW0108
    ],
)
async def test_a_plain_function_that_returns_a_coroutine_fails_with_advice(
    fn: Callable[[Tensor], Any], kind: str
) -> None:
    async with Batcher(fn) as batcher:
        with pytest.raises(TypeError, match=f"returned {kind} .* pass the function"):
            await batcher(torch.ones(1))
