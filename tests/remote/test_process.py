"""`ProcessExecutor`: calls, state and refusals, as for a `DeviceExecutor`."""

import asyncio
import contextvars
import math
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import aiopar
from aiopar import ProcessExecutor
from tests.caller_states import PLAIN, STATES, pack, snapshot, unpack


def pid_of(executor: aiopar.DeviceExecutor, worker: int = 0) -> int:
    """The process of a worker, which has run a call."""
    host = executor.stats().workers[worker].host
    assert host is not None
    return host.pid


@pytest.mark.anyio
async def test_calls_run_in_the_processes(executor: ProcessExecutor) -> None:
    assert await executor.run_sync(math.factorial, 5) == 120
    assert await executor.run_sync(partial(int, base=16), "ff") == 255
    assert await executor.submit(dict, [("a", 1)], b=2) == {"a": 1, "b": 2}
    total = await executor.submit(torch.add, torch.ones(2), 1, alpha=3)
    assert total.tolist() == [4.0, 4.0]
    pids = [await executor.on(worker=worker).run_sync(os.getpid) for worker in range(2)]
    assert len({*pids, os.getpid()}) == 3
    assert [pid_of(executor, worker) for worker in range(2)] == pids
    host = executor.stats().workers[1].host
    assert host == aiopar.HostInfo("process:1/cpu", platform.node(), pids[1])
    assert repr(executor) == "<ProcessExecutor on cpu, cpu>"
    with aiopar.use_executor(executor):
        assert await aiopar.run_sync(os.getpid) in pids
        assert await aiopar.fork(os.getpid) in pids


def comm(pid: str) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only with setproctitle")
def test_processes_have_names(executor: ProcessExecutor) -> None:
    for index in range(2):
        worker = executor.on(worker=index)
        assert worker.submit(comm, "self").result() == f"aiopar-{index} cpu"
        server = worker.submit(os.getppid).result()
        assert comm(str(server)) == "aiopar-fork"
    assert "aiopar-0" not in comm("self")


