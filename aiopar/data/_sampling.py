"""One epoch's batches as requests: numbered, those delivered before a resume left out."""

import copy
import inspect
import reprlib
import warnings
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any, Protocol, TypeAlias

import anyio
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset

from .._base.arguments import described, is_iterable
from ..executor._executor import DeviceExecutor
from ._cursor import (
    EpochPosition,
    Generators,
    NoState,
    PuttingBack,
    Request,
    Start,
    check_state,
    draw_seed,
    is_stateful,
    own_state,
    seed_pipes,
)
from ._outcome import END, StopFlag


class _Indexed(Protocol):
    """A map-style dataset; `__getitem__` may be `async def`."""

    def __getitem__(self, index: Any, /) -> Any: ...


class _Batched(Protocol):
    """One that fetches many samples at once; `__getitems__` may be `async def`."""

    def __getitems__(self, indices: Any, /) -> Any: ...


Source: TypeAlias = Dataset[Any] | _Indexed | _Batched | Iterable[Any] | AsyncIterable[Any]
"""What an `AsyncDataLoader` can read from."""


class Kind(Enum):
    """How samples are obtained from a source."""

    MAP = auto()
    """By index, from a plain `__getitem__` or `__getitems__`."""
    ASYNC_MAP = auto()
    """By index, from an `async def` of either."""
    ITERABLE = auto()
    ASYNC_ITERABLE = auto()


def kind_of(dataset: object, *, batched: bool) -> Kind:
    """Which kind of source `dataset` is.

    What can be indexed is read by index, as torch does, unless it is an `IterableDataset`.

    Args:
        dataset: The source.
        batched: Whether it may be asked for many samples at once.

    Raises:
        TypeError: It is none.
    """
    # A class has the methods of its objects; but that of an enum can be iterated itself.
    if not isinstance(dataset, type) or is_iterable(dataset):
        if hasattr(dataset, "__aiter__"):
            return Kind.ASYNC_ITERABLE
        if isinstance(dataset, IterableDataset):
            return Kind.ITERABLE
        if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
            return Kind.ASYNC_MAP if fetches_async(dataset, batched=batched) else Kind.MAP
        if hasattr(dataset, "__iter__"):
            return Kind.ITERABLE
    raise TypeError(
        "dataset must have __getitem__ or __getitems__ (plain or async def), or be an iterable or "
        f"an async iterable; got {described(dataset)}"
    )


def getitems_of(dataset: Any) -> Any:
    """Its `__getitems__`, which fetches a batch at once; None where it has none."""
    part = isinstance(dataset, Subset)
    if part and fetches_async(dataset, batched=False) and getitems_of(dataset.dataset) is None:
        return None  # its own would make a list of coroutines
    # As torch asks: a wrapper may say by None that what it wraps has none.
    return getattr(dataset, "__getitems__", None) or None


def fetches_async(dataset: Any, *, batched: bool) -> bool:
    """Whether what fetches a sample of `dataset` (`batched`: a batch, if it can) is `async def`."""
    while isinstance(dataset, Subset):
        # Its own methods are plain, and return the coroutines of the dataset that it is a part of.
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        # One sample after the other, whatever its parts can do.
        return all(fetches_async(part, batched=False) for part in dataset.datasets)
    getitem = (batched and getitems_of(dataset)) or getattr(dataset, "__getitem__", None)
    return inspect.iscoroutinefunction(getitem)


