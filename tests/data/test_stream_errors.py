"""Errors in a `Stream`: raised after the items before them, or skipped and recorded."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import anyio.lowlevel
import pytest

from tests.data.streams import (
    FUNCTIONS,
    SOURCES,
    Executor,
    Source,
    collect,
    double,
    double_async,
    fetched,
    iterable,
    left_since,
    mapped,
    running,
    stream_of,
    until,
)


def _fail_at(position: int, n: int) -> int:
    if n == position:
        raise LookupError("mine")
    return n


async def _fail_later_at(position: int, n: int) -> int:
    await anyio.lowlevel.checkpoint()
    return _fail_at(position, n)


@pytest.mark.anyio
@pytest.mark.parametrize("fail", [_fail_at, _fail_later_at], ids=["sync", "async"])
@SOURCES
async def test_an_error_comes_after_the_items_before_it_and_ends_the_stream(
    executor: Executor, fail: Callable[[int, int], Any], asynchronous: bool
) -> None:
    before = running()
    source = Source()
    stream = stream_of(
        iterable(asynchronous, source),
        mapped(partial(fail, 5), concurrency=3, bound=8),
        mapped(double),
        mapped(double_async),
        executor=executor,
    )
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await collect(stream, got)
    assert got == [4 * n for n in range(5)]
    note = f"in stage 'map({fail.__name__})' of the stream, item 5: int"
    assert caught.value.__notes__ == [note]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)
    await stream.aclose()
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.anyio
@FUNCTIONS
@SOURCES
async def test_an_error_of_the_source_comes_after_its_items(
    executor: Executor, fn: Callable[[int], Any], asynchronous: bool
) -> None:
    def generate() -> Iterator[int]:
        yield from range(5)
        raise LookupError("mine")

    async def generate_async() -> AsyncIterator[int]:
        for n in generate():
            yield n

    source = generate_async() if asynchronous else generate()
    # It cannot be skipped: no item follows it.
    stream = stream_of(source, mapped(fn, concurrency=2), executor=executor, max_failures=3)
    got: list[int] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await collect(stream, got)
    assert got == [0, 2, 4, 6, 8]
    assert caught.value.__notes__ == ["in stage 'source' of the stream, item 5"]


def _raise(error: type[BaseException], _: int) -> int:
    raise error


@pytest.mark.anyio
@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
async def test_an_error_that_would_end_the_readers_loop_is_replaced(
    executor: Executor, error: type[Exception]
) -> None:
    with pytest.raises(RuntimeError, match=f"raised {error.__name__}") as caught:
        await anext(stream_of(range(3), mapped(partial(_raise, error)), executor=executor))
    assert isinstance(caught.value.__cause__, error)


@pytest.mark.anyio
async def test_a_failing_iter_is_raised_by_the_first_read() -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await anext(fetched(Broken()))


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
