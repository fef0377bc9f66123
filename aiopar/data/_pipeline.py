"""`Pipeline`: a source and the steps for its items, declared one call at a time."""

import copy
import operator
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import AsyncGeneratorType
from typing import Any, Generic, TypeVar, overload

import torch

from .._base.arguments import (
    AsyncOnly,
    check_bound,
    check_int,
    check_number,
    described,
    expected_length,
    generator_kind,
    gives_async,
    is_async,
    is_iterable,
    items_of,
    listed,
    name_of,
    not_begun,
    short_repr,
)
from .._base.devices import Device, parse_device
from .._base.inputs import function_of_batch
from .._base.thread_state import CallerState
from ..executor._executor import DeviceExecutor, check_executor
from ..executor._loop_tasks import TaskRef, current_task
from ._cursor import Cursor, Generators, check_generator, current_cursor, is_stateful, restarting
from ._pinned import DeviceCopies
from ._steps import (
    UNAWAITED,
    InlineStep,
    MapStep,
    Step,
    batched,
    flattened,
    mapped,
    shuffled,
    skipping,
    unawaited,
)
from ._stream import Stream, progress_bar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
U = TypeVar("U")

_Parts = Iterable[U] | AsyncIterable[U]


@dataclass(frozen=True, slots=True)
class VerbStart:
    """What a verb needs to know about an iteration."""

    caller: CallerState  # of the reader
    first: int = 0  # the position of the first item that the verb gets
    seed: int = 0  # of a shuffle


@dataclass(frozen=True, slots=True)
class Verb:
    """One call on a pipeline, such as `map`."""

    name: str  # in messages
    build: Callable[[VerbStart], list[Step]]  # returns the steps of one iteration
    inputs: int | None = 1
    """How many items go in for each item that comes out. None: this depends on the items."""
    length: Callable[[int], int] | None = operator.index
    """How many items come out for a number that goes in. None: this depends on the items."""
    unit: str | None = None  # what comes out, for the progress bar; None: what goes in
    in_order: bool = True
    shuffles: bool = False
    generator: torch.Generator | None = None  # of a shuffle; None: torch's default generator


