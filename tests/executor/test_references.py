"""References: functions, arguments, results and errors are freed by reference counting."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import anyio
import anyio.lowlevel
import pytest

import aiopar
from aiopar.testing import Gate
from tests.freeing import collect_without_gil, without_gc


class Thing:
    """An argument or a result; it can be weakly referenced."""

    def __call__(self, *_: object) -> "Thing":
        return Thing()

    def fail(self, *_: object) -> None:
        raise Failure(self)


class Failure(Exception):
    """Can be weakly referenced, as builtin exceptions cannot."""


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    with without_gc():
        yield


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        executor.submit(str).result()
        yield executor


def _watched(things: list[Thing]) -> list[Callable[[], object]]:
    return [weakref.ref(thing) for thing in things]


def _alive(references: list[Callable[[], object]]) -> list[int]:
    collect_without_gil()
    return [place for place, reference in enumerate(references) if reference() is not None]


async def _idle(executor: aiopar.DeviceExecutor) -> None:
    """Wait until the worker and the loop have dropped all earlier calls."""
    await executor.run_sync(str)
    # If both calls were delivered together, the loop holds the earlier one until now.
    await anyio.lowlevel.checkpoint()


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_an_idle_worker_keeps_nothing_and_a_future_only_its_result(
    executor: aiopar.DeviceExecutor, verb: str
) -> None:
    fn, argument = Thing(), Thing()
    call = getattr(executor, verb)(fn, argument)
    result = await call
    references = _watched([fn, argument, result])
    del fn, argument, result
    await _idle(executor)
    assert _alive(references) == ([2] if verb == "submit" else [])
    references.append(weakref.ref(call))
    del call
    assert _alive(references) == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit"])
async def test_an_error_is_freed_after_it_was_caught(
    executor: aiopar.DeviceExecutor, verb: str
) -> None:
    owner, argument = Thing(), Thing()
    references = _watched([owner, argument])
    try:
        await getattr(executor, verb)(owner.fail, argument)
    except Failure as error:
        references.append(weakref.ref(error))
    del owner, argument
    await _idle(executor)
    assert _alive(references) == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["run_sync", "submit", "cancel"])
async def test_a_cancelled_call_that_is_queued_is_freed(
    executor: aiopar.DeviceExecutor, verb: str
) -> None:
    with Gate() as gate:
        held = executor.submit(gate)
        await gate.entered()
        fn, argument = Thing(), Thing()
        references = _watched([fn, argument])

        async def wait() -> None:
            nonlocal fn, argument
            call = getattr(executor, "submit" if verb == "cancel" else verb)(fn, argument)
            del fn, argument
            if verb == "cancel":
                call.cancel()
            else:
                await call

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        del tasks
        gc.collect()  # the backend's own cycles
        assert _alive(references) == []
        assert not held.done()


def test_nested_calls_are_freed(executor: aiopar.DeviceExecutor) -> None:
    references: list[Callable[[], object]] = []
    threads: set[threading.Thread] = set()

    def outer(depth: int) -> Thing:
        thing = Thing()
        references.append(weakref.ref(thing))
        threads.add(threading.current_thread())
        if depth:
            aiopar.wait(executor.submit(outer, depth - 1))
            executor.submit(outer, 0).result()
        return thing

    executor.submit(outer, 5).result()
    # Threads that handed their worker over end; the serving thread has dropped earlier calls.
    for thread in threads - {executor.submit(threading.current_thread).result()}:
        thread.join(30)
        assert not thread.is_alive()
    assert len(references) == 11
    assert _alive(references) == []


@pytest.mark.asyncio
async def test_a_generator_its_items_and_its_error_are_freed(
    executor: aiopar.DeviceExecutor,
) -> None:
    def generate(thing: Thing) -> Iterator[Thing]:
        for _ in range(3):
            yield Thing()
        raise Failure

    argument = Thing()
    references = _watched([argument])
    try:
        async with executor.iterate(generate, argument) as stream:
            del argument
            async for item in stream:
                references.append(weakref.ref(item))
                del item
    except Failure as error:
        references.append(weakref.ref(error))
    await _idle(executor)
    assert len(references) == 5
    assert _alive(references) == []


@pytest.mark.anyio
@pytest.mark.parametrize("verb", ["submit", "run_sync"])
async def test_a_call_that_finds_no_room_is_freed(verb: str) -> None:
    argument = Thing()
    references = _watched([argument])
    async with aiopar.DeviceExecutor(["cpu"], max_pending=1) as executor:
        with Gate() as gate:
            executor.submit(gate)
            await gate.entered()
            executor.submit(str)
            if verb == "submit":
                with pytest.raises(aiopar.QueueFull):
                    executor.submit(str, argument)
            else:
                with anyio.move_on_after(0):
                    await executor.run_sync(str, argument)
            del argument
            await anyio.lowlevel.checkpoint()
            assert _alive(references) == []


def test_a_closed_loop_is_freed() -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        loops = []
        for _ in range(5):
            loop = asyncio.new_event_loop()
            assert loop.run_until_complete(executor.run_sync(pow, 2, 5)) == 32
            loop.close()
            loops.append(weakref.ref(loop))
            del loop
        executor.submit(str).result()  # the worker has dropped the last call
        gc.collect()
        assert [loop() for loop in loops] == [None] * 5
