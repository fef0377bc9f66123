"""What the epochs of a loader are drawn from: torch's samplers, in torch's order, from anywhere.

Of each epoch torch draws `iter(sampler)`, then `base_seed` (that of worker processes: nobody needs
it here, but the generator goes on by it; where workers persist, in the first epoch alone), then the
first indices. So does this. For an `IterDataPipe` it draws a seed before all that, in each epoch.
"""

import copy
import reprlib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader

from ._checks import is_stateful
from ._dataset import Kind, Streamed
from ._item import END
from ._leaving import Leaving
from ._loader_position import EpochPosition, Generators, Start, check_state
from ._own_state import NoState, PuttingBack, own_state
from ._seeds import draw_seed, seed_pipes


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

    def begin(self, leaving: Leaving) -> tuple[EpochPosition, Any, Any]:
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

    def _draw(self, leaving: Leaving) -> Any:
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

    def _contents(self, leaving: Leaving) -> Any:
        if self.by_index:
            return iter(self.index_sampler)
        if self._is_async:
            return None  # nothing of it is drawn, and not on a worker
        size, drop_last = self.loader.batch_size, self.loader.drop_last
        return SampleBatches(self.dataset, size, leaving, drop_last=drop_last)

    def first(self, contents: Any, skipped: int, leaving: Leaving) -> tuple[Any, Any]:
        """`contents`, and the first of them that is not skipped."""
        if contents is None:
            return None, END  # `AsyncRequests` does the rest
        first = next(contents, END)
        while skipped and first is not END and not leaving.left:
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
        self, dataset: Iterable[Any], size: int | None, leaving: Leaving, *, drop_last: bool
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
            if leaving.left:
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
