"""Futures and errors form no reference cycles: they are freed without the garbage collector."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar import Future
from aiopar.testing import Gate
from tests.freeing import collect_without_gil, survivors, without_gc


@pytest.fixture
def _no_gc() -> Iterator[None]:
    with without_gc():
        yield


class _Error(Exception):
    """Can be referred to weakly."""


def _fail() -> None:
    raise _Error


def _fail_anew(done: Future[Any]) -> None:
    del done
    raise _Error


def _open(gate: Gate) -> None:
    gate.wait_entered()
    gate.open()


async def _read(future: Future[Any]) -> None:
    try:
        await future
    finally:
        del future


_ways_to_fail: dict[str, Callable[[Future[Any]], Future[Any]]] = {
    "itself": lambda future: future,
    "then": lambda future: future.then(lambda done: done.value()).then(lambda done: done.value()),
    "another error": lambda future: future.then(_fail_anew),
}


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("way", _ways_to_fail)
@pytest.mark.parametrize("done", [False, True], ids=["waiting", "done"])
async def test_an_awaited_error_is_freed_with_its_references(way: str, done: bool) -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            await_first = executor.submit(gate)
            failing = executor.submit(_fail)
            future = _ways_to_fail[way](failing)
            if done:
                gate.open()
                while not future.done():
                    await anyio.lowlevel.checkpoint()
            else:
                future.add_done_callback(lambda _: None)
                threading.Thread(target=_open, args=(gate,)).start()
            try:
                await _read(future)
            except _Error as error:
                left: list[weakref.ref[Any]] = [
                    weakref.ref(error),
                    weakref.ref(future),
                    weakref.ref(failing),
                ]
            await await_first
            del failing, future
            await executor.submit(str)
            collect_without_gil()
            assert [ref() for ref in left] == [None] * 3


@pytest.mark.asyncio
@pytest.mark.usefixtures("_no_gc")
async def test_an_error_that_asyncio_awaits_for_a_task_is_freed() -> None:
    alive: list[weakref.ref[Any]] = []

    def fail() -> None:
        own = threading.Event()
        alive.append(weakref.ref(own))
        raise _Error

    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        for start in (executor.submit_all, lambda calls: map(executor.submit, calls)):
            with contextlib.suppress(_Error):
                await asyncio.gather(*start([fail] * 2))
        with contextlib.suppress(_Error):
            await asyncio.shield(executor.submit(fail))
        assert await survivors(alive) == []


def _wait_all(future: Future[Any]) -> None:
    futures = [future]
    del future
    try:
        aiopar.wait_all(futures)
    finally:
        del futures


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize(
    "verb", [Future.result, Future.value, Future.wait, Future.exception, aiopar.wait, _wait_all]
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_raised_error_is_freed_with_its_references(
    verb: Callable[[Future[Any]], Any], wrapped: bool
) -> None:
    error = _Error()
    future: Future[Any] = Future()
    if wrapped:
        theirs: torch.futures.Future[Any] = torch.futures.Future()
        future = aiopar.wrap_future(theirs)
        theirs.set_exception(error)
        del theirs
    else:
        future.set_exception(error)
    left: list[weakref.ref[Any]] = [weakref.ref(error), weakref.ref(future)]
    del error
    with contextlib.suppress(_Error):
        verb(future)
    del future
    assert [ref() for ref in left] == [None] * 2


@pytest.mark.anyio
@pytest.mark.usefixtures("_no_gc")
async def test_a_cancelled_await_leaves_nothing() -> None:
    future: Future[int] = Future()
    left = weakref.ref(future)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, future)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    del tasks, future
    await anyio.lowlevel.checkpoint()
    assert left() is None


@pytest.mark.usefixtures("_no_gc")
@pytest.mark.parametrize("how", ["done", "cancelled"])
def test_a_future_made_by_then_is_freed_with_its_references(how: str) -> None:
    parent: Future[int] = Future()
    child = parent.then(Future.value)
    refs: list[weakref.ref[Any]] = [weakref.ref(parent), weakref.ref(child)]
    parent.set_result(1) if how == "done" else child.cancel()
    del parent, child
    nothing: list[Future[int]] = []
    refs.append(weakref.ref(aiopar.collect_all(nothing)))
    assert [ref() for ref in refs] == [None] * 3
