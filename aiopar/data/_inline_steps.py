"""Steps of a pipeline without workers of their own: generators that wrap an iterator.

Each step yields every `PENDING` and `Failure` at once.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from .._base.thread_state import CallerState
from ..executor._generators import END, Steps
from ._outcome import PENDING, UNAWAITED, Failure, StopFlag, failure, unawaited

CONTAINERS = frozenset((range, list, tuple, dict, set, frozenset, str, bytes))
"""Types whose iterators neither block nor run a user's code."""

_DRAWS = 1024


@dataclass(frozen=True, slots=True)
class InlineStep:
    """A declared step without workers or buffer: a generator around the iterator of the items.

    The pump or reader that takes its items advances it.
    """

    wrap: Callable[[Iterator[Any]], Iterator[Any]]
    blocks: bool = True
    """Whether it runs user code: then only workers advance it, never the event loop."""


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
    """The items of an iterable; if the iterable fails, a `Failure` is the last of them.

    `position` is that of the item from which the iterable was made. None: the iterable is the
    stream's source, and its failure is fatal.
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
                outcome = failure(error, name, first)
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
            # It may be a generator, which keeps its own torch state between steps.
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