class Streamed(IterableDataset[Any]):
    """An iterable, sync or async, that is no `IterableDataset`, in the eyes of torch's loader."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)  # a TypeError of its own, where it has none


def torch_loader(dataset: Any, kind: Kind, **options: Any) -> "DataLoader[Any]":
    """A torch `DataLoader` of it: for its checks, its default samplers, its worker processes.

    Raises:
        TypeError: As torch's.
        ValueError: As torch's.
    """
    streamed = kind is Kind.ASYNC_ITERABLE or (
        kind is Kind.ITERABLE and not isinstance(dataset, IterableDataset)
    )
    return DataLoader(Streamed(dataset) if streamed else dataset, **options)


class Sampling:
    """The samplers of a loader, and where its consumer is in what they yield.

    Args:
        loader: Has the samplers and the generator.
        kind: Of its dataset.
        persistent: Whether workers outlive an epoch.
    """

    def __init__(self, loader: "DataLoader[Any]", kind: Kind, *, persistent: bool) -> None:
        self.loader = loader
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, Streamed):
            self.dataset = self.dataset.source
        self.by_index = kind in (Kind.MAP, Kind.ASYNC_MAP)
        self._is_async = kind is Kind.ASYNC_ITERABLE
        self.stateful = self._find_stateful()
        self.exhausted = False
        """Whether the sampler was read to its end, and not begun again."""
        self.put_back_at_end = False
        """Whether what has a state of its own was put back behind its last item: at its next `iter`
        it may yield nothing, and begin again at the one after that."""
        self.generators = Generators(loader)
        self.persistent = persistent
        self._seeded = False
        self._epoch: int | None = None
        self._resumed: Mapping[str, Any] | None = None
        self._position: EpochPosition | None = None

    @property
    def index_sampler(self) -> Iterable[Any]:
        """What yields the indices of one batch (or of one sample) after the other."""
        batch_sampler = self.loader.batch_sampler
        return self.loader.sampler if batch_sampler is None else batch_sampler

    def _find_stateful(self) -> Any:
        """What has a state of its own: the sampler, or the dataset where that is iterated."""
        if not self.by_index and self.loader.num_workers:
            return None  # each worker process iterates a copy, whose state nobody is told
        found: Any = self.index_sampler if self.by_index else self.dataset
        while found is not None:
            if is_stateful(found):
                return found
            found = getattr(found, "sampler", None) if self.by_index else None
        return None

    def warn_if_longer(self, batches: int) -> None:
        """Warn of an iterable that had more samples than its length, if anybody asked for that.

        Once, at the end of an epoch of so many batches. torch warns with each batch too many, and
        takes each for one sample.
        """
        processes, size = self.loader.num_workers, self.loader.batch_size or 1
        length = getattr(self.loader, "_IterableDataset_len_called", None)
        # The last batch of each process may be incomplete.
        if length is None or batches * size <= length + max(1, processes) * (size - 1):
            return
        shared = "; is it shared out among the worker processes?" if processes else ""
        warnings.warn(
            f"Length of IterableDataset {reprlib.repr(self.dataset)} was reported to be {length} "
            "(when accessing len(dataloader)), but more samples have been fetched, in "
            f"{batches} batches{shared}",
            stacklevel=4,  # of who reads
        )

    @property
    def skipped(self) -> int:
        """How many batches of the next epoch were delivered before: it is resumed."""
        return 0 if self._resumed is None else self._resumed["batches"]

    def set_epoch(self, epoch: int) -> None:
        """Tell it to the samplers and to the dataset, those that take it."""
        self._epoch = epoch
        told: list[Any] = []
        party: Any
        for party in (*self._samplers(), self.dataset):
            if hasattr(party, "set_epoch") and not any(party is other for other in told):
                told.append(party)
                party.set_epoch(epoch)

    def _samplers(self) -> Iterator[Any]:
        yield self.loader.sampler
        yield self.loader.batch_sampler
        yield getattr(self.loader.batch_sampler, "sampler", None)

    def state_dict(self) -> dict[str, Any]:
        """Where the consumer is.

        Raises:
            ValueError: What has a state of its own gives none.
        """
        if self._resumed is not None:
            return copy.deepcopy(dict(self._resumed))
        position = self._position
        in_epoch = position is not None and not position.finished
        if position is None or position.finished:
            position = EpochPosition(self._start())
        state = position.as_dict()
        if isinstance(state["stateful"], NoState):
            state["stateful"].refuse("sampler" if self.by_index else "dataset")
        now = torch.get_rng_state() if self.generators.draws_globally else None
        place: dict[str, Any] = {"in_epoch": in_epoch, "now": now, "set_epoch": self._epoch}
        place |= {"batch_size": self.loader.batch_size, "processes": self._sharing}
        return copy.deepcopy(state) | place

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, with the next epoch to begin."""
        check_state(state)
        self.generators.check(state["generators"])
        self._check_counted(state)
        if state["now"] is not None:
            torch.set_rng_state(state["now"])
        if state["set_epoch"] is not None:
            self.set_epoch(state["set_epoch"])
        self._resumed = copy.deepcopy(dict(state))

    @property
    def _sharing(self) -> int:
        """How many processes share out an iterable: which batches come first depends on it."""
        return 0 if self.by_index else self.loader.num_workers

    def _check_counted(self, state: Mapping[str, Any]) -> None:
        # Batches are counted, not samples, but where a state of the sampler's own says all. Between
        # two epochs another size is welcome. A batch sampler of the user's has none of the loader.
        theirs, own = state["batch_size"], self.loader.batch_size
        counted = state["in_epoch"] and self.stateful is None
        if counted and theirs != own and None not in (theirs, own):
            raise ValueError(
                f"the state is from within an epoch with batch_size={theirs}, this loader has "
                f"{own}: samples would be lost, or come twice"
            )
        if counted and state["processes"] != self._sharing:
            raise ValueError(
                f"the state is from within an epoch of {state['processes']} worker processes that "
                f"share out the dataset, this loader has {self._sharing}: samples would be lost, "
                "or come twice"
            )

    @contextmanager
    def beginning(self) -> Iterator[EpochPosition]:
        """The begin of an epoch; of one that is resumed, what is drawn inside is drawn again."""
        resumed = self._resumed
        if resumed is None:
            self._position = position = EpochPosition(self._start())
            self.exhausted = False
            yield position
            return
        position = EpochPosition.of(resumed)
        self._seeded, self.exhausted = position.start.seeded, False
        # Any other is begun once an epoch, also where that is empty.
        self.put_back_at_end = self.stateful is not None and position.start.exhausted
        if resumed["in_epoch"]:
            with self.generators.replaying(position.start.generators):
                yield position
        else:
            # Nothing of it was drawn before; torch's own generator was set when this was loaded.
            self.generators.put_back(position.start.generators, shared=False)
            yield position
        # Last, so that a state asked for meanwhile is the one that was loaded.
        self._position, self._resumed = position, None

    def begin(self, leaving: StopFlag) -> tuple[EpochPosition, Any, Any]:
        """Begin an epoch.

        Called on a worker: to shuffle a large dataset takes a while.

        Args:
            leaving: Of the iteration.

        Returns:
            Where it is, the iterator of what remains of it, and what that begins with. Of an async
            iterable, which is iterated elsewhere: where it is, what puts it back (or None), `END`.
        """
        with self.beginning() as position:
            if not (position.resumed and self.stateful is not None):
                return position, *self.first(self._draw(leaving), position.batches, leaving)
            if position.batches:
                self._draw_seeds()  # the state, and what it may have of the generator, is of behind
            putting_back = self.putting_back(position)
            putting_back.before()
            if position.last and putting_back.done:
                # Nothing remains, and `iter` might begin what is for the next epoch.
                self.put_back_at_end = True
                return position, putting_back if self._is_async else iter(()), END
            contents = self._contents(leaving) if position.batches else self._draw(leaving)
            if contents is None:
                return position, putting_back, END
            putting_back.behind(contents if self.by_index else contents.samples)
            return position, *self.first(contents, 0, leaving)

    def putting_back(self, position: EpochPosition) -> PuttingBack:
        """Puts what has a state of its own back to where the consumer was."""
        return PuttingBack(
            self.stateful,
            position.after,
            begun=position.batches > 0,
            around=self.generators.watching,
        )

    def _start(self) -> Start:
        stateful = own_state(self.stateful, iterated=self._position is not None)
        return Start(self.generators.states(), self._seeded, stateful, self.exhausted)

    def _draw(self, leaving: StopFlag) -> Any:
        if not self.by_index:
            self._draw_seeds()
            return self._contents(leaving)
        indices = self._contents(leaving)
        self._draw_seeds()
        return indices

    def _draw_seeds(self) -> None:
        seed_pipes(self.dataset, self.loader.generator)
        if not self._seeded:
            draw_seed(self.loader.generator)
            self.seed_drawn()

    def seed_drawn(self) -> None:
        """`base_seed` was, of this epoch and, where workers persist, of all that follow."""
        self._seeded = self.persistent

    def seed_lost(self) -> None:
        """Those that persisted are gone: who works in the next epoch draws another."""
        self._seeded = False

    def _contents(self, leaving: StopFlag) -> Any:
        if self.by_index:
            return iter(self.index_sampler)
        if self._is_async:
            return None  # nothing of it is drawn, and not on a worker
        size, drop_last = self.loader.batch_size, self.loader.drop_last
        return SampleBatches(self.dataset, size, leaving, drop_last=drop_last)

    def first(self, contents: Any, skipped: int, leaving: StopFlag) -> tuple[Any, Any]:
        """`contents`, and the first of them that is not skipped."""
        if contents is None:
            return None, END  # `AsyncRequests` does the rest
        first = next(contents, END)
        while skipped and first is not END and not leaving.is_set:
            first = next(contents, END)
            skipped -= 1
        if first is END and self.put_back_at_end:
            contents = self._contents(leaving)
            first = next(contents, END)
        self.put_back_at_end = False
        return contents, first


