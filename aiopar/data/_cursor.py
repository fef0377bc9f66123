"""The position of an iteration of a loader or pipeline, and how a later iteration resumes."""

import copy
import inspect
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from .._base.arguments import as_int, check_instance, check_int, items_of
from .._base.tracebacks import in_words, without_frames
from .._base.tree import children
from ..executor._generators import END


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed, drawn as torch draws `base_seed`; None: from torch's default generator."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def check_generator(generator: torch.Generator | None) -> None:
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")


_DEFAULT = "torch"  # the name of torch's default generator


class Generators:
    """The random generators that an iteration draws from, by name."""

    def __init__(self, named: dict[str, torch.Generator]) -> None:
        self._named = named
        self.default_was_set = False
        """Whether a sampler or dataset, as it loaded a state, has set torch's default generator."""

    @classmethod
    def of_loader(cls, loader: "DataLoader[Any]") -> Self:
        name = _DEFAULT if loader.generator is None else "generator"
        own = cls({name: loader.generator or torch.default_generator})
        if loader.batch_sampler is None:
            own._add("sampler", loader.sampler)
        else:
            own._add("batch_sampler", loader.batch_sampler)
        return own

    def _add(self, name: str, sampler: Any) -> None:
        generator = getattr(sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            if not any(generator is other for other in self):
                self._named[f"{name}.generator"] = generator
        elif type(sampler) is BatchSampler:
            self._add(f"{name}.sampler", sampler.sampler)
        elif type(sampler) is not SequentialSampler:
            # A sampler without a generator may draw from torch's default generator.
            self._named[_DEFAULT] = torch.default_generator

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter(self._named.values())

    def __len__(self) -> int:
        return len(self._named)

    @property
    def has_default(self) -> bool:
        """Whether an iteration draws, or may draw, from torch's default generator."""
        return _DEFAULT in self._named

    def states(self) -> dict[str, Tensor]:
        return {name: generator.get_state() for name, generator in self._named.items()}

    def check(self, states: Mapping[str, Tensor]) -> None:
        """Raise ValueError unless `states` has a state for each generator, and no other."""
        if set(states) != set(self._named):
            raise ValueError(
                f"the state is of a loader that draws from {sorted(states)}, this one draws from "
                f"{sorted(self._named)}: give it the same generator and samplers"
            )

    def restore(self, states: Mapping[str, Tensor], *, default: bool = True) -> None:
        """Set the generators to `states`, torch's default generator only if `default`."""
        for name, generator in self._named.items():
            if default or name != _DEFAULT:
                generator.set_state(states[name])

    @contextmanager
    def replaying(self, states: Mapping[str, Tensor]) -> Iterator[None]:
        """Restore `states`, and on leaving the present state of torch's default generator.

        Numbers that the block draws again must not change what other code (dropout, initial
        weights) draws next from the default generator. If a sampler or dataset sets the default
        generator in the block, the generator keeps that state.
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

    A `state_dict` that needs arguments does not count: only a loader of the dataset's own can call
    such a method.
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


@dataclass(frozen=True, slots=True)
class MissingState:
    """Stands for a state that could not be read; `Cursor.state_dict` raises the error."""

    error: Exception


def read_state(owner: Any, *, iterated: bool = True) -> Any:
    """A copy of the state of a source, dataset or sampler; a `MissingState`; None: no state.

    An error before the owner was `iterated` means no state: some owners have none until then.
    """
    if not is_stateful(owner):
        return None
    try:
        # A copy: the owner may return the dict that it goes on to change.
        return copy.deepcopy(owner.state_dict())
    except Exception as error:  # noqa: BLE001  # `Cursor.state_dict` raises it
        return MissingState(without_frames(error)) if iterated else None


class StateLoader:
    """Loads a saved state, if there is one, into its owner, before or after `iter(owner)`.

    An owner that is its own iterator may start over in `iter`, or accept no state before `iter`.
    Such an owner gets the state after `iter`, as from torchdata's loader. `iterated`: the state was
    saved after `iter(owner)`. `generators` note if the owner sets torch's default generator.
    """

    def __init__(self, owner: Any, state: Any, generators: Generators, *, iterated: bool) -> None:
        self._owner = owner
        self._state = state
        self._generators = generators
        self._iterated = iterated
        self.loaded = state is None  # whether the owner has accepted the state, or there is none

    def before_iter(self) -> None:
        """Load the state; called before `iter`."""
        if self._state is None:
            return
        own_iterator = hasattr(self._owner, "__next__") or hasattr(self._owner, "__anext__")
        with suppress(Exception) if own_iterator else nullcontext():
            self._load()

    def after_iter(self, iterator: Any) -> None:
        """Load the state if the owner lacks the state; called once, with `iter(owner)`."""
        if self._state is None:
            return
        # The first `iter` after a load continues. A second load would let the next epoch continue,
        # too.
        own_iterator = self._iterated and iterator is self._owner
        restarted = own_iterator and not equal_states(read_state(self._owner), self._state)
        if restarted or not self.loaded:
            self._load()

    def _load(self) -> None:
        before = torch.get_rng_state()
        # A copy: the owner may keep the object and change it.
        self._owner.load_state_dict(copy.deepcopy(self._state))
        if not torch.equal(before, torch.get_rng_state()):
            self._generators.default_was_set = True
        self.loaded = True


def equal_states(one: Any, other: Any) -> bool:
    """Whether two states, perhaps with tensors and arrays, are equal; False: not comparable."""
    try:
        return _equal(one, other)
    except Exception:  # noqa: BLE001  # of a user's `__eq__`
        return False


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
    """A batch that must be fetched."""

    number: int  # of the batch in its epoch, from 0
    content: Any  # the indices of the samples; for an iterable, the samples themselves
    state: Any = None  # of a stateful sampler or dataset after this batch, or a `MissingState`
    last: bool = False  # whether this is known to be the last batch, as with a stateful sampler


@dataclass(eq=False)
class Cursor:
    """The position of an iteration. The cursor outlives the iteration.

    The items of a pipeline, or the batches of a loader's epoch, are numbered from 0.

    Attributes:
        generators: The states of the generators, by name. A loader has the states from before the
            epoch, a pipeline those from after its seeds were drawn.
        source: The own state of a pipeline's source at the start, or of a loader's sampler or
            dataset after batch `delivered - 1`; a `MissingState`; None: there is none.
        seeds: The seed of each shuffle of a pipeline.
        delivered: All items with a lower number were delivered, or skipped because they failed.
        ahead: The higher numbers that were delivered, if items come out of order.
        last: Whether item `delivered - 1` is known to be the last.
        ended: Whether the reader has seen the end of the iteration.
        at_end: Whether `source` is the state after the last item of the previous epoch or
            iteration.
        seeded: Whether an earlier epoch has drawn `base_seed` for all epochs; only used by loaders.
        initial: The own state of the source, sampler or dataset before its first iteration. A
            resumed iteration cannot ask: some sources begin when they are asked for their state.
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
    initial: Any = None

    def __post_init__(self) -> None:
        self.resumed = False  # whether the cursor was made from a saved state
        self._states: dict[int, FetchRequest] = {}  # the state after each item of `ahead`
        # The numbers of `ahead` from the saved state whose items were not drawn again yet.
        self._undrawn = set(self.ahead)

    @property
    def midway(self) -> bool:
        """Whether a saved iteration continues, after its first item."""
        return self.resumed and self.delivered > 0

    # Saving and loading.

    def state_dict(self, owner: str = "source") -> dict[str, Any]:
        """A copy of the attributes, in plain values and tensors; `owner` is named in an error."""
        if isinstance(self.source, MissingState):
            error = self.source.error
            # A new error: the traceback of the stored error would keep the frames of this caller.
            raise ValueError(f"the {owner} gives no state: {in_words(error)}") from error
        state = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return copy.deepcopy(state | {"ahead": sorted(self.ahead)})

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], *extra: str) -> Self:
        """The cursor that `state` was made from; it must have the `extra` keys, too."""
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a state dict, got {type(state).__name__}")
        expected = {*cls.__dataclass_fields__, *extra}
        if set(state) != expected:
            missing, unknown = sorted(expected - set(state)), sorted(map(str, {*state} - expected))
            raise ValueError(f"this is no state of a loader or pipeline: {missing=}, {unknown=}")
        own = copy.deepcopy({name: state[name] for name in cls.__dataclass_fields__})
        try:
            cursor = cls(**own | {"ahead": set(own["ahead"])})
            check_int("delivered", cursor.delivered, at_least=0)
            for number in cursor.ahead:
                check_int("a number in ahead", number, at_least=0)
            for seed in cursor.seeds:
                as_int("a seed", seed)
            for saved in cursor.generators.values():
                check_instance("the state of a generator", saved, Tensor)
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"this is no state of a loader or pipeline: {error}") from None
        cursor.resumed = True
        return cursor

    # The items of a pipeline.

    @classmethod
    def begin(cls, source: Any, generators: Generators, last: "Cursor | None") -> Self:
        """The cursor of a pipeline's iteration after `last`; draws a seed from each generator."""
        seeds = [draw_seed(generator) for generator in generators]
        state = read_state(source, iterated=last is not None)
        initial = state if last is None else last.initial
        return cls(generators.states(), state, seeds, initial=initial)

    def resume(self, source: Any, generators: Generators) -> "Cursor":
        """Restore the source; return this cursor, or that of a new iteration if this has ended."""
        if self.source is not None:
            source.load_state_dict(copy.deepcopy(self.source))  # the source may change it
        if not self.ended:
            return self
        return Cursor.begin(source, generators, None if self.source is None else self)

    # The batches of a loader.

    def deliver(self, request: FetchRequest) -> None:
        """Record that the batch was delivered, or skipped because it failed."""
        self._undrawn.discard(request.number)
        self.ahead.add(request.number)
        if request.state is not None:
            self._states[request.number] = request._replace(content=None)
        # Stop at a batch that was delivered before the save and not drawn again yet, because the
        # sampler's state after that batch is not known.
        while self.delivered in self.ahead and self.delivered not in self._undrawn:
            self.ahead.remove(self.delivered)
            passed = self._states.pop(self.delivered, None)
            if passed is not None:
                self.source, self.last = passed.state, passed.last
            self.delivered += 1
            self.at_end = False

    def was_delivered(self, request: FetchRequest) -> bool:
        """Whether the batch was delivered before the state was saved; records such a batch."""
        if request.number not in self._undrawn:
            return False
        self.deliver(request)
        return True


