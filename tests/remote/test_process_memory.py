"""What crosses between processes is nobody else's, and is freed; memory stays flat."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar import ProcessExecutor

_ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    with ProcessExecutor(["cpu"]) as executor:
        yield executor


def live_blocks(executor: aiopar.DeviceExecutor) -> tuple[int, int]:
    """How many blocks of the arenas are in use: of those written here, and of those read here."""
    worker: Any = executor._dispatcher.workers[0]
    channel = worker.slot.host._channel
    return channel._writes.sweep(), len(channel._reads._owners)


async def until_live(executor: aiopar.DeviceExecutor, written: int, read: int) -> None:
    """Wait until so many blocks are in use. A worker drops a result after its caller has it."""
    with anyio.fail_after(30):
        while live_blocks(executor) != (written, read):  # noqa: ASYNC110  # no event tells of it
            await anyio.sleep(0.001)


class Keeper:
    """Keeps its first input, in the process."""

    kept: Any = None

    @classmethod
    def call(cls, x: Any, y: Tensor) -> Any:
        if cls.kept is None:
            cls.kept = x
        y.add_(1)
        return cls.kept if len(y) == 1 else y

    @classmethod
    def forget(cls) -> None:
        cls.kept = None


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [100, 20_000])  # in the message; in a block of the arena
@pytest.mark.parametrize("kind", [Tensor, np.ndarray])
async def test_a_kept_input_stays_as_it_was(
    executor: ProcessExecutor, size: int, kind: type[Any]
) -> None:
    x: Any = torch.arange(float(size))
    if kind is np.ndarray:
        x = x.numpy()
    await executor.run_sync(Keeper.call, x, torch.zeros(2))
    for n in range(300):
        y = torch.full((size,), float(n))
        output = await executor.run_sync(Keeper.call, x + n, y)
        assert output[-1] == n + 1
        assert y[-1] == n, "an input is not written to"
        output.zero_()
    kept = await executor.run_sync(Keeper.call, x, torch.zeros(1))
    assert kept.tolist() == list(range(size))
    kept += 1
    again = await executor.run_sync(Keeper.call, x, torch.zeros(1))
    assert again.tolist() == list(range(size)), "an output that is written to changes nothing there"
    del output, kept, again
    await executor.run_sync(Keeper.forget)
    await executor.run_sync(int)  # by now the process has dropped the previous message
    await until_live(executor, 0, 0)


@pytest.mark.asyncio
async def test_results_outlive_their_executor() -> None:
    async with ProcessExecutor(["cpu"]) as executor:
        kept = await executor.run_sync(torch.arange, 10**6)
    assert kept.sum() == sum(range(10**6))
    kept += 1


@pytest.mark.asyncio
async def test_failed_and_lost_calls_leave_no_blocks(executor: ProcessExecutor) -> None:
    big = torch.zeros(10**5)
    with pytest.raises(ValueError, match="tensor"):
        await executor.run_sync(_fail, big)
    with pytest.raises(TypeError, match="lock"):
        await executor.run_sync(_fail, big, threading.Lock())
    with pytest.raises(TypeError, match="lock"):
        await executor.run_sync(_with_lock, big)
    await executor.run_sync(int)
    await until_live(executor, 0, 0)
    with pytest.raises(aiopar.WorkerLost):
        await executor.run_sync(_end, big)
    await executor.run_sync(int)
    await until_live(executor, 0, 0)


def _fail(*args: Any) -> None:
    raise ValueError(*args)


def _with_lock(x: Tensor) -> Any:
    return x + 1, threading.Lock()


def _end(_: Tensor) -> None:
    os._exit(0)


# Memory.


def _private_mb(pid: int) -> float:
    """Memory that no other process shares, in MB."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in rollup if line.startswith("Private_")) / 1000


def _memory_mb(pid: int) -> float:
    return psutil.Process(pid).memory_info().rss / 1e6


_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@_linux
@pytest.mark.may_block("reads /proc")
@pytest.mark.anyio
async def test_thousands_of_calls_half_of_them_cancelled(executor: ProcessExecutor) -> None:
    pid = await executor.run_sync(os.getpid)
    payload = torch.zeros(5_000)  # with a block of its own

    async def call(n: int, scope: anyio.CancelScope) -> None:
        with scope:
            result = await executor.run_sync(torch.add, payload, n, abandon_on_cancel=n % 4 == 0)
            assert result[0] == n

    async def some(count: int) -> None:
        for start in range(0, count, 100):
            async with anyio.create_task_group() as tasks:
                scopes = [anyio.CancelScope() for _ in range(100)]
                for n, scope in enumerate(scopes, start):
                    tasks.start_soon(call, n, scope)
                await anyio.lowlevel.checkpoint()
                for scope in scopes[::2]:
                    scope.cancel()
        await executor.run_sync(int)

    await some(1_000)
    before = _memory_mb(os.getpid()), _memory_mb(pid)
    files = [psutil.Process(each).num_fds() for each in (os.getpid(), pid)]
    await some(4_000)
    after = _memory_mb(os.getpid()), _memory_mb(pid)
    assert [now - then < 5 for now, then in zip(after, before, strict=True)] == [True, True]
    # Fewer is right too: what earlier tests left open may be closed by now.
    now_open = [psutil.Process(each).num_fds() for each in (os.getpid(), pid)]
    assert [now <= then for now, then in zip(now_open, files, strict=True)] == [True, True]
    await until_live(executor, 0, 0)
    assert executor.stats().workers[0].queued == 0


@_linux
def test_another_process_costs_little_memory() -> None:
    with ProcessExecutor(["cpu"]) as executor:
        assert _private_mb(executor.submit(os.getpid).result()) < 20


# A small /dev/shm, as in containers.


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs to mount")
def test_much_crosses_beside_a_small_dev_shm() -> None:
    program = """
    import os, subprocess, sys
    import numpy as np, aiopar

    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", "/dev/shm"], check=True)
    assert os.statvfs("/dev/shm").f_blocks * os.statvfs("/dev/shm").f_frsize == 8 << 20
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        x = np.arange(3_000_000, dtype=np.float32)
        kept = [executor.submit(np.negative, x).result() for _ in range(5)]
        assert all(np.array_equal(each, -x) for each in kept)
        assert not os.listdir("/dev/shm")
    """
    done = subprocess.run(
        ["unshare", "-m", sys.executable, "-c", textwrap.dedent(program)],
        cwd=_ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    if "unshare failed" in done.stderr:
        pytest.skip("this container may not make mounts")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Weights.


class Wide(nn.Module):
    """Has 100 MB of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(25_000_000))

    def forward(self, x: Tensor) -> tuple[int, Tensor]:
        return os.getpid(), x * self.weight.sum()


@_linux
@pytest.mark.may_block("reads /proc")
@pytest.mark.asyncio
async def test_processes_share_the_weights_of_a_pool() -> None:
    async with ProcessExecutor(["cpu"] * 3) as executor:
        pids = [await executor.on(worker=worker).run_sync(os.getpid) for worker in range(3)]
        before = [_private_mb(pid) for pid in pids]
        async with aiopar.ReplicaPool(Wide(), executor=executor, warmup=torch.ones(1)) as pool:
            ran: set[int] = set()
            while len(ran) < 3:
                async with anyio.create_task_group() as tasks:

                    async def one() -> None:
                        pid, output = await pool(torch.ones(1))
                        assert output.item() == 25_000_000
                        ran.add(pid)

                    for _ in range(6):
                        tasks.start_soon(one)
            grown = [_private_mb(pid) - then for pid, then in zip(pids, before, strict=True)]
            assert max(grown) < 20