class SampleBatches(Iterator[Any]):
    """The samples of an iterable, as torch batches them; one by one where `size` is None."""

    def __init__(
        self, dataset: Iterable[Any], size: int | None, leaving: StopFlag, *, drop_last: bool
    ) -> None:
        self.samples = iter(dataset)
        """The iterator of the dataset."""
        self._size = size
        self._leaving = leaving
        self._drop_last = drop_last
        self._ended = False

    def __next__(self) -> Any:
        if self._ended:
            raise StopIteration
        if self._size is None:
            return next(self.samples)
        leaving = self._leaving
        samples: list[Any] = []
        # By `next`, as torch: `for` or `islice` would call `iter` in each batch, where what is its
        # own iterator may start over.
        while len(samples) < self._size:
            sample = next(self.samples, END)
            if sample is END:
                break
            samples.append(sample)
            if leaving.is_set:
                # Incomplete, and nobody reads it. An error would be taken for the iterable's own,
                # which has nothing left to be closed then.
                return samples
        self._ended = len(samples) < self._size
        if not samples or (self._ended and self._drop_last):
            raise StopIteration
        return samples

    def close(self) -> None:
        """Leave the `with` and `finally` blocks of a generator."""
        close = getattr(self.samples, "close", None)
        if close is not None:
            close()