class Pipeline(AsyncOnly, Generic[T]):
    """A source and the steps for its items, each step with its own concurrency and bounded buffer.

    Each method returns a new pipeline. Nothing runs until a pipeline is iterated. Each `async for`
    is an iteration of its own, with its own workers and one reader: see `Stream`. `async with
    pipeline as stream: async for item in stream` waits, when it is left, until all threads and
    tasks have ended and the source is closed. The state of the caller (grad mode, autocast, context
    variables, ...) is captured when an iteration begins, and applies to all functions.

    Plain functions run on CPU workers. `async def` functions run as tasks on the reader's event
    loop. A plain function without `concurrency` has no worker and no buffer of its own: the worker
    that fetches the items calls it, for one item at a time. With `concurrency=n`, up to `n` items
    run at once, and as many results (at least two) may wait to be read; `prefetch` after the step
    sets another bound. No stage ever holds more items than its bound, running items included.

    If an item fails, its own error is raised in its place and ends the iteration; a note names the
    step and the position. `max_failures=n` skips up to `n` failed items and records them in
    `stream.failures`.

    `state_dict()` saves the position of the last iteration after any item, and `load_state_dict`
    makes the next iteration continue there. The state has the number of *delivered* items, the seed
    of each shuffle, the state of its generator, and the state of the source at the start if the
    source has `state_dict` and `load_state_dict`. The next iteration reads the source from its
    start, and skips the delivered items. It skips them before the steps `map`, `batch`, `prefetch`
    and `to` at the end of the pipeline. Functions before a `filter`, a `flat_map` or a `shuffle`
    run again for delivered items; with `max_failures`, all functions do. A pipeline with
    `in_order=False` cannot be resumed.

    Similar to SPDL's `PipelineBuilder`, torchdata.nodes and Grain. Differences: `async for` reads
    it, under asyncio and trio. Async functions run on the reader's event loop, so they can use the
    clients and connection pools of that loop.

    Args:
        source: An async iterable, or any iterable. Workers advance an iterable, one at a time,
            unless it is a list, a range or another plain container. An iterator can be iterated
            once, and the iteration closes a generator at its end. A map-style dataset, which has
            `__getitem__` and no `__iter__`, ends at its `len`.
        executor: The executor that runs plain functions. None: threads of each iteration's own. On
            an executor with accelerators, each item is a call of its own on the least loaded
            worker.
        max_failures: How many failed items are skipped.
        timeout: The most seconds that one read may wait before it raises `TimeoutError`; the next
            read continues to wait. None: no limit.

    Raises:
        TypeError: An argument has a wrong type; also raised by each method.
        ValueError: A number is out of range, or a device does not exist; also raised by each
            method.

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
        self._next: Cursor | None = None  # of the next iteration
        self._last: Cursor | None = None  # of the last iteration
        self._entered: dict[TaskRef | None, list[Stream[T]]] = {}

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
        self, fn: Callable[[T], Any], *, concurrency: int | None = None, in_order: bool = True
    ) -> "Pipeline[Any]":
        """Replace each item by `fn(item)`, awaited if `fn` is an `async def`, a `Batcher`, ...

        For a module, an item that is a mapping becomes keyword arguments, as in `aiopar.map`.
        If a plain function of any step returns a coroutine or an `aiopar.Future`, the item fails
        with a `TypeError`, because nobody would await the result.

        Args:
            fn: The function. A generator function is refused: use `flat_map`.
            concurrency: How many items run at once. None: one, without a worker of its own.
            in_order: Whether results come in the order of their items, or as soon as each is ready.
        """
        name = f"map({name_of(check_one_value(fn))})"
        concurrency = check_bound("concurrency", concurrency)
        build = partial(_function_steps, function_of_batch(fn), concurrency, name, in_order)
        return self._then(Verb(name, build, 1 if in_order else None, in_order=in_order))

    def filter(self, fn: Callable[[T], Any], *, concurrency: int | None = None) -> "Pipeline[T]":
        """Keep only the items for which `fn(item)` is true; `fn` may be async.

        Args:
            fn: The function. A generator function is refused.
            concurrency: How many items run at once; as for `map`.
        """
        name = f"filter({name_of(check_one_value(fn))})"
        # A flat_map to one item or none.
        kept = partial(_kept_async if is_async(fn) else _kept, fn)
        build = partial(_flat_map_steps, kept, check_bound("concurrency", concurrency), name)
        return self._then(Verb(name, build, None, length=None))

    def flat_map(
        self, fn: Callable[[T], _Parts[U] | Awaitable[_Parts[U]]], *, concurrency: int | None = None
    ) -> "Pipeline[U]":
        """Replace each item by the items of `fn(item)`, in order.

        Without `concurrency`, the iterable of a plain function is advanced as items are read, and
        may be endless. Otherwise all items of one iterable are collected in a list first.

        Args:
            fn: A generator function, or a function that returns an iterable; either may be async.
            concurrency: How many items run at once; as for `map`.
        """
        name = f"flat_map({name_of(_check_function(fn))})"
        build = partial(_flat_map_steps, fn, check_bound("concurrency", concurrency), name)
        return self._then(Verb(name, build, None, length=None, unit="item"))

    def shuffle(
        self, buffer_size: int, *, generator: torch.Generator | None = None
    ) -> "Pipeline[T]":
        """Draw each item at random from the next `buffer_size` items.

        Args:
            buffer_size: How many items are kept to draw from.
            generator: Each iteration draws only its seed from the generator, so that the order does
                not depend on how far the stream reads ahead. None: torch's default generator.
                `state_dict` saves the generator's state, and `load_state_dict` sets it.
        """
        buffer_size = check_int("buffer_size", buffer_size, at_least=1)
        build, name = partial(_shuffle_steps, buffer_size), f"shuffle({buffer_size})"
        check_generator(generator)
        return self._then(Verb(name, build, None, shuffles=True, generator=generator))

    def batch(self, batch_size: int, *, drop_last: bool = False) -> "Pipeline[list[T]]":
        """Collect items in lists of `batch_size`.

        Add `map(torch.utils.data.default_collate)` to make tensors of the lists. A failed item is
        in no batch: its error is raised before the batch comes.

        Args:
            batch_size: The length of a list.
            drop_last: Whether to drop the last list if it is shorter.
        """
        batch_size = check_int("batch_size", batch_size, at_least=1)
        step = InlineStep(partial(batched, size=batch_size, drop_last=drop_last), blocks=False)
        build, length = partial(_one_step, step), partial(_batches, batch_size, drop_last)
        verb = Verb(f"batch({batch_size})", build, batch_size, length=length, unit="batch")
        return self._then(verb)

    def prefetch(self, buffer_size: int) -> "Pipeline[T]":
        """Set the buffer of the previous step: at most `buffer_size` items run or are ready there.

        If `buffer_size` is less than the step's `concurrency`, only `buffer_size` items run at
        once. After a step without workers, this adds a buffer that one worker fills.

        Args:
            buffer_size: The most items.
        """
        buffer_size = check_int("buffer_size", buffer_size, at_least=1)
        step = MapStep(None, bound=buffer_size, name="prefetch")
        return self._then(Verb(f"prefetch({buffer_size})", partial(_one_step, step)))

    def to(self, device: Device) -> "Pipeline[T]":
        """Copy the tensors of each item to `device`; the copies are complete when the item comes.

        A separate stream copies them from reused pinned memory, so that the next item is copied
        while the reader computes with the current item. For an object with a method `to(device)`,
        this method of a shallow copy is called.

        Args:
            device: The device.
        """
        target = parse_device(device)
        name = f"to({target})"
        return self._then(Verb(name, partial(_to_steps, target, name)))

    def progress(self, total: int | None = None) -> "Pipeline[T]":
        """Show a progress bar with the rate and, if the number of items is known, the time left.

        The bar counts what the pipeline delivers: batches after `batch`, else items.

        Args:
            total: How many items or batches will be delivered. None: as the length of the source
                says, unless the pipeline has a `filter` or `flat_map`.

        Raises:
            ImportError: tqdm is not installed; raised when an iteration begins.
        """
        if total is not None:
            total = check_int("total", total, at_least=0)
        return self._then(bar=partial(progress_bar, total))

    def _then(self, *verbs: Verb, bar: partial[Any] | None = None) -> "Pipeline[Any]":
        following = copy.copy(self)
        following._verbs += verbs
        following._bar = bar or self._bar
        following._next = following._last = None
        following._entered = {}
        return following

    # Iterating.

    def __aiter__(self) -> Stream[T]:
        return self._stream(self._verbs, self._bar, "pipeline")

    def _through(self, stage: MapStep, bar: partial[Any] | None) -> Stream[Any]:
        """An iteration with one more stage at its end, the stage of `aiopar.map`."""
        verb = Verb(stage.name, partial(_one_step, stage))
        return self._stream((*self._verbs, verb), bar or self._bar, "map")

    def __length_hint__(self) -> int:
        """How many items an iteration delivers if none fails. No `__len__`: it may be unknown."""
        length = expected_length(self._source)
        for verb in self._verbs:
            length = None if length is None or verb.length is None else verb.length(length)
        if length is None:
            return NotImplemented  # type: ignore[no-any-return]  # the protocol's word for unknown
        return length

    def _stream(self, verbs: tuple[Verb, ...], bar: partial[Any] | None, name: str) -> Stream[Any]:
        source, generators = self._source, self._generators
        if self._next is None:
            position = Cursor.begin(source, generators, self._last)
        else:
            position = self._next.resume(source, generators)
            if is_stateful(source):
                source = restarting(source, position.initial)
        # Only now: if the source has failed to load its state, the next iteration tries again.
        self._last, self._next = position, None
        caller = CallerState()
        if bar is not None:
            unit = next((verb.unit for verb in reversed(verbs) if verb.unit), "item")
            delivered, expected = position.delivered, expected_length(self)
            bar = partial(bar, initial=delivered, expected=expected, unit=unit)
        return Stream(
            source,
            _build(verbs, caller, position, exact=not self._max_failures),
            caller=caller,
            executor=self._executor,
            max_failures=self._max_failures,
            timeout=self._timeout,
            position=position,
            bar=bar,
            name=name,
        )

    async def __aenter__(self) -> Stream[T]:
        stream = aiter(self)
        # Several tasks may enter one pipeline, each more than once.
        self._entered.setdefault(current_task(), []).append(stream)
        return stream

    async def __aexit__(self, *exc_info: object) -> None:
        task = current_task()
        # If another task has entered, or its loop is closed, the latest entry counts.
        if task not in self._entered:
            task = next(reversed(self._entered))
        entered = self._entered[task]
        stream = entered.pop()
        if not entered:
            del self._entered[task]
        await stream.__aexit__(*exc_info)

    @property
    def _generators(self) -> Generators:
        shuffles = [verb for verb in self._verbs if verb.shuffles]
        named = enumerate(verb.generator or torch.default_generator for verb in shuffles)
        return Generators({str(number): generator for number, generator in named})

    # Resuming.

    @property
    def finished(self) -> bool:
        """Whether the last iteration was read to its end, or the loaded state is from such an end.

        The next iteration of a finished pipeline begins again. A job that must process each item
        once looks here after `load_state_dict`.
        """
        position = self._next or self._last
        return position is not None and position.ended and (self._next is None or position.at_end)

    def state_dict(self) -> dict[str, Any]:
        """The position of the last iteration, or the start before any iteration, as plain values.

        Raises:
            ValueError: A step has `in_order=False`, or the source's own `state_dict` fails.
        """
        self._check_in_order()
        position = self._next or current_cursor(self._last, self._source, self._generators)
        return {**position.state_dict(), "steps": self._counted}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make the next iteration continue at a saved position.

        If the position is the end of an iteration, the next iteration begins anew: see `finished`.
        Later iterations also have the order that they would have had. The pipeline must have the
        same steps and generators as the saved pipeline; only functions of `map` may differ. This
        call sets the shuffles' generators.

        Args:
            state: The result of `state_dict`.

        Raises:
            TypeError: `state` is not a mapping.
            ValueError: `state` was not saved by such a pipeline, or a step has `in_order=False`.
        """
        self._check_in_order()
        position = Cursor.from_state_dict(state, "steps")
        if state["steps"] != self._counted:
            raise ValueError(
                f"the state is of a pipeline with the steps {state['steps']}, "
                f"this one has {self._counted}"
            )
        seeds, saved, own = len(position.seeds), len(position.generators), len(self._generators)
        if not seeds == saved == own:
            raise ValueError(
                f"the state has {seeds} seeds of {saved} generators, "
                f"this pipeline has {own} shuffles"
            )
        if position.source is not None and not is_stateful(self._source):
            kind = type(self._source).__name__
            raise ValueError(f"the state includes a source's state, which a {kind} cannot load")
        # Now, because another pipeline or loader may share a generator, and draw from it before the
        # next iteration begins.
        self._generators.restore(position.generators)
        self._next = position

    @property
    def _counted(self) -> list[str]:
        """The steps that change which item has which number: a state is of these steps only."""
        return [verb.name for verb in self._verbs if verb.inputs != 1 or verb.shuffles]

    def _check_in_order(self) -> None:
        for verb in self._verbs:
            if not verb.in_order:
                raise ValueError(
                    f"a pipeline with {verb.name} cannot be resumed: it is not in order"
                )


