"""`Batcher` over coroutine functions and `DataParallel`: awaited on an event loop."""

import asyncio
import contextvars
import functools
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._request import Request
from tests import simdevice
from tests.freeing import survivors, without_gc

from .batches import Callers, until
from .stand_ins import Loop, Waiting
from .streams import LONG, full
from .test_batcher_loops import RUNNERS
from .test_observer import Watcher
from .test_scheduler import scheduler_with

Devices = tuple[torch.device, ...]

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


class Bad(Exception):
    pass


class Stop(BaseException):
    """As `SystemExit`, which would end the loop."""


class Held:
    """A coroutine function that waits in each batch until it is let on."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.ended: list[list[Any]] = []
        self._events: list[anyio.Event] = []

    async def __call__(self, items: list[Any]) -> list[Any]:
        self.runs.append(list(items))
        event = anyio.Event()
        self._events.append(event)
        try:
            await event.wait()
        finally:
            self.ended.append(list(items))
        return [str(item) for item in items]

    def let_on(self) -> None:
        """Those that wait."""
        for event in self._events:
            event.set()


async def called(batcher: Batcher, *items: Any) -> dict[Any, Any]:
    """Results and errors of items that come together."""
    async with anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        for item in items:
            callers.call(item)
    return callers.outcomes


# What is awaited.


async def double(batch: Tensor) -> Tensor:
    await anyio.lowlevel.checkpoint()
    return batch * 2


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


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_what_can_be_awaited(kind: str) -> None:
    async with Batcher(KINDS[kind], max_batch_size=3, max_queue_delay=LONG) as batcher:
        items = [torch.full((2,), float(n)) for n in range(3)]
        outcomes = await called(batcher, *items)
        assert [outcomes[item].tolist() for item in items] == [[0, 0], [2, 2], [4, 4]]
        assert batcher.stats().batch_sizes == {3: 1}


@pytest.mark.anyio
async def test_a_data_parallel_splits_a_batch_over_its_devices(devices: Devices) -> None:
    network = nn.Linear(3, 2).to(devices[0])
    pieces: list[tuple[torch.device, int]] = []

    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, x: Tensor) -> Tensor:
            pieces.append((x.device, len(x)))
            result: Tensor = self.network(x)
            return result

    items = list(torch.randn(8, 3).unbind())
    async with aiopar.DeviceExecutor(devices) as executor:
        with aiopar.use_executor(executor), torch.no_grad():
            batcher = Batcher(
                aiopar.DataParallel(Noting(), device_ids=devices),
                max_batch_size=8,
                max_queue_delay=LONG,
            )
            expected = network(torch.stack(items).to(devices[0])).tolist()
        with aiopar.use_executor(executor):
            async with batcher:
                outcomes = await called(batcher, *items)
        outputs = [await executor.run_sync(outcomes[item].tolist) for item in items]
    for output, wanted in zip(outputs, expected, strict=True):
        assert output == pytest.approx(wanted, abs=1e-5)
    each = 8 // len(devices)
    assert sorted(pieces, key=str) == [(device, each) for device in devices]


@pytest.mark.anyio
async def test_it_is_awaited_on_the_loop_and_batches_are_made_on_workers() -> None:
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
    assert threads == {
        "collate": worker,
        "fn": threading.current_thread(),
        "unbatch": worker,
    }


@pytest.mark.anyio
async def test_it_runs_under_the_state_of_who_made_the_batcher() -> None:
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


@pytest.mark.anyio
async def test_only_the_bad_item_fails() -> None:
    runs: list[int] = []

    async def fn(batch: list[int]) -> list[int]:
        runs.append(len(batch))
        await anyio.lowlevel.checkpoint()
        if -1 in batch:
            raise Bad
        return batch

    async with Batcher(fn, **full(8)) as batcher:
        outcomes = await called(batcher, *range(-1, 7))
    error = outcomes.pop(-1)
    assert type(error) is Bad
    assert error.__notes__ == ["raised by one item alone, of a batch of 8"]
    assert outcomes == {n: n for n in range(7)}
    assert sorted(runs) == [1, 1, 2, 2, 4, 4, 8]


@pytest.mark.anyio
@pytest.mark.parametrize("unbatch_fn", [None, list])
async def test_outputs_that_do_not_match_the_batch(unbatch_fn: Any) -> None:
    async def fn(batch: list[int]) -> list[int]:
        return batch[1:]

    async with Batcher(fn, **full(3), unbatch_fn=unbatch_fn) as batcher:
        outcomes = await called(batcher, 1, 2, 3)
    for error in outcomes.values():
        with pytest.raises(aiopar.OutputMismatch, match=r"returned 2 outputs .* of 3 items"):
            raise error


@pytest.mark.anyio
async def test_out_of_memory_is_learned_from() -> None:
    held, sizes = Held(), []

    async def fn(batch: list[Any]) -> list[Any]:
        if "first" in batch:
            return await held(batch)
        sizes.append(len(batch))
        if len(batch) > 2:
            raise torch.OutOfMemoryError
        return batch

    async with Batcher(fn, collate_fn=list) as batcher:
        for expected in ([4, 2, 2], [2, 2]):
            sizes.clear()
            async with anyio.create_task_group() as tasks:
                callers = Callers(batcher, tasks)
                callers.call("first")
                await until(lambda: batcher.stats().in_flight == 1)
                await callers.queue(1, 2, 3, 4)
                await until(lambda: len(held.runs) > len(held.ended))
                held.let_on()
            assert sizes == expected
            assert callers.outcomes == {"first": "first", 1: 1, 2: 2, 3: 3, 4: 4}


@pytest.mark.anyio
async def test_a_device_error_is_everybodys() -> None:
    runs: list[int] = []

    async def fn(batch: list[int]) -> list[int]:
        runs.append(len(batch))
        raise torch.AcceleratorError("the device is lost")

    async with Batcher(fn, **full(4)) as batcher:
        outcomes = await called(batcher, 1, 2, 3, 4)
    assert runs == [4]
    assert {type(error) for error in outcomes.values()} == {torch.AcceleratorError}


@pytest.mark.anyio
async def test_what_waits_goes_together_when_a_batch_has_ended() -> None:
    held = Held()
    async with Batcher(held, collate_fn=list) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(0)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(1, 2, 3)
        assert held.runs == [[0]]
        held.let_on()
        await until(lambda: len(held.runs) == 2)
        held.let_on()
    assert held.runs == [[0], [1, 2, 3]]
    assert callers.outcomes == {n: str(n) for n in range(4)}


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_who_leaves_a_running_batch_is_noticed_by_nobody() -> None:
    held = Held()
    async with Batcher(held, **full(3)) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call("stays")
        callers.call("cancelled")
        callers.call("late", timeout=0.05)
        await until(lambda: isinstance(callers.outcomes.get("late"), aiopar.DeadlineExceeded))
        await until(lambda: bool(held.runs))
        callers.cancel("cancelled")
        await anyio.wait_all_tasks_blocked()
        assert held.ended == []
        held.let_on()
    assert set(callers.outcomes) == {"stays", "late"}
    assert callers.outcomes["stays"] == "stays"


@pytest.mark.anyio
async def test_observers_see_a_batch_without_a_device() -> None:
    watcher = Watcher()
    async with Batcher(double) as batcher:
        batcher.add_observer(watcher)
        await batcher(torch.ones(1))
    assert watcher.names == ["enqueue", "start", "compute", "computed", "ended", "completed"]
    [batch] = watcher.batches
    assert batch.device is None
    assert (batch.outputs, batch.errors) == (1, 0)
    assert {thread for *_, thread in watcher.events} == {threading.current_thread()}


@pytest.mark.anyio
async def test_nothing_of_a_batch_is_kept() -> None:
    refs: list[weakref.ref[Any]] = []
    errors: list[BaseException] = [Bad(), Stop()]

    async def fn(batch: Tensor) -> Tensor:
        output = batch * 2
        refs.extend(map(weakref.ref, (batch, output)))
        if (batch < 0).any():
            raise errors.pop()
        return output

    with without_gc():
        async with Batcher(fn) as batcher:
            await batcher(torch.ones(1))
            for _ in range(2):
                try:
                    await batcher(-torch.ones(1))
                except (Bad, Stop) as error:
                    refs.append(weakref.ref(error))
            assert await survivors(refs) == []
    assert len(refs) == 8


@pytest.mark.anyio
@pytest.mark.sim
async def test_a_batch_is_made_after_what_its_callers_had_launched() -> None:
    simdevice.set_kernel_latency(0.02)

    async def fn(batch: Tensor) -> Tensor:
        return batch

    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(fn) as batcher:
                with torch.Stream(device="sim:0"):
                    item = torch.zeros(2, device="sim:0") + 1
                    call = batcher(item)  # its task may begin later, under another stream
                assert (await call).tolist() == [1, 1]


# Its end.


@pytest.mark.anyio
async def test_aclose_waits_for_what_waits_and_runs() -> None:
    held = Held()
    async with anyio.create_task_group() as tasks:
        batcher = Batcher(held, collate_fn=list)
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        tasks.start_soon(batcher.aclose)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(aiopar.ServiceClosed):
            await batcher(3)
        held.let_on()
        await until(lambda: len(held.runs) == 2)
        held.let_on()
    assert callers.outcomes == {1: "1", 2: "2"}


@pytest.mark.anyio
async def test_aclose_without_drain_lets_running_batches_end() -> None:
    held = Held()
    async with anyio.create_task_group() as tasks:
        batcher = Batcher(held, collate_fn=list)
        callers = Callers(batcher, tasks)
        callers.call(1)
        await until(lambda: len(held.runs) == 1)
        await callers.queue(2)
        tasks.start_soon(functools.partial(batcher.aclose, drain=False))
        await until(lambda: isinstance(callers.outcomes.get(2), aiopar.ServiceClosed))
        held.let_on()
    assert callers.outcomes[1] == "1"
    assert held.runs == [[1]]


@pytest.mark.anyio
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


@pytest.mark.asyncio
async def test_no_task_is_left() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double, concurrency=2) as batcher:
        await batcher(torch.ones(1))
    async with Batcher(Held(), collate_fn=list) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher(1, timeout=0.01)
        await batcher.aclose(timeout=0.01)
    assert asyncio.all_tasks() == before


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


# Who else may end it.


@pytest.mark.asyncio
async def test_a_batch_that_others_cancel_is_run_once_more() -> None:
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


@pytest.mark.asyncio
async def test_a_batch_that_others_cancel_before_it_begins_is_begun_again() -> None:
    before = asyncio.all_tasks()
    async with Batcher(double) as batcher:
        call = asyncio.ensure_future(batcher(torch.ones(1)))
        await asyncio.sleep(0)
        (task,) = asyncio.all_tasks() - before - {call}
        task.cancel()
        assert await call == 2
        assert batcher.stats().batch_sizes == {1: 1}


@pytest.mark.asyncio
async def test_a_function_that_cancels_itself_fails() -> None:
    runs: list[list[Any]] = []

    async def fn(batch: list[Any]) -> list[Any]:
        runs.append(batch)
        if "good" not in batch:
            raise asyncio.CancelledError
        return batch

    async with Batcher(fn, collate_fn=list) as batcher:
        with pytest.raises(RuntimeError, match="cancelled from outside") as caught:
            await batcher("bad")
        assert isinstance(caught.value.__cause__, asyncio.CancelledError)
        assert await batcher("good") == "good"
    assert runs == [["bad"], ["bad"], ["good"]]


@pytest.mark.anyio
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


@pytest.mark.anyio
async def test_the_executor_is_shut_down_under_it() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = await Batcher(double, max_batch_size=4, max_queue_delay=LONG).__aenter__()
    outcomes = await called(batcher, *torch.ones(4, 1).unbind())
    assert {type(error) for error in outcomes.values()} == {aiopar.ExecutorShutdown}
    assert not any(hasattr(error, "__notes__") for error in outcomes.values())
    await batcher.aclose()


# What is not seen to be asynchronous.


def _returns_coroutine(batch: Tensor) -> Awaitable[Tensor]:
    return double(batch)


def _generator(batch: Tensor) -> Iterator[Tensor]:
    yield batch


def _returns_generator(batch: Tensor) -> Iterator[Tensor]:
    return _generator(batch)


async def _async_generator(batch: Tensor) -> AsyncIterator[Tensor]:
    yield batch


def _returns_async_generator(batch: Tensor) -> AsyncIterator[Tensor]:
    return _async_generator(batch)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (_returns_coroutine, "coroutine"),
        (_returns_generator, "generator"),
        (_returns_async_generator, "async generator"),
    ],
)
async def test_a_plain_function_that_returns_one_is_told_so(
    fn: Callable[[Tensor], Any], kind: str
) -> None:
    async with Batcher(fn) as batcher:
        with pytest.raises(TypeError, match=f"returned a {kind}, .* a {kind} function"):
            await batcher(torch.ones(1))


# Several event loops.


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_loop_after_the_other(runner: str) -> None:
    batcher = Batcher(double)

    async def main() -> None:
        assert await batcher(torch.ones(1)) == 2

    for _ in range(3):
        RUNNERS[runner](main)
    RUNNERS[runner](batcher.aclose)
    assert batcher.stats().completed == 3


def test_several_loops_at_once() -> None:
    runs: list[int] = []

    async def fn(batch: list[Any]) -> list[Any]:
        runs.append(len(batch))
        await anyio.lowlevel.checkpoint()
        return batch

    batcher = Batcher(fn, collate_fn=list, max_batch_size=16, concurrency=2)
    together = threading.Barrier(6)

    def run(number: int) -> dict[Any, Any]:
        outcomes: dict[Any, Any] = {}

        async def main() -> None:
            outcomes.update(await called(batcher, *((number, n) for n in range(100))))

        together.wait(30)
        RUNNERS[["asyncio", "uvloop", "trio"][number % 3]](main)
        return outcomes

    with ThreadPoolExecutor(6) as threads:
        for number, outcomes in enumerate(threads.map(run, range(6))):
            assert outcomes == {(number, n): (number, n) for n in range(100)}
    assert sum(runs) >= 600
    assert batcher.stats().queued == batcher.stats().in_flight == 0


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("together", [False, True])
def test_a_loop_that_ends_leaves_others_theirs(runner: str, other: str, together: bool) -> None:
    runs: list[list[str]] = []
    may_come = threading.Event()

    async def fn(batch: list[str]) -> list[str]:
        runs.append(sorted(batch))
        if batch == ["first"]:
            await until(lambda: batcher.stats().queued == 2)
        elif "leaves" in batch:
            await anyio.sleep_forever()
        return batch

    batcher = Batcher(fn, collate_fn=list)

    async def leave() -> None:
        """Run a batch on this loop, and let the loop end under it."""
        async with anyio.create_task_group() as tasks:
            if together:
                tasks.start_soon(batcher, "first")
                await until(lambda: runs == [["first"]])
            tasks.start_soon(batcher, "leaves")
            await until(lambda: batcher.stats().queued == 1 or runs == [["leaves"]])
            may_come.set()
            if together:
                await until(lambda: runs[1:] == [["leaves", "stays"]])
            else:
                await until(lambda: batcher.stats().queued == 1)
            tasks.cancel_scope.cancel()

    async def stay() -> str:
        result: str = await batcher("stays")
        return result

    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(RUNNERS[runner], leave)
        may_come.wait(30)
        assert threads.submit(RUNNERS[other], stay).result(30) == "stays"
        leaving.result(30)
    assert runs[-1] == ["stays"]
    assert batcher.stats().queued == batcher.stats().in_flight == 0


def test_what_waits_is_started_on_the_loop_of_one_that_waits() -> None:
    scheduler, [runner] = scheduler_with()
    loops = [Loop(), Loop(), Loop()]
    first, second, third = (Request(n, Waiting(loop)) for n, loop in enumerate(loops))
    scheduler.put(first)
    assert runner.take() == [0]
    scheduler.put(second)
    scheduler.put(third)
    scheduler.released(runner, runner.batch, [])
    assert [len(loop.posted) for loop in loops] == [0, 1, 0]
    # Its loop may end now, and never see what was posted to it.
    scheduler.discard(second)
    assert [len(loop.posted) for loop in loops] == [0, 1, 1]
    # If it does, there is nobody any more for whom it is kept running.
    loops[1].posted.pop().deliver()
    assert runner.starts == 1
    assert [len(loop.posted) for loop in loops] == [0, 0, 2]
    loops[2].posted.pop().deliver()
    loops[2].posted.pop().deliver()
    assert runner.starts == 2
    assert runner.take() == [2]
