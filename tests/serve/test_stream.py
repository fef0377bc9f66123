"""`Batcher.stream`: what is read, when steps are made, who leaves, and how it ends."""

import asyncio
import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._observer import outcome_of
from aiopar.testing import Gate
from tests import simdevice

from .batches import until
from .streams import ENDLESS, LONG, Counting, Readers, counted, full, held, idle, reading
from .test_batcher_loops import RUNNERS
from .test_observer import Watcher

pytestmark = pytest.mark.anyio

Devices = tuple[torch.device, ...]


async def settled(executor: aiopar.DeviceExecutor) -> None:
    """Let what is queued run, where there is one free worker, and what comes of it, and so on."""
    for _ in range(5):
        await executor.run_sync(str)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()


# What is read.


async def test_each_reads_its_own_part_of_each_step(kind: str) -> None:
    counting = Counting(40)
    async with Batcher(counting.of(kind), **full(3)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("a", "b", "c")
        assert readers.parts == {item: counted(item, 40) for item in "abc"}
        assert readers.ended == dict.fromkeys("abc"), "the generator's end is that of all"
    assert list(map(sorted, counting.batches)) == [["a", "b", "c"]]
    assert len(counting.steps) == 40
    assert len(counting.closed) == 1


async def test_items_are_collated_and_outputs_taken_apart_as_otherwise(devices: Devices) -> None:
    def double(batch: dict[str, Tensor]) -> Iterator[dict[str, Any]]:
        x = batch["x"]
        for _ in range(4):
            x = x * 2
            yield {"y": x, "n": ["text"] * len(x)}

    async with aiopar.DeviceExecutor(devices) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(double, max_batch_size=2, max_queue_delay=LONG)
            items = {n: {"x": torch.full((2,), float(n), device=devices[0])} for n in (1, 3)}
            found: dict[int, list[Any]] = {}

            async def read(n: int) -> None:
                parts = [part async for part in batcher.stream(items[n])]
                found[n] = [(part["y"].tolist(), part["n"]) for part in parts]

            async with batcher, anyio.create_task_group() as tasks:
                for n in items:
                    tasks.start_soon(read, n)
    for n in items:
        assert found[n] == [([n * 2.0**k] * 2, "text") for k in range(1, 5)]


@pytest.mark.sim
async def test_without_synchronization_parts_are_ordered_after() -> None:
    simdevice.set_kernel_latency(0.01)

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            batch = batch + 1
            yield batch

    async with aiopar.DeviceExecutor(["sim:0"], synchronize=False) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(generate) as batcher:
                parts = batcher.stream(torch.zeros(2, device="sim:0"))
                assert [part.tolist() async for part in parts] == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.sim
async def test_a_part_is_complete_on_its_device() -> None:
    launched: list[Tensor] = []

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for _ in range(3):
            batch = batch + 1
            launched.append(batch)
            yield batch

    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(generate) as batcher, anyio.create_task_group() as tasks:
                readers = Readers(batcher, tasks)
                with simdevice.paused("sim:0"):
                    readers.read(torch.zeros(2, device="sim:0"))
                    await until(lambda: bool(launched))
                    await anyio.wait_all_tasks_blocked()
                    assert list(readers.parts.values()) == [[]]
                    assert len(launched) == 1, "nor is the next step made"
    [parts] = readers.parts.values()
    assert [part.tolist() for part in parts] == [[1, 1], [2, 2], [3, 3]]


async def test_unbatch_fn_takes_each_step_apart() -> None:
    batcher = Batcher(Counting(2).generate, **full(2), unbatch_fn=lambda parts: parts[::-1])
    async with reading(batcher) as readers:
        readers.read("a", "b")
    assert readers.parts == {"a": counted("b", 2), "b": counted("a", 2)}


async def test_a_generator_without_steps(kind: str) -> None:
    async with Batcher(Counting(0).of(kind), collate_fn=list) as batcher:
        assert [part async for part in batcher.stream("a")] == []
        await idle(batcher)
        assert batcher.stats().completed == 1


async def test_callable_objects_modules_and_partials_stream() -> None:
    class Function:
        def __call__(self, batch: list[str]) -> Iterator[list[str]]:
            yield batch

    class Module(torch.nn.Module):
        async def forward(self, batch: list[str]) -> AsyncIterator[list[str]]:
            yield batch

    def generate(_: int, batch: list[str]) -> Iterator[list[str]]:
        yield batch

    for fn in (Function(), Module(), functools.partial(generate, 1)):
        async with Batcher(fn, collate_fn=list) as batcher:
            assert [part async for part in batcher.stream("a")] == ["a"]


# How steps are made.


def _thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.empty(0).device.type,
        _VARIABLE.get(),
    )


