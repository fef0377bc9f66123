"""The order of a loader's batches: kinds of datasets, samplers, resuming, requests."""

import copy
import inspect
import reprlib
import warnings
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain, count
from typing import Any, Protocol, TypeAlias

import anyio
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    IterDataPipe,
    Subset,
    graph_settings,
)

from .._base.arguments import described, is_iterable, items_of
from .._base.forking import ReentrantLock
from ..executor._executor import DeviceExecutor
from ..executor._generators import END
from ._cursor import (
    Cursor,
    FetchRequest,
    Generators,
    StateLoader,
    draw_seed,
    equal_states,
    is_stateful,
    read_state,
)
from ._steps import StopFlag


class _Indexed(Protocol):
    """A map-style dataset; `__getitem__` may be `async def`."""

    def __getitem__(self, index: Any, /) -> Any: ...


class _Batched(Protocol):
    """A dataset that fetches many samples at once; `__getitems__` may be `async def`."""

    def __getitems__(self, indices: Any, /) -> Any: ...


Source: TypeAlias = Dataset[Any] | Iterable[Any] | AsyncIterable[Any] | _Indexed | _Batched
"""What an `AsyncDataLoader` can read from."""


class DatasetKind(Enum):
    """How a dataset gives its samples."""

    MAP = auto()  # by index, from a plain `__getitem__` or `__getitems__`
    ASYNC_MAP = auto()  # by index, from an `async def __getitem__` or `__getitems__`
    ITERABLE = auto()
    ASYNC_ITERABLE = auto()

    @property
    def by_index(self) -> bool:
        return self in (DatasetKind.MAP, DatasetKind.ASYNC_MAP)

    @property
    def is_async(self) -> bool:
        """Whether tasks read the dataset."""
        return self in (DatasetKind.ASYNC_MAP, DatasetKind.ASYNC_ITERABLE)

    @property
    def owner(self) -> str:
        """What has the state of an epoch, in messages."""
        return "sampler" if self.by_index else "dataset"


def kind_of(dataset: object, *, batched: bool) -> DatasetKind:
    """The kind of `dataset`; its `__getitems__` counts only if the loader is `batched`.

    As in torch, a dataset that can be indexed is read by index unless it is an `IterableDataset`.
    """
    # A class has the methods of its instances, but is not a dataset. An enum class is iterable.
    if not isinstance(dataset, type) or is_iterable(dataset):
        if hasattr(dataset, "__aiter__"):
            return DatasetKind.ASYNC_ITERABLE
        if isinstance(dataset, IterableDataset):
            return DatasetKind.ITERABLE
        if hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__"):
            asynchronous = fetches_async(dataset, batched=batched)
            return DatasetKind.ASYNC_MAP if asynchronous else DatasetKind.MAP
        if hasattr(dataset, "__iter__"):
            return DatasetKind.ITERABLE
    raise TypeError(
        "dataset must have __getitem__ or __getitems__ (plain or async def), or be an iterable or "
        f"an async iterable; got {described(dataset)}"
    )


def getitems_of(dataset: Any) -> Any:
    """The `__getitems__` of `dataset`, which fetches a whole batch, or None."""
    subset = isinstance(dataset, Subset)
    if subset and fetches_async(dataset, batched=False) and getitems_of(dataset.dataset) is None:
        return None  # `Subset.__getitems__` would return a list of coroutines
    # As in torch, the attribute of a wrapper may be None.
    return getattr(dataset, "__getitems__", None) or None


def fetches_async(dataset: Any, *, batched: bool) -> bool:
    """Whether an `async def` fetches the samples of `dataset`, or its batches if `batched`."""
    while isinstance(dataset, Subset):
        # The methods of `Subset` are plain, and return the coroutines of the inner dataset.
        dataset = dataset.dataset
    if isinstance(dataset, ConcatDataset):
        # A `ConcatDataset` fetches one sample at a time, even if its parts have `__getitems__`.
        return all(fetches_async(part, batched=False) for part in dataset.datasets)
    getitem = (batched and getitems_of(dataset)) or getattr(dataset, "__getitem__", None)
    return inspect.iscoroutinefunction(getitem)


