"""Every way in which an iteration ends leaves no thread, task, file or reference."""

import asyncio
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import anyio
import pytest

from aiopar.data import AsyncDataLoader, LoaderStream
from aiopar.testing import Gate
from tests.data.datasets import FailingAsync, Held, Item, same
from tests.data.loaders import loader_threads, no_threads, read, read_into
from tests.data.streams import Source, until
from tests.freeing import survivors, without_gc

pytestmark = pytest.mark.usefixtures("_threads_of_one_test_are_gone_before_the_next")


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["break", "error", "cancel", "aclose", "end"])
@pytest.mark.parametrize("kind", ["map", "iterable", "async map", "async iterable"])
async def test_nothing_is_left_behind(way: str, kind: str) -> None:
    source = Source(40)
    datasets: dict[str, Any] = {
        "map": range(40),
        "iterable": source,
        "async map": FailingAsync(set()),
        "async iterable": source.later(),
    }
    tasks = _tasks()
    loader = AsyncDataLoader(datasets[kind], 2, num_workers=2)
    with anyio.CancelScope() as scope:
        try:
            async with loader as stream:
                await _leave(stream, way, scope)
        except ZeroDivisionError:
            assert way == "error"
    await no_threads()
    assert source.closed.is_set() == ("iterable" in kind)
    assert _tasks() == tasks


async def _leave(stream: LoaderStream[Any], way: str, scope: anyio.CancelScope) -> None:
    async for _ in stream:
        if way == "break":
            break
        if way == "error":
            raise ZeroDivisionError
        if way == "cancel":
            scope.cancel()
        if way == "aclose":
            await stream.aclose()


def _tasks() -> int:
    return len(asyncio.all_tasks()) if asyncio._get_running_loop() else 0


@pytest.mark.anyio
async def test_a_plain_break_ends_the_iteration() -> None:
    """Without `async with` nothing waits; workers end after their current sample."""
    gate = Gate()
    gate.open()
    with without_gc():
        dataset = Held(gate)
        loader = AsyncDataLoader(dataset, 2, num_workers=2, collate_fn=same)
        async for _ in loader:
            break
        del _
        await no_threads()
        fetched = gate.count
        assert await survivors(dataset.refs) == []
        assert gate.count == fetched < 20
        ref = weakref.ref(loader)
        del loader
        assert ref() is None


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["map", "iterable", "resumed"])
async def test_workers_stop_after_their_current_sample(kind: str) -> None:
    collated: list[list[Any]] = []
    closed: list[bool] = []

    def samples() -> Iterator[Item]:
        try:
            for index in range(100):
                yield held[index]
        finally:
            closed.append(True)

    with Gate() as gate:
        held = Held(gate)
        dataset: Any = held if kind == "map" else samples()
        loader = AsyncDataLoader(dataset, 10, num_workers=2, collate_fn=collated.append)
        if kind == "resumed":
            loader.load_state_dict(loader.state_dict() | {"ended": False, "delivered": 5})
        stream = aiter(loader)
        readers = 2 if kind == "map" else 1
        async with anyio.create_task_group() as group:
            group.start_soon(read_into, [], stream)
            await gate.entered(readers)
            group.start_soon(stream.aclose)
            await until(lambda: stream.closed)
            gate.open()
        assert gate.count == readers
        assert collated == []
        assert closed == [True] * (kind != "map")


@pytest.mark.anyio
@pytest.mark.parametrize(("times", "persistent"), [(1, False), (3, False), (1, True)])
async def test_aclose_waits_for_iterations_that_were_broken_off(
    times: int, persistent: bool
) -> None:
    with ExitStack() as opened:
        gates = [opened.enter_context(Gate()) for _ in range(times)]
        dataset = Held(gates[0])
        loader = AsyncDataLoader(dataset, 1, collate_fn=same, persistent_workers=persistent)
        for gate in gates:
            dataset.gate = gate
            gate.let_on()
            async for _ in loader:
                await gate.entered(2)
                break
        async with anyio.create_task_group() as group:
            group.start_soon(_open, gates)
            await loader.aclose()
            assert [gate.held for gate in gates] == [0] * times
            assert not loader_threads()
        await loader.aclose()


async def _open(gates: list[Gate]) -> None:
    for gate in gates:
        gate.open()


@pytest.mark.anyio
async def test_an_iteration_that_was_broken_off_is_forgotten_when_the_next_begins() -> None:
    variable: ContextVar[Item] = ContextVar("variable")
    loader = AsyncDataLoader(range(40), 2, num_workers=2)
    for _ in range(3):
        variable.set(item := Item(0))
        async for _ in loader:
            break
        await no_threads()
    first = weakref.ref(item)
    variable.set(Item(1))
    del item
    assert first() is not None, "the loader still knows how to wait for it"
    await read(loader)
    assert await survivors([first]) == []


@pytest.mark.anyio
async def test_aclose_after_a_plain_break_raises_what_a_generator_raises() -> None:
    def source() -> Iterator[int]:
        try:
            yield from range(40)
        finally:
            raise LookupError("on its way out")

    loader = AsyncDataLoader(source(), 2, persistent_workers=True)
    async for _ in loader:
        break
    with pytest.raises(LookupError, match="on its way out"):
        await loader.aclose()
    assert not loader_threads()
    await loader.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["end", "break"])
async def test_a_closed_loader_holds_no_state_of_the_reader(how: str) -> None:
    variable: ContextVar[Item] = ContextVar("variable")
    alive = []
    loader = AsyncDataLoader(range(9), 3)

    async def read_one() -> None:
        variable.set(item := Item(0))
        alive.append(weakref.ref(item))
        async for _ in loader:
            if how == "break":
                break

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read_one)
    await loader.aclose()
    assert await survivors(alive) == []