# The steps of each verb. These are module functions in partials, so that a pipeline can be pickled.


def _function_steps(
    fn: Callable[[Any], Any], concurrency: int | None, name: str, in_order: bool, start: VerbStart
) -> list[Step]:
    if concurrency is None and not is_async(fn):
        run = partial(start.caller.run, fn)  # as in `WorkerStage`
        return [InlineStep(partial(mapped, fn=run, name=name, first=start.first))]
    return [MapStep(fn, concurrency or 1, 0, in_order, name, first=start.first)]


def _kept(fn: Callable[[Any], Any], item: Any) -> tuple[Any, ...]:
    verdict = fn(item)
    if type(verdict) in UNAWAITED:
        raise unawaited(verdict)
    return (item,) if verdict else ()


async def _kept_async(fn: Callable[[Any], Awaitable[Any]], item: Any) -> tuple[Any, ...]:
    return (item,) if await fn(item) else ()


def _flat_map_steps(
    fn: Callable[[Any], Any], concurrency: int | None, name: str, start: VerbStart
) -> list[Step]:
    # Inline, the parts of an item are read one by one. A worker or a task makes a list of them.
    inline = concurrency is None and not gives_async(fn)
    listed_parts = _list_parts_async if gives_async(fn) else _list_parts
    parts = partial(_parts if inline else listed_parts, fn)
    flatten = partial(flattened, caller=start.caller, name=name, first=start.first)
    steps = _function_steps(parts, concurrency, name, True, start)
    return [*steps, InlineStep(flatten, blocks=inline)]


