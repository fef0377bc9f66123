"""What a pipeline was told to do, and the steps of a stream that each becomes."""

import functools
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from .._callables import gives_async, is_async, name_of
from .._caller import CallerState
from . import _links
from ._checks import check_parts
from ._links import DROPPED
from ._pinned import DeviceCopies
from ._plan import Link, Map, Step


class Verb(Protocol):
    """One call on a pipeline."""

    @property
    def name(self) -> str:
        """What messages and the pipeline's `repr` call it."""

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        """What it becomes.

        Args:
            first: The position of the first item that it gets, for messages.
            caller: Who iterates.
            seed: For what is drawn at random.
        """

    def taken(self, given: int) -> int | None:
        """How many items it has taken when it has given `given`; None: one cannot say."""


@dataclass(frozen=True, slots=True)
class OneToOne:
    """A function on each item: `map`."""

    fn: Callable[[Any], Any]
    concurrency: int | None
    in_order: bool

    @property
    def name(self) -> str:
        return f"map({name_of(self.fn)})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        name = self.name
        if self.concurrency is None and not is_async(self.fn):
            return [Link(functools.partial(_links.mapped, fn=self.fn, name=name, first=first))]
        return [Map(self.fn, self.concurrency or 1, None, self.in_order, name, first=first)]

    def taken(self, given: int) -> int | None:
        return given if self.in_order else None


@dataclass(frozen=True, slots=True)
class Staged:
    """A stage as it is, in order: that of `aiopar.map`."""

    stage: Map

    @property
    def name(self) -> str:
        return self.stage.name

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        return [replace(self.stage, first=first)]

    def taken(self, given: int) -> int | None:
        return given


@dataclass(frozen=True, slots=True)
class Filter:
    """Only some items."""

    fn: Callable[[Any], Any]
    concurrency: int | None

    @property
    def name(self) -> str:
        return f"filter({name_of(self.fn)})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        name = self.name
        if is_async(self.fn):
            fn = _marking_async(self.fn)
        elif self.concurrency is None:
            return [Link(functools.partial(_links.filtered, fn=self.fn, name=name, first=first))]
        else:
            fn = _links.marking(self.fn)
        return [
            Map(fn, self.concurrency or 1, name=name, first=first),
            Link(_links.kept, blocks=False),
        ]

    def taken(self, given: int) -> int | None:
        return None


def _marking_async(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def mark(item: Any) -> Any:
        return item if await fn(item) else DROPPED

    return mark


@dataclass(frozen=True, slots=True)
class FlatMap:
    """Any number of items for each."""

    fn: Callable[[Any], Any]
    concurrency: int | None

    @property
    def name(self) -> str:
        return f"flat_map({name_of(self.fn)})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        name = self.name
        if gives_async(self.fn):
            fn = _listing_async(self.fn)
        elif self.concurrency is None:
            # One step at a time, however many come of one item.
            fn = _iterable(self.fn)
            make = functools.partial(_links.mapped, fn=fn, name=name, first=first)
            flatten = functools.partial(_links.flattened, caller=caller, name=name, first=first)
            return [Link(make), Link(flatten)]
        else:
            fn = _listing(self.fn)
        return [
            Map(fn, self.concurrency or 1, name=name, first=first),
            Link(_links.unlisted, blocks=False),
        ]

    def taken(self, given: int) -> int | None:
        return None


def _iterable(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(item: Any) -> Any:
        return check_parts(fn(item))

    return make


def _listing(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def collect(item: Any) -> list[Any]:
        return list(check_parts(fn(item)))

    return collect


def _listing_async(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    async def collect(item: Any) -> list[Any]:
        made = fn(item)
        if not isinstance(made, AsyncIterable):
            made = await made
        if isinstance(made, AsyncIterable):
            return [part async for part in made]
        return list(check_parts(made))

    return collect


@dataclass(frozen=True, slots=True)
class Shuffle:
    """In a random order."""

    buffer_size: int
    generator: torch.Generator | None

    @property
    def name(self) -> str:
        return f"shuffle({self.buffer_size})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        around = functools.partial(_links.shuffled, buffer_size=self.buffer_size, seed=seed)
        return [Link(around, blocks=False)]

    def taken(self, given: int) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class Batch:
    """Lists of items."""

    batch_size: int
    drop_last: bool

    @property
    def name(self) -> str:
        return f"batch({self.batch_size})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        around = functools.partial(_links.batched, size=self.batch_size, drop_last=self.drop_last)
        return [Link(around, blocks=False)]

    def taken(self, given: int) -> int | None:
        return given * self.batch_size


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A buffer."""

    buffer_size: int

    @property
    def name(self) -> str:
        return f"prefetch({self.buffer_size})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        return [Map(None, bound=self.buffer_size, name="prefetch", first=first)]

    def taken(self, given: int) -> int | None:
        return given


@dataclass(frozen=True, slots=True)
class To:
    """On a device."""

    device: torch.device

    @property
    def name(self) -> str:
        return f"to({self.device})"

    def steps(self, first: int, caller: CallerState, seed: int) -> list[Step]:
        copies = DeviceCopies([self.device], whole=True)
        place = functools.partial(copies, readers=caller.streams)
        return [Map(place, bound=2, name=self.name, first=first)]

    def taken(self, given: int) -> int | None:
        return given


def compiled(
    verbs: Sequence[Verb],
    caller: CallerState,
    seeds: Sequence[int],
    *,
    delivered: int = 0,
    exact: bool = True,
) -> list[Step]:
    """The steps of a stream that begins after `delivered` items.

    Those are left out as early as one can tell which items they were made of: behind the last verb
    of which one cannot, else right at the source.

    Args:
        verbs: What the pipeline was told.
        caller: Who iterates.
        seeds: One for each verb.
        delivered: How many items of the end result to leave out.
        exact: Whether nothing is left out that fails. Else all is done again up to the end, for
            how many items a verb has taken does not follow from how many it gave.
    """
    firsts, place, count = _positions(verbs, delivered, exact)
    steps: list[Step] = []
    for index, verb in enumerate(verbs):
        if count and index == place:
            steps.append(Link(functools.partial(_links.skipping, count=count), blocks=False))
        for step in verb.steps(firsts[index], caller, seeds[index]):
            _append(steps, step)
    if count and place == len(verbs):
        steps.append(Link(functools.partial(_links.skipping, count=count), blocks=False))
    return steps


def _positions(verbs: Sequence[Verb], delivered: int, exact: bool) -> tuple[list[int], int, int]:
    """Where each verb begins to count; before which verb to skip, and how many items."""
    firsts = [0] * len(verbs)
    place, count = len(verbs), delivered
    while exact and place:
        taken = verbs[place - 1].taken(count)
        if taken is None:
            break
        place, count = place - 1, taken
        firsts[place] = count
    return firsts, place, count


def _append(steps: list[Step], step: Step) -> None:
    last = steps[-1] if steps else None
    if isinstance(step, Map) and step.fn is None and isinstance(last, Map) and last.bound is None:
        # A buffer behind a stage that has one: that is it.
        steps[-1] = replace(last, bound=step.bound)
    else:
        steps.append(step)