class WrappedIterable(IterableDataset[Any]):
    """Makes an `IterableDataset` of any iterable, plain or async, for torch's loader."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)  # the source raises the TypeError if it has no length


_SETTINGS = ("default_generator", "set_epoch", "batch_size", "processes")
"""The keys of a loader's state that are not attributes of the cursor."""


class Sampling:
    """The order of a loader's batches, and the reader's position in it.

    The `num_workers` of the torch loader is 0 unless worker processes load.
    """

    def __init__(self, loader: "DataLoader[Any]", kind: DatasetKind, *, persistent: bool) -> None:
        self.loader = loader
        self.dataset: Any = loader.dataset
        if isinstance(self.dataset, WrappedIterable):
            self.dataset = self.dataset.source
        self.kind = kind
        self.stateful = self._find_stateful()  # the sampler or dataset; None: neither is stateful
        self.generators = Generators.of_loader(loader)
        self.restart_if_empty = False
        """Whether `stateful` was restored to its state at the end of an epoch. Then `stateful` may
        yield nothing after the next `iter`, and begin again after another `iter`."""
        self._persistent = persistent
        # The state of `stateful` after the first batch of an epoch that was resumed midway; END if
        # the epoch had no batch.
        self._first: Any = None
        self._iterator: Any = None  # of the running epoch, if the iterator has a state of its own
        self._at_end = False  # the sampler was read to its end, and no epoch has begun since
        self._seeded = False
        self._epoch: int | None = None
        self._loaded: dict[str, Any] | None = None
        self._cursor: Cursor | None = None
        # Guards the cursor: the reader and the worker that draws batches write to it.
        self._lock = ReentrantLock()

    @property
    def _iterated(self) -> Any:
        """What is iterated: the dataset, or the sampler of the indices of each batch or sample."""
        if not self.kind.by_index:
            return self.dataset
        batch_sampler = self.loader.batch_sampler
        return self.loader.sampler if batch_sampler is None else batch_sampler

    def _find_stateful(self) -> Any:
        if not self.kind.by_index and self.loader.num_workers:
            return None  # each worker process iterates its own copy, whose state is unknown here
        found = self._iterated
        while found is not None:
            if is_stateful(found):
                return found
            found = getattr(found, "sampler", None) if self.kind.by_index else None
        return None

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the samplers and the dataset that have it, once each."""
        self._epoch = epoch
        batch_sampler = self.loader.batch_sampler
        inner = getattr(batch_sampler, "sampler", None)
        owners: list[Any] = [self.loader.sampler, batch_sampler, inner, self.dataset]
        for owner in {id(owner): owner for owner in owners}.values():
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)

    # The reader.

    def delivered(self, request: FetchRequest) -> None:
        with self._lock:
            assert self._cursor is not None  # noqa: S101  # the request was made with it
            self._cursor.deliver(request)

    def finished(self) -> None:
        assert self._cursor is not None  # noqa: S101
        self._cursor.ended = True
        # One warning an epoch. torch warns at each excess batch, and counts a batch as one sample.
        batches = self._cursor.delivered
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
            stacklevel=4,  # the reader's line
        )

    # Saving and loading.

    @property
    def skipped(self) -> int:
        """The number of batches of the next epoch that were delivered before it was resumed."""
        return 0 if self._loaded is None else self._loaded["delivered"]

    def state_dict(self) -> dict[str, Any]:
        if self._loaded is not None:
            return copy.deepcopy(self._loaded)
        cursor = self._cursor
        if cursor is None or cursor.ended:
            cursor = self._new_cursor()
            cursor.ended = True
        with self._lock:
            state = cursor.state_dict(self.kind.owner)
        settings = (
            torch.get_rng_state() if self.generators.has_default else None,
            self._epoch,
            self.loader.batch_size,
            self._sharing_processes,
        )
        return state | dict(zip(_SETTINGS, settings, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        cursor = Cursor.from_state_dict(state, *_SETTINGS)
        self.generators.check(cursor.generators)
        # Within an epoch and without a stateful sampler, the position is a number of batches of one
        # size. The size of a user's batch sampler is unknown (None).
        if not cursor.ended and self.stateful is None and cursor.source is None:
            own = {"batch_size": self.loader.batch_size, "processes": self._sharing_processes}
            for name, value in own.items():
                if state[name] != value and None not in (state[name], value):
                    raise ValueError(
                        f"the state is from within an epoch with {name}={state[name]}, this loader "
                        f"has {value}: samples would be lost or repeated"
                    )
        if state["default_generator"] is not None:
            torch.set_rng_state(state["default_generator"])
        if state["set_epoch"] is not None:
            self.set_epoch(state["set_epoch"])
        self._loaded = copy.deepcopy(dict(state))

    @property
    def _sharing_processes(self) -> int:
        """How many worker processes share an iterable, which decides the order of the batches."""
        return 0 if self.kind.by_index else self.loader.num_workers

    # Beginning an epoch.

    @contextmanager
    def beginning(self) -> Iterator[Cursor]:
        """Begin an epoch; the block of a resumed epoch draws the same numbers as before."""
        if self._loaded is None:
            self._cursor = cursor = self._new_cursor()
            self._at_end = False
            yield cursor
            return
        self._cursor = cursor = Cursor.from_state_dict(self._loaded, *_SETTINGS)
        within_epoch, cursor.ended = not cursor.ended, False
        self._seeded, self._at_end = cursor.seeded, False
        self.restart_if_empty = self.stateful is not None and cursor.at_end
        if within_epoch:
            with self.generators.replaying(cursor.generators):
                yield cursor
        else:
            # The saved epoch had ended: nothing is drawn again. `load_state_dict` has set the
            # default generator.
            self.generators.restore(cursor.generators, default=False)
            yield cursor
        # Last, because `state_dict` returns the loaded state until the epoch has begun.
        self._loaded = None

    def _new_cursor(self) -> Cursor:
        last = self._cursor
        state = read_state(self.stateful, iterated=last is not None)
        return Cursor(
            self.generators.states(),
            state,
            at_end=self._at_end,
            # New worker processes draw a new `base_seed`.
            seeded=self._seeded and getattr(self.loader, "running", True),
            initial=state if last is None else last.initial,
        )

    def begin(self, stop: StopFlag) -> tuple[Cursor, Any, Iterator[Any]]:
        """Begin an epoch of a plain dataset; return its cursor, iterator and requests' contents."""
        with self.beginning() as cursor:
            state = self._load_state(cursor)
            if state is None:
                return cursor, None, iter(())
            iterator = items_of(self._iterated)
            if self.kind.by_index and not self._goes_on(cursor):
                self._draw_seeds()
            state.after_iter(iterator)
            return cursor, *self.remaining(iterator, self.skipped_of(cursor, iterator), stop)

    def begin_async(self) -> tuple[Cursor, StateLoader | None]:
        """Begin an epoch of an async iterable, up to its `aiter`; as `_load_state`, on a worker."""
        with self.beginning() as cursor:
            return cursor, self._load_state(cursor)

    def _load_state(self, cursor: Cursor) -> StateLoader | None:
        """Load a state, and draw the seeds that come before `iter`; None: no batches remain.

        The caller must call `after_iter` of the result.
        """
        goes_on = self._goes_on(cursor)
        if goes_on:
            # First, because the saved state may include the generator's state after this draw.
            self._draw_seeds()
        state = self.state_loader(cursor)
        state.before_iter()
        if cursor.last and state.loaded:
            # `iter` might begin the next epoch.
            self.restart_if_empty = True
            return None
        if not goes_on and not self.kind.by_index:
            self._draw_seeds()
        return state

    def skipped_of(self, cursor: Cursor, iterator: Any) -> int:
        """How many batches of `iterator` must be skipped; loads the iterator's own state."""
        self._iterator = None
        if self.stateful is not None:
            return 0
        if not self.kind.by_index and is_stateful(iterator):
            self._iterator = iterator
            if cursor.midway and cursor.source is not None:
                iterator.load_state_dict(copy.deepcopy(cursor.source))
                return 0
        return cursor.delivered

    def _goes_on(self, cursor: Cursor) -> bool:
        """Whether a stateful sampler or dataset continues within an epoch."""
        return cursor.midway and self.stateful is not None

    def state_loader(self, cursor: Cursor) -> StateLoader:
        """Loads the cursor's state into the sampler or dataset, if the cursor was resumed."""
        state = cursor.source if cursor.resumed and self.stateful is not None else None
        return StateLoader(self.stateful, state, self.generators, iterated=cursor.delivered > 0)

    def _draw_seeds(self) -> None:
        if isinstance(self.dataset, IterDataPipe):
            # The random steps of a datapipe (`shuffle`) are seeded for each epoch.
            seed = draw_seed(self.loader.generator)
            graph_settings.apply_random_seed(self.dataset, torch.Generator().manual_seed(seed))
        if not self._seeded:
            draw_seed(self.loader.generator)
            self.seed_drawn()

    def seed_drawn(self) -> None:
        """Record that `base_seed` was drawn; if workers persist, it serves all epochs."""
        self._seeded = self._persistent

    def _contents(self, iterator: Any, stop: StopFlag) -> Iterator[Any]:
        if self.kind.by_index:
            return iterator  # type: ignore[no-any-return]
        size, drop_last = self.loader.batch_size, self.loader.drop_last
        return sample_batches(iterator, size, stop, drop_last=drop_last)

    def remaining(self, iterator: Any, skipped: int, stop: StopFlag) -> tuple[Any, Iterator[Any]]:
        """The iterator, and its contents after `skipped` batches; draws the next content now."""
        contents = self._contents(iterator, stop)
        content = next(contents, END)
        while skipped and content is not END and not stop.is_set:
            content = next(contents, END)
            skipped -= 1
        while self.restarts(content is END):
            iterator = items_of(self._iterated)
            contents = self._contents(iterator, stop)
            content = next(contents, END)
        return iterator, _rest(content, contents)

    def restarts(self, empty: bool) -> bool:
        """Whether the sampler or dataset must be iterated again; `empty`: there was no batch.

        The loaded state may be from the end of an epoch. Or the dataset begins at a loaded state
        after each `iter`, as Hugging Face's do. Then the initial state is loaded.
        """
        cursor, first, self._first = self._cursor, self._first, None
        assert cursor is not None  # noqa: S101
        if self.restart_if_empty:
            self.restart_if_empty = False
            self._first = END if empty else None
            return empty
        if self.stateful is None or (first is None and not cursor.midway):
            return False
        here = END if empty else read_state(self.stateful)
        if cursor.midway:
            self._first = here
            return False
        if not equal_states(first, here):
            return False
        try:
            self.stateful.load_state_dict(copy.deepcopy(cursor.initial))
        except Exception as error:
            if empty:
                return False
            raise ValueError(
                f"the {self.kind.owner} begins each epoch at the state that was loaded, and "
                "cannot load the state from before its first epoch"
            ) from error
        return True

    # Requests.

    def requests(self, cursor: Cursor, contents: Iterator[Any]) -> Iterator[FetchRequest]:
        """The requests for the batches of `contents`; each content is drawn with its request."""
        make = self.request_maker(cursor)
        for content in chain(contents, (END,)):
            request = make(content)
            del content
            if request is not None:
                yield request
                del request

    def request_maker(self, cursor: Cursor) -> Callable[[Any], FetchRequest | None]:
        """A function that makes the request of each drawn content; its last argument is `END`.

        The result is None for a batch that was delivered before. With a stateful sampler, each
        request comes one call later, when it is known whether its batch is the last. The state does
        not tell, because a sampler may have the same state at its end as at its start.
        """
        numbers = count(cursor.delivered)
        owner = self._iterator if self.stateful is None else self.stateful
        held: FetchRequest | None = None

        def make(content: Any) -> FetchRequest | None:
            nonlocal held
            if content is END:
                self._at_end = True
                request, held = held and held._replace(last=True), None
            elif owner is None:
                request = FetchRequest(next(numbers), content)
            else:
                drawn = FetchRequest(next(numbers), content, read_state(owner))
                request, held = held, drawn
            with self._lock:
                delivered = request is None or cursor.was_delivered(request)
            return None if delivered else request

        return make


