"""`Batcher.stream`: what is read, when steps are made, who leaves, and how it ends."""

import contextvars
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests import simdevice

from .batches import until
from .streams import ENDLESS, LONG, Counting, Readers, counted, full, held, reading

pytestmark = pytest.mark.anyio

Devices = tuple[torch.device, ...]


@pytest.fixture(params=["generator", "async generator"])
def kind(request: pytest.FixtureRequest) -> str:
    """Run the test with a generator function, and with an async one."""
    param: str = request.param
    return param


async def settled(executor: aiopar.DeviceExecutor) -> None:
    """Let what is queued on its only worker run, and what comes of it, and so on."""
    for _ in range(5):
        await executor.run_sync(str)
        for _ in range(5):
            await anyio.lowlevel.checkpoint()


async def idle(batcher: Batcher) -> None:
    """Wait until nothing waits or runs."""
    await until(lambda: (stats := batcher.stats()).queued == stats.in_flight == 0)


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


async def test_each_step_is_a_call_of_its_own_on_one_worker() -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor), Gate() as gate:
            batcher = Batcher(counting.generate, collate_fn=list)
            async with batcher, batcher.stream("a", buffer=1) as stream:
                await anext(stream)
                [thread] = set(counting.steps)
                other = executor.on(worker=1 - int(thread[-1]))
                held_up = other.submit(gate)
                await gate.entered()
                # Nobody else is there to run these, and the generator is on the same worker.
                for n in range(20):
                    assert await executor.run_sync(str, n) == str(n)
                    await anext(stream)
                assert set(counting.steps) == {thread}
            gate.open()
            await held_up
    assert counting.closed == [thread]


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


# Errors.


class Bad(Exception):
    pass


def bad_at(step: int) -> Callable[[list[Any], int], None]:
    """Fails in this step, where the item "bad" is in the batch."""

    def on_step(batch: list[Any], number: int) -> None:
        if number == step and "bad" in batch:
            raise Bad

    return on_step