_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


async def test_a_generators_state_is_its_own_and_that_of_who_made_the_batcher() -> None:
    seen: list[tuple[Any, ...]] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        seen.append(_thread_state())
        with torch.device("meta"):
            _VARIABLE.set(2)
            yield batch
            seen.append(_thread_state())
            yield batch

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            _VARIABLE.set(1)
            with torch.no_grad():
                batcher = Batcher(generate, collate_fn=list)
            _VARIABLE.set(0)
            async with batcher, batcher.stream("a") as stream:
                async for _ in stream:
                    assert await executor.run_sync(_thread_state) == (True, False, "cpu", 0)
    assert seen == [(False, False, "cpu", 1), (False, False, "meta", 2)]


@asynccontextmanager
async def occupied(worker: aiopar.DeviceExecutor) -> AsyncIterator[None]:
    """Hold a worker."""
    with Gate() as gate:
        held_up = worker.submit(gate)
        await gate.entered()
        yield
    await held_up


async def test_each_step_is_a_call_of_its_own_on_one_worker() -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(counting.generate, collate_fn=list)
            async with batcher, batcher.stream("a", buffer=1) as stream:
                await anext(stream)
                [thread] = set(counting.steps)
                own, other = (executor.on(worker=n ^ int(thread[-1])) for n in (0, 1))
                async with occupied(other):
                    for n in range(20):  # the worker is free between steps
                        assert await executor.run_sync(str, n) == str(n)
                        await anext(stream)
                async with occupied(own):
                    made = len(counting.steps)
                    await anext(stream)
                    await settled(executor)
                    assert len(counting.steps) == made, "no other worker makes them"
                await until(lambda: len(counting.steps) == made + 1)
                async with occupied(own):
                    await stream.aclose()
                    await settled(executor)
                    assert counting.closed == [], "nor closes the generator"
    assert set(counting.steps) == set(counting.closed) == {thread}


async def test_collate_and_unbatch_run_on_workers(kind: str) -> None:
    threads: dict[str, threading.Thread] = {}

    def note(name: str, value: Any) -> Any:
        threads[name] = threading.current_thread()
        return value

    counting = Counting(1, lambda *_: note("step", None))
    async with Batcher(
        counting.of(kind),
        collate_fn=lambda items: note("collate", items),
        unbatch_fn=lambda outputs: note("unbatch", outputs),
    ) as batcher:
        assert [part async for part in batcher.stream("a")] == counted("a", 1)
    here = threading.current_thread()
    assert threads["collate"] is not here
    assert threads["unbatch"] is not here
    assert (threads["step"] is here) == (kind == "async generator")


async def test_an_async_generator_runs_in_one_task_from_its_first_step_to_its_end() -> None:
    async def generate(batch: list[str]) -> AsyncIterator[list[str]]:
        # A cancel scope raises if it is left in another task than it was entered in.
        with anyio.CancelScope():
            async with anyio.create_task_group():
                yield batch
                yield batch

    async with Batcher(generate, collate_fn=list) as batcher:
        assert [part async for part in batcher.stream("a")] == ["a", "a"]
        async with batcher.stream("b") as stream:
            assert await anext(stream) == "b"


# Who reads slowly.


