"""Fetching the samples of batches as tasks on the event loop."""

import asyncio
import math
import operator
import reprlib
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio
from anyio.abc import TaskGroup

from .._base.arguments import length_of
from .._base.tracebacks import add_note_once, awaitable_error, own_traceback, stand_in
from ..errors import Left
from ..executor._executor import DeviceExecutor
from ..executor._worker import current_worker
from ._cursor import Request
from ._outcome import UNAWAITED, StopFlag, unawaited, without_frames
from ._sampling import getitems_of


@dataclass(frozen=True, slots=True, eq=False)
class FailedSample:
    """A sample that `max_failures` let an `AsyncDataLoader` leave out.

    Attributes:
        index: Its index in the dataset; a list of indices where they failed together, in
            `__getitems__` or in `collate_fn`; None in an iterable, whose samples have none, and
            where nobody can tell.
        batch: The batch that it would have been in, counted from 0 in its epoch; None where nobody
            can tell: of worker processes with `in_order=False`.
        error: What was raised.
    """

    index: Any
    batch: int | None
    error: BaseException


NO_BATCH: Any = object()
"""Stands for the batch where all samples have failed."""


class Loaded(NamedTuple):
    """What has come of a request."""

    request: Request
    batch: Any
    samples: int
    """How many are in it."""
    failures: Sequence[FailedSample] = ()


def no_samples(request: Request) -> Request:
    """`request`, without the samples or indices: for who delivers the batch."""
    return request._replace(content=None)


def known_length(*candidates: Any) -> int:
    """The length of the first of `candidates` that has one; 0 if none has."""
    lengths = map(length_of, candidates)
    return next((length for length in lengths if length is not None), 0)


class Collation:
    """Makes a batch of samples; what plain and async fetching have in common.

    Args:
        collate_fn: As torch's.
        batched: Whether a request asks for a list of samples, not for a single one.
        by_index: Whether what a request names are indices, which errors then tell.
        max_failures: How many samples may fail; no more are noted, for the next is raised.
        leaving: Of the iteration.
        by_tasks: Whether tasks fetch, and no workers.
        finish: What is done with the batch, on the same worker; its errors are no sample's.
    """

    def __init__(
        self,
        collate_fn: Callable[[Any], Any],
        *,
        batched: bool,
        by_index: bool,
        max_failures: int,
        leaving: StopFlag,
        by_tasks: bool = False,
        finish: Callable[[Any], Any] | None = None,
    ) -> None:
        self._collate_fn = collate_fn
        self._finish = finish
        self.batched = batched
        self._by_index = by_index
        self._by_tasks = by_tasks
        self.max_failures = max_failures
        self.leaving = leaving

    def __call__(
        self,
        request: Request,
        samples: Any,
        failures: Sequence[FailedSample] = (),
        *,
        whole: bool = False,
    ) -> Loaded:
        """The batch; called on a worker.

        Args:
            request: What was asked for.
            samples: What was fetched.
            failures: What was not.
            whole: Whether `samples` may be anything: `__getitems__` has returned it.
        """
        if self.leaving.is_set:
            raise Left
        if failures and (samples is NO_BATCH or not samples):
            return Loaded(no_samples(request), NO_BATCH, 0, failures)
        count = 1
        if self.batched:
            count = known_length(request.content, samples) if whole else len(samples)
        try:
            batch = self._collate_fn(samples)
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who reads
            return self.failed(request, request.content, error, failures, "collating")
        if self._finish is not None:
            batch = self._finish(batch)
        return Loaded(no_samples(request), batch, count, failures)

    def of_outcomes(
        self, request: Request, samples: Any, failed: list[tuple[Any, Exception]], whole: bool
    ) -> Loaded:
        """The batch, of what tasks have fetched and what has failed, by index; on a worker."""
        failures: Sequence[FailedSample] = ()
        while failed:
            failures = self.noted(request, *failed.pop(0), failures)
        return self(request, samples, failures, whole=whole)

    def failed(
        self,
        request: Request,
        index: Any,
        error: BaseException,
        failures: Sequence[FailedSample],
        doing: str = "fetching",
    ) -> Loaded:
        """What there is without the batch; raises the error if that is one too many."""
        try:
            noted = self.noted(request, index, error, failures, doing)
        finally:
            del error  # its traceback holds this frame
        return Loaded(no_samples(request), NO_BATCH, 0, noted)

    def noted(
        self,
        request: Request,
        index: Any,
        error: BaseException,
        failures: Sequence[FailedSample],
        doing: str = "fetching",
    ) -> Sequence[FailedSample]:
        """`failures` with one more, caught in the calling frame; raised if that is one too many."""
        error = awaitable_error(own_traceback(error))
        worker = None if self._by_tasks else current_worker()
        by = "" if worker is None else f", in worker {worker.index}"
        what = f" {reprlib.repr(index)} of" if self._by_index else " of"
        samples = "samples" if isinstance(index, list) else "sample"
        add_note_once(error, f"{doing} {samples}{what} batch {request.number}{by}")
        try:
            if len(failures) >= self.max_failures:
                raise error
            index = index if self._by_index else None
            return [*failures, FailedSample(index, request.number, without_frames(error))]
        finally:
            del error  # its traceback holds this frame


class WorkerInit:
    """Calls `worker_init_fn` with each worker's number before the worker does anything else."""

    def __init__(self, fn: Callable[[int], object]) -> None:
        self._fn = fn
        self._numbers: dict[int, int] = {}
        self._lock = threading.Lock()

    def __call__(self) -> None:
        """To be called in a worker, before it fetches."""
        worker = current_worker()
        assert worker is not None  # noqa: S101
        if worker.index in self._numbers:
            return
        with self._lock:
            # Counted from 0, also on an executor that has other workers too.
            number = self._numbers.setdefault(worker.index, len(self._numbers))
        self._fn(number)


class Fetch:
    """Fetches by index with plain functions; called on workers."""

    def __init__(self, dataset: Any, collate: Collation, init: WorkerInit | None) -> None:
        self._dataset = dataset
        self._getitems = getitems_of(dataset) if collate.batched else None
        self._collate = collate
        self._init = init

    def __call__(self, request: Request) -> Loaded:
        if self._init is not None:
            self._init()
        failures: Sequence[FailedSample] = ()
        if not self._collate.batched or self._getitems is not None:
            fetch = self._getitems or self._dataset.__getitem__
            try:
                samples = fetch(request.content)
                if type(samples) in UNAWAITED:
                    raise unawaited(samples)
            except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who reads
                return self._collate.failed(request, request.content, error, failures)
            return self._collate(request, samples, whole=True)
        dataset, leaving, samples = self._dataset, self._collate.leaving, []
        for index in request.content:
            if leaving.is_set:
                raise Left
            try:
                sample = dataset[index]
                if type(sample) in UNAWAITED:
                    raise unawaited(sample)
                samples.append(sample)
            except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who reads
                failures = self._collate.noted(request, index, error, failures)
        return self._collate(request, samples, failures)


class CollateOnly:
    """Makes batches of the samples of an iterable, which come with the request; on workers."""

    def __init__(self, collate: Collation) -> None:
        self._collate = collate

    def __call__(self, request: Request) -> Loaded:
        return self._collate(request, request.content)


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
                if self._collate.leaving.is_set:
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