def _parts(fn: Callable[[Any], Any], item: Any) -> Any:
    return _check_parts(fn(item))


def _list_parts(fn: Callable[[Any], Any], item: Any) -> list[Any]:
    return list(items_of(_parts(fn, item)))


async def _list_parts_async(fn: Callable[[Any], Any], item: Any) -> list[Any]:
    parts = fn(item)
    if not isinstance(parts, AsyncIterable):
        parts = await parts
    if isinstance(parts, AsyncIterable):
        return [part async for part in parts]
    return list(items_of(_check_parts(parts)))


def _check_parts(parts: Any) -> Any:
    if is_iterable(parts):
        return parts
    if type(parts) in UNAWAITED:
        raise unawaited(parts)
    if isinstance(parts, AsyncGeneratorType):
        raise not_begun(parts)
    raise TypeError(
        f"the function of a flat_map must return an iterable, not {type(parts).__name__}"
    )


def _shuffle_steps(buffer_size: int, start: VerbStart) -> list[Step]:
    wrap = partial(shuffled, buffer_size=buffer_size, seed=start.seed)
    return [InlineStep(wrap, blocks=False)]


def _to_steps(device: torch.device, name: str, start: VerbStart) -> list[Step]:
    copy_to_device = partial(DeviceCopies([device], whole=True), readers=start.caller.streams)
    steps = _function_steps(copy_to_device, None, name, True, start)
    return [*steps, MapStep(None, bound=2, name=name, first=start.first)]


