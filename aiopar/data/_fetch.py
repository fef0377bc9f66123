"""Fetching the samples of a batch, in threads or tasks, and collating them."""

import asyncio
import math
import operator
import reprlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import anyio

from .._base.arguments import length_of
from .._base.inputs import outline
from .._base.thread_state import FRESH_STATE, CallerState, applied, fresh
from .._base.tracebacks import (
    add_note_once,
    awaitable_error,
    own_traceback,
    stand_in,
    without_frames,
)
from ..executor._executor import DeviceExecutor
from ..executor._worker import current_worker
from ._cursor import FetchRequest
from ._sampling import DatasetKind, Sampling, getitems_of
from ._steps import UNAWAITED, StopFlag, unawaited


@dataclass(frozen=True, slots=True, eq=False)
class FailedSample:
    """A sample that an `AsyncDataLoader` skipped, as `max_failures` allows.

    Attributes:
        index: The index of the sample; a list of indices if samples failed together in
            `__getitems__` or `collate_fn`; None for an iterable, whose samples have no index, and
            for worker processes with `in_order=False`.
        batch: The number of the batch in its epoch, from 0; None for worker processes with
            `in_order=False`.
        error: The error that was raised.
    """

    index: Any
    batch: int | None
    error: BaseException


NO_BATCH: Any = object()
"""Takes the place of a batch of which all samples have failed."""


class Left(Exception):  # not an error: nobody sees it
    """Raised by a worker that stops loading, because the epoch was closed."""


class Loaded(NamedTuple):
    """A batch that was fetched."""

    request: FetchRequest  # without its content
    batch: Any
    samples: int  # how many the batch has
    failures: Sequence[FailedSample] = ()


class Collate:
    """Makes batches of samples, on workers; `collate_fn` runs under the state of the caller.

    `finish` is called with each batch, on the same worker; its error is no failure of a sample.
    """

    def __init__(
        self,
        sampling: Sampling,
        caller: CallerState,
        max_failures: int,
        stop: StopFlag,
        finish: Callable[[Any], Any] | None,
    ) -> None:
        self.caller = caller
        self._collate_fn = sampling.loader.collate_fn
        self._kind = sampling.kind
        self._finish = finish
        self.batched = sampling.loader.batch_sampler is not None
        self.max_failures = max_failures
        self.stop = stop

    def content(self, request: FetchRequest) -> Loaded:
        """The batch of the samples of an iterable, which are the content of the request."""
        return self(request, request.content, len(request.content) if self.batched else 1, [])

    def __call__(
        self, request: FetchRequest, samples: Any, count: int, failures: list[FailedSample]
    ) -> Loaded:
        """The batch of `samples`, or `NO_BATCH` if they are `NO_BATCH` or fail together."""
        if self.stop.is_set:
            raise Left
        batch = NO_BATCH
        if samples is not NO_BATCH:
            try:
                batch = self.caller.run(self._collate_fn, samples)
            except Exception as error:  # noqa: BLE001  # it is raised where the loader is read
                add_note_once(error, "collate_fn was called with ", outline(samples))
                self.add_failure(failures, request, request.content, error, "collating")
            else:
                if self._finish is not None:
                    batch = self._finish(batch)
        return Loaded(request._replace(content=None), batch, count, failures)

    def add_failure(
        self,
        failures: list[FailedSample],
        request: FetchRequest,
        index: Any,
        error: BaseException,
        doing: str = "fetching",
    ) -> None:
        """Add a failed sample to `failures`; raises `error`, with a note, if it is one too many."""
        error = awaitable_error(own_traceback(error))
        worker = None if self._kind is DatasetKind.ASYNC_MAP else current_worker()
        by = "" if worker is None else f", in worker {worker.index}"
        what = f" {reprlib.repr(index)} of" if self._kind.by_index else " of"
        many = "s" if isinstance(index, list) else ""
        add_note_once(error, f"{doing} sample", f"{many}{what} batch {request.number}{by}")
        try:
            if len(failures) >= self.max_failures:
                raise error
            index = index if self._kind.by_index else None
            failures.append(FailedSample(index, request.number, without_frames(error)))
        finally:
            del error  # its traceback holds this frame


