"""How far an iteration of a pipeline is, and what the next needs to go on behind it."""

import copy
import inspect
import threading
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterDataPipe,
    SequentialSampler,
    graph_settings,
)

from .._base.arguments import as_int, check_int
from .._base.tracebacks import in_words
from .._base.tree import children
from ._outcome import END, without_frames


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return `generator`, or raise TypeError if it is not a `torch.Generator`."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    return generator


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`; None: from torch's own."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def seed_pipes(dataset: object, generator: torch.Generator | None) -> None:
    """Seed what draws in an `IterDataPipe` (`shuffle`) for its next epoch; nothing else is."""
    if isinstance(dataset, IterDataPipe):
        seed = draw_seed(generator)
        graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(seed))


class NoState:
    """In place of a state: it was asked for, and `error` came.

    Kept, for who reads need not want to resume: it is raised where somebody asks for the state.
    """

    def __init__(self, error: Exception) -> None:
        self._error = without_frames(error)

    def refuse(self, party: str) -> NoReturn:
        """Raise ValueError: the `party` (source, sampler or dataset) gives no state."""
        # Not the error itself: its traceback would hold who asks, for as long as this is kept.
        words = in_words(self._error)
        raise ValueError(f"the {party} gives no state: {words}") from self._error


def is_stateful(given: object) -> bool:
    """Whether an object has a state that can be saved and loaded.

    A `state_dict` that needs arguments does not count: some datasets have one for a loader of their
    own, which passes the number of delivered samples.
    """
    state_dict = getattr(given, "state_dict", None)
    if state_dict is None or not hasattr(given, "load_state_dict"):
        return False
    try:
        inspect.signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # the signature of a function written in C may be unknown
        pass
    return True


def own_state(party: Any, *, iterated: bool = True) -> Any:
    """A copy of its state, or `NoState`; None: it has none.

    Args:
        party: May have one, that can be put back into it.
        iterated: Whether it was. Before that, some have no state yet: as they are made, they are
            where they begin.
    """
    if not is_stateful(party):
        return None
    try:
        # It may be the party's own, which goes on.
        return copy.deepcopy(party.state_dict())
    except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who asks for the state
        return NoState(error) if iterated else None


class PuttingBack:
    """Puts what is iterated back to a state of its own: before its `iter`, or around it.

    Most go on in the `iter` that comes behind. What is its own iterator may start over there, or
    take no state before: as by torchdata's loader, it is put back behind its `iter`.

    Args:
        party: Has the state.
        state: Its; None to leave it as it is.
        begun: Whether the state was taken behind an `iter`, not before.
        around: Makes what the state is loaded in.
    """

    def __init__(
        self,
        party: Any,
        state: Any,
        *,
        begun: bool,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._party = party
        self._state = state
        self._begun = begun
        self._around = around
        self.done = state is None
        """Whether it was put back."""

    def before(self) -> None:
        """To be called before `iter`."""
        if self._state is None:
            return
        iterates = hasattr(self._party, "__next__") or hasattr(self._party, "__anext__")
        with suppress(Exception) if iterates else nullcontext():
            self._load()

    def behind(self, iterator: Any) -> None:
        """To be called with what `iter` returned, before anything is read."""
        if self._state is None:
            return
        # One that goes on in its `iter` does so once a loading: another would be for the next.
        again = self._begun and iterator is self._party and not self._is_there()
        if again or not self.done:
            self._load()

    def _is_there(self) -> bool:
        try:
            return _equal(self._party.state_dict(), self._state)
        except Exception:  # noqa: BLE001  # it cannot be compared: nobody knows
            return False

    def _load(self) -> None:
        with self._around():
            # A copy, which it may take for its own.
            self._party.load_state_dict(copy.deepcopy(self._state))
        self.done = True


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    parts, others = children(one), children(other)
    if parts is not None and others is not None:
        keys = list(parts[0]) == list(others[0])
        return keys and all(map(_equal, parts[1], others[1]))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)  # of NumPy's arrays: one for each


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


_KEYS = {"delivered", "ended", "seeds", "generators", "source"}


@dataclass(slots=True)
class PipelinePosition:
    """Of one iteration; also when that is gone."""

    seeds: list[int]
    """What each random step was seeded with."""
    generators: list[torch.Tensor]
    """The state of the generator that each seed was drawn from, for the next iteration."""
    source: Any
    """The source's own state when the iteration began (or, once it has ended, now), or `NoState`;
    None: it has none."""
    delivered: int = 0
    ended: bool = False
    """Whether the reader was told that there is no more."""

    def state_dict(self) -> dict[str, Any]:
        """A copy, as a dict.

        Raises:
            ValueError: The source gives no state.
        """
        if isinstance(self.source, NoState):
            self.source.refuse("source")
        return {
            "delivered": self.delivered,
            "ended": self.ended,
            "seeds": list(self.seeds),
            "generators": list(self.generators),
            "source": copy.deepcopy(self.source),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], randoms: int) -> "PipelinePosition":
        """The position that a `state_dict` describes, of a pipeline with that many random steps.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is that of another pipeline, or no state at all.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a state dict, got {type(state).__name__}")
        if set(state) != _KEYS:
            raise ValueError(f"expected the keys {sorted(_KEYS)}, got {sorted(map(str, state))}")
        position = cls(**copy.deepcopy(dict(state)))
        try:
            position._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a pipeline: {error}") from None
        if len(position.seeds) != randoms:
            raise ValueError(
                f"the state is that of a pipeline with {len(position.seeds)} shuffles, this one "
                f"has {randoms}"
            )
        return position

    def _check(self) -> None:
        """Raise where an iteration would, which is late, and in words about something else."""
        check_int("delivered", self.delivered, at_least=0)
        for seed in self.seeds:
            as_int("a seed", seed)
        for generator in self.generators:
            torch.Generator().set_state(generator)
        if len(self.generators) != len(self.seeds):
            raise ValueError(f"{len(self.seeds)} seeds of {len(self.generators)} generators")


def begun(
    source: Any, generators: Sequence[torch.Generator], *, first: bool = False
) -> PipelinePosition:
    """The position of an iteration that begins: one seed is drawn from each generator.

    Args:
        source: Of the pipeline.
        generators: Of its random steps.
        first: Whether none began before.
    """
    seeds = [draw_seed(generator) for generator in generators]
    return PipelinePosition(seeds, _states(generators), own_state(source, iterated=not first))


def now(
    last: PipelinePosition | None, source: Any, generators: Sequence[torch.Generator]
) -> PipelinePosition:
    """The position of the iteration that began last; between two, as if one had just ended."""
    # As they are now, not as it left them: others may have drawn from them since (dropout, from
    # torch's own), before the next iteration does.
    states = _states(generators)
    if last is not None and not last.ended:
        return replace(last, generators=states)
    delivered = 0 if last is None else last.delivered
    state = own_state(source, iterated=last is not None)
    return PipelinePosition([0] * len(states), states, state, delivered, ended=True)


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def put_back(generators: Sequence[torch.Generator], position: PipelinePosition) -> None:
    """Set them to what a state has of them; called where it is loaded.

    Not where the next iteration begins: who iterates the pipeline (another one, a loader) may draw
    from the same generator first, torch's own above all, and that draw would come twice.
    """
    for generator, state in zip(generators, position.generators, strict=True):
        generator.set_state(state)


def resumed(
    position: PipelinePosition, source: Any, generators: Sequence[torch.Generator]
) -> PipelinePosition:
    """The position of the iteration that goes on from `position`; the source is put back to it."""
    if position.source is not None:
        source.load_state_dict(copy.deepcopy(position.source))  # which it may take for its own
    # After the end, the next one is to begin.
    first = position.source is None
    return begun(source, generators, first=first) if position.ended else position


def from_its_beginning(source: Any) -> Any:
    """The items of a source that was put back to where an epoch begins.

    Some sources are at their end there, and yield nothing once, before they begin again: those of
    torchdata, whose state was taken behind the last item of the epoch before.
    """
    return _async_items(source) if isinstance(source, AsyncIterable) else _items(source)


# By `next` alone: `for` and `yield from` call `iter` again, where what is its own iterator
# may start over.
def _items(source: Iterable[Any]) -> Iterator[Any]:
    items: Any = iter(source)
    try:
        item = next(items, END)
        if item is END:
            items = iter(source)
            item = next(items, END)
        while item is not END:
            yield item
            item = next(items, END)
    finally:
        if hasattr(items, "close"):
            items.close()


async def _async_items(source: AsyncIterable[Any]) -> AsyncIterator[Any]:
    items = aiter(source)
    try:
        item = await anext(items, END)
        if item is END:
            items = aiter(source)
            item = await anext(items, END)
        while item is not END:
            yield item
            item = await anext(items, END)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
