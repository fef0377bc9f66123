"""The steps of a pipeline as declared, and what passes from step to step.

This is an item, a `Failure` in place of an item, `PENDING` or `END`. An inline step yields
`PENDING` and a `Failure` at once.
"""

import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import CoroutineType
from typing import Any, Final, TypeAlias, final

import torch

from .._base.arguments import not_begun
from .._base.inputs import outline
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, awaitable_error, own_traceback, stand_in
from ..executor._generators import END, Steps
from ..futures._future import Future

PENDING: Final[Any] = object()
"""There is no item yet. The stage calls its listener when there is one."""


@dataclass(slots=True, eq=False)
class StopFlag:
    """Tells workers that the reader has left; workers look between two items.

    A `threading.Event` has a lock, which must not be taken in a finalizer or after Ctrl-C.
    """

    is_set: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class FailedItem:
    """An item that a stream skipped, as `max_failures` allows.

    Attributes:
        error: The error that was raised.
        stage: The step in which the item failed.
        position: The position of the item among the inputs of that step, counted from 0.
    """

    error: BaseException
    stage: str
    position: int


@final
@dataclass(slots=True, eq=False)
class Failure:
    """Takes the place of an item that failed; every later stage passes the failure on."""

    error: BaseException | None  # None after `take`
    stage: str
    position: int
    fatal: bool = False  # no item can follow: the source failed, or a worker was lost

    def take(self) -> BaseException:
        """Return the error, once; its traceback may refer to this object."""
        error, self.error = self.error, None
        assert error is not None  # noqa: S101
        return error


def failure(
    error: BaseException, stage: str, position: int, *items: Any, fatal: bool = False
) -> Failure:
    """The `Failure` for an error that was caught in the calling frame.

    `items`: the item, if the error describes it.
    """
    error = own_traceback(error)
    if isinstance(error, StopAsyncIteration):
        # A StopAsyncIteration from `__anext__` would end the reader's loop silently.
        error = stand_in("the stage raised StopAsyncIteration", error)
    error = awaitable_error(error)
    item = ": ".join([str(position), *map(outline, items)])
    add_note_once(error, f"in stage {stage!r} of the stream, item ", item)
    if isinstance(error, AttributeError) and error.obj is None and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if "get_worker_info" in frame.f_code.co_names:
            add_note_once(
                error,
                "get_worker_info() is None in threads, which share one process: use the argument "
                'of worker_init_fn, or AsyncDataLoader(..., worker_type="process")',
            )
    return Failure(error, stage, position, fatal)


UNAWAITED: frozenset[type] = frozenset((CoroutineType, Future))
"""The types that a plain function must not return, because nobody would await the result."""


def unawaited(result: Any) -> TypeError:
    """The error for a plain function that returned a `result` of a type in `UNAWAITED`."""
    if isinstance(result, Future):
        return TypeError("the function returned a Future: give an `async def` that awaits it")
    return not_begun(result)


# The steps.


@dataclass(frozen=True, slots=True)
class MapStep:
    """A declared stage: a function of each item, with pumps and a buffer of its own."""

    fn: Callable[[Any], Any] | None  # None: items are only fetched ahead
    concurrency: int = 1  # how many pumps there may be at once
    bound: int = 0
    """The most items that run or are ready, even if less than `concurrency`. 0: as many items may
    be ready as may run, and at least two."""
    in_order: bool = True  # whether outcomes leave in the order in which their items came
    name: str = "map"  # in errors and statistics
    first: int = 0  # the position of the first item
    described: bool = True  # whether errors describe the item; not if the user does not know it

    @property
    def buffer(self) -> int:
        return self.bound or self.concurrency + max(2, self.concurrency)


@dataclass(frozen=True, slots=True)
class InlineStep:
    """A declared step without workers or buffer: a generator around the iterator of the items."""

    wrap: Callable[[Iterator[Any]], Iterator[Any]]
    blocks: bool = True  # it runs user code: workers advance it, never the event loop


