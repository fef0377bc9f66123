"""Errors in a `Stream`: raised after the items before them, or skipped and recorded."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import FrozenInstanceError
from typing import Any

import anyio.lowlevel
import pytest

from aiopar.data import FailedItem, Stream
from tests.data.streams import (
    FUNCTIONS,
    SOURCES,
    Source,
    double,
    double_async,
    fetched,
    iterable,
    left_since,
    mapped,
    read_to_the_end,
    running,
    stream_of,
    until,
)


async def _collect(stream: Stream[Any], got: list[Any]) -> None:
    async for item in stream:
        got.append(item)  # noqa: PERF401  # an error must not lose those before it


def _fails_at(position: int) -> Callable[[int], int]:
    def fail(n: int) -> int:
        if n == position:
            raise LookupError("mine")
        return n

    return fail


def _fails_later_at(position: int) -> Callable[[int], Any]:
    async def fail(n: int) -> int:
        await anyio.lowlevel.checkpoint()
        return _fails_at(position)(n)

    return fail


@pytest.mark.anyio
@pytest.mark.parametrize("make", [_fails_at, _fails_later_at], ids=["sync", "async"])
@SOURCES
async def test_an_error_comes_after_the_items_before_it_and_ends_the_stream(
    make: Callable[[int], Callable[[int], Any]], asynchronous: bool
) -> None:
    before = running()
    source = Source()
    stream = stream_of(
        iterable(asynchronous, source),
        mapped(make(5), concurrency=3, bound=8),
        mapped(double),
        mapped(double_async),
    )
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await _collect(stream, got)
    assert got == [4 * n for n in range(5)]
    assert caught.value.__notes__ == ["in stage 'map(fail)' of the stream, item 5"]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_an_error_of_the_source_comes_after_its_items(
    fn: Callable[[int], Any], asynchronous: bool
) -> None:
    def generate() -> Iterator[int]:
        yield from range(5)
        raise LookupError("mine")

    async def generate_async() -> AsyncIterator[int]:
        for n in generate():
            yield n

    source = generate_async() if asynchronous else generate()
    # It cannot be skipped: no item follows it.
    stream = stream_of(source, mapped(fn, concurrency=2), max_failures=3)
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await _collect(stream, got)
    assert got == [0, 2, 4, 6, 8]
    assert caught.value.__notes__ == ["in stage 'source' of the stream, item 5"]


@pytest.mark.anyio
@pytest.mark.parametrize("make", [_fails_at, _fails_later_at], ids=["sync", "async"])
async def test_failures_are_skipped_and_recorded(
    make: Callable[[int], Callable[[int], Any]],
) -> None:
    verbs = [mapped(make(2)), mapped(abs), mapped(make(7), concurrency=2)]
    stream = stream_of(Source(10), *verbs, max_failures=2)
    assert [n async for n in stream] == [0, 1, 3, 4, 5, 6, 8, 9]
    assert [(f.stage, f.position) for f in stream.failures] == [("map(fail)", 2), ("map(fail)", 7)]
    assert all(isinstance(f.error, LookupError) for f in stream.failures)
    assert stream.stats().failures == 2

    assert isinstance(stream.failures, tuple), "callers cannot change it"
    assert {type(failed) for failed in stream.failures} == {FailedItem}
    with pytest.raises(FrozenInstanceError):
        stream.failures[0].position = 3

    one_too_many = stream_of(Source(10), *verbs, max_failures=1)
    with pytest.raises(LookupError, match="mine"):
        await read_to_the_end(one_too_many)
    assert one_too_many.delivered == 6


@pytest.mark.anyio
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_an_error_that_would_end_the_readers_loop_is_replaced(error: type[Exception]) -> None:
    def fail(n: int) -> int:
        raise error

    with pytest.raises(RuntimeError, match=f"raised {error.__name__}") as caught:
        await anext(stream_of(range(3), mapped(fail)))
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.anyio
async def test_a_failing_iter_is_raised_by_the_first_read() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await anext(fetched(Broken()))


@pytest.mark.anyio
async def test_a_task_cancelled_from_outside_does_not_cancel_the_reader(
    anyio_backend: tuple[str, dict[str, Any]],
) -> None:
    if anyio_backend[0] == "trio":
        pytest.skip("a task of trio cannot be cancelled by others")

    async def cancel_this(n: int) -> int:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await anyio.lowlevel.checkpoint()
        return n

    stream = stream_of(range(3), mapped(cancel_this))
    words = r"'map\(cancel_this\)' was cancelled from outside"
    with pytest.raises(RuntimeError, match=words) as caught:
        await anext(stream)
    assert isinstance(caught.value.__cause__, asyncio.CancelledError)


class _Own(BaseException):
    pass


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "words"),
    [
        (asyncio.CancelledError, "was cancelled from outside"),
        (GeneratorExit, "was ended by GeneratorExit"),
        (_Own, "was ended by _Own"),
    ],
)
async def test_a_base_exception_ends_the_stream_and_not_the_loop(
    error: type[BaseException], words: str
) -> None:
    async def fail(_: int) -> int:
        raise error

    async def source() -> AsyncIterator[int]:
        yield 1
        raise error

    streams = [stream_of(range(3), mapped(fail)), stream_of(source())]
    for failing in streams:
        with pytest.raises(RuntimeError, match=words) as caught:
            _ = [item async for item in failing]
        assert type(caught.value.__cause__) is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_in_a_task_ends_the_loop(error: type[BaseException]) -> None:
    async def fail(_: int) -> None:
        raise error

    async def read() -> None:
        async with stream_of(range(3), mapped(fail)) as stream:
            await anext(stream)

    with pytest.raises(error):
        asyncio.run(read())
