"""`Batcher.stream`: what fails, and how a batcher that streams is closed."""

import asyncio
import contextvars
import threading
import weakref
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
from tests import simdevice
from tests.freeing import survivors, without_gc

from .batches import until
from .streams import ENDLESS, LONG, Counting, Readers, counted, full, held, idle, reading

pytestmark = pytest.mark.anyio

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


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
        if number == 3 and batch == ["fails"]:
            raise KeyError

    counting = Counting(ENDLESS, on_step)
    async with reading(Batcher(counting.of(kind), **full(2))) as readers:
        readers.read("fails", "goes on")
        await until(lambda: bool(readers.ended))
        assert readers.parts["fails"] == counted("fails", 3)
        assert type(readers.ended["fails"]) is KeyError
        assert readers.batcher.stats().in_flight == 2
        readers.cancel("goes on")
        await idle(readers.batcher)
        assert readers.batcher.stats().completed == 2


async def read_all(stream: Any) -> list[Any]:
    return [part async for part in stream]


async def test_a_device_error_is_that_of_parts_that_have_begun_too(kind: str) -> None:
    def on_step(batch: list[Any], _: int) -> None:
        if batch == [2, 3]:
            raise torch.AcceleratorError("the device is lost")
        if len(batch) > 1:
            raise Bad

    counting = Counting(ENDLESS, on_step)
    batcher = Batcher(counting.of(kind), **full(4))
    async with batcher, AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(batcher.stream(item)) for item in range(4)]
        for stream in streams:
            with pytest.raises(torch.AcceleratorError):
                await read_all(stream)
        await idle(batcher)
    assert counting.batches == [[0, 1, 2, 3], [0, 1], [0], [1], [2, 3]]
    assert len(counting.closed) == 5


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


async def test_a_generator_is_closed_under_its_own_state() -> None:
    seen: list[tuple[int, bool]] = []

    def generate(batch: list[Any]) -> Iterator[list[Any]]:
        try:
            _VARIABLE.set(2)
            with torch.no_grad():
                yield batch[1:]
        finally:
            seen.append((_VARIABLE.get(), torch.is_grad_enabled()))

    async with Batcher(generate, collate_fn=list) as batcher:
        stream = batcher.stream("a")
        with pytest.raises(aiopar.OutputMismatch) as caught:
            await anext(stream)
        assert seen == [(2, True)], "also while somebody keeps the error"
        assert caught.value is not None


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


async def test_an_async_generator_that_is_being_closed_is_not_cancelled() -> None:
    closing, closed = anyio.Event(), anyio.Event()

    async def generate(batch: list[Any]) -> AsyncIterator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            closing.set()
            with anyio.move_on_after(0.05):
                await anyio.sleep_forever()
            closed.set()

    batcher = Batcher(generate, collate_fn=list)
    async with batcher.stream("a") as stream:
        await anext(stream)
    await closing.wait()
    await batcher.aclose(timeout=0.001)
    assert closed.is_set()


def test_a_stream_that_others_cancel_fails() -> None:
    counting = Counting(ENDLESS)

    async def main() -> None:
        before = asyncio.all_tasks()
        async with Batcher(counting.generate_async, collate_fn=list) as batcher:
            async with batcher.stream("a", buffer=1) as stream:
                await until(lambda: len(counting.steps) == 1)
                for task in asyncio.all_tasks() - before:
                    task.cancel()
                assert await anext(stream) == ("a", 0)
                with pytest.raises(RuntimeError, match="cancelled from outside"):
                    await anext(stream)
            await idle(batcher)
            async with batcher.stream("b") as stream:
                assert await anext(stream) == ("b", 0)

    asyncio.run(main())


def test_a_stream_whose_batch_is_cancelled_before_its_first_part_fails() -> None:
    events: list[str] = []

    async def generate(batch: list[Any]) -> AsyncIterator[list[Any]]:
        events.append("begun")
        try:
            await anyio.sleep_forever()
            yield batch
        finally:
            events.append("closed")

    async def main() -> None:
        before = asyncio.all_tasks()
        async with Batcher(generate, collate_fn=list) as batcher, batcher.stream("a") as stream:
            await until(lambda: events == ["begun"])
            # The one that runs the batch, not that of the generator.
            [task] = [one for one in asyncio.all_tasks() - before if "_run" in task_name(one)]
            task.cancel()
            with pytest.raises(RuntimeError, match="cancelled from outside"):
                await anext(stream)
        assert events == ["begun", "closed"]

    asyncio.run(main())


def task_name(task: asyncio.Task[Any]) -> str:
    """The name of the function that a task of the batcher was made for."""
    frame = getattr(task.get_coro(), "cr_frame", None)
    return "" if frame is None else str(frame.f_locals["fn"].__name__)


# What is kept.


async def test_nothing_of_a_stream_is_kept(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def step(batch: Tensor) -> Tensor:
        output = batch * 2
        refs.extend(map(weakref.ref, (batch, output)))
        return output

    def generate(batch: Tensor) -> Iterator[Tensor]:
        for number in range(3):
            if batch == -number:
                raise Bad
            yield step(batch)

    async def generate_async(batch: Tensor) -> AsyncIterator[Tensor]:
        for part in generate(batch):
            yield part

    fn: Any = generate if kind == "generator" else generate_async
    with without_gc():
        async with Batcher(fn) as batcher:
            stream = batcher.stream(torch.ones(1), timeout=LONG)
            async with stream:
                assert stream._entry is not None
                requests = [weakref.ref(stream._entry.request)]
                assert len([part async for part in stream]) == 3
            del stream
            await idle(batcher)
            assert await survivors(requests) == []
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

    with without_gc():
        batcher = Batcher(Counting(2, on_step).of(kind), **full(2))
        async with batcher, batcher.stream("a") as stream, batcher.stream("b"):
            with suppress(Bad):
                await read_all(stream)
            await idle(batcher)
        assert await survivors(refs) == []
    assert len(refs) == 1


async def test_parts_that_were_read_are_not_kept_while_it_goes_on(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def generate(batch: Tensor) -> Iterator[Tensor]:
        output = batch
        del batch
        while True:
            refs.append(weakref.ref(output))
            output = output * 2
            yield output

    async def generate_async(batch: Tensor) -> AsyncIterator[Tensor]:
        parts = generate(batch)
        del batch
        for part in parts:
            yield part
            del part

    fn: Any = generate if kind == "generator" else generate_async
    with without_gc():
        batcher = Batcher(fn, max_batch_size=2, max_queue_delay=LONG)
        item = torch.ones(1)
        item_ref = weakref.ref(item)
        async with batcher, batcher.stream(item, buffer=2) as stream:
            async with batcher.stream(torch.ones(1), buffer=2) as other:
                del item
                await anext(other)
            for _ in range(10):
                await anext(stream)
            # The two that are not read are left; not those that the other has left unread.
            await until(lambda: len(refs) == 12)
            assert await survivors([item_ref, *refs[:11]]) == []
