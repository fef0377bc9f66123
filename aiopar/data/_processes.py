"""torch's worker processes, read on a worker thread because their queues block."""

import atexit
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from signal import strsignal
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .._base.forking import ReentrantLock, Registry
from .._base.tracebacks import (
    add_note_once,
    awaitable_error,
    in_words,
    own_traceback,
    without_frames,
)
from .._base.tree import tensors
from ..executor._generators import END
from ._cursor import Cursor, FetchRequest, StateLoader
from ._fetch import NO_BATCH, FailedSample, Left, Loaded
from ._sampling import Sampling
from ._steps import StopFlag

# The thread that waits for a batch looks after each so many seconds whether the epoch was closed,
# or a process has died; torch looks every 5 s.
_LOOK_INTERVAL = 0.2

# A process that still fetches so many seconds after it was told to end is terminated.
_GRACE = 0.5


class WorkerProcesses(_MultiProcessingDataLoaderIter):
    """torch's iterator, which ends worker processes only in the process that started them.

    A forked process, such as a worker process of another loader, has a copy of the iterator. When
    that copy is freed, torch would stop the parent's worker processes, and wait for a lock that the
    parent holds.
    """

    started_in: int | None = None  # a process's id; None before the first worker process is started
    stop = StopFlag()  # set when the epoch is closed: nobody waits for a batch any more

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.started_in = os.getpid()
        super().__init__(loader)
        # Else torch's handler of SIGCHLD raises when a process dies: in the main thread, perhaps in
        # the event loop, not where the loader is read.
        torch._C._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        # `Sampling` warns if the length was too short.
        self._IterableDataset_len_called = None

    def _try_get_data(self, timeout: float = _LOOK_INTERVAL) -> Any:
        if self.stop.is_set:
            raise Left
        return super()._try_get_data(timeout)  # type: ignore[no-untyped-call]  # torch's

    def _shutdown_workers(self) -> None:
        if self.started_in == os.getpid():
            super()._shutdown_workers()

    def shut_down(self) -> None:
        """End the processes, and wait until they have ended; terminate those that are stuck."""
        # torch waits 5 s for each process. This timer ends stuck processes sooner, but only after
        # torch has ended the thread that reads from them.
        timer = threading.Timer(_GRACE, self._terminate)
        with suppress(RuntimeError):  # no thread can be started
            timer.start()
        try:
            self._shutdown_workers()
        finally:
            timer.cancel()

    def _terminate(self) -> None:
        for process in self._workers:
            process.terminate()


