"""A continuous batch keeps no item, part, result, state or error longer than its caller."""

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.testing import Gate
from tests.freeing import survivors, without_gc

from .batches import current_executor
from .streams import idle

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    with without_gc():
        yield


class Thing:
    """An item, a part, a result or a state; it can be weakly referenced."""


class Failure(Exception):
    """Can be weakly referenced."""


class Watching:
    """Makes two parts and a result for each item, and watches everything.

    Args:
        on_step: Called before each step; may raise.
    """

    def __init__(self, on_step: Callable[[], object] = lambda: None) -> None:
        self.on_step = on_step
        self.watched: list[weakref.ref[Any]] = []
        self.left: dict[Any, int] = {}

    def start(self, item: Thing) -> Thing:
        state = Thing()
        self.left[state] = 2
        self.watch(item, state)
        return state

    def step(self, states: list[Thing]) -> Sequence[Any]:
        self.on_step()
        results: list[Any] = []
        for state in states:
            self.left[state] -= 1
            part = Thing()
            results.append(part if self.left[state] else aiopar.Done(Thing(), part))
            self.watch(part, *([] if self.left[state] else [results[-1].result]))
        return results

    def stop(self, state: Thing) -> None:
        del self.left[state]

    def watch(self, *things: Any) -> None:
        self.watched.extend(map(weakref.ref, things))


async def read(batcher: Any, count: int, **options: Any) -> None:
    async for _ in batcher.stream(Thing(), **options):
        count -= 1
        if not count:
            break


@pytest.mark.parametrize("leaves_after", [1, 9])
async def test_parts_and_results_are_released(leaves_after: int) -> None:
    stepper = Watching()
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(read, batcher, leaves_after)
        await idle(batcher)
        assert len(stepper.watched) >= 5 * 3
        assert await survivors(stepper.watched) == []


async def test_what_an_await_returns_is_released() -> None:
    stepper = Watching()

    async def call() -> None:
        await batcher(Thing())

    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call)
        assert len(stepper.watched) == 5 * 5
        assert await survivors(stepper.watched) == []


async def test_a_caller_that_leaves_in_its_last_step_leaves_nothing() -> None:
    gate = Gate()
    stepper = Watching(gate)
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        with gate:
            async with batcher.stream(Thing()):
                await gate.entered()
                gate.let_on()
                await gate.entered(2)
        await idle(batcher)
        assert len(stepper.watched) == 5
        assert await survivors(stepper.watched) == []


async def test_an_item_is_released_when_its_first_part_is_there() -> None:
    stepper = Watching()
    async with (
        current_executor(["cpu"]),
        aiopar.ContinuousBatcher(stepper) as batcher,
        batcher.stream(Thing(), buffer=1) as stream,
    ):
        await anext(stream)
        assert await survivors(stepper.watched[:1]) == []


@pytest.mark.parametrize("streams", [False, True])
async def test_an_error_is_released_with_its_callers(streams: bool) -> None:
    stepper: Any = Watching()

    def failure() -> Failure:
        error = Failure()
        stepper.watch(error)
        return error

    def fail() -> None:
        raise failure()  # a frame of the traceback must not hold the error

    stepper.on_step = fail

    async def call() -> None:
        with pytest.raises(Failure):
            await (read(batcher, 9) if streams else batcher(Thing()))

    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call)
        assert len(stepper.watched) > 10
        assert await survivors(stepper.watched) == []


async def test_a_caller_that_leaves_releases_its_item() -> None:
    stepper = Watching()
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        for _ in range(20):
            with anyio.move_on_after(0):
                await batcher(Thing())
        await idle(batcher)
        assert await survivors(stepper.watched) == []


@pytest.mark.parametrize("way", ["result", "error"])
async def test_a_closed_batcher_is_released(way: str) -> None:
    stepper = Watching()
    async with current_executor(["cpu"]):
        batcher = aiopar.ContinuousBatcher(stepper)
        async with batcher:
            if way == "error":
                stepper.on_step = lambda: 1 / 0
                with pytest.raises(ZeroDivisionError):
                    await batcher(Thing())
            else:
                await batcher(Thing())
        parts: list[weakref.ref[Any]] = [
            weakref.ref(batcher),
            weakref.ref(batcher._scheduler),
            weakref.ref(stepper),
        ]
        del batcher, stepper
    gc.collect()  # a scheduler and its runners are a cycle
    assert await survivors(parts) == []
