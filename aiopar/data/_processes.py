"""torch's own worker processes, read from an event loop: what blocks is called on a worker."""

import os
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from signal import strsignal
from traceback import clear_frames
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from .._base.forking import Registry
from .._base.tracebacks import add_note_once, awaitable_error, in_words, own_traceback
from .._base.tree import tensors
from ._cursor import PuttingBack, Request
from ._fetch import NO_BATCH, FailedSample, Loaded, no_samples
from ._outcome import END, StopFlag, without_frames
from ._sampling import Numbered, Sampling


class Processes(_MultiProcessingDataLoaderIter):
    """torch's iterator, which ends its processes in the process that started them alone.

    One that is forked meanwhile, as every worker process of another loader is, has a copy, and
    frees it: at its exit, or as garbage. torch tells the processes to stop there too, by what they
    share with their own reader; that finds them dead, or waits for a lock that nobody lets go.
    """

    started_in: int | None = None
    """The process; None before there is one to end."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.started_in = os.getpid()
        super().__init__(loader)
        # Else torch's handler of SIGCHLD, which a loader of its own leaves in the main thread, says
        # it there if one dies: in whatever runs, the event loop perhaps, not in who reads.
        torch._C._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def deaths(self) -> str:
        """Which of the processes have failed, and how."""
        codes = [(worker.pid, worker.exitcode) for worker in self._workers]
        return ", ".join(
            f"worker process {pid} was ended by signal {-code} ({strsignal(-code)})"
            if code < 0
            else f"worker process {pid} ended with exit code {code}"
            for pid, code in codes
            if code
        )

    def _shutdown_workers(self) -> None:
        if self.started_in == os.getpid():
            super()._shutdown_workers()


class ProcessLoader(DataLoader[Any]):
    """torch's, whose processes are known before the first of them starts."""

    processes: Processes | None = None

    def _get_iterator(self) -> Processes:
        # What fails while torch starts them (a sampler, the start of the last) leaves some, and
        # their only reference, which torch ends them by, in the error's traceback.
        self.processes = Processes.__new__(Processes)
        try:
            self.processes.__init__(self)  # type: ignore[misc]
        except BaseException:
            self.shut_down()
            raise
        return self.processes

    def shut_down(self) -> None:
        """End the processes, and wait until they have."""
        processes, self.processes, self._iterator = self.processes, None, None
        # As torch does when its iterator is freed, which an error that the user keeps would put
        # off: the iterator is in its traceback. Before the first process there is no list.
        if processes is not None and hasattr(processes, "_workers"):
            processes._shutdown_workers()


class _Indices(Iterable[Any]):
    """The index sampler that torch's loader gets: it leaves out what was delivered before."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self.epoch: ProcessBatches | None = None
        self._begun: Generator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        assert self.epoch is not None  # noqa: S101
        self.epoch.rewind()
        # Begun here and now, as often as torch does so: some samplers draw when they are begun.
        self.epoch.put_back()
        contents = iter(() if self.epoch.nothing_remains else self._sampler)
        self._begun = self.epoch.indices(contents)
        return self._begun

    def forget(self) -> None:
        """The epoch is over."""
        self.epoch = None
        if self._begun is not None:
            # Persistent processes keep it, and it would keep them: in a cycle, whose collection
            # waits for them, in any thread, and torch 5 s for each.
            self._begun.close()
            self._begun = None

    def __len__(self) -> int:
        return len(self._sampler)


class WorkerProcesses:
    """torch's loader with its processes: of one iteration, or, persistent, of many.

    Args:
        sampling: Of the epochs.
        options: What torch's loader gets about its workers.
    """

    def __init__(self, sampling: Sampling, options: dict[str, Any]) -> None:
        self._sampling = sampling
        self._options = options
        self.in_order: bool = options["in_order"]
        self._indices = _Indices(sampling.index_sampler)
        self._loader: ProcessLoader | None = None
        self.lock = threading.Lock()
        """Held by who calls torch: an iteration that was broken off may still be in there, and the
        next has the same processes."""
        _all.add(self)

    def begin(self, epoch: "ProcessBatches") -> Iterator[Any]:
        """Start the processes, or wake them, for this epoch."""
        self._indices.epoch = epoch
        position = epoch.position
        if position.resumed and not position.start.seeded:
            # Unbroken, this epoch started them: those that persist would draw no `base_seed`.
            self._shut_down()
        if self._loader is None:
            self._loader = self._made()
        return iter(self._loader)

    def _made(self) -> ProcessLoader:
        template, how = self._sampling.loader, dict[str, Any]()
        if not self._sampling.by_index:
            how = {"batch_size": template.batch_size, "drop_last": template.drop_last}
        elif template.batch_sampler is None:
            how = {"batch_size": None, "sampler": self._indices}
        else:
            how = {"batch_sampler": self._indices}
        return ProcessLoader(
            template.dataset,
            collate_fn=template.collate_fn,
            generator=template.generator,
            **how,
            **self._options,
        )

    def deaths(self) -> str:
        """Which of the processes have failed, and how."""
        processes = None if self._loader is None else self._loader.processes
        return "" if processes is None else processes.deaths()

    def end(self) -> None:
        """The epoch is over: what it holds is let go, its processes end unless they persist."""
        self._indices.forget()
        # Persistent ones too if one has died: torch would wait 5 s for it in each epoch, and fail.
        if not self._options["persistent_workers"] or self.deaths():
            self._shut_down()

    def close(self) -> None:
        """End persistent processes; blocks until they have ended."""
        with self.lock:
            self._shut_down()

    def _shut_down(self) -> None:
        if self._loader is not None:
            self._loader.shut_down()
        self._sampling.seed_lost()

    def forget_after_fork(self) -> None:
        """In a child process: the worker processes are the parent's, as who holds the lock is."""
        self.lock = threading.Lock()
        self._loader = None
        self._sampling.seed_lost()