class WorkerInit:
    """Calls `worker_init_fn` with the number of each worker, before the worker reads."""

    def __init__(self, fn: Callable[[int], object]) -> None:
        self._fn = fn
        self._numbers: dict[int, int] = {}
        self._ready: set[int] = set()
        self._lock = threading.Lock()

    def __call__(self, caller: CallerState) -> None:
        """Call the function under the state of `caller`, unless this worker has called it."""
        worker = current_worker()
        assert worker is not None  # noqa: S101
        if worker.index in self._ready:
            return
        with self._lock:
            # The executor may have other workers, too: the numbers still count from 0.
            number = self._numbers.setdefault(worker.index, len(self._numbers))
        with fresh(), applied(caller.torch_state or FRESH_STATE):
            caller.context().run(self._fn, number)
        self._ready.add(worker.index)  # if the function has failed, the next epoch calls it again


class _Fetching:
    """Fetches a batch by index, all samples at once if the dataset can."""

    def __init__(self, dataset: Any, collate: Collate) -> None:
        getitems = getitems_of(dataset) if collate.batched else None
        self._at_once = not collate.batched or getitems is not None
        self._fetch = getitems or partial(operator.getitem, dataset)
        self._collate = collate

    def _asked(self, request: FetchRequest) -> list[Any]:
        return [request.content] if self._at_once else list(request.content)

    def _batch(
        self, request: FetchRequest, fetched: list[Any], failures: list[FailedSample]
    ) -> Loaded:
        """The batch of the results of all fetches that have not failed."""
        samples, count = fetched, len(fetched)
        if failures and not fetched:
            samples = NO_BATCH
        elif self._at_once:
            samples = fetched[0]
            if self._collate.batched:
                lengths = map(length_of, (request.content, samples))
                count = next((length for length in lengths if length is not None), 0)
        return self._collate(request, samples, count, failures)


class Fetch(_Fetching):
    """Fetches with plain functions, on a worker."""

    def __init__(self, dataset: Any, collate: Collate, init: WorkerInit | None) -> None:
        super().__init__(dataset, collate)
        self._init = init

    def __call__(self, request: FetchRequest) -> Loaded:
        collate = self._collate
        if self._init is not None:
            self._init(collate.caller)
        samples: list[Any] = []
        failures: list[FailedSample] = []
        for index in self._asked(request):
            if collate.stop.is_set:
                raise Left
            try:
                sample = collate.caller.run(self._fetch, index)
                if type(sample) in UNAWAITED:
                    raise unawaited(sample)
                samples.append(sample)
            except Exception as error:  # noqa: BLE001  # it is raised where the loader is read
                collate.add_failure(failures, request, index, error)
        return self._batch(request, samples, failures)


class AsyncFetch(_Fetching):
    """Fetches with async functions on the event loop, `limit` at once; `executor` collates."""

    def __init__(
        self, dataset: Any, collate: Collate, executor: DeviceExecutor, limit: int
    ) -> None:
        super().__init__(dataset, collate)
        self._executor = executor
        self._free = anyio.Semaphore(limit)
        # Held by the batch that starts its samples, so that the first batch is ready first.
        self._turn = anyio.Lock()

    def _load(
        self, request: FetchRequest, samples: list[Any], failed: list[tuple[Any, Exception]]
    ) -> Loaded:
        failures: list[FailedSample] = []
        while failed:
            self._collate.add_failure(failures, request, *failed.pop(0))
        return self._batch(request, samples, failures)

    async def __call__(self, request: FetchRequest) -> Loaded:
        indices = self._asked(request)
        samples: list[Any] = [None] * len(indices)
        failed: dict[int, Exception] = {}

        async def fetch(place: int) -> None:
            try:
                # Else this task, of a task group, would not have the caller's state.
                samples[place] = await self._collate.caller.drive(self._fetch, indices[place])
            except (Exception, asyncio.CancelledError) as error:
                if isinstance(error, Exception):
                    failed[place] = error
                elif anyio.current_effective_deadline() == -math.inf:
                    raise  # the whole fetch was cancelled
                else:
                    # A stand-in: raised here, a cancellation would end the task without a sample.
                    what = "the task of a sample was cancelled from outside"
                    failed[place] = stand_in(what, error)
                if len(failed) > self._collate.max_failures:
                    group.cancel_scope.cancel()
            finally:
                self._free.release()

        async with anyio.create_task_group() as group, self._turn:
            for place in range(len(indices)):
                await self._free.acquire()
                group.start_soon(fetch, place)
        fetched = [sample for place, sample in enumerate(samples) if place not in failed]
        errors = [(indices[place], failed.pop(place)) for place in sorted(failed)]
        return await self._executor.run_sync(self._load, request, fetched, errors)
