"""A worker lets its waker go on; between brief calls it is woken where that is."""

import asyncio
import os
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

import aiopar
from aiopar.executor import _sleep
from aiopar.executor._sleep import Sleep
from aiopar.executor._worker import ThreadWorker
from aiopar.testing import Gate

pytestmark = pytest.mark.skipif(
    _sleep._current_core is None or len(os.sched_getaffinity(0)) == 1,
    reason="needs Linux, and two cores",
)


def cores() -> set[int]:
    """Those that the calling thread is allowed."""
    return os.sched_getaffinity(0)


class Sleeper(threading.Thread):
    """Sleeps, and looks what it is allowed before it ends its sleep, after, and in the end."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.sleep = Sleep()
        self.asleep = threading.Event()
        self.items: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.seen: list[set[int]] = []
        self._times = times

    def run(self) -> None:
        for _ in range(self._times):
            self.sleep.begin()
            self.asleep.set()
            self.items.get()
            self.seen.append(cores())
            self.sleep.end()
            self.seen.append(cores())
        self.items.get()
        self.seen.append(cores())


async def until(condition: Callable[[], bool]) -> None:
    """Let the others go on until it holds."""
    with anyio.fail_after(10):
        while not condition():
            await anyio.lowlevel.checkpoint()


@asynccontextmanager
async def sleeping(*, again: bool = False) -> AsyncIterator[Sleeper]:
    """One that sleeps (or will, after it was woken, sleep again); in the end it is woken."""
    sleeper = Sleeper(1 + again)
    await anyio.to_thread.run_sync(sleeper.start)
    try:
        await until(sleeper.asleep.is_set)
        await anyio.lowlevel.checkpoint()
        yield sleeper
    finally:
        for _ in range(3):
            sleeper.items.put(None)
        await anyio.to_thread.run_sync(sleeper.join, 10)


@pytest.mark.anyio
async def test_it_is_woken_on_one_core_and_goes_on_with_all() -> None:
    async with sleeping() as sleeper:
        sleeper.sleep.wake_here()
        sleeper.sleep.wake_here()  # another, who has something for it as well
    [narrow, restored, _] = sleeper.seen
    assert narrow < restored == cores()


@pytest.mark.anyio
async def test_a_thread_that_may_not_run_here_is_woken_where_it_may(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with sleeping() as sleeper:
        monkeypatch.setattr(_sleep, "_current_core", lambda: 10**4)
        sleeper.sleep.wake_here()
    assert sleeper.seen == [cores()] * 3


@pytest.mark.anyio
async def test_who_is_awake_is_left_alone() -> None:
    sleep = Sleep()
    before = cores()
    sleep.wake_here()
    sleep.begin()
    sleep.end()
    sleep.wake_here()
    assert cores() == before


@pytest.mark.asyncio
async def test_by_a_loop_that_goes_on_it_is_woken_anywhere() -> None:
    async with sleeping() as sleeper:
        asyncio.get_running_loop().call_soon(str)
        sleeper.sleep.wake_here()
    assert sleeper.seen == [cores()] * 3


@pytest.mark.anyio
async def test_by_a_plain_thread_it_is_woken_anywhere() -> None:
    async with sleeping() as sleeper:
        await anyio.to_thread.run_sync(sleeper.sleep.wake_here)
    assert sleeper.seen == [cores()] * 3


@pytest.mark.asyncio
async def test_ctrl_c_before_it_is_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(thread: int, allowed: set[int]) -> None:
        narrow(thread, allowed)
        raise KeyboardInterrupt

    narrow = os.sched_setaffinity
    async with sleeping() as sleeper:
        with monkeypatch.context() as patched:
            patched.setattr(os, "sched_setaffinity", interrupted)
            with pytest.raises(KeyboardInterrupt):
                sleeper.sleep.wake_here()
        sleeper.sleep.wake_here()
    assert len(sleeper.seen[0]) == 1
    assert sleeper.seen[1] == cores()


@pytest.mark.anyio
async def test_another_wakes_it_while_a_waker_is_at_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not wait for that one, and is left with all cores."""
    gate, ask = Gate(), os.sched_getaffinity

    def held(thread: int) -> set[int]:
        allowed = ask(thread)
        if thread:
            gate()
        return allowed

    with gate:
        async with sleeping() as sleeper, anyio.create_task_group() as tasks:
            monkeypatch.setattr(os, "sched_getaffinity", held)
            monkeypatch.setattr(_sleep, "about_to_wait", lambda: True)
            tasks.start_soon(anyio.to_thread.run_sync, sleeper.sleep.wake_here)
            await gate.entered()
            sleeper.items.put(None)
            await until(lambda: len(sleeper.seen) == 2)
            gate.open()
    assert sleeper.seen == [ask(0)] * 3, "at no time it was allowed less"