async def test_before_the_first_part_only_the_bad_item_fails(kind: str) -> None:
    counting = Counting(ENDLESS, bad_at(0))
    async with Batcher(counting.of(kind), **full(8)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("bad", *range(7))
            # Neither do the parts into which the batch is split wait for each other's end.
            await until(lambda: all(len(readers.parts[n]) > 20 for n in range(7)))
            await until(lambda: bool(readers.ended))
            [(item, error)] = readers.ended.items()
            assert (item, type(error)) == ("bad", Bad)
            assert error is not None
            assert error.__notes__ == ["raised by one item alone, of a batch of 8"]
            assert batcher.stats().in_flight == 8, "it is one batch until all of it has ended"
            for n in range(7):
                readers.cancel(n)
        await idle(batcher)
    assert len(counting.batches) == len(counting.closed) == 7


async def test_parts_of_a_batch_end_each_at_its_time(kind: str) -> None:
    def on_step(batch: list[Any], number: int) -> None:
        if len(batch) > 1:
            raise Bad
        if number == 3 and batch == [0]:
            raise KeyError

    counting = Counting(10, on_step)
    async with Batcher(counting.of(kind), **full(2)) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read(0, 1)
        assert readers.parts == {0: counted(0, 3), 1: counted(1, 10)}
        assert {item: type(error) for item, error in readers.ended.items()} == {
            0: KeyError,
            1: type(None),
        }
        await idle(batcher)
        assert batcher.stats().completed == 2


async def test_a_broken_function_is_not_tried_for_each_item(kind: str) -> None:
    def on_step(_: list[Any], __: int) -> None:
        raise Bad

    counting = Counting(1, on_step)
    async with reading(Batcher(counting.of(kind), **full(32))) as readers:
        readers.read(*range(32))
    assert {type(error) for error in readers.ended.values()} == {Bad}
    assert len(counting.batches) == 10


async def test_after_the_first_part_all_get_the_error(kind: str) -> None:
    counting = Counting(5, bad_at(2))
    async with Batcher(counting.of(kind), **full(3)) as batcher, batcher.stream("slow") as slow:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("bad", "good")
        parts = {item: counted(item, 2) for item in ("bad", "good")}
        assert readers.parts == parts
        assert {type(error) for error in readers.ended.values()} == {Bad}
        await idle(batcher)
        assert [await anext(slow), await anext(slow)] == counted("slow", 2), "first its parts"
        with pytest.raises(Bad) as caught:
            await anext(slow)
        note = "raised after the first part of the output, for a batch of 3 items"
        assert caught.value.__notes__ == [note]
        assert [part async for part in slow] == []
    assert len(counting.batches) == len(counting.closed) == 1


@pytest.mark.parametrize("at", [0, 2])
async def test_outputs_that_do_not_match_the_batch_are_everybodys_error(kind: str, at: int) -> None:
    counting = Counting(ENDLESS)

    def shorten(outputs: list[Any]) -> list[Any]:
        return outputs[outputs[0][1] == at :]

    async with Batcher(counting.of(kind), **full(4), unbatch_fn=shorten) as batcher:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read(*range(4))
        assert readers.parts == {item: counted(item, at) for item in range(4)}
        for error in readers.ended.values():
            assert isinstance(error, aiopar.OutputMismatch)
            assert str(error) == "unbatch_fn returned 3 outputs for a batch of 4 items"
        await idle(batcher)
        assert len(counting.batches) == len(counting.closed) == 1, "and the generator is closed"
    assert set(counting.closed) == set(counting.steps)


@pytest.mark.parametrize("at", [0, 2])
async def test_out_of_memory_is_learned_from(kind: str, at: int) -> None:
    def on_step(batch: list[Any], number: int) -> None:
        if number == at and len(batch) > 2:
            raise torch.OutOfMemoryError

    counting = Counting(3, on_step)
    async with Batcher(counting.of(kind), collate_fn=list) as batcher:
        for _ in range(2):
            counting.batches.clear()
            async with anyio.create_task_group() as tasks:
                readers = Readers(batcher, tasks)
                async with held(batcher):
                    await readers.queue(1, 2, 3, 4)
            sizes = [len(batch) for batch in counting.batches[1:]]
            if len(sizes) == 2:
                break
            # Before the first part, halves are tried; later it is too late for that.
            assert sizes == ([4, 2, 2] if at == 0 else [4])
            errors = {type(error) for error in readers.ended.values()}
            assert errors == {type(None) if at == 0 else torch.OutOfMemoryError}
        assert sizes == [2, 2]
        assert readers.parts == {item: counted(item, 3) for item in (1, 2, 3, 4)}


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, StopIteration])
async def test_errors_of_any_kind_reach_who_reads(at: int, error: type[BaseException]) -> None:
    def on_step(_: list[Any], number: int) -> None:
        if number == at:
            raise error

    async with Batcher(Counting(3, on_step).generate, collate_fn=list) as batcher:
        stream = batcher.stream("a")
        for part in counted("a", at):
            assert await anext(stream) == part
        with pytest.raises(RuntimeError if error is StopIteration else error):
            await anext(stream)


async def test_an_error_cannot_be_taken_for_the_end(kind: str) -> None:
    def collate(items: list[Any]) -> Any:
        raise StopAsyncIteration

    async with Batcher(Counting().of(kind), collate_fn=collate) as batcher:
        with pytest.raises(RuntimeError, match="raised StopAsyncIteration"):
            async for _ in batcher.stream("a"):
                pass