@pytest.mark.parametrize("buffer", [1, 3, 16])
async def test_a_step_is_made_while_everybody_has_room(kind: str, buffer: int) -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            options: Any = {} if buffer == 16 else {"buffer": buffer}
            async with reading(Batcher(counting.of(kind), **full(2))) as readers:
                readers.read("fast")
                parts = readers.parts["fast"]
                async with readers.batcher.stream("slow", **options) as slow:
                    for number in range(5):
                        wanted = buffer + number
                        await until(lambda wanted=wanted: len(parts) == wanted)  # type: ignore[misc]
                        await settled(executor)
                        assert len(counting.steps) == wanted
                        assert await anext(slow) == ("slow", number)
                    readers.cancel("fast")
    assert readers.parts["fast"][:5] == counted("fast", 5)


async def test_who_reads_nothing_at_all_holds_its_batch_up(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(counting.of(kind), collate_fn=list) as batcher:
                async with batcher.stream("a", buffer=2):
                    await until(lambda: len(counting.steps) == 2)
                    async with batcher.stream("b") as stream:
                        await settled(executor)
                        assert len(counting.steps) == 2
                        assert batcher.stats().queued == 1, "a batch runs until all have left it"
                        await stream.aclose()
                await idle(batcher)
    assert counting.batches == [["a"]]


@pytest.mark.parametrize("concurrency", [1, 2, 3])
async def test_as_many_batches_stream_at_once_as_concurrency_says(
    kind: str, concurrency: int
) -> None:
    counting = Counting(ENDLESS)
    options: dict[str, Any] = {"max_batch_size": 1, "concurrency": concurrency}
    batcher = Batcher(counting.of(kind), collate_fn=list, **options)
    async with batcher, AsyncExitStack() as streams:
        for item in range(4):
            await streams.enter_async_context(batcher.stream(item, buffer=1))
        await until(lambda: len(counting.steps) == concurrency)
        stats = batcher.stats()
        assert (stats.in_flight, stats.queued) == (concurrency, 4 - concurrency)


# Who leaves.


async def broken_off(stream: Any, _: Counting) -> None:
    async for _part in stream:
        break


async def closed(stream: Any, _: Counting) -> None:
    await anext(stream)
    await stream.aclose()
    assert [part async for part in stream] == [], "it has ended"
    await stream.aclose()


async def left(stream: Any, _: Counting) -> None:
    async with stream:
        await anext(stream)


async def failed(stream: Any, _: Counting) -> None:
    with suppress(ZeroDivisionError):
        async with stream:
            await anext(stream)
            raise ZeroDivisionError


async def cancelled(stream: Any, _: Counting) -> None:
    with anyio.CancelScope() as scope:
        async for _part in stream:
            scope.cancel()
    assert [part async for part in stream] == [], "it has ended"


async def never_read(stream: Any, counting: Counting) -> None:
    await stream.__aenter__()
    await until(lambda: bool(counting.steps))


LEAVING = [broken_off, closed, left, failed, cancelled, never_read]


@pytest.mark.parametrize("leave", LEAVING)
async def test_when_nobody_is_left_the_generator_is_closed(
    kind: str, leave: Callable[[Any, Counting], Any]
) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list) as batcher:
        await leave(batcher.stream("a", buffer=1), counting)
        await until(lambda: len(counting.closed) == 1)
        await until(lambda: batcher.stats().in_flight == 0)
    assert set(counting.closed) == set(counting.steps), "where its steps were made"


