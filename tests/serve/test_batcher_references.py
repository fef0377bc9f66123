"""References: nothing outlives its item, and nothing waits for the garbage collector."""

import asyncio
import gc
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from tests.freeing import survivors, without_gc

from .batches import Bad, Recorder, busy, until
from .coroutines import coroutine
from .streams import full
from .test_batcher_errors import unwilling

Watched = list[weakref.ref[Any]]


class Thing:
    """An item or an output; it can be weakly referenced."""


class Failure(Exception):
    """Can be weakly referenced, as builtin exceptions cannot."""


class Stop(BaseException):
    """Stands for `SystemExit`, which would end the loop."""


@pytest.fixture(autouse=True)
def _no_garbage_collector() -> Iterator[None]:
    with without_gc():
        yield


def watch(watched: Watched, *things: Any) -> None:
    watched.extend(map(weakref.ref, things))


class Outputs:
    """A function that returns a new thing for each item, and watches its items."""

    def __init__(self) -> None:
        self.watched: Watched = []

    def __call__(self, items: list[Thing]) -> list[Thing]:
        outputs = [Thing() for _ in items]
        watch(self.watched, *items, *outputs)
        return outputs


async def call_all(batcher: Batcher[Any, Any], count: int) -> None:
    """Send `count` items at once, and drop their outcomes."""

    async def call() -> None:
        await batcher(Thing())

    async with anyio.create_task_group() as tasks:
        for _ in range(count):
            tasks.start_soon(call)


@pytest.mark.anyio
@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("unbatch_fn", [None, list])
async def test_items_and_outputs_are_released(unbatch_fn: Any, on_loop: bool) -> None:
    fn = Outputs()
    call = coroutine(fn) if on_loop else fn
    async with Batcher(call, collate_fn=list, unbatch_fn=unbatch_fn) as batcher:
        await call_all(batcher, 20)
        assert len(fn.watched) == 40
        assert await survivors(fn.watched) == []


