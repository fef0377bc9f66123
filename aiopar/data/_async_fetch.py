"""Fetching the samples of batches as tasks on the event loop."""

import asyncio
import math
import operator
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import anyio
from anyio.abc import TaskGroup

from .._error_handling import stand_in
from .._executor import DeviceExecutor
from ._dataset import getitems_of
from ._fetch import NO_BATCH, Collation, Loaded
from ._loader_position import Request


class AsyncFetch:
    """Fetches by index with async functions, on the event loop; `limit` fetches at once.

    What is made of the samples is made on a worker.
    """

    def __init__(
        self, dataset: Any, collate: Collation, executor: DeviceExecutor, limit: int
    ) -> None:
        getitems = getitems_of(dataset) if collate.batched else None
        self._one_by_one = collate.batched and getitems is None
        self._fetch = getitems or partial(operator.getitem, dataset)
        self._collate = collate
        self._executor = executor
        self._free = anyio.Semaphore(limit)
        # Batches begin their samples one after the other: the first are complete first.
        self._turn = anyio.Lock()

    async def __call__(self, request: Request) -> Loaded:
        if self._one_by_one:
            samples, failed = await self._fetch_each(list(request.content))
        else:
            whole, failed = await self._fetch_each([request.content])
            samples = whole[0] if whole else NO_BATCH
        return await self._executor.run_sync(
            self._collate.of_outcomes, request, samples, failed, not self._one_by_one
        )

    async def _fetch_each(
        self, indices: list[Any]
    ) -> tuple[list[Any], list[tuple[Any, Exception]]]:
        """What was fetched, and what has failed, by index."""
        outcomes: list[Any] = [None] * len(indices)
        failed: dict[int, Exception] = {}

        async def fetch(place: int) -> None:
            try:
                outcomes[place] = await self._fetch(indices[place])
            except (Exception, asyncio.CancelledError) as error:  # to who reads
                # Here, not by `group`, which takes any cancellation of a task for its own doing:
                # the batch would have None for the sample.
                if (sample_error := _sample_error(error)) is None:
                    raise
                failed[place] = sample_error
                del sample_error
                if len(failed) > self._collate.max_failures:
                    group.cancel_scope.cancel()
            finally:
                self._free.release()

        async with anyio.create_task_group() as group:
            await self._begin_each(group, fetch, len(indices))
        samples = [sample for place, sample in enumerate(outcomes) if place not in failed]
        return samples, [(indices[place], failed.pop(place)) for place in sorted(failed)]

    async def _begin_each(
        self, group: TaskGroup, fetch: Callable[[int], Coroutine[Any, Any, None]], count: int
    ) -> None:
        async with self._turn:
            for place in range(count):
                await self._free.acquire()
                if self._collate.leaving.left:
                    # A loop that ends meanwhile would warn of what was never begun.
                    self._free.release()
                    return
                group.start_soon(fetch, place)


def _sample_error(error: Exception | asyncio.CancelledError) -> Exception | None:
    """The error of a sample that has raised `error`; None: its fetch was cancelled."""
    if isinstance(error, Exception):
        return error
    if anyio.current_effective_deadline() == -math.inf:
        return None
    return stand_in("the task of a sample was cancelled from outside", error)