# These loops call `next`, not `iter`: a second `iter` in an epoch may restart an iterator.


def _rest(content: Any, contents: Iterator[Any]) -> Iterator[Any]:
    while content is not END:
        yield content
        content = next(contents, END)


def sample_batches(
    samples: Iterator[Any], size: int | None, stop: StopFlag, *, drop_last: bool
) -> Iterator[Any]:
    """Lists of `size` samples, as torch batches an iterable; `size` None: single samples."""
    batch: list[Any] = []
    while (sample := next(samples, END)) is not END:
        if size is None:
            yield sample
            continue
        batch.append(sample)
        del sample
        # After `stop` nobody reads the batch. An error raised here would count as the iterable's.
        if len(batch) == size or stop.is_set:
            full, batch = batch, []
            yield full
            del full
    if batch and not drop_last:
        yield batch


def draw_requests(
    sampling: Sampling, stop: StopFlag, begin_worker: Callable[[], object] | None = None
) -> Iterator[FetchRequest]:
    """The requests of one epoch of a plain dataset; `begin_worker` is called before each step."""
    if begin_worker is not None:
        begin_worker()
    cursor, iterator, contents = sampling.begin(stop)
    try:
        for request in sampling.requests(cursor, contents):
            yield request
            del request
            if begin_worker is not None:
                begin_worker()
    except GeneratorExit:
        if hasattr(iterator, "close"):
            iterator.close()
        raise


