"""`Batcher.stream`: errors before the first part and later, and which callers get them."""

import contextvars
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.serve import Batcher
from tests import simdevice

from .batches import LONG, Bad, current_executor, running, until
from .streams import ENDLESS, Counting, Readers, counted, full, held, idle, of_kind, read_all

pytestmark = pytest.mark.anyio

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def bad_at(step: int) -> Callable[[list[Any], int], None]:
    """Fails in this step if the item "bad" is in the batch."""

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
            # The parts of the split batch do not wait for each other's end either.
            await until(lambda: all(len(readers.parts[n]) > 20 for n in range(7)))
            await until(lambda: bool(readers.outcomes))
            [(item, error)] = readers.outcomes.items()
            assert (item, type(error)) == ("bad", Bad)
            assert error is not None
            assert error.__notes__[-1].startswith("raised by one item of a batch of 8; item: str")
            assert running(batcher) == 1, "it is one batch until all of it has ended"
            for n in range(7):
                readers.cancel(n)
        await idle(batcher)
    assert len(counting.batches) == len(counting.closed) == 7


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


async def test_after_the_first_part_all_get_the_error(kind: str) -> None:
    counting = Counting(5, bad_at(2))
    async with Batcher(counting.of(kind), **full(3)) as batcher, batcher.stream("slow") as slow:
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read("bad", "good")
        parts = {item: counted(item, 2) for item in ("bad", "good")}
        assert readers.parts == parts
        assert {type(error) for error in readers.outcomes.values()} == {Bad}
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
        for error in readers.outcomes.values():
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
            errors = {type(error) for error in readers.outcomes.values()}
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
    def generate(batch: list[Any]) -> Generator[list[Any]]:
        try:
            while True:
                yield batch
        finally:
            raise Bad

    async with Batcher(of_kind(kind, generate), collate_fn=list) as batcher:
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

    async with (
        current_executor(["sim:0"]),
        Batcher(generate, max_batch_size=2, max_queue_delay=LONG) as batcher,
    ):
        async with anyio.create_task_group() as tasks:
            readers = Readers(batcher, tasks)
            readers.read(*torch.zeros(2, 3, device="sim:0").unbind())
        for parts in readers.parts.values():
            assert len(parts) == at
        for error in readers.outcomes.values():
            assert "the kernel failed" in str(error)
    assert closed == ["aiopar-sim:0-0"]