Step: TypeAlias = MapStep | InlineStep

CONTAINERS = frozenset((range, list, tuple, dict, set, frozenset, str, bytes))
"""Types whose iterators neither block nor run a user's code."""

_DRAWS = 1024


def until_stopped(items: Iterator[Any], stop: StopFlag) -> Iterator[Any]:
    """The items until `stop` is set; from then on no step calls user code."""
    for item in items:
        if stop.is_set:  # it was set while this item was fetched
            return
        yield item
        del item
        if stop.is_set:
            return


def stepped(steps: "Steps[Any]", name: str, position: int | None = None) -> Iterator[Any]:
    """The items of an iterable; if the iterable fails, the last one is a `Failure`.

    `position`: of the item from which the iterable was made. None: the iterable is the stream's
    source, and the failure is fatal.
    """
    taken = 0
    while True:
        try:
            item = next(steps, END)
        except BaseException as error:  # noqa: BLE001  # the reader gets it
            fatal = position is None
            item = failure(error, name, taken if position is None else position, fatal=fatal)
        if item is END:
            return
        taken += 1
        yield item
        del item


def mapped(items: Iterator[Any], fn: Callable[[Any], Any], name: str, first: int) -> Iterator[Any]:
    """`fn(item)` for each item; the position of the first item is `first`."""
    for item in items:
        if item is PENDING:
            yield item
            continue
        outcome = item
        if type(item) is not Failure:
            try:
                outcome = fn(item)
                if type(outcome) in UNAWAITED:
                    raise unawaited(outcome)
            except BaseException as error:  # noqa: BLE001  # the reader gets it
                outcome = failure(error, name, first, item)
        first += 1
        del item
        yield outcome
        del outcome


def flattened(items: Iterator[Any], caller: CallerState, name: str, first: int) -> Iterator[Any]:
    """The parts of each item, which is an iterable; the position of the first item is `first`."""
    for item in items:
        if item is PENDING:
            yield item
            continue
        if type(item) is Failure:
            yield item
        elif type(item) in CONTAINERS:
            yield from item
        else:
            # The item may be a generator, which keeps its own torch state between steps.
            steps = Steps(partial(_same, item), caller)
            try:
                yield from stepped(steps, name, first)
            finally:
                steps.close()
        first += 1
        del item


def _same(item: Any) -> Any:
    return item


def batched(items: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """Lists of `size` items; the last list may be shorter."""
    batch: list[Any] = []
    for item in items:
        if item is PENDING or type(item) is Failure:
            yield item
            continue
        batch.append(item)
        del item
        if len(batch) == size:
            full, batch = batch, []
            yield full
            del full
    if batch and not drop_last:
        yield batch


def shuffled(items: Iterator[Any], buffer_size: int, seed: int) -> Iterator[Any]:
    """The items in a random order: each is drawn from the next `buffer_size` items."""
    generator = torch.Generator().manual_seed(seed)
    draws = _draws(buffer_size, generator)
    buffer: list[Any] = []
    for item in items:
        if item is PENDING or type(item) is Failure:
            yield item
        elif len(buffer) < buffer_size:
            buffer.append(item)
        else:
            place = next(draws)
            drawn, buffer[place] = buffer[place], item
            yield drawn
            del drawn
        del item
    for place in torch.randperm(len(buffer), generator=generator, device="cpu").tolist():
        drawn, buffer[place] = buffer[place], None
        yield drawn
        del drawn


def _draws(below: int, generator: torch.Generator) -> Iterator[int]:
    while True:
        yield from torch.randint(below, (_DRAWS,), generator=generator, device="cpu").tolist()


def skipping(items: Iterator[Any], count: int) -> Iterator[Any]:
    """The items after the first `count` items, failures not counted."""
    for item in items:
        if count and item is not PENDING and type(item) is not Failure:
            count -= 1
            continue
        yield item
        del item
