"""Exceptions: copied, pickled, with notes, and raised more than once."""

import copy
import pickle
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
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
    for note in ("one", "two", "one", "two"):
        add_note_once(error, note)
    assert error.__notes__ == ["one", "two"]


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


class Failing(torch.nn.Module):
    def forward(self, _: object) -> Any:
        raise Frozen


async def _unit() -> None:
    async with aiopar.Parallel(1, units(_fail)) as parallel:
        await parallel.put(0)
        await parallel.get()


async def _read(items: Any) -> None:
    async with items as opened:
        async for _ in opened:
            pass


CALLS: dict[str, Callable[[], Awaitable[object]]] = {
    "parallel_apply": lambda: aiopar.parallel_apply([_fail] * 2, [0, 1], devices=["cpu"] * 2),
    "Parallel": _unit,
    "map": lambda: _read(aiopar.map(_fail, range(3))),
    "pipeline": lambda: _read(Pipeline(range(3)).map(_fail, concurrency=2)),
    "loader": lambda: _read(AsyncDataLoader(range(3), collate_fn=_fail)),
    "run_sync": lambda: aiopar.run_sync(_fail, 0),
    "DataParallel": lambda: aiopar.DataParallel(Failing(), ["cpu", "cpu"])(torch.ones(2)),
    "iterate": lambda: _read(aiopar.get_executor().iterate(map, _fail, range(3))),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("grad", [True, False])
async def test_an_error_that_accepts_no_notes_reaches_the_caller(call: str, grad: bool) -> None:
    with pytest.raises(Frozen), torch.set_grad_enabled(grad):
        await CALLS[call]()


@pytest.mark.asyncio
async def test_an_error_whose_str_fails_is_raised_unchanged() -> None:
    def fail(_: int) -> None:
        aiopar.current_replica().barrier()
        raise Speechless

    with pytest.raises(Speechless) as caught:
        await aiopar.parallel_apply([fail] * 2, [0, 1], devices=["cpu"] * 2)
    assert "replica 1 failed too: Speechless" in caught.value.__notes__
    assert in_words(ValueError("said")) == "ValueError: said"
