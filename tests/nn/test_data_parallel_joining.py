"""How a `DataParallel` joins the outputs: where the last replica has ended, if it can."""

import asyncio
import threading
from typing import Any

import pytest
import torch
from torch import nn

import aiopar
from aiopar.nn import _data_parallel
from aiopar.nn._scatter_gather import gather_sync
from aiopar.testing import Gate
from tests import simdevice

CPUS = ["cpu", "cpu"]


class Threads(nn.Module):
    """Notes the threads of its forwards; `meanwhile` is called in each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.meanwhile: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(threading.get_ident())
        if self.meanwhile is not None:
            self.meanwhile()
        return x * 2


@pytest.fixture
def joins(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads that outputs were joined on."""
    threads: list[int] = []

    def noted(*args: Any) -> Any:
        threads.append(threading.get_ident())
        return gather_sync(*args)

    monkeypatch.setattr(_data_parallel, "gather_sync", noted)
    return threads


@pytest.mark.anyio
async def test_on_the_worker_that_ends_last(joins: list[int]) -> None:
    module = Threads()
    x = torch.arange(4.0)
    async with aiopar.DeviceExecutor(CPUS) as executor:
        with aiopar.use_executor(executor):
            for _ in range(20):
                assert torch.equal(await aiopar.DataParallel(module, CPUS)(x), x * 2)
    # Which of the two ends last is not said: the first may be held up when it has returned.
    pairs = zip(module.seen[::2], module.seen[1::2], strict=True)
    assert [join in pair for join, pair in zip(joins, pairs, strict=True)] == [True] * 20


@pytest.mark.anyio
async def test_elsewhere_if_others_wait_there(joins: list[int]) -> None:
    async with aiopar.DeviceExecutor(CPUS) as executor:
        others: list[aiopar.Future[int]] = []

        def meanwhile() -> None:
            others.extend(executor.on(worker=index).submit(abs, -1) for index in range(2))

        module = Threads()
        module.meanwhile = meanwhile
        x = torch.arange(4.0)
        with aiopar.use_executor(executor):
            assert torch.equal(await aiopar.DataParallel(module, CPUS)(x), x * 2)
        assert [await other for other in others] == [1] * 4
        assert len(joins) == 1


@pytest.mark.anyio
async def test_by_the_state_of_the_caller() -> None:
    module = nn.Linear(2, 2)
    dp = aiopar.DataParallel(module, CPUS)
    x = torch.randn(4, 2)
    with torch.inference_mode():
        call = dp(x)
    assert (await call).is_inference()
    y = await dp(x)
    y.sum().backward()
    assert module.weight.grad is not None


@pytest.mark.anyio
async def test_what_cannot_be_joined(joins: list[int]) -> None:
    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x if aiopar.current_replica().index else [x]

    with pytest.raises(ValueError, match="different types"):
        await aiopar.DataParallel(Uneven(), CPUS)(torch.ones(4))
    assert len(joins) == 1


@pytest.mark.anyio
async def test_what_fails_is_not_joined(joins: list[int]) -> None:
    module = Threads()
    module.meanwhile = {}.popitem
    with pytest.raises(KeyError) as caught:
        await aiopar.DataParallel(module, CPUS)(torch.ones(4))
    [note] = caught.value.__notes__
    assert note in ("in replica 0 on device cpu", "in replica 1 on device cpu")
    assert not joins


@pytest.mark.asyncio
async def test_cancelled_while_it_joins(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()

    def held(*args: Any) -> None:
        gate()

    monkeypatch.setattr(_data_parallel, "gather_sync", held)
    task = asyncio.create_task(aiopar.DataParallel(Threads(), CPUS)(torch.ones(4)))
    await gate.entered()
    task.cancel()
    await asyncio.sleep(0)  # the cancellation arrives; it waits for what runs
    assert not task.done()
    gate.open()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.asyncio
async def test_cancelled_while_replicas_run(joins: list[int]) -> None:
    gate = Gate()
    module = Threads()
    module.meanwhile = gate
    async with aiopar.DeviceExecutor(CPUS) as executor:
        with aiopar.use_executor(executor):
            task = asyncio.create_task(aiopar.DataParallel(module, CPUS)(torch.ones(4)))
            await gate.entered()
            task.cancel()
            await asyncio.sleep(0)  # the cancellation arrives; it waits for what runs
            gate.open()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await executor.submit(abs, -1) == 1
        assert [w.running + w.queued for w in executor.stats().workers] == [0, 0]
    assert not joins


class Falsy(Exception):
    """Some errors carry a collection, and are false when it is empty."""

    def __len__(self) -> int:
        return 0


class Untestable(Exception):
    """Some carry a tensor."""

    def __bool__(self) -> bool:
        raise RuntimeError("ambiguous")


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [Falsy, Untestable])
async def test_errors_that_have_a_truth_value(kind: type[Exception], joins: list[int]) -> None:
    def fail() -> None:
        raise kind

    module = Threads()
    module.meanwhile = fail
    with pytest.raises(kind):
        await aiopar.DataParallel(module, CPUS)(torch.ones(4))
    assert not joins


@pytest.mark.anyio
async def test_device_ids_that_were_assigned() -> None:
    dp = aiopar.DataParallel(Threads(), CPUS)
    setattr(dp, "device_ids", CPUS)  # noqa: B010  # of another type than it has
    assert torch.equal(await dp(torch.ones(4)), torch.full((4,), 2.0))


@pytest.mark.sim
@pytest.mark.asyncio
@pytest.mark.parametrize("grad", [True, False])
async def test_on_a_stream_without_waiting_for_kernels(grad: bool) -> None:
    devices = ["sim:0", "sim:0"]

    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if aiopar.current_replica().index == 0:
                simdevice.sleep(0.2, "sim:0")
            return x * 2

    async with aiopar.DeviceExecutor(devices, synchronize=False) as executor:
        with aiopar.use_executor(executor), torch.set_grad_enabled(grad):
            dp = aiopar.DataParallel(Uneven(), devices)
            x = torch.ones(4, device="sim:0")
            torch.accelerator.synchronize()
            with torch.Stream("sim:0"):
                y = await dp(x)
                assert y.tolist() == [2.0] * 4
