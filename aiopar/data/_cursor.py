"""Where an iteration of a loader or a pipeline is, and how a later one goes on from there."""

import copy
import inspect
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .._base.arguments import as_int, check_instance, check_int
from .._base.tracebacks import in_words
from .._base.tree import children
from ._outcome import END, without_frames


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed, drawn as torch draws `base_seed`; None: from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """Return `generator`, or raise TypeError if it is not a `torch.Generator`."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    return generator


_DEFAULT = "torch"
"""The name of torch's default generator among the names of generators."""


class Generators:
    """The generators that the order of a loader's epochs is drawn from, by name."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._own: dict[str, torch.Generator] = {}
        self.default_was_set = False
        """Whether a sampler or dataset has set torch's default generator as it loaded its state."""
        self.has_default = loader.generator is None
        """Whether torch's default generator is, or may be, one of them."""
        if loader.generator is not None:
            self._own["generator"] = loader.generator
        if loader.batch_sampler is None:
            self._add("sampler", loader.sampler)
        else:
            self._add("batch_sampler", loader.batch_sampler)

    def _add(self, name: str, sampler: Any) -> None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            if not any(generator is other for other in self._own.values()):
                self._own[f"{name}.generator"] = generator
        elif type(sampler) is BatchSampler:
            self._add(f"{name}.sampler", sampler.sampler)
        elif type(sampler) is not SequentialSampler:
            # A sampler without a generator may draw from torch's default one.
            self.has_default = True

    def states(self) -> dict[str, Tensor]:
        """The state of each generator."""
        states = {name: generator.get_state() for name, generator in self._own.items()}
        if self.has_default:
            states[_DEFAULT] = torch.get_rng_state()
        return states

    def check(self, states: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `states` has a state for each generator, and no other."""
        names = [*self._own, *([_DEFAULT] if self.has_default else [])]
        if set(states) != set(names):
            raise ValueError(
                f"the state is of a loader that draws from {sorted(states)}, this one draws from "
                f"{sorted(names)}: give it the same generator and samplers"
            )

    def restore(self, states: Mapping[str, Tensor], *, default: bool = True) -> None:
        """Set the generators to `states`, torch's default one only with `default`."""
        for name, generator in self._own.items():
            generator.set_state(states[name])
        if self.has_default and default:
            torch.set_rng_state(states[_DEFAULT])

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Restore `states`; on leaving, torch's default generator is as it was before.

        Other code (dropout, initial weights) has drawn from the default generator since the states
        were read. What is drawn from it here was drawn before. If a state that is loaded here sets
        it, that stays.
        """
        now = torch.get_rng_state() if self.has_default else None
        self.default_was_set = False
        self.restore(states)
        try:
            yield
        finally:
            if now is not None and not self.default_was_set:
                torch.set_rng_state(now)


# The own state of a source, a dataset or a sampler.


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


class MissingState:
    """Stands for a state that could not be read, because `state_dict()` raised an error.

    The iteration goes on. The error is raised when somebody asks for the state.
    """

    def __init__(self, error: Exception) -> None:
        self._error = without_frames(error)

    def refuse(self, owner: str) -> NoReturn:
        """Raise ValueError: the `owner` (source, sampler or dataset) gives no state."""
        # A new error: the traceback of the stored one would keep the frames of this caller.
        words = in_words(self._error)
        raise ValueError(f"the {owner} gives no state: {words}") from self._error


def read_state(owner: Any, *, iterated: bool = True) -> Any:
    """A copy of the state of a source, dataset or sampler, or a `MissingState`; None: it has none.

    Some have no state before they are `iterated`, and need none.
    """
    if not is_stateful(owner):
        return None
    try:
        # A copy: the dict may be the one that the owner goes on to change.
        return copy.deepcopy(owner.state_dict())
    except Exception as error:  # noqa: BLE001  # raised when somebody asks for the state
        return MissingState(error) if iterated else None


class StateLoader:
    """Loads a saved state into a dataset or sampler, before its `iter` or after it.

    Most owners take the state before `iter`, and `iter` goes on from there. An owner that is its
    own iterator may start over in `iter`, or take no state before it. torchdata's loader therefore
    loads after `iter`; for such owners this does too. `iterated` says whether the state was read
    after an `iter`, not before. A state of None is not loaded.
    """

    def __init__(self, owner: Any, state: Any, generators: Generators, *, iterated: bool) -> None:
        self._owner = owner
        self._state = state
        self._generators = generators
        self._iterated = iterated
        self.loaded = state is None
        """Whether the owner has the state, or needs none."""

    def before_iter(self) -> None:
        """Load the state; called before `iter`."""
        if self._state is None:
            return
        own_iterator = hasattr(self._owner, "__next__") or hasattr(self._owner, "__anext__")
        with suppress(Exception) if own_iterator else nullcontext():
            self._load()

    def after_iter(self, iterator: Any) -> None:
        """Load the state if that is still needed; called with the result of `iter`, once."""
        if self._state is None:
            return
        # An owner that goes on in its `iter` does so once per load: another load would be for the
        # next epoch.
        restarted = self._iterated and iterator is self._owner and not self._has_state()
        if restarted or not self.loaded:
            self._load()

    def _has_state(self) -> bool:
        try:
            return _equal(self._owner.state_dict(), self._state)
        except Exception:  # noqa: BLE001  # a state that cannot be compared is loaded again
            return False

    def _load(self) -> None:
        before = torch.get_rng_state()
        # A copy: the owner may keep and change what it is given.
        self._owner.load_state_dict(copy.deepcopy(self._state))
        if not torch.equal(before, torch.get_rng_state()):
            self._generators.default_was_set = True
        self.loaded = True


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
    return bool(same.all() if hasattr(same, "all") else same)  # NumPy compares each element


# The cursor.


class FetchRequest(NamedTuple):
    """A batch that is to be fetched."""

    number: int
    """The number of the batch in its epoch, from 0."""
    content: Any
    """The indices; of an iterable, the samples themselves."""
    state: Any = None
    """The state of a stateful sampler or dataset after this batch, or a `MissingState`."""
    last: bool = False
    """Whether this is the last batch; only known with a stateful sampler or dataset."""

    def without_content(self) -> "FetchRequest":
        """The request without its indices or samples."""
        return self._replace(content=None)


@dataclass(eq=False)
class Cursor:
    """Where an iteration is. The cursor outlives the iteration.

    The items of a pipeline, or the batches of a loader's epoch, are numbered from 0. An iteration
    that goes on from a cursor draws them again from the same generators, and leaves out those that
    were delivered. A loader with a stateful sampler or dataset loads the state of that instead.

    Attributes:
        generators: The states of the generators that the order is drawn from, by name. A loader has
            the states from before the epoch, a pipeline those after its seeds were drawn.
        source: The own state of a pipeline's source at its start, or of a loader's sampler or
            dataset after batch `delivered - 1`; a `MissingState`; None: there is none.
        seeds: The seed of each shuffle of a pipeline.
        delivered: All items with a lower number were delivered, or left out as failed.
        ahead: The higher numbers that were delivered, if items come out of order.
        last: Whether item `delivered - 1` is known to be the last.
        ended: Whether the reader was told that there are no more items.
        at_end: Whether `source` is the state after the last item of the epoch before; of loaders.
        seeded: Whether `base_seed` was drawn in an earlier epoch, for all epochs; of loaders.
    """

    generators: dict[str, Tensor] = field(default_factory=dict)
    source: Any = None
    seeds: list[int] = field(default_factory=list)
    delivered: int = 0
    ahead: set[int] = field(default_factory=set)
    last: bool = False
    ended: bool = False
    at_end: bool = False
    seeded: bool = False

    def __post_init__(self) -> None:
        self.resumed = False
        """Whether it was loaded from a state."""
        self._states: dict[int, FetchRequest] = {}  # the state after each item of `ahead`
        # The items of `ahead` that the saved state has, until they are drawn again.
        self._undrawn = set(self.ahead)

    # Saving and loading.

    def state_dict(self, owner: str = "source") -> dict[str, Any]:
        """A copy of the attributes, in plain values and tensors.

        Raises:
            ValueError: The `owner` of the source's state gives none.
        """
        if isinstance(self.source, MissingState):
            self.source.refuse(owner)
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return copy.deepcopy(state | {"ahead": sorted(self.ahead)})

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], *extra: str) -> Self:
        """The cursor that `state` was made from.

        Args:
            state: The result of `state_dict`.
            extra: Other keys that `state` must have, which are not the cursor's.

        Raises:
            TypeError: `state` is no mapping.
            ValueError: `state` has other keys, or values that cannot be a cursor's.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a state dict, got {type(state).__name__}")
        expected = {*cls.__dataclass_fields__, *extra}
        if set(state) != expected:
            missing, unknown = sorted(expected - set(state)), sorted(map(str, {*state} - expected))
            raise ValueError(f"this is no state of a loader or pipeline: {missing=}, {unknown=}")
        own = copy.deepcopy({name: state[name] for name in cls.__dataclass_fields__})
        try:
            cursor = cls(**own | {"ahead": set(own["ahead"])})
            cursor._check()
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is no state of a loader or pipeline: {error}") from None
        cursor.resumed = True
        return cursor

    def _check(self) -> None:
        check_int("delivered", self.delivered, at_least=0)
        for number in self.ahead:
            check_int("a number in ahead", number, at_least=0)
        for seed in self.seeds:
            as_int("a seed", seed)
        for state in self.generators.values():
            check_instance("the state of a generator", state, Tensor)

    # The items of a pipeline.

    @classmethod
    def begin(
        cls, source: Any, generators: Sequence[torch.Generator], *, first: bool = False
    ) -> Self:
        """The cursor of a pipeline's iteration that begins; it draws a seed from each generator."""
        seeds = [draw_seed(generator) for generator in generators]
        return cls(_states(generators), read_state(source, iterated=not first), seeds)

    def resume(self, source: Any, generators: Sequence[torch.Generator]) -> "Cursor":
        """Put the source back; the cursor of the iteration that goes on from this one.

        If this one has ended, the next iteration begins.
        """
        if self.source is not None:
            source.load_state_dict(copy.deepcopy(self.source))  # the source may change it
        if not self.ended:
            return self
        return Cursor.begin(source, generators, first=self.source is None)

    def check_shuffles(self, count: int) -> None:
        """Raise ValueError unless the cursor is that of a pipeline with `count` shuffles."""
        if not len(self.seeds) == len(self.generators) == count:
            raise ValueError(
                f"the state has {len(self.seeds)} seeds of {len(self.generators)} generators, this "
                f"pipeline has {count} shuffles"
            )

    def set_generators(self, generators: Sequence[torch.Generator]) -> None:
        """Set the generators of a pipeline's shuffles; called when a state is loaded.

        Not when the next iteration begins: another pipeline or loader may share a generator (as
        torch's default one) and draw from it first.
        """
        for name, generator in enumerate(generators):
            generator.set_state(self.generators[str(name)])

    # The batches of a loader.

    def deliver(self, request: FetchRequest) -> None:
        """The batch was handed to the reader, or left out as failed."""
        self._undrawn.discard(request.number)
        self.ahead.add(request.number)
        if request.state is not None:
            self._states[request.number] = request.without_content()
        # A batch that the saved state has in `ahead` waits until it is drawn again: only then the
        # sampler's state after it is known.
        while self.delivered in self.ahead and self.delivered not in self._undrawn:
            self.ahead.remove(self.delivered)
            passed = self._states.pop(self.delivered, None)
            if passed is not None:
                self.source, self.last = passed.state, passed.last
            self.delivered += 1
            self.at_end = False

    def was_delivered(self, request: FetchRequest) -> bool:
        """Whether the batch was delivered before the state was saved."""
        if request.number not in self._undrawn:
            return False
        self.deliver(request)
        return True


def current_cursor(
    last: Cursor | None, source: Any, generators: Sequence[torch.Generator]
) -> Cursor:
    """The cursor of a pipeline now; `last` is that of its last iteration."""
    # As they are now, not as the iteration left them: other code may have drawn from them since.
    states = _states(generators)
    if last is not None and not last.ended:
        return replace(last, generators=states)
    delivered = 0 if last is None else last.delivered
    state = read_state(source, iterated=last is not None)
    return Cursor(states, state, [0] * len(states), delivered, ended=True)


def _states(generators: Sequence[torch.Generator]) -> dict[str, Tensor]:
    return {str(name): generator.get_state() for name, generator in enumerate(generators)}


# A source that was put back.


def restarting(source: Any) -> Any:
    """The items of a source that was put back to its state at the start of an iteration.

    A source may be at its end there, because the state was read after the last item of the
    iteration before: it yields nothing once, and begins again with the next `iter`.
    """
    return _async_items(source) if isinstance(source, AsyncIterable) else _items(source)


# By `next` only: `for` and `yield from` call `iter` again, and a source that is its own iterator
# may start over there.
def _items(source: Iterable[Any]) -> Iterator[Any]:
    items: Any = iter(source)
    try:
        if (item := next(items, END)) is END:
            item = next(items := iter(source), END)
        while item is not END:
            yield item
            item = next(items, END)
    finally:
        if hasattr(items, "close"):
            items.close()


async def _async_items(source: AsyncIterable[Any]) -> AsyncIterator[Any]:
    items: Any = aiter(source)
    try:
        if (item := await anext(items, END)) is END:
            item = await anext(items := aiter(source), END)
        while item is not END:
            yield item
            item = await anext(items, END)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
