"""Processes that end, hang or cannot start; cancelled calls; what is kept alive."""

import asyncio
import atexit
import ctypes
import errno
import os
import signal
import weakref
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar import (
    Batcher,
    ProcessExecutor,
    ReplicaPool,
    WorkerLost,
)
from tests.freeing import survivors, without_gc
from tests.remote.held import ProcessGate
from tests.serve.batches import LONG, Callers


async def gone(pid: int) -> None:
    """Wait until a process has ended."""
    with anyio.fail_after(30), suppress(ProcessLookupError):
        while True:  # no event tells of it
            os.kill(pid, 0)
            await anyio.sleep(0.001)


def _kill_self(number: int) -> None:
    os.kill(os.getpid(), number)


def _read_null() -> None:
    ctypes.string_at(0)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("fn", "how"),
    [
        (partial(_kill_self, signal.SIGKILL), "was killed by SIGKILL"),
        (partial(_kill_self, signal.SIGRTMIN + 3), f"was killed by signal {signal.SIGRTMIN + 3}"),
        (_read_null, "was killed by SIGSEGV"),
        (partial(os._exit, 3), "ended with exit code 3"),
        (partial(os._exit, 0), "ended with exit code 0"),
    ],
)
async def test_a_process_that_ends_in_a_call(
    executor: ProcessExecutor, fn: Callable[[], Any], how: str
) -> None:
    worker = executor.on(worker=0)
    pid = await worker.run_sync(os.getpid)
    other = await executor.on(worker=1).run_sync(os.getpid)
    for call in (lambda: worker.run_sync(fn), lambda: worker.submit(fn)):
        pid = await worker.run_sync(os.getpid)
        with pytest.raises(WorkerLost) as caught:
            await call()
        assert str(caught.value).startswith(f"worker process:0/cpu (pid {pid} on ")
        assert str(caught.value).endswith(f"{how}; its call may have run")
        assert caught.value.may_have_run
    assert await worker.run_sync(os.getpid) != pid
    assert await executor.on(worker=1).run_sync(os.getpid) == other


@pytest.mark.anyio
async def test_an_idle_process_that_ends_is_replaced_silently(executor: ProcessExecutor) -> None:
    worker = executor.on(worker=0)
    for data in (None, b"x" * 10**7, torch.rand(10**6)):
        pid = await worker.run_sync(os.getpid)
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
        assert await worker.run_sync(type, data) is type(data)
        assert await worker.run_sync(os.getpid) != pid


def _fork() -> int:
    child = os.fork()
    if not child:
        signal.pause()
    return child


def _spawn() -> int:
    return os.posix_spawn("/bin/sleep", ["sleep", "1000"], os.environ)


@pytest.mark.anyio
@pytest.mark.parametrize("start", [_fork, _spawn])
async def test_a_child_of_a_lost_process(
    executor: ProcessExecutor, start: Callable[[], int]
) -> None:
    """It keeps nothing open that tells of the loss."""
    worker = executor.on(worker=0)
    child = await worker.run_sync(start)
    try:
        pid = await worker.run_sync(os.getpid)
        with pytest.raises(WorkerLost, match=f"pid {pid} .*SIGKILL"):
            await worker.run_sync(_kill_self, signal.SIGKILL)
        assert await worker.run_sync(abs, -1) == 1
    finally:
        os.kill(child, signal.SIGKILL)


# Processes that cannot start.


@pytest.mark.asyncio
async def test_a_module_that_cannot_be_imported(executor: ProcessExecutor) -> None:
    text = "this module cannot be imported"
    async with ProcessExecutor(["cpu"], preload=["tests.remote.broken_module"]) as broken:
        for _ in range(2):
            with pytest.raises(LookupError, match=text) as caught:
                await broken.run_sync(abs, -1)
            assert caught.value.__notes__ == ["worker process:0/cpu cannot start"]
            with pytest.raises(LookupError, match=text):
                await broken.submit(abs, -1)
        [stats] = broken.stats().workers
        assert (stats.host, stats.completed, stats.failed) == (None, 0, 4)
    assert await executor.run_sync(abs, -1) == 1


