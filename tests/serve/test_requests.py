"""Requests that end before they are queued: observers and metrics count them, too."""

from collections.abc import AsyncIterator, Callable
from time import monotonic
from typing import Any

import anyio
import pytest
import torch
from prometheus_client import CollectorRegistry
from torch import nn

import aiopar
from aiopar.serve import Batcher, PrometheusMetrics, ReplicaPool
from aiopar.testing import Gate

from .replicas import Scale, X
from .test_observer import Watcher

pytestmark = pytest.mark.anyio


class Counted:
    """The metrics of a batcher, and the events that an observer sees."""

    def __init__(self, batcher: Batcher[Any, Any]) -> None:
        self._batcher = batcher
        self._registry = CollectorRegistry()
        PrometheusMetrics(batcher, registry=self._registry)
        self.watcher = Watcher()
        batcher.add_observer(self.watcher)

    def _read(self, metric: str) -> dict[str, float]:
        return {
            sample.labels[label]: sample.value
            for family in self._registry.collect()
            for sample in family.samples
            for label in ("outcome", "cause")
            if sample.name == f"aiopar_batcher_{metric}_total" and label in sample.labels
            if sample.value
        }

    def check(self, outcome: str, error: BaseException, cause: str | None = None) -> None:
        """Assert that one request had this outcome, and nothing else happened."""
        assert self._read("requests") == {outcome: 1}
        rejections = {} if cause is None else {cause: 1}
        assert self._read("rejections") == self._batcher.stats().rejected == rejections
        assert self.watcher.names == ["enqueue", "completed"]
        [(item, none), (same, told)] = [event[1:3] for event in self.watcher.events]
        assert item is same
        assert none is None
        assert told is error
        assert item.rejected == cause


def _identity(items: list[Any]) -> list[Any]:
    return items


async def _steps(items: list[Any]) -> AsyncIterator[list[Any]]:
    yield items


async def _ask(batcher: Batcher[Any, Any], fn: Callable[[Any], Any], item: Any) -> None:
    if fn is _steps:
        await anext(batcher.stream(item))
    else:
        await batcher(item)


def _fail(error: Exception) -> Callable[[Any], Any]:
    def fail(_: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("fn", [_identity, _steps])
async def test_closed_before_it_was_used(fn: Callable[[Any], Any]) -> None:
    batcher = Batcher(fn)
    counted = Counted(batcher)
    await batcher.aclose()
    with pytest.raises(aiopar.ServiceClosed) as caught:
        await _ask(batcher, fn, 1)
    counted.check("rejected", caught.value, "closed")


@pytest.mark.parametrize("fn", [_identity, _steps])
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"batch_key": _fail(aiopar.InvalidInput("no such adapter"))}, aiopar.InvalidInput),
        ({"batch_key": _fail(aiopar.ServiceClosed("another"))}, aiopar.ServiceClosed),
        ({"batch_key": lambda _: []}, TypeError),
        ({"cost": _fail(LookupError("cost"))}, LookupError),
        ({"cost": lambda _: -1.0}, ValueError),
    ],
)
async def test_key_or_cost_fails(
    fn: Callable[[Any], Any], options: dict[str, Any], kind: type[Exception]
) -> None:
    async with Batcher(fn, **options) as batcher:
        counted = Counted(batcher)
        with pytest.raises(kind) as caught:
            await _ask(batcher, fn, 1)
        counted.check("failed", caught.value)


async def test_pool_does_not_open() -> None:
    pool = ReplicaPool(Scale(2.0, _fail(RuntimeError("no memory"))), ["cpu"], warmup=X)
    counted = Counted(batcher := Batcher(pool))
    with pytest.raises(RuntimeError, match="no memory") as caught:
        await batcher(X[0])
    counted.check("failed", caught.value)
    await pool.aclose()


async def test_pool_is_closed() -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"])
    await pool.aclose()
    counted = Counted(batcher := Batcher(pool))
    with pytest.raises(aiopar.ServiceClosed) as caught:
        await batcher(torch.ones(2))
    counted.check("rejected", caught.value, "closed")


@pytest.mark.parametrize("outcome", ["expired", "cancelled"])
async def test_caller_leaves_while_the_pool_opens(outcome: str) -> None:
    gate, errors = Gate(), list[BaseException]()
    pool = ReplicaPool(Scale(2.0, lambda _: gate()), ["cpu"], warmup=X)
    counted = Counted(batcher := Batcher(pool))

    async def ask() -> None:
        try:
            await batcher(X[0], timeout=0.01 if outcome == "expired" else None)
        except BaseException as error:
            errors.append(error)
            if outcome == "cancelled":
                raise

    async with anyio.create_task_group() as opening:
        with gate:
            opening.start_soon(pool.__aenter__)
            await gate.entered()
            began = monotonic()
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await anyio.wait_all_tasks_blocked()
                blocked = monotonic()
                if outcome == "cancelled":
                    tasks.cancel_scope.cancel()
            gate.open()
    counted.check(outcome, errors[0])
    [(item, _)] = counted.watcher.of("completed")
    assert began <= item.arrived <= blocked
    await batcher.aclose()
    await pool.aclose()


async def test_opening_a_batcher_is_not_a_request() -> None:
    pool = ReplicaPool(nn.Linear(2, 2), ["cpu"])
    await pool.aclose()
    counted = Counted(batcher := Batcher(pool))
    with pytest.raises(aiopar.ServiceClosed):
        await batcher.__aenter__()
    assert counted.watcher.names == []
    assert batcher.stats().rejected == {}
