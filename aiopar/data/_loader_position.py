"""Where a loader is: the generators at an epoch's start, and the batches delivered since.

Fetching runs ahead of its consumer, so that neither the generators nor the sampler are, at any
moment, where the consumer is. Hence what is kept is how the epoch began, and how many batches of
it were handed out; a sampler that has a `state_dict` of its own is asked after each batch that it
yields, and its answer travels with the batch.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

GLOBAL = "torch"
"""Stands for torch's default generator among the names of generators."""


class Request(NamedTuple):
    """One batch to be fetched."""

    number: int
    """Of the batch in its epoch, from 0."""
    content: Any
    """Indices; of an iterable, the samples themselves."""
    after: Any = None
    """The state of a stateful sampler or dataset behind it, or `NoState`."""
    last: bool = False
    """Whether it is known to be the epoch's last; told for stateful ones only."""


class Generators:
    """The generators that the order of a loader's epochs is drawn from."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._own: dict[str, torch.Generator] = {}
        self._set_by_state = False
        self.draws_globally = loader.generator is None
        """Whether torch's default generator is, or may be, one of them."""
        if loader.generator is not None:
            self._own["generator"] = loader.generator
        name, sampler = "sampler", loader.sampler
        if loader.batch_sampler is not None:
            name, sampler = "batch_sampler", loader.batch_sampler
        self._add(name, sampler)

    def _add(self, name: str, sampler: Any) -> None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            if not any(generator is other for other in self._own.values()):
                self._own[f"{name}.generator"] = generator
        elif type(sampler) is BatchSampler:
            self._add(f"{name}.sampler", sampler.sampler)
        elif type(sampler) is not SequentialSampler:
            # One without a generator, or one of the user's: it may draw from torch's own.
            self.draws_globally = True

    def states(self) -> dict[str, Tensor]:
        """Where each of them is, by name."""
        states = {name: generator.get_state() for name, generator in self._own.items()}
        if self.draws_globally:
            states[GLOBAL] = torch.get_rng_state()
        return states

    def check(self, states: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `states` are of such generators as these."""
        names = [*self._own, *([GLOBAL] if self.draws_globally else [])]
        if set(states) != set(names):
            raise ValueError(
                f"the state is of a loader that draws from {sorted(states)}, this one draws from "
                f"{sorted(names)}: give it the same generator and samplers"
            )

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Put all back to `states`, torch's default one only until this is left.

        It is everybody's, and has gone on since (dropout, initial weights): what is drawn from it
        here was drawn before.
        """
        now = torch.get_rng_state() if self.draws_globally else None
        self._set_by_state = False
        self.put_back(states)
        try:
            yield
        finally:
            if now is not None and not self._set_by_state:
                torch.set_rng_state(now)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A state is loaded inside; if it sets torch's default one, that is not undone.

        Who has it in a state of its own goes on drawing from it, where that says.
        """
        before = torch.get_rng_state()
        yield
        if not torch.equal(before, torch.get_rng_state()):
            self._set_by_state = True

    def put_back(self, states: Mapping[str, Tensor], *, shared: bool = True) -> None:
        """Set them to `states`; torch's default one only if `shared`."""
        for name, generator in self._own.items():
            generator.set_state(states[name])
        if self.draws_globally and shared:
            torch.set_rng_state(states[GLOBAL])


@dataclass
class Start:
    """How an epoch began."""

    generators: dict[str, Tensor]
    seeded: bool
    """Whether `base_seed` was drawn, once for all, in an epoch before."""
    stateful: Any
    """The state of a stateful sampler or dataset, or `NoState`."""
    exhausted: bool
    """Whether that state is the one behind the last item of an epoch."""


@dataclass
class EpochPosition:
    """How far an epoch has been delivered; written by its consumer and by who draws its batches."""

    start: Start
    batches: int = 0
    """All batches with a lower number were delivered, or left out as failed."""
    ahead: set[int] = field(default_factory=set)
    """Those delivered beyond, where batches come in the order of completion."""
    after: Any = None
    """The state of a stateful sampler or dataset behind batch `batches - 1`, or `NoState`."""
    last: bool = False
    """Whether batch `batches - 1` was the last, as far as that is told."""
    finished: bool = False
    """Whether the consumer was told that the epoch has ended."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._behind: dict[int, Request] = {}
        self._undrawn = set(self.ahead)
        self.resumed = False
        """Whether it goes on from a state that was loaded."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "EpochPosition":
        """The one that `state` was taken at."""
        names = ("generators", "seeded", "stateful", "exhausted")
        start = Start(*(state[name] for name in names))
        position = cls(
            start, state["batches"], set(state["ahead"]), state["stateful"], state["last"]
        )
        position.resumed = True
        return position

    def was_delivered(self, request: Request) -> bool:
        """Whether `request` was before the state was taken that this goes on from."""
        if request.number not in self._undrawn:
            return False
        self.deliver(request)  # for the state behind it
        return True

    def deliver(self, request: Request) -> None:
        """It was handed to the consumer, or left out as failed."""
        with self._lock:
            self._undrawn.discard(request.number)
            self.ahead.add(request.number)
            if request.after is not None:
                self._behind[request.number] = request._replace(content=None)
            # One delivered before the state was taken that this goes on from: until it is drawn
            # again, nobody knows the state of a stateful sampler behind it.
            while self.batches in self.ahead and self.batches not in self._undrawn:
                self.ahead.remove(self.batches)
                behind = self._behind.pop(self.batches, None)
                if behind is not None:
                    self.after, self.last = behind.after, behind.last
                self.batches += 1

    def as_dict(self) -> dict[str, Any]:
        """It, in plain values and tensors."""
        with self._lock:
            return {
                "in_epoch": True,
                "batches": self.batches,
                "ahead": sorted(self.ahead),
                "generators": dict(self.start.generators),
                "seeded": self.start.seeded,
                "stateful": self.after if self.batches else self.start.stateful,
                "exhausted": self.start.exhausted and not self.batches,
                "last": self.last,
            }


KEYS = frozenset(
    (
        "in_epoch",
        "batches",
        "ahead",
        "generators",
        "seeded",
        "stateful",
        "exhausted",
        "last",
        "now",
        "set_epoch",
        "batch_size",
        "processes",
    )
)
"""What a state dict of a loader has."""


def check_state(state: object) -> None:
    """Raise unless `state` is one that a loader's `state_dict` returned."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a loader's state is a dict, not {type(state).__name__}")
    if set(state) != KEYS:
        missing, unknown = sorted(KEYS - set(state)), sorted(map(str, set(state) - KEYS))
        raise ValueError(f"this is no loader's state: {missing=}, {unknown=}")