@pytest.mark.parametrize("leave", LEAVING)
async def test_who_leaves_does_not_slow_the_others(
    kind: str, leave: Callable[[Any, Counting], Any]
) -> None:
    counting = Counting(100)
    async with Batcher(counting.of(kind), **full(2)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("stays")
            await leave(batcher.stream("leaves", buffer=1), counting)
        assert readers.parts == {"stays": counted("stays", 100)}
        assert len(counting.batches) == len(counting.closed) == 1


async def test_who_leaves_the_queue_is_not_computed(kind: str) -> None:
    counting = Counting(1)
    async with Batcher(counting.of(kind), **full(2)) as batcher:
        async with batcher.stream("gone") as stream:
            assert batcher.stats().queued == 1
            await stream.aclose()
            assert batcher.stats().queued == 0
        async with anyio.create_task_group() as tasks:
            Readers(batcher, tasks).read("a", "b")
    assert list(map(sorted, counting.batches)) == [["a", "b"]]


def test_the_garbage_collector_may_come_while_a_lock_is_held() -> None:
    async def main() -> None:
        async with Batcher(Counting().generate, **full(2)) as batcher:
            stream = batcher.stream("a")
            read = stream.__anext__()
            read.send(None)  # it waits
            with batcher._scheduler._lock:
                read.close()
            await idle(batcher)
            stream = batcher.stream("b")
            await stream.__aenter__()
            with batcher._scheduler._lock:
                del stream
            await idle(batcher)

    asyncio.run(main())


async def test_a_deadline_is_that_of_the_whole_stream(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list, timeout=0.05) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            async for _ in batcher.stream("a"):
                pass
        await idle(batcher)
        async with batcher.stream("b", timeout=0.05) as stream:
            await idle(batcher)
            with pytest.raises(aiopar.DeadlineExceeded):
                await anext(stream)  # not the parts that wait
            assert [part async for part in stream] == []
    assert len(counting.closed) == len(counting.batches)


# The queue: as for `await batcher(item)`.


async def test_a_deadline_that_passes_in_the_queue(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list) as batcher, held(batcher):
        with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
            await anext(batcher.stream("late", timeout=0.01))
    assert counting.batches == [["first"]]


async def test_a_full_queue_refuses_on_entering_or_at_the_first_read(kind: str) -> None:
    options: dict[str, Any] = {"collate_fn": list, "max_pending": 1}
    async with Batcher(Counting().of(kind), **options) as batcher, held(batcher):
        async with batcher.stream("waits"):
            with pytest.raises(aiopar.Overloaded):
                await batcher.stream("refused").__aenter__()
            stream = batcher.stream("refused")
            with pytest.raises(aiopar.Overloaded):
                await anext(stream)
            assert [part async for part in stream] == []
        assert batcher.stats().rejected == {"queue_full": 2}


async def test_keys_costs_and_priorities(kind: str) -> None:
    counting = Counting(1)
    options: dict[str, Any] = {"batch_key": len, "cost": len, "max_batch_cost": 6}
    async with Batcher(counting.of(kind), collate_fn=list, **options) as batcher:
        with pytest.raises(aiopar.InvalidInput, match="costs 7"):
            await anext(batcher.stream("a" * 7))
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            async with held(batcher):
                await readers.queue("aa", "bb", "c")
                await readers.queue("ddd", priority=-1)
                await readers.queue("ee", "ff")
    assert counting.batches[1:] == [["ddd"], ["aa", "bb", "ee"], ["c"], ["ff"]]


# What it is not.


async def test_a_batcher_that_streams_is_not_awaited(kind: str) -> None:
    async with Batcher(Counting().of(kind)) as batcher:
        with pytest.raises(TypeError, match=r"an? .*generator function: use `async for .*stream"):
            await batcher("a")


async def test_one_that_does_not_is_not_streamed() -> None:
    with pytest.raises(TypeError, match="use `await batcher"):
        Batcher(str).stream("a")


async def test_arguments_are_checked_at_once() -> None:
    batcher = Batcher(Counting().generate)
    with pytest.raises(TypeError, match="buffer must be an int, not float"):
        batcher.stream("a", buffer=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer must be at least 1, got 0"):
        batcher.stream("a", buffer=0)
    with pytest.raises(TypeError, match="timeout must be a number, not str"):
        batcher.stream("a", timeout="1")  # type: ignore[arg-type]


async def test_one_task_reads_at_a_time(kind: str) -> None:
    async with Batcher(Counting().of(kind), **full(2)) as batcher:
        async with batcher.stream("a") as stream, anyio.create_task_group() as tasks:
            found: list[Any] = []

            async def read() -> None:
                found.extend([part async for part in stream])
                found.append("end")

            tasks.start_soon(read)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RuntimeError, match="by another task"):
                await anext(stream)
            assert found == []
            await stream.aclose()
        assert found == ["end"], "it has come to who was reading"
        assert batcher.stats().queued == 0


# Who looks on.


async def test_observers_see_a_stream_as_an_item(kind: str) -> None:
    watcher = Watcher()
    options: dict[str, Any] = {"collate_fn": list, "max_pending": 1}
    async with Batcher(Counting(3).of(kind), **options) as batcher, held(batcher):
        batcher.add_observer(watcher)
        async with batcher.stream("a") as stream:
            with pytest.raises(aiopar.Overloaded):
                await anext(batcher.stream("refused"))
        assert [part async for part in stream] == []
    assert watcher.names == ["enqueue", "enqueue", "completed", "completed"]
    (left, _), (refused, _) = watcher.of("enqueue")
    (first, overloaded), (second, closed) = watcher.of("completed")
    assert (first, second) == (refused, left)
    assert refused.rejected == "queue_full"
    assert type(overloaded) is aiopar.Overloaded
    assert type(closed) is GeneratorExit
    assert outcome_of(left, closed) == "cancelled"


async def test_observers_see_how_streams_end(kind: str) -> None:
    watcher = Watcher()

    def on_step(batch: list[Any], number: int) -> None:
        if number and "bad" in batch:
            raise ZeroDivisionError

    async with Batcher(Counting(3, on_step).of(kind), collate_fn=list) as batcher:
        batcher.add_observer(watcher)
        for item in ("good", "bad"):
            with suppress(ZeroDivisionError):
                assert len([part async for part in batcher.stream(item)]) == 3
            await idle(batcher)
    assert [type(error) for _, error in watcher.of("completed")] == [type(None), ZeroDivisionError]
    assert [(batch.outputs, batch.errors) for batch in watcher.batches] == [(1, 0), (0, 1)]
    assert [size for _, size in watcher.of("compute")] == [1, 1], "of the first step"


# Several event loops.


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_batch_for_readers_in_several_loops(kind: str, runner: str, other: str) -> None:
    counting = Counting(50)
    batcher = Batcher(counting.of(kind), **full(2))

    async def read(item: str) -> list[Any]:
        return [part async for part in batcher.stream(item, buffer=2)]

    with ThreadPoolExecutor(2) as threads:
        reading = [
            threads.submit(RUNNERS[name], functools.partial(read, item))
            for item, name in (("a", runner), ("b", other))
        ]
        assert [future.result(30) for future in reading] == [counted("a", 50), counted("b", 50)]
    assert len(counting.batches) == 1
    assert batcher.stats().in_flight == 0


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_loop_that_ends_under_a_stream(kind: str, runner: str, other: str) -> None:
    entered, gone = threading.Event(), threading.Event()
    batcher = Batcher(Counting(50).of(kind), **full(2))

    async def leave() -> None:
        async with batcher.stream("leaves") as stream:  # it is the second: here the batch starts
            await anext(stream)

    async def stay() -> tuple[list[Any], type[Exception]]:
        parts: list[Any] = []
        async with batcher.stream("stays", buffer=2) as stream:
            entered.set()
            await until(gone.is_set)
            try:
                while True:
                    parts.append(await anext(stream))
            except (StopAsyncIteration, RuntimeError) as end:
                return parts, type(end)

    with ThreadPoolExecutor(1) as threads:
        staying = threads.submit(RUNNERS[runner], stay)
        entered.wait(30)
        RUNNERS[other](leave)
        gone.set()
        # An async generator ends with the loop that it is on.
        if kind == "generator":
            assert staying.result(30) == (counted("stays", 50), StopAsyncIteration)
        else:
            assert staying.result(30) == (counted("stays", 2), RuntimeError)
    assert batcher.stats().in_flight == 0


def test_a_stream_is_read_in_one_loop() -> None:
    batcher = Batcher(Counting().generate, **full(2))
    stream = batcher.stream("a")

    async def read() -> None:
        with pytest.raises(RuntimeError, match="in one event loop"):
            await anext(stream)
        assert [part async for part in stream] == []

    with pytest.raises(RuntimeError, match="none runs here"):
        anext(batcher.stream("b")).send(None)
    with asyncio.Runner() as runner:
        runner.run(stream.__aenter__())
        asyncio.run(read())
        runner.run(idle(batcher))