@pytest.mark.anyio
async def test_the_batch_goes_with_the_last_of_its_views() -> None:
    watched: Watched = []

    def fn(batch: torch.Tensor) -> torch.Tensor:
        outputs = batch + 1
        watch(watched, batch, outputs)
        return outputs

    async with Batcher(fn) as batcher:
        kept = await batcher(torch.tensor(1.0))
        assert await survivors(watched[:1]) == []
        assert kept._base is watched[1]()
        del kept
        assert await survivors(watched) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize(
    "error",
    [
        Failure(),
        Stop(),
        aiopar.OutputMismatch("two"),
        torch.AcceleratorError("lost"),
        torch.OutOfMemoryError("full"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_is_released_with_its_caller(error: BaseException, on_loop: bool) -> None:
    watched: Watched = []

    def fn(items: list[Thing]) -> list[Thing]:
        activations = Thing()
        watch(watched, activations, *items)
        fresh = type(error)(*error.args)
        if type(error).__weakrefoffset__:
            watch(watched, fresh)
        try:
            raise fresh
        finally:
            del fresh

    async def call() -> None:
        try:
            await batcher(Thing())
        except BaseException as caught:
            if type(caught) is not type(error):
                raise

    async with Batcher(coroutine(fn) if on_loop else fn, **full(5)) as batcher:
        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call)
        assert len(watched) >= 6
        assert await survivors(watched) == []


@pytest.mark.anyio
async def test_an_error_of_the_loop_is_released_with_its_caller() -> None:
    watched: Watched = []
    async with Batcher(unwilling) as batcher:
        try:
            await batcher(torch.ones(2))
        except Bad as error:
            watch(watched, error)
        assert len(watched) == 1
        assert await survivors(watched) == []


@pytest.mark.anyio
@pytest.mark.parametrize("on_loop", [False, True])
async def test_an_error_that_is_kept_keeps_no_other_item(on_loop: bool) -> None:
    watched: Watched = []
    kept: list[BaseException] = []

    class Bad(Thing):
        pass

    def fn(items: list[Thing]) -> list[Thing]:
        if any(isinstance(item, Bad) for item in items):
            raise Failure
        outputs = [Thing() for _ in items]
        watch(watched, *outputs)
        return outputs

    async def call(type_: type[Thing]) -> None:
        item = type_()
        if type_ is Thing:
            watch(watched, item)
        try:
            await batcher(item)
        except Failure as error:
            kept.append(error)

    async with Batcher(coroutine(fn) if on_loop else fn, **full(4)) as batcher:
        async with anyio.create_task_group() as tasks:
            for type_ in (Thing, Thing, Bad, Thing):
                tasks.start_soon(call, type_)
        assert await survivors(watched) == []
    assert len(kept) == 1


@pytest.mark.anyio
async def test_a_cancelled_or_expired_item_is_released_in_the_queue() -> None:
    watched: Watched = []

    async with busy() as callers:

        async def call(**options: Any) -> None:
            item = Thing()
            watch(watched, item)
            await callers.batcher(item, **options)

        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call)
                await until(lambda: callers.batcher.stats().queued == 1)
                scope.cancel()
        del tasks, scope
        with pytest.raises(aiopar.DeadlineExceeded):
            await call(timeout=0.01)
        gc.collect()  # the backend's own cycles
        assert await survivors(watched) == []
        assert callers.gate.held == 1


@pytest.mark.anyio
async def test_a_refused_item_is_let_go_of() -> None:
    watched: Watched = []

    async with busy(max_pending=1) as callers:
        await callers.queue(1)

        async def call() -> None:
            item = Thing()
            watch(watched, item)
            try:
                await callers.batcher(item)
            except aiopar.Overloaded as error:
                watch(watched, error)

        await call()
        assert len(watched) == 2
        assert await survivors(watched) == []


@pytest.mark.anyio
async def test_a_deadline_that_was_not_needed_keeps_nothing() -> None:
    """asyncio keeps a cancelled timer until all earlier timers have fired."""
    variable: ContextVar[Thing] = ContextVar("variable")
    watched: Watched = []

    async def call() -> None:
        thing, item = Thing(), Thing()
        variable.set(thing)
        watch(watched, thing, item)
        await batcher(item, timeout=3600)

    async with (
        Batcher(Outputs(), collate_fn=list) as batcher,
        anyio.create_task_group() as others,
    ):
        others.start_soon(anyio.sleep, 1000)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
        del tasks
        gc.collect()  # the backend's own cycles
        assert await survivors(watched) == []
        others.cancel_scope.cancel()


@pytest.mark.anyio
async def test_an_idle_batcher_keeps_nothing_of_the_task_that_opened_it() -> None:
    variable: ContextVar[Thing] = ContextVar("variable")
    batcher = Batcher(Outputs(), collate_fn=list, max_queue_delay=0.001)
    watched: Watched = []

    async def call() -> None:
        thing = Thing()
        variable.set(thing)
        watch(watched, thing)
        await batcher(Thing())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call)
    del tasks
    gc.collect()  # the backend's own cycles
    assert await survivors(watched) == []
    await batcher.aclose()


def test_a_closed_loop_is_not_kept() -> None:
    batcher = Batcher(Recorder(), collate_fn=list, max_queue_delay=0.001)

    async def main() -> None:
        await batcher(1, timeout=1000)
        with anyio.move_on_after(0):
            await batcher(2)

    loops = []
    for _ in range(5):
        loop = asyncio.new_event_loop()
        loop.run_until_complete(main())
        loop.close()
        loops.append(weakref.ref(loop))
        del loop
    aiopar.get_executor().submit(str).result()  # the worker is behind the last of them
    gc.collect()
    assert [loop() for loop in loops] == [None] * 5


@pytest.mark.anyio
async def test_an_unused_batcher_is_collected() -> None:
    batcher = Batcher(Outputs(), collate_fn=list)
    await batcher(Thing())
    watched: Watched = [weakref.ref(batcher)]
    del batcher
    await anyio.lowlevel.checkpoint()
    await aiopar.get_executor().submit(str)
    gc.collect()
    assert await survivors(watched) == []


@pytest.mark.anyio
async def test_a_pool_does_not_keep_a_batcher_that_was_not_closed() -> None:
    async with ReplicaPool(torch.nn.Identity(), ["cpu"]) as pool:
        batcher = Batcher(pool)
        assert (await batcher(torch.ones(2))).shape == (2,)
        kept = weakref.ref(batcher)
        del batcher
        with anyio.fail_after(30):
            while kept() is not None:  # its thread lets go of it, just after the answer
                gc.collect()
                await anyio.lowlevel.checkpoint()
        assert (await pool(torch.ones(1, 2))).shape == (1, 2)
