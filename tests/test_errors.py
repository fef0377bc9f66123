"""Exceptions: copied, pickled, with notes, and raised more than once."""

import asyncio
import copy
import pickle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch

import aiopar
from aiopar._base.tracebacks import add_note_once, error_chain, in_words
from aiopar.data import AsyncDataLoader, Pipeline
from tests.train.units import units


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_overloaded_can_be_copied(
    again: Callable[[aiopar.Overloaded], aiopar.Overloaded],
) -> None:
    error = aiopar.Overloaded("the queue is full", estimated_wait=1.5)
    error.add_note("of replica 3")
    found = again(error)
    assert type(found) is aiopar.Overloaded
    assert found is not error
    assert (str(found), found.estimated_wait) == ("the queue is full", 1.5)
    assert found.__notes__ == ["of replica 3"]


def test_public_errors_name_the_package_in_tracebacks_and_can_be_pickled() -> None:
    public = [kind for kind in vars(aiopar).values() if isinstance(kind, type)]
    errors = [kind for kind in public if issubclass(kind, Exception)]
    assert len(errors) == 12
    assert {kind.__module__ for kind in errors} == {"aiopar"}
    assert all(pickle.loads(pickle.dumps(kind)) is kind for kind in errors)


def test_a_note_is_added_once() -> None:
    error = ValueError("again")
    for number, note in enumerate(("one", "two", "one", "two")):
        add_note_once(error, note)
        add_note_once(error, "number ", str(number))
    assert error.__notes__ == ["one", "number 0", "two"]


def test_error_chain_has_causes_contexts_and_members_once() -> None:
    one, two, three, four = ValueError(1), ValueError(2), ValueError(3), ValueError(4)
    group = ExceptionGroup("several", [one, three])
    one.__cause__, one.__context__ = two, four
    two.__context__ = one
    assert {*error_chain(group)} == {group, one, two, three, four}
    assert len(error_chain(group)) == 5
    assert error_chain(four) == [four]


@dataclass(frozen=True)
class Frozen(Exception):
    """Accepts no attributes, so no notes."""

    code: int = 3


class Speechless(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def _fail(_: object) -> Any:
    raise Frozen


class Module(torch.nn.Module):
    def __init__(self, fn: Callable[[object], Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: object) -> Any:
        return self.fn(x)


class Samples:
    """A dataset of three samples."""

    def __init__(self, fn: Callable[[object], Any]) -> None:
        self.fn = fn

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return self.fn(index)


async def _unit(fn: Callable[[object], Any]) -> None:
    async with aiopar.Parallel(1, units(fn)) as parallel:
        for number in range(3):
            await parallel.put(number)
        await parallel.get()


async def _read(items: Any) -> None:
    async with items as opened:
        async for _ in opened:
            pass


async def _batch(fn: Callable[[object], Any], *, loop: bool = False) -> None:
    async def on_loop(items: list[int]) -> Any:
        return fn(items)

    async with aiopar.Batcher(on_loop if loop else fn, collate_fn=list) as batcher:
        outcomes = await asyncio.gather(*map(batcher, range(3)), return_exceptions=True)
        assert isinstance(outcomes[0], BaseException)
        raise outcomes[0]


CALLS: dict[str, Callable[[Callable[[object], Any]], Awaitable[object]]] = {
    "parallel_apply": lambda fn: aiopar.parallel_apply([fn] * 2, [0, 1], devices=["cpu"] * 2),
    "Parallel": _unit,
    "map": lambda fn: _read(aiopar.map(fn, range(3))),
    "pipeline": lambda fn: _read(Pipeline(range(3)).map(fn, concurrency=2)),
    "loader": lambda fn: _read(AsyncDataLoader(range(3), collate_fn=fn)),
    "run_sync": lambda fn: aiopar.run_sync(fn, 0),
    "DataParallel": lambda fn: aiopar.DataParallel(Module(fn), ["cpu", "cpu"])(torch.ones(2)),
    "iterate": lambda fn: _read(aiopar.get_executor().iterate(map, fn, range(3))),
    "Batcher": _batch,
    "Batcher of a coroutine function": partial(_batch, loop=True),
}
SKIPPING_CALLS: dict[str, Callable[[Callable[[object], Any]], Awaitable[object]]] = {
    "pipeline": lambda fn: _read(Pipeline(range(3), max_failures=3).map(fn)),
    "loader": lambda fn: _read(AsyncDataLoader(Samples(fn), max_failures=3)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("grad", [True, False])
async def test_an_error_that_accepts_no_notes_reaches_the_caller(call: str, grad: bool) -> None:
    with pytest.raises(Frozen), torch.set_grad_enabled(grad):
        await CALLS[call](_fail)


@pytest.mark.asyncio
@pytest.mark.parametrize("call", [*CALLS.values(), *SKIPPING_CALLS.values()])
async def test_the_notes_of_an_error_that_is_raised_again_do_not_grow(
    call: Callable[[Callable[[object], Any]], Awaitable[object]],
) -> None:
    error = ValueError("always the same")

    def fail(_: object) -> Any:
        raise error.with_traceback(None)

    for _ in range(4):
        with suppress(ValueError):
            await call(fail)
    notes = getattr(error, "__notes__", [])
    assert len(notes) <= 3  # of four calls
    assert sum(map(len, notes)) < 2000


@pytest.mark.asyncio
async def test_an_error_whose_str_fails_is_raised_unchanged() -> None:
    def fail(_: int) -> None:
        aiopar.current_replica().barrier()
        raise Speechless

    with pytest.raises(Speechless) as caught:
        await aiopar.parallel_apply([fail] * 2, [0, 1], devices=["cpu"] * 2)
    assert "replica 1 failed too: Speechless" in caught.value.__notes__
    assert in_words(ValueError("said")) == "ValueError: said"