def current_cursor(last: Cursor | None, source: Any, generators: Generators) -> Cursor:
    """The present cursor of a pipeline; `last` is the cursor of its last iteration."""
    # The present states, not those at the end of the iteration: other code may have drawn since.
    states = generators.states()
    if last is not None and not last.ended:
        return replace(last, generators=states)
    delivered = 0 if last is None else last.delivered
    state = read_state(source, iterated=last is not None)
    cursor = Cursor(states, state, [0] * len(states), delivered, ended=True)
    cursor.at_end, cursor.initial = (False, state) if last is None else (True, last.initial)
    return cursor


def restarting(source: Any, initial: Any) -> Any:
    """The items of a source that was restored to its state at the start of an iteration.

    If the state is from the end of the previous iteration, the source yields nothing after the
    first `iter`, and begins again with the second, or when its `initial` state is loaded.
    """
    if isinstance(source, AsyncIterable):
        return _async_items(source, initial)
    return _items(source, initial)


def _load_initial(source: Any, initial: Any) -> None:
    with suppress(Exception):  # there are no items, as after each `iter` before
        source.load_state_dict(copy.deepcopy(initial))


# `for` and `yield from` would call `iter` again, and a source that is its own iterator may then
# start over.
def _items(source: Iterable[Any], initial: Any) -> Iterator[Any]:
    items: Any = items_of(source)
    try:
        if (item := next(items, END)) is END:
            item = next(items := items_of(source), END)
        if item is END:
            _load_initial(source, initial)
            item = next(items := items_of(source), END)
        while item is not END:
            yield item
            item = next(items, END)
    finally:
        if hasattr(items, "close"):
            items.close()


async def _async_items(source: AsyncIterable[Any], initial: Any) -> AsyncIterator[Any]:
    items: Any = aiter(source)
    try:
        if (item := await anext(items, END)) is END:
            item = await anext(items := aiter(source), END)
        if item is END:
            _load_initial(source, initial)
            item = await anext(items := aiter(source), END)
        while item is not END:
            yield item
            item = await anext(items, END)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