class Numbered:
    """What all kinds of requests have in common."""

    position: EpochPosition
    """Of the consumer; there before the first request is."""

    def __init__(self, sampling: Sampling, leaving: StopFlag) -> None:
        self._sampling = sampling
        self._leaving = leaving
        self._number = 0
        self._held: Request | None = None

    def delivered(self, request: Request) -> None:
        """It was handed to the consumer, or left out as failed."""
        self.position.deliver(request)

    def finished(self) -> None:
        """The consumer was told that there is no more."""
        self.position.finished = True
        self._sampling.warn_if_longer(self.position.batches)

    def begin(self, position: EpochPosition) -> None:
        """Count on from there."""
        self.position = position
        self._number = position.batches

    def requests(self, contents: Iterator[Any], content: Any) -> Generator[Request, None, None]:
        """Requests for `content` and for what `contents` has next, drawn as they are asked for.

        By `next` alone: what is its own iterator may start over where `iter` is called again.
        """
        while True:
            request = self.request(content)
            if request is not None:
                yield request
            if content is END:
                return
            content = next(contents, END)

    def request(self, content: Any) -> Request | None:
        """The next request, now that `content` (or `END`) has come; None if there is none yet."""
        stateful = self._sampling.stateful
        request = None
        if stateful is not None:
            # One behind, to say of each whether it is the last: a sampler that has ended may have
            # the state of one that begins.
            request, self._held = self._held, None
            if content is not END:
                self._held = Request(self._number, content, own_state(stateful))
            elif request is not None:
                request = request._replace(last=True)
        elif content is not END:
            request = Request(self._number, content)
        self._number += 1
        if content is END:
            self._sampling.exhausted = True
        if request is None or self.position.was_delivered(request):
            return None
        return request


