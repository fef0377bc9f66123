"""Items and failures of a stream are freed by reference counting when it fails or is exited.

An error's traceback holds the frames that it passed through and their callers: the steps and pumps
of the stream, which had the failure as a local variable.
"""

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import pytest

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from tests.data.streams import until
from tests.freeing import survivors, without_gc

BAD = 2
"""The number of the item that fails: not the first, and before the first buffer is full."""


class Item:
    def __init__(self, number: int) -> None:
        self.number = number


class Items:
    """A source of items, with weak references to them."""

    def __init__(self, *, failing: bool) -> None:
        self.refs: list[weakref.ref[Item]] = []
        self.failed = threading.Event()
        self._failing = failing

    def __iter__(self) -> Iterator[Item]:
        for number in range(20):
            item = Item(number)
            self.refs.append(weakref.ref(item))
            yield item

    def check(self, item: Item) -> Item:
        if self._failing and item.number == BAD:
            self.failed.set()
            raise LookupError(BAD)
        return item

    async def check_later(self, item: Item) -> Item:
        return self.check(item)

    def parts(self, item: Item) -> Iterator[Item]:
        yield self.check(item)

    def checked(self) -> Iterator[Item]:
        """The items; the source itself fails."""
        for item in self:
            yield self.check(item)

    async def checked_later(self) -> AsyncIterator[Item]:
        for item in self:
            yield self.check(item)


def _loader(source: Any, collate: Any = list) -> AsyncDataLoader[Any]:
    return AsyncDataLoader(source, batch_size=1, prefetch_factor=4, collate_fn=collate)


STREAMS: dict[str, Callable[[Items], Any]] = {
    "map": lambda items: Pipeline(items).map(items.check),
    "map, with workers": lambda items: Pipeline(items).map(items.check, concurrency=2),
    "map, out of order": lambda items: Pipeline(items).map(
        items.check, concurrency=2, in_order=False
    ),
    "map, async": lambda items: Pipeline(items).map(items.check_later, concurrency=2),
    "map and map": lambda items: Pipeline(items).map(items.check).map(type),
    "filter": lambda items: Pipeline(items).filter(items.check),
    "filter, with workers": lambda items: Pipeline(items).filter(items.check, concurrency=2),
    "flat_map": lambda items: Pipeline(items).flat_map(items.parts),
    "flat_map, with workers": lambda items: Pipeline(items).flat_map(items.parts, concurrency=2),
    "batches": lambda items: Pipeline(items).map(items.check).batch(2),
    "shuffled": lambda items: Pipeline(items).map(items.check).shuffle(1),
    "source": lambda items: Pipeline(items.checked()),
    "batches of the source": lambda items: Pipeline(items.checked()).batch(2),
    "async source": lambda items: Pipeline(items.checked_later()).batch(2),
    "devices": lambda items: aiopar.map(items.check, items, devices=["cpu", "cpu"]),
    "loader": lambda items: _loader(items, lambda samples: items.check(*samples)),
    "loader, the source": lambda items: _loader(items.checked()),
    "loader, async": lambda items: _loader(items.checked_later()),
}


async def _fail(stream: Any) -> bool:
    try:
        async for item in stream:
            del item
    except LookupError:
        return True
    return False


@pytest.mark.anyio
@pytest.mark.parametrize("name", STREAMS)
async def test_a_failed_stream_frees_its_items(name: str) -> None:
    with without_gc():
        items = Items(failing=True)
        assert await _fail(STREAMS[name](items))
        assert await survivors(items.refs) == []


async def _leave(stream: Any, reached: Callable[[], object]) -> None:
    async with stream as entered:
        await anext(entered)
        await until(reached)


@pytest.mark.anyio
@pytest.mark.parametrize("failing", [True, False])
@pytest.mark.parametrize("name", STREAMS)
async def test_a_stream_that_was_exited_frees_its_items_and_unread_failures(
    name: str, failing: bool
) -> None:
    with without_gc():
        items = Items(failing=failing)
        reached = items.failed.is_set if failing else lambda: len(items.refs) > BAD
        await _leave(STREAMS[name](items), reached)
        assert await survivors(items.refs) == []


@pytest.mark.anyio
async def test_a_stream_exited_while_tasks_wait_frees_its_items() -> None:
    waiting: set[int] = set()

    async def wait(item: Item) -> None:
        if item.number:
            waiting.add(item.number)
            await anyio.sleep_forever()

    with without_gc():
        items = Items(failing=False)
        await _leave(Pipeline(items).map(wait, concurrency=2), lambda: waiting == {1, 2})
        assert await survivors(items.refs) == []