class AsyncRequests(AsyncIterator[FetchRequest]):
    """The requests of one epoch of an async iterable; at most `bound` are undelivered."""

    def __init__(self, sampling: Sampling, executor: DeviceExecutor, bound: int) -> None:
        self._sampling = sampling
        self._executor = executor
        self.room = anyio.Semaphore(bound)
        """Must be released when a batch was delivered."""
        self._make: Callable[[Any], FetchRequest | None] | None = None
        self._samples: Any = None
        self._first = END
        self._ended = False

    async def __anext__(self) -> FetchRequest:
        make = self._make or await self._begin()
        await self.room.acquire()  # first: a batch that is being fetched takes room, too
        while True:
            content, self._first = self._first, END
            if content is END:
                content = await self._content()
            request = make(content)
            if request is not None:
                return request
            if content is END:
                raise StopAsyncIteration

    async def _begin(self) -> Callable[[Any], FetchRequest | None]:
        sampling = self._sampling
        cursor, state = await self._executor.run_sync(sampling.begin_async)
        if state is None:
            self._ended = True
        else:
            self._samples = aiter(sampling.dataset)
            await self._executor.run_sync(state.after_iter, self._samples)
            for _ in range(sampling.skipped_of(cursor, self._samples)):
                await self._content()
            # As in `Sampling.remaining`.
            self._first = await self._content()
            while sampling.restarts(self._first is END):
                self._samples, self._ended = aiter(sampling.dataset), False
                self._first = await self._content()
        self._make = sampling.request_maker(cursor)
        return self._make

    async def _content(self) -> Any:
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
        if hasattr(self._samples, "aclose"):
            await self._samples.aclose()