@pytest.mark.anyio
async def test_it_has_ended_a_sleep_and_begun_another_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate, narrow = Gate(), os.sched_setaffinity

    def held(thread: int, allowed: set[int]) -> None:
        narrow(thread, allowed)
        if thread:
            gate()

    with gate:
        async with sleeping(again=True) as sleeper, anyio.create_task_group() as tasks:
            monkeypatch.setattr(os, "sched_setaffinity", held)
            monkeypatch.setattr(_sleep, "about_to_wait", lambda: True)
            tasks.start_soon(anyio.to_thread.run_sync, sleeper.sleep.wake_here)
            await gate.entered()
            sleeper.asleep.clear()
            sleeper.items.put(None)
            await until(sleeper.asleep.is_set)
            gate.open()
    assert sleeper.seen[-1] == cores()


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["sched_getaffinity", "sched_setaffinity"])
async def test_where_it_is_forbidden_calls_run_all_the_same(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(*_: object) -> None:
        raise PermissionError

    async with sleeping() as sleeper:
        monkeypatch.setattr(os, name, forbidden)
        sleeper.sleep.wake_here()
        monkeypatch.undo()
    assert sleeper.seen == [cores()] * 3


def _asleep(executor: aiopar.DeviceExecutor) -> bool:
    [worker] = executor._dispatcher.workers
    assert isinstance(worker, ThreadWorker)
    return worker.server is not None and worker.server.sleep._asleep


@contextmanager
def _clock(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    """Every call takes so long."""
    now = [0.0]

    def tick() -> float:
        now[0] += seconds
        return now[0]

    with monkeypatch.context() as patched:
        patched.setattr("aiopar.executor._worker_thread.perf_counter", tick)
        yield


@pytest.mark.anyio
async def test_between_brief_calls_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with _clock(monkeypatch, 1e-6):
            for _ in range(30):
                assert await executor.run_sync(cores) == cores()
            await until(lambda: _asleep(executor))
        with _clock(monkeypatch, 1.0):
            await executor.run_sync(str)
            [thread] = {await executor.run_sync(threading.get_native_id) for _ in range(3)}
            for _ in range(100):
                await anyio.lowlevel.checkpoint()
            assert not _asleep(executor)
            assert os.sched_getaffinity(thread) == cores()


@pytest.mark.anyio
async def test_calls_and_the_threads_they_start_are_allowed_all_cores() -> None:
    """From loops and plain threads at once."""
    seen: list[set[int]] = []

    def start() -> None:
        thread = threading.Thread(target=lambda: seen.append(cores()))
        thread.start()
        thread.join()

    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:

        def submit() -> None:
            seen.extend(executor.submit(cores).result() for _ in range(200))

        async def await_them() -> None:
            seen.extend([await executor.run_sync(cores) for _ in range(200)])

        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(anyio.to_thread.run_sync, submit)
            tasks.start_soon(anyio.to_thread.run_sync, anyio.run, await_them)
            tasks.start_soon(await_them)
            for _ in range(50):
                await executor.run_sync(start)
    assert len(seen) == 850
    assert all(allowed == cores() for allowed in seen)


@pytest.mark.anyio
async def test_what_a_call_has_set_for_good_stays() -> None:
    one = {min(cores())}
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        for _ in range(50):
            await executor.run_sync(str)
        await executor.run_sync(os.sched_setaffinity, 0, one)
        assert all([await executor.run_sync(cores) == one for _ in range(50)])


def policy_of_worker() -> int:
    """How the kernel schedules a fresh worker of the calling thread."""
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        return executor.submit(os.sched_getscheduler, 0).result()


def test_a_worker_does_not_interrupt_its_waker() -> None:
    assert policy_of_worker() == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def test_another_policy_of_the_users_is_kept() -> None:
    found: list[int] = []

    def look() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # of this thread alone
        found.append(policy_of_worker())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [os.SCHED_IDLE]


def test_where_that_is_forbidden_it_runs_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbid(*args: object) -> None:
        raise PermissionError

    with monkeypatch.context() as patched:
        patched.setattr(os, "sched_setscheduler", forbid)
        assert policy_of_worker() == os.SCHED_OTHER