_all: Registry[WorkerProcesses] = Registry(WorkerProcesses.forget_after_fork)


class ProcessBatches(Numbered, Iterator[Loaded]):
    """The batches of one epoch, loaded by worker processes; `next` blocks, on a worker.

    Args:
        sampling: Of the epoch.
        leaving: Of the iteration.
        processes: Of the loader.
        max_failures: How many batches may fail.
    """

    def __init__(
        self,
        sampling: Sampling,
        leaving: StopFlag,
        processes: WorkerProcesses,
        max_failures: int,
    ) -> None:
        super().__init__(sampling, leaving)
        self._processes = processes
        self._max_failures = max_failures
        self._failed = 0
        self._batches: Iterator[Any] | None = None
        self._putting_back: PuttingBack | None = None
        self.nothing_remains = False
        """Whether the sampler is not to be begun; see `Sampling.begin`."""
        # Read ahead by torch, not come yet.
        self._under_way: deque[Request] = deque()
        self._sampler_error: Exception | None = None
        """To be raised when these have come."""

    def __next__(self) -> Loaded:
        with self._processes.lock:
            try:
                return self._next()
            except BaseException as error:
                if deaths := self._processes.deaths():
                    add_note_once(error, deaths)
                self._end()  # nobody closes an iterator that has ended
                raise

    def _next(self) -> Loaded:
        if self._batches is None:
            self._begin()
        assert self._batches is not None  # noqa: S101
        batch = END
        try:
            batch = next(self._batches)
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who reads
            # While batches are owed it is not the epoch's end, but what a sample raised.
            if self._under_way or not isinstance(error, StopIteration):
                error = own_traceback(error)
                # torch's hold the processes, and the error: a cycle, as above.
                clear_frames(error.__traceback__)
                return self._failure(error)
        if batch is END:
            self._raise_sampler_error()
            raise StopIteration
        if self._sampling.by_index:
            request = self._under_way.popleft()
            batched = self._sampling.loader.batch_sampler is not None
            return Loaded(no_samples(request), batch, len(request.content) if batched else 1)
        request = Request(self._number, None)
        self._number += 1
        return Loaded(request, batch, self._count(batch))

    def _begin(self) -> None:
        with self._sampling.beginning() as position:
            self.begin(position)
            self._batches = self._processes.begin(self)
            self._sampling.seed_drawn()
        if not self._sampling.by_index:
            # Which process has which samples is the dataset's secret: what was delivered is loaded
            # once more.
            for _ in range(position.batches):
                if self._leaving.is_set:
                    break
                next(self._batches, None)

    def rewind(self) -> None:
        """Undo torch's draw of `base_seed` where, unbroken, there was none: processes persisted."""
        start = self.position.start
        if self.position.resumed and start.seeded:
            self._sampling.generators.put_back(start.generators)

    def put_back(self) -> None:
        """Put a stateful sampler back to where the consumer was, if this goes on from a state."""
        position = self.position
        if not position.resumed or self._sampling.stateful is None:
            return
        # A state from before the epoch is one from before torch's first `iter`, not the second.
        if self._putting_back is None or position.batches:
            self._putting_back = self._sampling.putting_back(position)
            self._putting_back.before()
            self.nothing_remains = position.last and self._putting_back.done

    def indices(self, contents: Iterator[Any]) -> Generator[Any]:
        """What torch is to have loaded, as it asks for it."""
        position, stateful = self.position, self._sampling.stateful is not None
        if self._putting_back is not None:
            self._putting_back.behind(contents)
        skipped = 0 if stateful else position.batches
        contents, first = self._sampling.first(contents, skipped, self._leaving)
        self._sampling.put_back_at_end = self.nothing_remains
        try:
            for request in self.requests(contents, first):
                self._under_way.append(request)
                yield request.content
        except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who reads
            # Not now: torch would lose the batches that are under way, and has no more to ask for.
            self._sampler_error = own_traceback(error)

    def _raise_sampler_error(self) -> None:
        error, self._sampler_error = self._sampler_error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback holds this frame

    def _failure(self, error: BaseException) -> Loaded:
        """What there is instead of a batch that failed; raises the error if that is one too many.

        So it does for what is no sample's error (a process that died), and for that of an iterable:
        what comes after it is lost.
        """
        of_sample = "in DataLoader worker process" in in_words(error)
        error = awaitable_error(error)
        try:
            if not self._under_way or not of_sample:
                raise error
            request = self._under_way.popleft()
            # Out of order torch does not tell whose the error is.
            known = self._processes.in_order
            batch = f"batch {request.number}" if known else "a batch"
            add_note_once(error, f"fetching {batch}, in a worker process")
            if self._failed >= self._max_failures:
                raise error
            self._failed += 1
            index, number = (request.content, request.number) if known else (None, None)
            failed = FailedSample(index, number, without_frames(error))
            return Loaded(no_samples(request), NO_BATCH, 0, [failed])
        finally:
            del error  # its traceback holds this frame

    def _count(self, batch: Any) -> int:
        if self._sampling.loader.batch_size is None:
            return 1
        tensor = next(tensors(batch), None)
        size: int = self._sampling.loader.batch_size
        return size if tensor is None or not tensor.ndim else len(tensor)

    def close(self) -> None:
        """End the processes, unless they persist, and wait until they have; on a worker."""
        with self._processes.lock:
            self._end()

    def _end(self) -> None:
        self._batches = self._sampler_error = None
        self._under_way.clear()
        self._processes.end()
