"""What a `Batcher` refuses before any work: bad options, and bad arguments of a call."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from aiopar.serve import Batcher

from .batches import busy

pytestmark = pytest.mark.asyncio


async def idle(_: object) -> None:
    """No plain function."""


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"max_batch_size": 0}, ValueError, "max_batch_size must be at least 1, got 0"),
        ({"max_batch_size": 2.0}, TypeError, "max_batch_size must be an int, not float"),
        ({"max_batch_size": True}, TypeError, "max_batch_size must be an int, not bool"),
        ({"max_batch_size": None}, TypeError, "max_batch_size must be an int, not NoneType"),
        ({"max_pending": 0}, ValueError, "max_pending must be at least 1"),
        ({"max_pending": None}, TypeError, "max_pending must be an int, not NoneType"),
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1"),
        ({"concurrency": "2"}, TypeError, "concurrency must be an int, not str"),
        ({"max_queue_delay": -1}, ValueError, "max_queue_delay must be at least 0, got -1"),
        ({"max_queue_delay": None}, TypeError, "max_queue_delay must be a number, not NoneType"),
        ({"max_queue_delay": math.nan}, ValueError, "max_queue_delay must be at least 0, got nan"),
        ({"max_wait": -0.1}, ValueError, "max_wait must be at least 0"),
        ({"max_wait": "1"}, TypeError, "max_wait must be a number, not str"),
        ({"timeout": 0}, ValueError, "timeout must be above 0, got 0"),
        ({"timeout": True}, TypeError, "timeout must be a number, not bool"),
        ({"read_timeout": 0}, ValueError, "read_timeout must be above 0, got 0"),
        ({"read_timeout": None}, TypeError, "read_timeout must be a number, not NoneType"),
        ({"cost": len, "max_batch_cost": 0}, ValueError, "max_batch_cost must be above 0"),
        ({"max_batch_cost": 5}, ValueError, "max_batch_cost needs cost"),
        ({"cost": len, "padded": True}, ValueError, "padded needs max_batch_cost"),
        ({"padded": None}, TypeError, "padded must be a bool, not NoneType"),
        ({"padded": 1}, TypeError, "padded must be a bool, not int"),
        ({"collate_fn": 3}, TypeError, "collate_fn must be callable, got 3"),
        ({"unbatch_fn": 3}, TypeError, "unbatch_fn must be callable, got 3"),
        ({"batch_key": "x"}, TypeError, "batch_key must be callable, got 'x'"),
        ({"cost": 1}, TypeError, "cost must be callable, got 1"),
        ({"batch_key": idle}, TypeError, "batch_key must be a plain function, not an async one"),
        ({"collate_fn": idle}, TypeError, "collate_fn must be a plain function"),
        ({"unbatch_fn": idle}, TypeError, "unbatch_fn must be a plain function"),
    ],
)
async def test_bad_options(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Batcher(fn_or_pool=str, **options)


async def test_an_object_that_is_not_callable() -> None:
    with pytest.raises(TypeError, match="expected a callable, got 3"):
        Batcher(3)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"timeout": math.nan}, ValueError, "timeout must be at least 0, got nan"),
        ({"timeout": "1"}, TypeError, "timeout must be a number, not str"),
        ({"priority": 1.5}, TypeError, "priority must be an int, not float"),
        ({"priority": "high"}, TypeError, "priority must be an int, not str"),
        ({"priority": None}, TypeError, "priority must be an int, not NoneType"),
    ],
)
async def test_bad_arguments_of_a_call(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with busy() as callers:
        with pytest.raises(error, match=words):
            await callers.batcher(1, **options)
        await callers.queue(2)
    assert callers.runs == [[2]]


@pytest.mark.parametrize(
    ("cost", "error", "words"),
    [
        (math.nan, ValueError, "cost must be finite and at least 0, got nan"),
        (math.inf, ValueError, "cost must be finite and at least 0, got inf"),
        (-1, ValueError, "cost must be finite and at least 0, got -1"),
        ("1", TypeError, "cost must return a number, not str"),
        (None, TypeError, "cost must return a number, not NoneType"),
    ],
)
async def test_costs_that_cannot_be_compared(cost: Any, error: type[Exception], words: str) -> None:
    async with busy(cost=lambda item: cost if item == "bad" else 1) as callers:
        with pytest.raises(error, match=words):
            await callers.batcher("bad")
        await callers.queue(2)
    assert callers.runs == [[2]]


async def test_a_cost_may_be_any_number() -> None:
    async with busy(max_batch_size=2, cost=lambda item: torch.tensor(len(item))) as callers:
        await callers.queue("a", "bbbb", "c")
    assert callers.runs == [["a", "c"], ["bbbb"]]


async def test_a_key_that_cannot_be_hashed() -> None:
    async with busy(batch_key=lambda item: [item] if item == "bad" else None) as callers:
        with pytest.raises(TypeError, match="batch_key must return what can be hashed, not list"):
            await callers.batcher("bad")
        await callers.queue(2)
    assert callers.runs == [[2]]


@pytest.mark.parametrize("option", ["batch_key", "cost"])
async def test_an_error_of_key_or_cost_is_the_callers_own(option: str) -> None:
    options: dict[str, Any] = {option: lambda item: 1 // len(item)}
    async with busy(**options) as callers:
        with pytest.raises(ZeroDivisionError):
            await callers.batcher("")
        await callers.queue("b")
    assert callers.runs == [["b"]]


def twice(batch: torch.Tensor) -> Iterator[torch.Tensor]:
    yield batch
    yield batch


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
async def test_an_item_from_within_a_transform(transform: Any) -> None:
    """The item would lose the transform in the batch: `grad` would silently find no gradient."""
    async with Batcher(torch.sin) as batcher, Batcher(twice) as streaming:
        for begin in (batcher, streaming.stream):
            with pytest.raises(RuntimeError, match="would run outside of it"):
                transform(begin)(torch.ones(2))
