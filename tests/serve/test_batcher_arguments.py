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
        ({"batch_sizes": 4}, TypeError, "batch_sizes must be an iterable of ints, not int"),
        ({"batch_sizes": ["4"]}, TypeError, "batch_sizes must be an int, not str"),
        ({"batch_sizes": [0, 4]}, ValueError, "batch_sizes must be at least 1, got 0"),
        ({"batch_sizes": []}, ValueError, "batch_sizes is empty"),
        (
            {"batch_sizes": [2, 4], "max_batch_size": 8},
            ValueError,
            "max_batch_size must be the largest of batch_sizes, 4, or be left out; got 8",
        ),
        ({"max_pending": 0}, ValueError, "max_pending must be at least 1"),
        ({"concurrency": 0}, ValueError, "concurrency must be at least 1"),
        ({"concurrency": "2"}, TypeError, "concurrency must be an int, not str"),
        ({"max_queue_delay": -1}, ValueError, "max_queue_delay must be at least 0, got -1"),
        ({"max_queue_delay": None}, TypeError, "max_queue_delay must be a number, not NoneType"),
        ({"max_wait": -0.1}, ValueError, "max_wait must be at least 0"),
        ({"max_wait": "1"}, TypeError, "max_wait must be a number, not str"),
        ({"timeout": 0}, ValueError, "timeout must be above 0, got 0"),
        ({"timeout": True}, TypeError, "timeout must be a number, not bool"),
        ({"read_timeout": 0}, ValueError, "read_timeout must be above 0, got 0"),
        ({"cost": len, "max_batch_cost": 0}, ValueError, "max_batch_cost must be above 0"),
        ({"max_batch_cost": 5}, ValueError, "max_batch_cost needs cost"),
        ({"cost": len, "padded": True}, ValueError, "padded needs max_batch_cost"),
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


def cost_of_bad(cost: Any) -> dict[str, Any]:
    return {"cost": lambda item: cost if item == "bad" else 1}


@pytest.mark.parametrize(
    ("options", "call", "error", "words"),
    [
        ({}, {"timeout": math.nan}, ValueError, "timeout must be at least 0, got nan"),
        ({}, {"timeout": "1"}, TypeError, "timeout must be a number, not str"),
        ({}, {"priority": 1.5}, TypeError, "priority must be an int, not float"),
        (cost_of_bad(math.nan), {}, ValueError, "cost must be finite and at least 0, got nan"),
        (cost_of_bad(math.inf), {}, ValueError, "cost must be finite and at least 0, got inf"),
        (cost_of_bad(-1), {}, ValueError, "cost must be finite and at least 0, got -1"),
        (cost_of_bad("1"), {}, TypeError, "cost must return a number, not str"),
        ({"batch_key": lambda item: [] if item == "bad" else 1}, {}, TypeError, "hashed, not list"),
        ({"batch_key": lambda item: 1 // (item != "bad")}, {}, ZeroDivisionError, "by zero"),
        ({"cost": lambda item: 1 // (item != "bad")}, {}, ZeroDivisionError, "by zero"),
    ],
)
async def test_bad_arguments_of_a_call_fail_it_only(
    options: dict[str, Any], call: dict[str, Any], error: type[Exception], words: str
) -> None:
    async with busy(**options) as callers:
        with pytest.raises(error, match=words):
            await callers.batcher("bad", **call)
        await callers.queue("good")
    assert callers.runs == [["good"]]


async def test_a_cost_may_be_any_number() -> None:
    async with busy(max_batch_size=2, cost=lambda item: torch.tensor(len(item))) as callers:
        await callers.queue("a", "bbbb", "c")
    assert callers.runs == [["a", "c"], ["bbbb"]]


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
