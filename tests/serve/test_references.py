"""Nothing outlives its item, stream or pool, and nothing waits for the garbage collector."""

import asyncio
import gc
import weakref
from collections.abc import Generator, Iterator
from contextlib import suppress
from contextvars import ContextVar
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate
from tests import simdevice
from tests.freeing import survivors, without_gc

from .batches import LONG, Bad, Recorder, busy, coroutine, current_executor, on_asyncio, until
from .replicas import CPUS, Fragile, Scale, X, break_copy, open_pool
from .streams import Counting, full, idle, of_kind, read_all
from .test_batcher_errors import unwilling

pytestmark = pytest.mark.anyio


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


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("unbatch_fn", [None, list])
async def test_items_and_outputs_are_released(unbatch_fn: Any, on_loop: bool) -> None:
    fn = Outputs()
    call = coroutine(fn) if on_loop else fn
    async with Batcher(call, collate_fn=list, unbatch_fn=unbatch_fn) as batcher:
        await call_all(batcher, 20)
        assert len(fn.watched) == 40
        assert await survivors(fn.watched) == []


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


@on_asyncio
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


async def test_an_error_of_the_loop_is_released_with_its_caller() -> None:
    watched: Watched = []
    async with Batcher(unwilling) as batcher:
        try:
            await batcher(torch.ones(2))
        except Bad as error:
            watch(watched, error)
        assert len(watched) == 1
        assert await survivors(watched) == []


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


async def test_a_cancelled_expired_or_refused_item_is_released() -> None:
    watched: Watched = []

    async with busy(max_pending=1) as callers:

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
        await callers.queue(1)
        try:
            await call()
        except aiopar.Overloaded as error:
            watch(watched, error)
        gc.collect()  # the backend's own cycles
        assert await survivors(watched) == []
        assert callers.gate.held == 1


async def test_a_batcher_keeps_nothing_of_the_task_that_opened_it_nor_do_its_timers() -> None:
    """asyncio keeps a cancelled timer until all earlier timers have fired."""
    batcher = Batcher(Outputs(), collate_fn=list, max_queue_delay=0.001)
    variable: ContextVar[Thing] = ContextVar("variable")
    watched: Watched = []

    async def call(seconds: float | None) -> None:
        thing, item = Thing(), Thing()
        variable.set(thing)
        watch(watched, thing, item)
        await batcher(item, timeout=seconds)

    async with anyio.create_task_group() as others:
        others.start_soon(anyio.sleep, 1000)
        for seconds in (None, 3600):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call, seconds)
            del tasks
        gc.collect()  # the backend's own cycles
        assert await survivors(watched) == []
        others.cancel_scope.cancel()
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


async def test_an_unused_batcher_is_collected() -> None:
    batcher = Batcher(Outputs(), collate_fn=list)
    await batcher(Thing())
    watched: Watched = [weakref.ref(batcher)]
    del batcher
    await anyio.lowlevel.checkpoint()
    await aiopar.get_executor().submit(str)
    gc.collect()
    assert await survivors(watched) == []


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


# Streams.


