"""`Batcher` over coroutine functions and `DataParallel`: awaited on an event loop."""

import contextvars
import functools
import threading
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher
from tests import simdevice

from .batches import LONG, Callers, until
from .coroutines import Held, called, double
from .streams import full
from .test_observer import Watcher

Devices = tuple[torch.device, ...]

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


class Stop(BaseException):
    """Stands for `SystemExit`, which would end the loop."""


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


@pytest.mark.anyio
@pytest.mark.parametrize("kind", KINDS)
async def test_callables_that_are_awaited(kind: str) -> None:
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
    assert threads == {
        "collate": worker,
        "fn": threading.current_thread(),
        "unbatch": worker,
    }


@pytest.mark.anyio
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
async def test_a_caller_that_leaves_a_running_batch_does_not_disturb_the_other_callers() -> None:
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
@pytest.mark.sim
async def test_a_batch_is_collated_after_the_kernels_of_its_callers() -> None:
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