def test_a_broken_setproctitle_costs_no_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "setproctitle.py").write_text("raise ImportError('a library is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with ProcessExecutor(["cpu"], preload=["sched"]) as executor:  # a fork server of its own
        assert executor.submit(math.factorial, 3).result() == 6


# The state of the caller.


def _portable(state: str) -> bool:
    return "hooks" not in state and state != "everything"


@pytest.mark.anyio
@pytest.mark.parametrize("state", [*filter(_portable, STATES)])
async def test_the_state_of_the_caller_applies_there(state: str, executor: ProcessExecutor) -> None:
    with STATES[state]():
        expected = snapshot()
        call = executor.on(worker=0).run_sync(snapshot)
        future = executor.on(worker=0).submit(snapshot)
    assert await call == expected
    assert await future == expected
    assert await executor.on(worker=0).run_sync(snapshot) == PLAIN


def _leave_state_behind() -> None:
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.set_autocast_enabled("cpu", True)
    _variable.set("left behind")


def _value() -> str:
    return _variable.get()


_variable = contextvars.ContextVar("_variable", default="default")


@pytest.mark.asyncio
async def test_no_call_sees_what_another_left_behind(executor: ProcessExecutor) -> None:
    worker = executor.on(worker=0)
    _variable.set("of the caller")
    await worker.run_sync(_leave_state_behind)
    assert await worker.run_sync(snapshot) == PLAIN
    assert await worker.run_sync(_value) == "default"


class _Mode(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.asyncio
async def test_function_modes_and_saved_tensor_hooks_are_refused(executor: ProcessExecutor) -> None:
    with _Mode():
        moded = executor.run_sync(torch.ones, 2)
    with torch.device("cpu"), torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        hooked = executor.run_sync(torch.ones, 2)
    what = "cannot run in another process: set it in the function that is called"
    with pytest.raises(NotImplementedError, match=rf"from within _Mode, a function mode {what}"):
        await moded
    with pytest.raises(NotImplementedError, match=rf"from within saved-tensor hooks {what}"):
        await hooked
    assert await executor.run_sync(abs, -1) == 1


@pytest.mark.asyncio
async def test_each_process_draws_numbers_of_its_own_that_follow_the_seed_of_the_parent() -> None:
    drawn: list[list[Any]] = []
    with torch.random.fork_rng():
        for _ in range(2):
            torch.manual_seed(3)
            async with ProcessExecutor(["cpu", "cpu"], num_threads=3) as executor:
                views = [executor.on(worker=worker) for worker in range(2)]
                drawn.append([(await view.run_sync(torch.rand, 3)).tolist() for view in views])
                of_numpy = [list(await view.run_sync(_numpy_numbers)) for view in views]
                assert of_numpy[0] != of_numpy[1]
                assert await executor.run_sync(torch.get_num_threads) == 3
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[0][1]


def _numpy_numbers() -> Any:
    import numpy as np

    return np.random.random(3)


# What is refused.


@pytest.mark.asyncio
async def test_what_runs_step_by_step_is_refused(executor: ProcessExecutor) -> None:
    with pytest.raises(NotImplementedError, match=r"iterate\(\)"):
        executor.iterate(range, 3)
    with pytest.raises(NotImplementedError, match="synchronize=False"):
        executor.on(synchronize=False)
    with pytest.raises(TypeError, match="generator function"):
        await executor.run_sync(_numbers)
    with pytest.raises(TypeError, match="returned a generator"):
        await executor.run_sync(partial(_call, _numbers))
    with pytest.raises(TypeError, match="returned a coroutine"):
        await executor.run_sync(partial(_call, asyncio.sleep, 0))


def _numbers() -> Iterator[int]:
    yield 1


def _call(fn: Callable[..., Any], *args: Any) -> Any:
    return fn(*args)


@pytest.mark.asyncio
async def test_graphs_are_refused(executor: ProcessExecutor) -> None:
    leaf = torch.ones(2, requires_grad=True)
    assert (await executor.run_sync(_requires_grad, leaf)) == (True, True)
    with pytest.raises(ValueError, match=r"has a graph.*pass tensor\.detach\(\)") as caught:
        await executor.run_sync(torch.sum, leaf * 2)
    assert "argument 1 (Tensor) cannot be pickled" in caught.value.__notes__
    with pytest.raises(ValueError, match=r"has a graph.*call under torch\.no_grad\(\)") as caught:
        await executor.run_sync(torch.mul, leaf, 2)
    assert "the result (Tensor) cannot be pickled" in caught.value.__notes__
    with torch.no_grad():
        assert (await executor.run_sync(torch.mul, leaf, 2)).tolist() == [2.0, 2.0]


def _requires_grad(x: Tensor) -> tuple[bool, bool]:
    return x.requires_grad, x.is_leaf


class Holder:
    """A class of a module, with an attribute that a test gives it."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self, *_: object) -> None:
        pass


def _local_class() -> type:
    class Local:
        pass

    return Local


@pytest.mark.asyncio
async def test_what_has_no_name_goes_by_value(executor: ProcessExecutor) -> None:
    weight, local = torch.ones(5000), _local_class()
    assert await executor.run_sync(lambda x: (x * weight).sum().item(), 2) == 10_000
    assert await executor.run_sync(partial(lambda x, y: x - y, 5), 3) == 2
    assert type(await executor.run_sync(local)) is local
    assert (await executor.run_sync(lambda: lambda: Holder))() is Holder, "by its name"
    with aiopar.use_executor(executor):
        sums = [x async for x in aiopar.map(lambda x: x + weight.sum(), [1, 2])]
    assert sums == [5001, 5002]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"preload": "math"}, TypeError, "preload must be an iterable of names of modules"),
        ({"preload": [math]}, TypeError, "preload must be an iterable of names of modules"),
        ({"max_pending": 0}, ValueError, "max_pending"),
        ({"num_threads": "2"}, TypeError, "num_threads"),
        ({"kill_after": -1}, ValueError, "kill_after"),
        ({"kill_after": math.nan}, ValueError, "kill_after"),
        ({"devices": []}, ValueError, "device"),
        ({"devices": ["cuda:99"]}, ValueError, "cuda:99"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        ProcessExecutor(**arguments)


# The end.


# Programs in a process.


@pytest.mark.asyncio
async def test_aiopar_and_multiprocessing_work_in_a_process(executor: ProcessExecutor) -> None:
    assert await executor.run_sync(_use_everything) == [1, [0, 1, 4], [0, 1, 2, 3], -3]


def _use_everything() -> list[Any]:

    async def main() -> Any:
        return await aiopar.run_sync(abs, -1)

    loader: Any = torch.utils.data.DataLoader(range(4), num_workers=1)  # type: ignore[arg-type]
    with multiprocessing.get_context("fork").Pool(1) as pool:
        squares = pool.map(_square_of, range(3))
    loaded = [int(batch) for batch in loader]
    with ProcessExecutor(["cpu"]) as own:
        return [asyncio.run(main()), squares, loaded, own.submit(int, -3).result()]


def _square_of(n: int) -> int:
    return n * n