@pytest.mark.asyncio
async def test_a_batch_whose_worker_cannot_start_is_not_split() -> None:
    async with ProcessExecutor(["cpu"], preload=["tests.remote.broken_module"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(list, max_batch_size=8, collate_fn=list) as batcher:
                results = await asyncio.gather(*map(batcher, range(8)), return_exceptions=True)
    for error in results:
        assert isinstance(error, LookupError)
        assert error.__notes__ == ["worker process:0/cpu cannot start"]


@pytest.mark.asyncio
async def test_a_process_that_cannot_be_forked() -> None:
    async with ProcessExecutor(["cpu"], preload=["tests.remote.no_fork_module"]) as executor:
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"could not be forked .*{errno.EAGAIN}"):
                await executor.run_sync(abs, -1)


# The end.


@pytest.mark.anyio
async def test_close_with_a_time_limit(gate: ProcessGate) -> None:
    executor = ProcessExecutor(["cpu"])
    async with gate:
        hanging = executor.submit(gate.hold)
        pid = await gate.entered()
        queued = executor.submit(abs, -1)
        await executor.aclose(timeout=0.1)
        with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
            await hanging
        with pytest.raises(WorkerLost):
            await queued
        await gone(pid)


@pytest.mark.parametrize("wait", [True, False])
def test_shutdown_that_cancels_kills_only_processes_that_run_a_call(
    gate: ProcessGate, tmp_path: Path, wait: bool
) -> None:
    executor, trace = ProcessExecutor(["cpu", "cpu"]), tmp_path / "trace"
    executor.on(worker=1).submit(atexit.register, trace.touch).result()
    running = executor.on(worker=0).submit(gate.hold)
    gate.wait_entered()
    queued = executor.on(worker=0).submit(abs, -1)
    executor.shutdown(wait, cancel_futures=True)
    with pytest.raises(WorkerLost, match="was killed by SIGKILL"):
        running.result()
    assert queued.cancelled()
    executor.shutdown()
    assert trace.exists()


@pytest.mark.asyncio
async def test_close_with_a_time_limit_while_a_process_starts() -> None:
    executor = ProcessExecutor(["cpu"], preload=["tests.remote.stuck_module"])
    call = executor.submit(abs, -1)
    await executor.aclose(timeout=0.1)
    with pytest.raises(WorkerLost):
        await call


@pytest.mark.anyio
async def test_the_time_limit_of_an_executor_that_drains_in_time(gate: ProcessGate) -> None:
    executor = ProcessExecutor(["cpu"])
    call = executor.submit(abs, -1)
    await executor.aclose(timeout=60)
    assert await call == 1
    for timeout in (-1, "1"):
        with pytest.raises((ValueError, TypeError), match="timeout"):
            await executor.aclose(timeout=timeout)  # type: ignore[arg-type]


# Callers that leave, with `kill_after`.


async def _while_held(call: Callable[[], Awaitable[object]], gate: ProcessGate) -> int:
    """Await `call()`, and cancel the await when it has come to `gate`; returns the process."""
    async with anyio.create_task_group() as tasks:

        async def run() -> None:
            await call()

        tasks.start_soon(run)
        pid = await gate.entered()
        tasks.cancel_scope.cancel()
    return pid


async def _leave_run_sync(executor: ProcessExecutor, gate: ProcessGate) -> int:
    return await _while_held(lambda: executor.run_sync(gate.hold), gate)


async def _leave_submit(executor: ProcessExecutor, gate: ProcessGate) -> int:
    future = executor.submit(gate.hold)

    async def wait() -> None:
        await future

    return await _while_held(wait, gate)


async def _cancel_submit(executor: ProcessExecutor, gate: ProcessGate) -> int:
    future = executor.submit(gate.hold)
    pid = await gate.entered()
    assert not future.cancel()
    with pytest.raises(WorkerLost):
        await future
    return pid


async def _leave_map(executor: ProcessExecutor, gate: ProcessGate) -> int:
    with aiopar.use_executor(executor):
        outputs = aiopar.map(gate.hold, [1], devices=["cpu"])

    async def read() -> None:
        async with outputs:
            await anext(outputs)

    return await _while_held(read, gate)


async def _leave_pool(executor: ProcessExecutor, gate: ProcessGate) -> int:
    pool = ReplicaPool(Holds(gate.hold), executor=executor, warmup=torch.tensor(False))
    async with pool:
        pid = await _while_held(lambda: pool(torch.tensor(True)), gate)
        assert not await pool(torch.tensor(False))
    return pid


async def _leave_batcher(executor: ProcessExecutor, gate: ProcessGate) -> int:
    with aiopar.use_executor(executor):
        async with Batcher(gate.hold, max_batch_size=1, collate_fn=list) as batcher:
            return await _while_held(lambda: batcher(1), gate)


class Holds(torch.nn.Module):
    """Calls a function if its input is true."""

    def __init__(self, fn: Callable[[], object]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x:
            self.fn()
        return x


_LEAVE = [
    _leave_run_sync,
    _leave_submit,
    _cancel_submit,
    _leave_map,
    _leave_pool,
    _leave_batcher,
]


@pytest.mark.anyio
@pytest.mark.parametrize("leave", _LEAVE)
async def test_the_process_of_a_call_whose_caller_has_left_is_replaced(
    leave: Callable[[ProcessExecutor, ProcessGate], Awaitable[int]], gate: ProcessGate
) -> None:
    async with ProcessExecutor(["cpu"], kill_after=0) as executor:
        pid = await leave(executor, gate)
        await gone(pid)
        assert await executor.run_sync(os.getpid) != pid


@pytest.mark.anyio
@pytest.mark.parametrize("all_leave", [False, True])
async def test_a_batch_is_left_when_all_its_callers_have_left(
    gate: ProcessGate, all_leave: bool
) -> None:
    async with ProcessExecutor(["cpu"], kill_after=0) as executor:
        batcher = Batcher(gate.hold, max_batch_size=2, max_queue_delay=LONG, collate_fn=list)
        with aiopar.use_executor(executor):
            await batcher.__aenter__()
        async with batcher, anyio.create_task_group() as tasks:
            callers = Callers(batcher, tasks)
            callers.call(1)
            callers.call(2)
            pid = await gate.entered()
            callers.cancel(1)
            if all_leave:
                callers.cancel(2)
                await gone(pid)
            else:
                gate.open()
        assert callers.outcomes.get(2) == (None if all_leave else 2)
        assert (await executor.run_sync(os.getpid) == pid) is not all_leave


# References. The garbage collector is off, here and there.


_things: "weakref.WeakSet[Thing]" = weakref.WeakSet()


class Thing:
    """Counted in the process where it was unpickled."""

    def __init__(self, size: int = 10**5) -> None:
        self.tensor = torch.zeros(size)
        _things.add(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        _things.add(self)

    def fail(self, *_: object) -> None:
        raise ValueError(self)

    def end(self, *_: object) -> None:
        os._exit(1)


def _alive() -> int:
    return len(_things)


def _echo(thing: Thing) -> Thing:
    return thing


def _disable_gc() -> None:
    import gc

    gc.disable()


@pytest.mark.anyio
async def test_nothing_is_kept_alive(executor: ProcessExecutor) -> None:
    worker = executor.on(worker=0)
    await worker.run_sync(_disable_gc)
    with without_gc():
        thing = Thing()
        sent = weakref.ref(thing)
        received = [weakref.ref(await worker.run_sync(_echo, thing))]
        received.append(weakref.ref(await worker.submit(_echo, thing)))
        for call, *others in ((thing.fail,), (_with_lambda,), (print, lambda: 1)):
            try:
                await worker.run_sync(partial(call, thing), *others)
            except (ValueError, AttributeError, TypeError) as error:
                received += [weakref.ref(arg) for arg in error.args if isinstance(arg, Thing)]
        assert len(received) == 3
        assert await worker.run_sync(_alive) == 0
        with suppress(WorkerLost):
            await worker.run_sync(thing.end, thing)
        del thing, call, others
        assert await survivors([sent, *received]) == []


def _with_lambda(thing: Thing) -> Any:
    return thing, lambda: 1
