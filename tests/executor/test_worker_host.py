"""The seam of workers: tasks run on a host that gets them pickled."""

import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
import torch

import aiopar

from .hosts import HostExecutor


def host_of(value: int = 0, *, plus: int = 0) -> tuple[str, int]:
    """Return the name of the thread and a sum."""
    return threading.current_thread().name, value + plus


def fail() -> None:
    raise KeyError("of the task")


class Box:
    """An argument that is compared by identity: its pickled copy differs."""


def same(box: Box) -> Box:
    return box


def numbers() -> Iterator[int]:
    yield 1


@pytest_asyncio.fixture
async def executor() -> AsyncIterator[HostExecutor]:
    async with HostExecutor(["cpu", "cpu"]) as executor:
        yield executor


@pytest.mark.asyncio
async def test_tasks_run_on_the_host(executor: HostExecutor) -> None:
    names = {"hosted-cpu-0-host", "hosted-cpu-1-host"}
    name, value = await executor.run_sync(host_of, 1)
    assert name in names
    assert value == 1
    name, value = await executor.submit(host_of, 1, plus=2)
    assert name in names
    assert value == 3


def test_map_runs_its_calls_on_the_hosts() -> None:
    with HostExecutor(["cpu", "cpu"]) as executor:
        outcomes = list(executor.map(host_of, range(4)))
    assert {name for name, _ in outcomes} <= {"hosted-cpu-0-host", "hosted-cpu-1-host"}
    assert [value for _, value in outcomes] == [0, 1, 2, 3]


@pytest.mark.asyncio
async def test_arguments_and_results_are_pickled(executor: HostExecutor) -> None:
    box = Box()
    assert await executor.run_sync(same, box) is not box
    with pytest.raises(AttributeError, match="local"):
        await executor.run_sync(lambda: None)


def torch_state() -> tuple[bool, bool, torch.dtype, str]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_autocast_dtype("cpu"),
        torch.empty(0).device.type,
    )


@pytest.mark.asyncio
async def test_a_task_runs_under_the_portable_state_of_its_caller(executor: HostExecutor) -> None:
    default = torch_state()
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        call = executor.run_sync(torch_state)
    assert await call == (False, False, torch.float16, "meta")
    with torch.inference_mode():
        call = executor.run_sync(torch_state)
    assert (await call)[1]
    assert await executor.run_sync(torch_state) == default


@pytest.mark.asyncio
async def test_errors_of_a_task_are_raised(executor: HostExecutor) -> None:
    with pytest.raises(KeyError, match="of the task"):
        await executor.run_sync(fail)
    assert [stats.failed for stats in executor.stats().workers].count(1) == 1


@pytest.mark.asyncio
async def test_missing_capabilities_are_refused_before_work(executor: HostExecutor) -> None:
    with pytest.raises(NotImplementedError, match=r"iterate\(\) needs the capability 'iterate'"):
        executor.iterate(numbers)
    with pytest.raises(NotImplementedError, match="'meetings', which worker 0 on cpu"):
        executor.submit_all([host_of, host_of])
    with pytest.raises(NotImplementedError, match="'streams'"):
        executor.on(synchronize=False)
    with aiopar.use_executor(executor), pytest.raises(NotImplementedError, match="'shared_param"):
        await aiopar.backward(torch.ones(1, requires_grad=True).sum())
    assert not any(stats.completed for stats in executor.stats().workers)


@pytest.mark.asyncio
async def test_a_parallel_call_needs_meetings(executor: HostExecutor) -> None:
    with aiopar.use_executor(executor), pytest.raises(NotImplementedError, match="meetings"):
        await aiopar.parallel_apply([host_of, host_of], [1, 2], devices=["cpu", "cpu"])
