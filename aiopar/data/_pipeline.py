"""`Pipeline`: a source and what is done to its items, declared step by step."""

import copy
import functools
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar, overload

import anyio
import torch

from .._base.arguments import (
    check_int,
    check_number,
    gives_async,
    is_async,
    listed,
    name_of,
    short_repr,
)
from .._base.devices import Device, parse_device
from .._base.thread_state import CallerState
from ..data import _inline_steps as _links
from ..executor._executor import DeviceExecutor, check_executor
from ._checks import (
    check_concurrency,
    check_function,
    check_generator,
    check_one_value,
    check_parts,
    check_source,
    is_stateful,
)
from ._cursor import PipelinePosition, begun, from_its_beginning, now, put_back, resumed
from ._flow import Link, Map, Step
from ._inline_steps import DROPPED
from ._pinned import DeviceCopies
from ._progress import progress_bar
from ._stream import Stream


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


T = TypeVar("T")
U = TypeVar("U")

_Parts = Iterable[U] | AsyncIterable[U]


class Pipeline(Generic[T]):
    """A stream of items, each step with its own concurrency and bounded buffer.

    Each call returns a new pipeline; nothing runs until one is iterated: by `async for`, or by
    `async with pipeline as stream: async for item in stream`, which on leaving waits until all
    threads and tasks are gone and the source is closed. (A plain `async for` that is broken off
    stops them too, but nobody waits.) Each `async for` is an iteration of its own, with workers of
    its own; one iteration has one reader. The state of the caller (grad mode, autocast, context
    variables, ...) is captured where an iteration begins, and holds for all functions.

    Functions may be plain, run on CPU workers, or `async def`, run as tasks on the event loop of
    who iterates. A plain function without `concurrency` has no worker and no buffer of its own: it
    runs within the worker that fetches, one item at a time, which costs about a microsecond an
    item. With `concurrency=n` up to `n` items run at once, and as many (at least two) wait to be
    read: `prefetch` behind it says another number. No stage ever holds more items than its bound,
    those that run included, whatever its reader does.

    An item that fails raises its own error, with a note of step and position, where it would have
    come; `max_failures=n` leaves out up to `n` of them, and records them in `stream.failures`. An
    error ends the iteration.

    `state_dict()` says how far the last iteration is, at any item; `load_state_dict` has the next
    one go on behind it. Saved are the number of items *delivered*, the seed of each shuffle and the
    state of its generator, and the source's own state at the start, if it has `state_dict` and
    `load_state_dict`. The source is read again from its start and what was delivered is left out,
    before the first step where one can tell which items that were (maps in order, `batch`,
    `prefetch`, `to`), so that functions do not run again behind that; behind `filter`, `flat_map`
    and `shuffle`, and everywhere with `max_failures`, they do. A pipeline with a step that is not
    in order cannot be resumed.

    Compared with SPDL's `PipelineBuilder`, torchdata.nodes and Grain: it is read by `async for`,
    under asyncio and trio; async functions run on the reader's own loop, so that its clients and
    connection pools can be used.

    Args:
        source: Any iterable (stepped on workers, by one at a time, unless it is a list, a range or
            the like) or async iterable. An iterator can be iterated once; the iteration owns it,
            and closes a generator.
        executor: Where plain functions run. None: on threads of each iteration's own. Where it has
            accelerators, each item is a call of its own, on the least loaded worker.
        max_failures: How many items may fail and be left out.
        timeout: How many seconds one read may wait before it raises `TimeoutError`, which says what
            is under way; the next read waits on. None: for ever.

    Raises:
        TypeError: An argument is of a wrong type; here, and in each of the methods.
        ValueError: A number is out of range, or there is no such device; likewise.

    Example:
        >>> import asyncio, aiopar
        >>> async def main():
        ...     pipeline = aiopar.data.Pipeline(range(10)).map(lambda n: n * n, concurrency=2)
        ...     async with pipeline.filter(lambda n: n % 2).batch(3) as stream:
        ...         return [batch async for batch in stream]
        >>> asyncio.run(main())
        [[1, 9, 25], [49, 81]]
    """

    def __init__(
        self,
        source: Iterable[T] | AsyncIterable[T],
        *,
        executor: DeviceExecutor | None = None,
        max_failures: int = 0,
        timeout: float | None = None,
    ) -> None:
        self._source: Any = check_source(source)
        self._executor = check_executor(executor)
        self._max_failures = check_int("max_failures", max_failures, at_least=0)
        self._timeout = None if timeout is None else check_number("timeout", timeout, zero=False)
        self._verbs: tuple[Verb, ...] = ()
        self._bar: partial[Any] | None = None
        self._next: PipelinePosition | None = None  # where the next iteration is to begin
        self._last: PipelinePosition | None = None  # where the last one is
        self._entered: dict[int, list[Stream[T]]] = {}

    @short_repr
    def __repr__(self) -> str:
        steps = listed([verb.name for verb in self._verbs])
        return f"of {type(self._source).__name__}{': ' * bool(steps)}{steps}"

    # Declaring.

    @overload
    def map(
        self,
        fn: Callable[[T], Awaitable[U]],
        *,
        concurrency: int | None = None,
        in_order: bool = True,
    ) -> "Pipeline[U]": ...

    @overload
    def map(
        self, fn: Callable[[T], U], *, concurrency: int | None = None, in_order: bool = True
    ) -> "Pipeline[U]": ...

    def map(
        self,
        fn: Callable[[T], Any],
        *,
        concurrency: int | None = None,
        in_order: bool = True,
    ) -> "Pipeline[Any]":
        """`fn(item)` for each item; of an `async def`, a `Batcher`, ..., what it comes to.

        A plain function that returns what nobody has awaited, a coroutine or an `aiopar.Future`, is
        refused, here and by the other steps: its item fails with a TypeError. A generator function,
        plain or async, is refused at once: see `flat_map`.

        Args:
            fn: The function.
            concurrency: How many items at once. None: one at a time; see the class.
            in_order: Whether results come in the order of their items; else each when it is ready,
                so that a slow one holds up no other.
        """
        return self._then(OneToOne(check_one_value(fn), check_concurrency(concurrency), in_order))

    def filter(self, fn: Callable[[T], Any], *, concurrency: int | None = None) -> "Pipeline[T]":
        """Only the items of which `fn(item)` is true."""
        return self._then(Filter(check_one_value(fn), check_concurrency(concurrency)))

    def flat_map(
        self,
        fn: Callable[[T], _Parts[U] | Awaitable[_Parts[U]]],
        *,
        concurrency: int | None = None,
    ) -> "Pipeline[U]":
        """The items of `fn(item)`, of each item in turn.

        `fn` is a generator function, or returns an iterable. Without `concurrency` it is stepped
        as items are fetched, and may give any number. With it, or if it is asynchronous (an async
        generator too), all that one item gives is collected in a list first.
        """
        return self._then(FlatMap(check_function(fn), check_concurrency(concurrency)))

    def shuffle(
        self, buffer_size: int, *, generator: torch.Generator | None = None
    ) -> "Pipeline[T]":
        """Each item drawn at random from the `buffer_size` that are next.

        Args:
            buffer_size: How many items are kept to draw from.
            generator: Where the iteration's seed is drawn from, one number each, so that how far
                the stream runs ahead makes no difference. None: torch's own, which is everybody's;
                as by `AsyncDataLoader`, its state is saved, and put back where a state is loaded.
        """
        generator = check_generator(generator)
        return self._then(Shuffle(check_int("buffer_size", buffer_size, at_least=1), generator))

    def batch(self, batch_size: int, *, drop_last: bool = False) -> "Pipeline[list[T]]":
        """Lists of `batch_size` items.

        `map(torch.utils.data.default_collate)` behind it makes tensors of them.
        An item that failed is in no batch: its error comes before the batch that it would be in.

        Args:
            batch_size: How many.
            drop_last: Whether the last is left out if it is shorter.
        """
        return self._then(Batch(check_int("batch_size", batch_size, at_least=1), drop_last))

    def prefetch(self, buffer_size: int) -> "Pipeline[T]":
        """At most `buffer_size` items here, those that run in the stage before included.

        It says how much memory there may be to them, and holds whatever `concurrency` says: with
        less than that, `buffer_size` run at once. Behind a stage without workers it is a buffer of
        its own, filled by one worker.
        """
        return self._then(Prefetch(check_int("buffer_size", buffer_size, at_least=1)))

    def to(self, device: Device) -> "Pipeline[T]":
        """Each item with its tensors on `device`, complete there.

        Copied on a stream of its own, from pinned memory that is used again, so that the next item
        is copied while the last is computed with.
        """
        return self._then(To(parse_device(device)))

    def progress(self, total: int | None = None) -> "Pipeline[T]":
        """With a progress bar: rate and, if `total` is given, time left. Needs tqdm.

        Args:
            total: How many items will be delivered.

        Raises:
            ImportError: There is no tqdm; when the iteration begins.
        """
        if total is not None:
            total = check_int("total", total, at_least=0)
        following = self._copy()
        following._bar = partial(progress_bar, total)
        return following

    def _then(self, verb: Verb) -> "Pipeline[Any]":
        following = self._copy()
        following._verbs += (verb,)
        return following

    def _copy(self) -> "Pipeline[Any]":
        following = copy.copy(self)
        following._next = following._last = None
        following._entered = {}
        return following

    # Iterating.

    def __aiter__(self) -> Stream[T]:
        return self._stream(self._verbs, self._bar, "pipeline")

    def _through(self, stage: Map, bar: partial[Any] | None) -> Stream[Any]:
        """An iteration whose items go through one stage more: what that gives is delivered."""
        return self._stream((*self._verbs, Staged(stage)), bar or self._bar, "map")

    def _stream(self, verbs: tuple[Verb, ...], bar: partial[Any] | None, name: str) -> Stream[Any]:
        source, generators = self._source, self._generators
        position, self._next = self._next, None
        if position is None:
            position = begun(source, generators, first=self._last is None)
        else:
            position = resumed(position, source, generators)
            if is_stateful(source):
                source = from_its_beginning(source)
        self._last = position
        caller = CallerState()
        seeds = iter(position.seeds)
        steps = compiled(
            verbs,
            caller,
            [next(seeds) if isinstance(verb, Shuffle) else 0 for verb in verbs],
            delivered=position.delivered,
            exact=not self._max_failures,
        )
        return Stream(
            source,
            steps,
            caller=caller,
            executor=self._executor,
            max_failures=self._max_failures,
            timeout=self._timeout,
            position=position,
            bar=bar and partial(bar, initial=position.delivered),
            name=name,
        )

    async def __aenter__(self) -> Stream[T]:
        stream = aiter(self)
        # A pipeline may be entered by several tasks, and more than once by each.
        self._entered.setdefault(anyio.get_current_task().id, []).append(stream)
        return stream

    async def __aexit__(self, *exc_info: object) -> None:
        task = anyio.get_current_task().id
        if task not in self._entered:  # another has entered it (an `AsyncExitStack` handed on)
            task = next(reversed(self._entered))
        entered = self._entered[task]
        stream = entered.pop()
        if not entered:
            del self._entered[task]
        await stream.__aexit__(*exc_info)

    @property
    def _shuffles(self) -> list[Shuffle]:
        return [verb for verb in self._verbs if isinstance(verb, Shuffle)]

    @property
    def _generators(self) -> list[torch.Generator]:
        return [shuffle.generator or torch.default_generator for shuffle in self._shuffles]

    # Resuming.

    def state_dict(self) -> dict[str, Any]:
        """How far the last iteration is (or, before the first, where it will begin).

        Raises:
            ValueError: A step is not in order, so that a count does not say which items are left.
                Or the source, which has a state of its own, raises an error instead of giving it.
        """
        self._check_in_order()
        if self._next is not None:
            return self._next.state_dict()
        return now(self._last, self._source, self._generators).state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Have the next iteration go on where `state` says, and those after it as they would have.

        The generators of its shuffles are set at this call. The pipeline must be made as that was
        from which the state came, generators included.

        Raises:
            TypeError: It is no state dict.
            ValueError: It is that of another kind of pipeline, or a step is not in order.
        """
        self._check_in_order()
        position = PipelinePosition.from_state_dict(state, len(self._shuffles))
        if position.source is not None and not is_stateful(self._source):
            kind = type(self._source).__name__
            raise ValueError(f"the state has its source's own, which a {kind} cannot take")
        put_back(self._generators, position)
        self._next = position

    def _check_in_order(self) -> None:
        for verb in self._verbs:
            if isinstance(verb, OneToOne) and not verb.in_order:
                raise ValueError(
                    f"a pipeline with {verb.name} cannot be resumed: it is not in order"
                )