def _batches(size: int, drop_last: bool, count: int) -> int:
    return count // size if drop_last else -(-count // size)


def _one_step(step: Step, start: VerbStart) -> list[Step]:
    return [replace(step, first=start.first) if isinstance(step, MapStep) else step]


def _build(
    verbs: Sequence[Verb], caller: CallerState, position: Cursor, *, exact: bool
) -> list[Step]:
    """The steps of an iteration that begins at `position`.

    Delivered items are skipped as early as possible: as many verbs before the end as have a known
    number of inputs per output. Without `exact`, failed items are skipped too and no number is
    known, so delivered items are skipped at the end.
    """
    firsts = [0] * len(verbs)
    place, count = len(verbs), position.delivered
    while exact and place and (inputs := verbs[place - 1].inputs) is not None:
        place, count = place - 1, count * inputs
        firsts[place] = count
    skip: list[Step] = [InlineStep(partial(skipping, count=count), blocks=False)] if count else []
    seeds = iter(position.seeds)
    steps: list[Step] = []
    for index, verb in enumerate(verbs):
        if index == place:
            steps += skip
        seed = next(seeds) if verb.shuffles else 0
        for step in verb.build(VerbStart(caller, firsts[index], seed)):
            match steps[-1:], step:
                case [MapStep(bound=0) as last], MapStep(fn=None):
                    # `prefetch` sets the bound of the buffer that the previous stage has.
                    steps[-1] = replace(last, bound=step.bound)
                case _:
                    steps.append(step)
    return steps if place < len(verbs) else steps + skip


# Checks of arguments.


def check_source(source: Any) -> Any:
    if not is_iterable(source) and not isinstance(source, AsyncIterable):
        raise TypeError(f"expected an iterable or async iterable, got {described(source)}")
    return source


def check_one_value(fn: F) -> F:
    """Return `fn`; raises TypeError for a generator function: nobody would iterate its result."""
    kind = generator_kind(_check_function(fn))
    if kind is not None:
        raise TypeError(f"{fn!r} is {kind}, which makes any number of items: use Pipeline.flat_map")
    return fn


def _check_function(fn: F) -> F:
    if not callable(fn):
        raise TypeError(f"expected a callable, got {fn!r}")
    return fn