async def test_nothing_of_a_stream_is_kept(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def step(batch: Tensor) -> Tensor:
        output = batch * 2
        refs.extend(map(weakref.ref, (batch, output)))
        return output

    def generate(batch: Tensor) -> Generator[Tensor]:
        for number in range(3):
            if batch == -number:
                raise Bad
            yield step(batch)

    async with Batcher(of_kind(kind, generate)) as batcher:
        stream = batcher.stream(torch.ones(1), timeout=LONG)
        async with stream:
            assert len([part async for part in stream]) == 3
        del stream
        await idle(batcher)
        assert await survivors(refs) == []
        for number in (0, 2):  # before the first part, and later
            try:
                await read_all(batcher.stream(-number * torch.ones(1)))
            except Bad as error:
                refs.append(weakref.ref(error))
            await idle(batcher)
            assert await survivors(refs) == []
    assert len(refs) == 6 + 1 + 5


async def test_an_error_that_nobody_reads_is_not_kept(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def on_step(_: list[Any], number: int) -> None:
        if number:
            error = Bad()
            refs.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

    batcher = Batcher(Counting(2, on_step).of(kind), **full(2))
    async with batcher, batcher.stream("a") as stream, batcher.stream("b"):
        with suppress(Bad):
            await read_all(stream)
        await idle(batcher)
    assert await survivors(refs) == []
    assert len(refs) == 1


async def test_parts_that_were_read_are_not_kept_while_it_goes_on(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def generate(batch: Tensor) -> Generator[Tensor]:
        output = batch
        del batch
        while True:
            refs.append(weakref.ref(output))
            output = output * 2
            yield output

    batcher = Batcher(of_kind(kind, generate), max_batch_size=2, max_queue_delay=LONG)
    item = torch.ones(1)
    item_ref = weakref.ref(item)
    async with batcher, batcher.stream(item, buffer=2) as stream:
        async with batcher.stream(torch.ones(1), buffer=2) as other:
            del item
            await anext(other)
        for _ in range(10):
            await anext(stream)
        # Two unread parts are left, and none of those that the other stream had not read.
        await until(lambda: len(refs) == 12)
        assert await survivors([item_ref, *refs[:11]]) == []


# Pools.


WARMUP = torch.zeros(1, 2)


@pytest.mark.parametrize("end", ["closed", "dropped"])
async def test_pool_that_is_closed_or_dropped_frees_its_replicas(end: str) -> None:
    module = Scale(1.0)
    pool = ReplicaPool(module, CPUS, warmup=X)
    await pool(X)
    refs: list[weakref.ref[Any]] = [weakref.ref(module), *module.copies.refs()]
    assert len(refs) == 3
    del module
    if end == "closed":
        await pool.aclose()
        refs = refs[1:]  # it may be opened again
    else:
        del pool
    assert await survivors(refs) == []


@pytest.mark.parametrize("end", ["closed", "dropped"])
async def test_pools_that_come_and_go_leave_nothing_in_their_executor(end: str) -> None:
    def references() -> int:
        return sum(isinstance(one, weakref.WeakMethod) for one in gc.get_objects())

    async with aiopar.DeviceExecutor(CPUS) as executor:
        await executor.run_sync(abs, 1)
        before = references()
        for _ in range(3):
            pool = ReplicaPool(Scale(1.0), executor=executor, warmup=X)
            await pool(X)
            if end == "closed":
                await pool.aclose()
            gone = [weakref.ref(pool)]
            del pool
            assert await survivors(gone) == []
        assert references() == before


@pytest.mark.parametrize("verb", ["swap", "load_state_dict"])
async def test_replaced_weights_are_freed(verb: str) -> None:
    module, new = Scale(1.0), Scale(2.0)
    refs: list[weakref.ref[Any]] = [weakref.ref(module)]
    copies = module.copies
    pool = ReplicaPool(module, CPUS, warmup=X)
    del module
    async with pool:
        refs += copies.refs()
        await (pool.swap(new) if verb == "swap" else pool.load_state_dict(new.state_dict()))
        await pool(X)
        assert await survivors(refs) == []


async def test_broken_replica_is_freed() -> None:
    module = Fragile()
    async with open_pool(module, warmup=WARMUP) as pool:
        break_copy(module, 0)
        await pool(X)
        assert await survivors(module.copies.refs()[:1]) == []
        await until(lambda: pool.stats().replicas[0].rebuilds == 1)


@pytest.mark.parametrize(
    "fault", ["the input", "two replicas", "the only replica", "the warm-up", "the opening"]
)
async def test_pool_keeps_no_error(fault: str) -> None:
    failing = [False]
    refs: list[weakref.ref[Any]] = []

    def fail(_: Tensor) -> None:
        if failing[0]:
            failing[0] = fault != "the input"  # then the warm-up of the health check passes
            raise Failure

    async def call() -> None:
        try:
            await (pool.swap(Scale(2.0, fail)) if fault == "the warm-up" else pool(X))
        except (Failure, aiopar.ReplicaUnavailable) as error:
            refs.extend(weakref.ref(one) for one in (error, error.__cause__) if one is not None)

    devices = ["cpu"] if fault == "the only replica" else CPUS
    pool = ReplicaPool(Scale(1.0, fail), devices, warmup=WARMUP)
    if fault != "the opening":
        await pool.__aenter__()
    failing[0] = True
    async with anyio.create_task_group() as tasks:
        for _ in range(3 if fault == "the opening" else 1):
            tasks.start_soon(call)
    failing[0] = False
    assert len(refs) == {"the only replica": 2, "the opening": 3}.get(fault, 1)
    assert await survivors(refs) == []
    await pool.aclose()


@pytest.mark.sim
class TestOnAnAccelerator:
    @on_asyncio
    async def test_replaced_weights_live_until_kernels_have_read_them(self) -> None:
        x, module, gate = torch.ones(2, device="sim:1"), Scale(2.0), Gate()
        warmed: list[torch.device] = []

        def hold_the_second(x: Tensor) -> None:
            warmed.append(x.device)
            if len(warmed) == 2:
                gate()

        async with (
            aiopar.DeviceExecutor(["sim:1", "sim:0"]) as executor,
            ReplicaPool(module, executor=executor, warmup=torch.ones(1)) as pool,
        ):
            old = module.copies.refs()[:1]
            stream = await executor.on(worker=0).run_sync(torch.accelerator.current_stream, "sim:1")
            with gate:
                swap = asyncio.ensure_future(pool.swap(Scale(3.0, hold_the_second)))
                await gate.entered()  # the copy on sim:1 is ready; the worker of sim:0 is held
                with simdevice.paused(stream):
                    late = asyncio.ensure_future(pool(x))
                    while not simdevice.pending_streams("sim:1"):
                        await anyio.lowlevel.checkpoint()
                    gate.open()
                    assert await survivors(old) == []
                    assert not late.done()
                first, second = await late
                await swap
            assert first.tolist() == second.tolist() == [2.0, 2.0]

    @on_asyncio
    async def test_replicas_on_one_device_share_their_weights(self) -> None:
        module = Scale(2.0)
        devices = ["sim:0", "sim:0", "sim:1"]
        async with open_pool(module, on=devices, warmup=torch.ones(1)):
            copies = [module.copies[index] for index in range(3)]
            weights = [copied.weight.data_ptr() for copied in copies]
            twins = [copied.twin.data_ptr() for copied in copies]
        assert weights[0] == weights[1] != weights[2]
        assert len(set(twins)) == 3


# The garbage collector, threads that cannot start, and what an idle batcher holds.


@on_asyncio
async def test_the_garbage_collector_may_close_a_forgotten_call_at_any_time() -> None:
    """It may run while its thread holds the queue's lock, and must not wait for it."""
    gate = Gate()
    closed: list[str] = []

    class Key:
        def __hash__(self) -> int:
            return 1

        def __eq__(self, other: object) -> bool:
            gc.collect()
            return True

    def fn(items: list[str]) -> list[str]:
        gate()
        return items

    async def call(batcher: Batcher[Any, Any], item: str) -> None:
        try:
            await batcher(item)
        finally:
            closed.append(item)

    async with (
        Batcher(fn, collate_fn=list, batch_key=lambda _: Key()) as batcher,
        asyncio.TaskGroup() as tasks,
    ):
        with gate:
            forgotten: Any = call(batcher, "forgotten")
            forgotten.send(None)
            await gate.entered()
            gc.disable()
            try:
                cycle = [forgotten]
                cycle.append(cycle)
                del forgotten, cycle
                for item in ("next", "after next"):
                    tasks.create_task(call(batcher, item))
                await until(lambda: batcher.stats().queued == 2)
            finally:
                gc.enable()
            assert closed == ["forgotten"]


@on_asyncio
async def test_threads_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: object) -> None:
        raise RuntimeError("can't start new thread")

    recorder = Recorder()
    async with current_executor(["cpu"]), Batcher(recorder, collate_fn=list) as batcher:
        with monkeypatch.context() as patched:
            patched.setattr("threading.Thread.start", start)
            for item in (1, 2):
                with pytest.raises(RuntimeError, match="can't start new thread"):
                    await batcher(item)
        assert batcher.stats().queued == 0
        assert await batcher(3) == "3"
    assert recorder.runs == [[3]]


def idle_worker(executor: aiopar.DeviceExecutor) -> bool:
    [worker] = executor.stats().workers
    return worker.queued == worker.running == 0


@on_asyncio
async def test_an_idle_batcher_is_really_idle() -> None:
    """It has no timer, no task, and no call in an executor."""
    loop = asyncio.get_running_loop()
    async with current_executor(["cpu"]) as executor:
        before = len(asyncio.all_tasks())
        async with Batcher(Recorder(), collate_fn=list, max_queue_delay=0.001) as batcher:
            await batcher(1, timeout=1000)
            with pytest.raises(aiopar.DeadlineExceeded):
                async with asyncio.timeout(30):
                    await batcher(2, timeout=1e-6)
            await until(lambda: idle_worker(executor))
            assert len(asyncio.all_tasks()) == before
            timers: list[asyncio.TimerHandle] = loop._scheduled  # type: ignore[attr-defined]
            assert [timer for timer in timers if not timer.cancelled()] == []
