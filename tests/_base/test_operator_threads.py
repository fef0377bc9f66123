"""The cores of the process. `num_threads`: workers share them; other threads keep their setting."""

import os
import sys
import threading
from collections.abc import Iterator
from math import inf
from pathlib import Path

import pytest
import torch

import aiopar
from aiopar._base import operator_threads
from aiopar._base.devices import default_devices
from aiopar._base.operator_threads import CoreShares, cgroup_cores, core_count
from aiopar.testing import Gate
from tests.gil import GIL
from tests.no_threads import NO_THREAD, no_more_threads

CORES = torch.get_num_threads()


@pytest.fixture(autouse=True)
def _other_threads_are_unchanged() -> Iterator[None]:
    yield
    seen: list[int] = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert torch.get_num_threads() == CORES, "in this thread"
    assert seen == [CORES], "in a new thread"


def test_cores_are_those_of_the_cpu_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert core_count() == 3
    assert len(default_devices()) == 3


def test_without_cpu_affinity_all_cores_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert core_count() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert core_count() == 1
    assert len(default_devices()) == 2, "one core still gets two workers"


@pytest.mark.parametrize(("granted", "cores"), [(0.5, 1), (2.0, 2), (2.5, 3), (inf, 64)])
def test_cores_are_those_that_the_cgroup_grants(
    monkeypatch: pytest.MonkeyPatch, granted: float, cores: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    monkeypatch.setattr(operator_threads, "_granted", granted)
    assert core_count() == cores
    assert len(default_devices()) == max(2, cores)
    assert CoreShares(None).share(1) == min(cores, CORES)


@pytest.mark.parametrize(
    ("groups", "files", "granted"),
    [
        ("0::/", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/", {"cpu.max": "max 100000\n"}, inf),
        ("0::/a/b", {"a/cpu.max": "150000 100000\n", "a/b/cpu.max": "max 100000\n"}, 1.5),
        ("0::/of/the/host", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/../../of/the/host", {"cpu.max": "50000 100000\n"}, 0.5),
        (
            "5:memory:/\n4:cpu,cpuacct:/a\n0::/\n",
            {"cpu/a/cpu.cfs_quota_us": "300000\n", "cpu/a/cpu.cfs_period_us": "100000\n"},
            3.0,
        ),
        ("1:cpu:/", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, inf),
        ("5:memory:/", {"cpu.max": "100000 100000\n"}, inf),
        (None, {}, inf),
    ],
)
def test_the_cores_of_a_cgroup(
    tmp_path: Path, groups: str | None, files: dict[str, str], granted: float
) -> None:
    mounted = tmp_path / "mounted"
    for name, text in files.items():
        (mounted / name).parent.mkdir(parents=True, exist_ok=True)
        (mounted / name).write_text(text)
    if groups is not None:
        (tmp_path / "groups").write_text(groups)
    assert cgroup_cores(tmp_path / "groups", mounted) == granted


def _held_threads(gate: Gate) -> int:
    gate()
    return torch.get_num_threads()


@pytest.mark.anyio
@pytest.mark.parametrize("worker", [0, 3])
async def test_a_single_running_worker_has_all_cores(worker: int) -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 4) as executor:
        one = executor.on(worker=worker)
        assert [await one.run_sync(torch.get_num_threads) for _ in range(3)] == [CORES] * 3


@pytest.mark.anyio
@pytest.mark.parametrize("running", [2, 3, 2 * CORES])
async def test_running_workers_share_the_cores(running: int) -> None:
    async with aiopar.DeviceExecutor(["cpu"] * running) as executor:
        with Gate() as gate:
            for worker in range(running - 1):
                executor.on(worker=worker).submit(gate)
            await gate.entered(running - 1)
            share = max(1, CORES // running)
            last = executor.on(worker=running - 1)
            assert await last.run_sync(torch.get_num_threads) == share
        # The other workers count as running until they have looked for the next call.
        while await last.run_sync(torch.get_num_threads) != CORES:
            pass


@pytest.fixture
def _no_other_thread_runs_until_this_one_waits() -> Iterator[None]:
    if not GIL:
        pytest.skip("without a GIL the other threads run")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_other_thread_runs_until_this_one_waits")
@pytest.mark.parametrize("started", [True, False])
async def test_the_first_call_of_a_gang_leaves_cores_for_the_second(
    started: bool,
) -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        for worker in range(2 * started):
            await executor.on(worker=worker).run_sync(int)
        first, second = executor.submit_all([_met_threads] * 2)
        assert (await first, await second) == (max(1, CORES // 2),) * 2


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_other_thread_runs_until_this_one_waits")
async def test_the_first_of_two_queued_calls_leaves_cores_for_the_second() -> None:
    for _ in range(10):
        async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
            first, second = (executor.submit(torch.get_num_threads) for _ in range(2))
            assert await first == max(1, CORES // 2)
            await second  # it may run alone by then


def _met_threads() -> int:
    threads = torch.get_num_threads()
    aiopar.current_replica().barrier()  # both calls run at the same time
    return threads


def test_a_worker_that_cannot_start_takes_no_cores() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
            executor.on(worker=0).submit(int)
        assert executor.on(worker=1).submit(torch.get_num_threads).result() == CORES


@pytest.mark.anyio
@pytest.mark.parametrize("num_threads", [1, 2])
async def test_a_fixed_number_does_not_depend_on_other_workers(num_threads: int) -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 2, num_threads=num_threads) as executor:
        assert await executor.run_sync(torch.get_num_threads) == num_threads
        with Gate() as gate:
            futures = [executor.submit(_held_threads, gate) for _ in range(2)]
            await gate.entered(2)
        assert [await future for future in futures] == [num_threads] * 2


@pytest.mark.anyio
async def test_a_thread_that_replaces_a_blocked_one_has_the_same_share() -> None:
    async with aiopar.DeviceExecutor(["cpu"], num_threads=1) as executor:

        def outer() -> tuple[int, int]:
            behind = executor.submit(torch.get_num_threads)
            return behind.result(), torch.get_num_threads()

        assert await executor.run_sync(outer) == (1, 1)


@pytest.mark.anyio
async def test_an_executor_made_in_a_worker_divides_all_cores() -> None:
    def inner() -> int:
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            return executor.submit(torch.get_num_threads).result()

    async with aiopar.DeviceExecutor(["cpu"], num_threads=2 * CORES) as executor:
        assert await executor.run_sync(inner) == CORES