class _EpochIndices:
    """The index sampler that torch iterates; it skips the batches that were delivered."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epoch: ProcessBatches | None = None
        self._iterator: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None  # noqa: S101
        self._iterator = self.epoch.iterate(self._sampler)
        return self._iterator

    def forget(self) -> None:
        """End the epoch."""
        self.epoch = None
        if self._iterator is not None:
            # Persistent processes and the generator's frame refer to each other. A thread that
            # collected this cycle would wait for the processes.
            self._iterator.close()  # type: ignore[attr-defined]
            self._iterator = None

    def __len__(self) -> int:
        return len(self._sampler)


class ProcessLoader(DataLoader[Any]):
    """torch's loader with its worker processes, which may persist over several epochs."""

    def __init__(self, dataset: Any, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.lock = ReentrantLock()
        """Held while torch is called: a closed epoch may still wait for a batch when the next epoch
        begins with the same processes."""
        self.stop = StopFlag()  # of the running epoch
        self._indices = _EpochIndices(super()._index_sampler)
        self._processes: WorkerProcesses | None = None
        _loaders.add(self)

    @property
    def _index_sampler(self) -> Any:
        # torch iterates the result. An `IterableDataset` has no indices.
        iterable = isinstance(self.dataset, IterableDataset)
        return super()._index_sampler if iterable else self._indices

    def _get_iterator(self) -> WorkerProcesses:
        # First: if torch fails to start all processes (because the sampler raises, ...), only the
        # error's traceback would refer to the started ones.
        self._processes = WorkerProcesses.__new__(WorkerProcesses)
        self._processes.stop = self.stop
        try:
            self._processes.__init__(self)  # type: ignore[misc]
        except BaseException:
            self.shut_down()
            raise
        return self._processes

    def begin(self, epoch: "ProcessBatches", stop: StopFlag) -> Iterator[Any]:
        """Start the processes, or wake them, for this epoch, until `stop` is set."""
        self._indices.epoch = epoch
        self.stop = stop
        if self._processes is not None:
            self._processes.stop = stop
        return iter(self)

    @property
    def running(self) -> bool:
        return self._processes is not None

    def deaths(self) -> str:
        """Says which processes have failed, and how."""
        codes = [(one.pid, one.exitcode) for one in getattr(self._processes, "_workers", ())]
        return ", ".join(
            f"worker process {pid} was ended by signal {-code} ({strsignal(-code)})"
            if code < 0
            else f"worker process {pid} ended with exit code {code}"
            for pid, code in codes
            if code
        )

    def end(self) -> None:
        """End the epoch, and the processes unless they persist."""
        self._indices.forget()
        # After a death, end persistent processes, too: the next epoch would fail.
        if not self.persistent_workers or self.deaths():
            self.shut_down()

    def close(self) -> None:
        """End persistent processes, and wait until they have ended."""
        with self.lock:
            self.shut_down()

    def shut_down(self) -> None:
        """End the processes, and wait until they have ended; with `lock` held."""
        processes, self._processes, self._iterator = self._processes, None, None
        # torch would end them when its iterator is freed, but an error that the user keeps may
        # refer to the iterator. `_workers` is missing if no process was started.
        if processes is not None and hasattr(processes, "_workers"):
            processes.shut_down()

    def forget_after_fork(self) -> None:
        """Reset the loader in a forked child: the worker processes belong to the parent."""
        self._processes = self._iterator = None


_loaders: Registry[ProcessLoader] = Registry(ProcessLoader.forget_after_fork)


@atexit.register
def _stop_at_exit() -> None:
    # The exit handler of executors, which runs later, waits for the threads that read.
    for loader in _loaders:
        loader.stop.is_set = True


class ProcessBatches(Iterator[Loaded]):
    """The batches of one epoch, loaded by worker processes; `next` blocks."""

    def __init__(
        self, sampling: Sampling, loader: ProcessLoader, stop: StopFlag, max_failures: int
    ) -> None:
        self._sampling = sampling
        self._loader = loader
        self._stop = stop
        self._max_failures = max_failures
        self._failed = 0
        self._number = 0
        self._cursor = Cursor()  # until the epoch begins
        self._batches: Iterator[Any] | None = None
        self._state: StateLoader | None = None
        self._nothing_remains = False  # the sampler must not be iterated; see `Sampling.begin`
        # The batches that torch has asked for and not delivered yet.
        self._requested: deque[FetchRequest] = deque()
        self._sampler_error: Exception | None = None  # raised after all requested batches

    def __next__(self) -> Loaded:
        with self._loader.lock:
            try:
                return self._next()
            except BaseException as error:
                if deaths := self._loader.deaths():
                    add_note_once(error, deaths)
                self._end()  # an iterator that has ended is not closed
                raise

    def _next(self) -> Loaded:
        batches = self._begin() if self._batches is None else self._batches
        batch = END
        try:
            batch = next(batches)
        except Exception as error:  # noqa: BLE001  # it is raised where the loader is read
            # While requested batches are missing, a StopIteration is the error of a sample.
            if self._requested or not isinstance(error, StopIteration):
                return self._failure(own_traceback(error))
        if batch is END:
            failed, self._sampler_error = self._sampler_error, None
            try:
                raise StopIteration if failed is None else failed
            finally:
                del failed  # its traceback holds this frame
        if self._sampling.kind.by_index:
            request = self._requested.popleft()
            batched = self._sampling.loader.batch_sampler is not None
            samples = len(request.content) if batched else 1
            return Loaded(request._replace(content=None), batch, samples)
        request = FetchRequest(self._number, None)
        self._number += 1
        return Loaded(request, batch, self._count(batch))

    def _begin(self) -> Iterator[Any]:
        with self._sampling.beginning() as cursor:
            self._cursor, self._number = cursor, cursor.delivered
            if cursor.resumed and not cursor.seeded:
                # The saved epoch drew a `base_seed`. Processes that persist would draw none.
                self._loader.shut_down()
            self._batches = self._loader.begin(self, self._stop)
            self._sampling.seed_drawn()
        if not self._sampling.kind.by_index:
            # Only the dataset knows which process has which samples: load the delivered batches
            # again.
            for _ in range(cursor.delivered):
                if self._stop.is_set:
                    break
                next(self._batches, None)
        return self._batches

    def iterate(self, sampler: Any) -> Iterator[Any]:
        """Iterate the sampler of the indices; torch may iterate it twice per epoch."""
        cursor, sampling = self._cursor, self._sampling
        if cursor.resumed and cursor.seeded:
            # torch has drawn a `base_seed`; the saved epoch, with persistent processes, had not.
            sampling.generators.restore(cursor.generators)
        # A state from the start of the epoch is loaded before torch's first `iter` only.
        first = self._state is None or cursor.delivered
        if cursor.resumed and sampling.stateful is not None and first:
            self._state = sampling.state_loader(cursor)
            self._state.before_iter()
            self._nothing_remains = cursor.last and self._state.loaded
        # Now, not at the first index: some samplers draw in `iter`.
        return self._indices(iter(() if self._nothing_remains else sampler))

    def _indices(self, contents: Iterator[Any]) -> Iterator[Any]:
        """The indices of each batch; torch asks for them."""
        cursor, sampling = self._cursor, self._sampling
        if self._state is not None:
            self._state.after_iter(contents)
        skipped = 0 if sampling.stateful is not None else cursor.delivered
        _, contents = sampling.remaining(contents, skipped, self._stop)
        sampling.restart_if_empty = self._nothing_remains
        try:
            for request in sampling.requests(cursor, contents):
                self._requested.append(request)
                yield request.content
        except Exception as error:  # noqa: BLE001  # it is raised where the loader is read
            # An error raised here would make torch lose the requested batches.
            self._sampler_error = own_traceback(error)

    def _failure(self, error: BaseException) -> Loaded:
        """The result for a batch that failed; raises the error if the failure is not skipped."""
        of_sample = "in DataLoader worker process" in in_words(error)
        if of_sample:
            # torch's frames refer to the error. The error's text has the process's traceback.
            error.with_traceback(None)
        error = awaitable_error(error)
        try:
            # A process has died, or an iterable has failed, whose later samples are lost.
            if not self._requested or not of_sample:
                raise error
            request = self._requested.popleft()
            # Out of order, torch does not tell which batch has failed.
            known = self._loader.in_order
            batch = f"batch {request.number}" if known else "a batch"
            add_note_once(error, f"fetching {batch}, in a worker process")
            if self._failed >= self._max_failures:
                raise error
            self._failed += 1
            index, number = (request.content, request.number) if known else (None, None)
            failed = FailedSample(index, number, without_frames(error))
            return Loaded(request._replace(content=None), NO_BATCH, 0, [failed])
        finally:
            del error  # its traceback holds this frame

    def _count(self, batch: Any) -> int:
        size: int | None = self._sampling.loader.batch_size
        if size is None:
            return 1
        tensor = next(tensors(batch), None)
        return size if tensor is None or not tensor.ndim else tensor.size(0)

    def close(self) -> None:
        """End the processes unless they persist, and wait until they have ended."""
        with self._loader.lock:
            self._end()

    def _end(self) -> None:
        self._batches = self._sampler_error = None
        self._requested.clear()
        self._loader.end()