async def test_a_generator_that_fails_when_it_is_closed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            raise Bad

    async def generate_async(batch: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            raise Bad

    fn: Any = generate if kind == "generator" else generate_async
    async with Batcher(fn, collate_fn=list) as batcher:
        async with batcher.stream("a") as stream:
            assert await anext(stream) == "a"
        await idle(batcher)
    [record] = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[0] is Bad


@pytest.mark.sim
@pytest.mark.parametrize("at", [0, 2])
async def test_a_kernel_that_fails_late_is_everybodys_error(at: int) -> None:
    closed: list[str] = []

    def generate(batch: Tensor) -> Iterator[Tensor]:
        try:
            for number in range(10):
                if number == at:
                    simdevice.fail_next_sync("the kernel failed", "sim:0")
                yield batch
        finally:
            closed.append(threading.current_thread().name)

    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(generate, max_batch_size=2, max_queue_delay=LONG) as batcher:
                async with anyio.create_task_group() as tasks:
                    readers = Readers(batcher, tasks)
                    readers.read(*torch.zeros(2, 3, device="sim:0").unbind())
                for parts in readers.parts.values():
                    assert len(parts) == at
                for error in readers.ended.values():
                    assert "the kernel failed" in str(error)
    assert closed == ["aiopar-sim:0-0"]


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
    with pytest.raises(ValueError, match="timeout must be above 0, got 0"):
        batcher.stream("a", timeout=0)


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


# The end of the batcher.


async def test_aclose_lets_streams_end(kind: str) -> None:
    counting = Counting(50)
    batcher = Batcher(counting.of(kind), collate_fn=list)
    ended: list[str] = []

    async def close() -> None:
        await batcher.aclose()
        ended.append("closed")

    async with batcher.stream("a", buffer=1) as running, anyio.create_task_group() as tasks:
        await anext(running)
        async with batcher.stream("b") as queued:
            tasks.start_soon(close)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(aiopar.ServiceClosed):
                await anext(batcher.stream("c"))
            assert ended == []
            assert [part async for part in running] == counted("a", 50)[1:]
            assert [part async for part in queued] == counted("b", 50)
    assert ended == ["closed"]
    assert len(counting.closed) == 2


async def test_aclose_without_drain_ends_them(kind: str) -> None:
    counting = Counting(ENDLESS)
    batcher = Batcher(counting.of(kind), collate_fn=list)
    async with batcher.stream("a", buffer=2) as running:
        await until(lambda: len(counting.steps) == 2)
        async with batcher.stream("b") as queued:
            await batcher.aclose(drain=False)
            assert len(counting.closed) == 1, "it waits for that"
            with pytest.raises(aiopar.ServiceClosed):
                await anext(queued)
        assert [await anext(running), await anext(running)] == counted("a", 2)
        with pytest.raises(aiopar.ServiceClosed):
            await anext(running)
    assert counting.batches == [["a"]]


async def test_aclose_ends_them_after_its_timeout(kind: str) -> None:
    counting = Counting(ENDLESS)
    async with Batcher(counting.of(kind), collate_fn=list) as batcher:
        async with batcher.stream("a", buffer=1) as running:
            await until(lambda: len(counting.steps) == 1)
            async with batcher.stream("b") as queued:
                await batcher.aclose(timeout=0.01)
                with pytest.raises(aiopar.ServiceClosed):
                    await anext(queued)
            assert await anext(running) == ("a", 0)
            with pytest.raises(aiopar.ServiceClosed):
                await anext(running)
        await until(lambda: len(counting.closed) == 1)


async def test_an_error_in_the_block_of_the_batcher_ends_them(kind: str) -> None:
    counting = Counting(ENDLESS)
    with suppress(ZeroDivisionError):
        async with Batcher(counting.of(kind), collate_fn=list) as batcher:
            stream = batcher.stream("a")
            await anext(stream)
            raise ZeroDivisionError
    assert len(counting.closed) == 1


async def test_the_executor_is_shut_down_under_it() -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = await Batcher(counting.generate, **full(2)).__aenter__()
    async with batcher.stream("a") as a, batcher.stream("b") as b:
        for stream in (a, b):
            with pytest.raises(aiopar.ExecutorShutdown):
                await anext(stream)
    assert counting.batches == []
    await batcher.aclose()


@pytest.mark.parametrize("read", [True, False])
async def test_the_executor_is_shut_down_between_two_steps(read: bool) -> None:
    counting = Counting(ENDLESS)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = await Batcher(counting.generate, **full(2)).__aenter__()
            async with batcher.stream("a", buffer=1) as a, batcher.stream("b", buffer=1) as b:
                await until(lambda: len(counting.steps) == 1)
                await executor.aclose()
                if read:
                    for item, stream in (("a", a), ("b", b)):
                        assert await anext(stream) == (item, 0)
                    for stream in (a, b):
                        with pytest.raises(aiopar.ExecutorShutdown):
                            await anext(stream)
    assert len(counting.closed) == 1
    await batcher.aclose()
