"""Awaiting one call: `run_sync`, with its cancellation and backpressure."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.lowlevel

from ._call import FutureCall, LoopCall
from ._future import thread_hooks
from ._pool import WorkerPool
from ._waiting import settle
from ._wakeup import in_event_loop, waker_of
from ._worker import Worker, current_worker

T = TypeVar("T")

_get_running_loop = asyncio._get_running_loop


async def run_in_loop(
    call: LoopCall[T], pool: WorkerPool, workers: Sequence[Worker], abandon_on_cancel: bool
) -> T:
    """Queue a call and await it; on asyncio, past any `Future`."""
    loop = _get_running_loop()
    if loop is None:
        return await run_anywhere(call.as_future_call(), pool, workers, abandon_on_cancel)
    call.waker = waker_of(loop)
    waiter: asyncio.Future[T] = asyncio.Future(loop=loop)
    call.waiter = waiter
    thread_hooks.about_to_block()  # first: if it fails, nothing was queued that nobody awaits
    if pool.admission is None:
        pool.put(call, workers)
    else:
        await _admit(call, pool, workers)
    try:
        return await waiter
    except asyncio.CancelledError:
        # Claimed here, it never ran; delivered, this is its own error or it has just ended.
        if call.claim():
            call.drop()
        elif not (call.delivered or abandon_on_cancel):
            await _until_delivered(call, loop)
        raise
    finally:
        # An error's traceback holds this frame, which must not hold the error.
        del call, waiter


# What a warning that it was never awaited says.
run_in_loop.__qualname__ = "DeviceExecutor.run_sync"


async def run_anywhere(
    call: FutureCall[T], pool: WorkerPool, workers: Sequence[Worker], abandon_on_cancel: bool
) -> T:
    """Queue a call and await its future: under trio, or in a worker without a loop."""
    future = call.future
    try:
        if _get_running_loop() is None and in_event_loop():
            # trio's: what is cancelled already does not begin there.
            await anyio.lowlevel.checkpoint_if_cancelled()
        await _admit(call, pool, workers)
    except BaseException:
        call.cancel()  # as in `WorkerPool.admit`
        raise
    try:
        # Cancelled, it drops a call that has not started: nobody else knows of this future.
        return await future
    except BaseException:
        if not (future.done() or abandon_on_cancel):
            await settle([future])
        raise
    finally:
        del call, future


async def _admit(
    call: FutureCall[Any] | LoopCall[Any], pool: WorkerPool, workers: Sequence[Worker]
) -> None:
    """Queue a call, waiting until there is room for it."""
    admission = pool.admission
    # A call made by a call is exempt: if it had to wait for room, so might everybody.
    if admission is None or current_worker() is not None:
        pool.put(call, workers)
        return
    pool.check_open()
    granted = admission.request([workers])
    try:
        [worker] = await granted
    except BaseException:
        if not admission.give_up(granted):  # granted and cancelled at once: nobody takes the room
            admission.leave(granted.value()[0])
        raise
    admission.admit(call, worker)
    pool.put(call, [worker])


async def _until_delivered(call: LoopCall[Any], loop: asyncio.AbstractEventLoop) -> None:
    """Wait for a call whose waiter was cancelled while it ran, and discard the outcome."""
    # Shielded, else anyio would deliver its cancellation again and again while this waits.
    with anyio.CancelScope(shield=True):
        # On the loop's thread, as `deliver` is: it cannot come between the look and the wait.
        while not call.delivered:
            call.waiter = loop.create_future()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([call.waiter])
    if call.waiter.done() and not call.waiter.cancelled():
        call.waiter.exception()  # seen, and discarded