class Requests(Numbered, Iterator[Request]):
    """The batches of an epoch, begun by the first `next`; one thread at a time.

    Args:
        sampling: Of the epoch.
        leaving: Of the iteration.
        begin_worker: Called in the thread, each time before anything is read.
    """

    def __init__(
        self,
        sampling: Sampling,
        leaving: StopFlag,
        begin_worker: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(sampling, leaving)
        self._begin_worker = begin_worker
        self._contents: Any = None
        self._requests: Generator[Request, None, None] | None = None

    def __next__(self) -> Request:
        if self._begin_worker is not None:
            self._begin_worker()
        if self._requests is None:
            position, self._contents, first = self._sampling.begin(self._leaving)
            self.begin(position)
            self._requests = self.requests(self._contents, first)
        return next(self._requests)

    def close(self) -> None:
        """Close what is iterated, if that can be closed."""
        if self._requests is not None:
            self._requests.close()  # a cycle, and its frame has a batch in hand
        if hasattr(self._contents, "close"):
            self._contents.close()


class AsyncRequests(Numbered, AsyncIterator[Request]):
    """As `Requests`, of an async iterable; at most `bound` of them are not delivered."""

    def __init__(
        self, sampling: Sampling, leaving: StopFlag, executor: DeviceExecutor, bound: int
    ) -> None:
        super().__init__(sampling, leaving)
        self._executor = executor
        self._room = anyio.Semaphore(bound)
        self._begun = False
        self._samples: Any = None
        self._first = END
        self._ended = False

    def delivered(self, request: Request) -> None:
        """It was handed to the consumer, or left out as failed: there is room for another."""
        super().delivered(request)
        self._room.release()

    async def __anext__(self) -> Request:
        if not self._begun:
            await self._begin()
            self._begun = True
        # Before its samples are fetched: they count.
        await self._room.acquire()
        while True:
            content, self._first = self._first, END
            if content is END:
                content = await self._content()
            request = self.request(content)
            if request is not None:
                return request
            if content is END:
                raise StopAsyncIteration

    async def _begin(self) -> None:
        begun = await self._executor.run_sync(self._sampling.begin, self._leaving)
        position, putting_back, _ = begun
        self.begin(position)
        if position.last and putting_back is not None and putting_back.done:
            self._ended = True  # as in `Sampling.begin`
            return
        self._samples = aiter(self._sampling.dataset)
        if putting_back is not None:
            await self._executor.run_sync(putting_back.behind, self._samples)
        if self._sampling.stateful is None:
            for _ in range(position.batches):
                await self._content()
        elif self._sampling.put_back_at_end:
            # As in `Sampling.first`.
            self._first = await self._content()
            if self._first is END:
                self._samples, self._ended = aiter(self._sampling.dataset), False
            self._sampling.put_back_at_end = False

    async def _content(self) -> Any:
        """The samples of the next batch, as torch batches them."""
        loader = self._sampling.loader
        size = loader.batch_size or 1
        samples: list[Any] = []
        while len(samples) < size and not self._ended:
            sample = await anext(self._samples, END)
            if sample is END:
                self._ended = True
            else:
                samples.append(sample)
        if not samples or (self._ended and loader.drop_last):
            return END
        return samples[0] if loader.batch_size is None else samples

    async def aclose(self) -> None:
        """Close what is iterated, if that can be closed."""
        if hasattr(self._samples, "aclose"):
            await self._samples.aclose()
