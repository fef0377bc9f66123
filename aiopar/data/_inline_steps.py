"""Steps of a pipeline that need no workers of their own: generators around an iterator.

Each hands on `PENDING` and failures as they are, at once.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from .._base.thread_state import CallerState
from ._checks import UNAWAITED, unawaited
from ._outcome import PENDING, Failure, Leaving, failure
from ._stages import SyncSource

DROPPED: Any = type("DROPPED", (), {})()
"""What a filter with workers leaves in the place of an item; taken out by `kept`."""

_DRAWS = 1024


def until_left(items: Iterator[Any], leaving: Leaving) -> Iterator[Any]:
    """The items, until the reader has left: from then on no step of anybody's code begins."""
    for item in items:
        if leaving.left:  # while this one was fetched
            return
        yield item
        del item
        if leaving.left:
            return


def mapped(items: Iterator[Any], fn: Callable[[Any], Any], name: str, first: int) -> Iterator[Any]:
    """`fn` of each; items are counted from `first`."""
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
            except BaseException as error:  # noqa: BLE001  # who reads the stream gets it
                outcome = failure(error, name, first)
        first += 1
        del item
        yield outcome
        del outcome


def filtered(
    items: Iterator[Any], fn: Callable[[Any], Any], name: str, first: int
) -> Iterator[Any]:
    """Those of which `fn` is true."""
    for outcome in mapped(items, marking(fn), name, first):
        if outcome is not DROPPED:
            yield outcome


def marking(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that returns its item, or `DROPPED`."""

    def mark(item: Any) -> Any:
        verdict = fn(item)
        if type(verdict) in UNAWAITED:
            raise unawaited(verdict)
        return item if verdict else DROPPED

    return mark


def kept(items: Iterator[Any]) -> Iterator[Any]:
    """Without what a filter has dropped."""
    return (item for item in items if item is not DROPPED)


def flattened(items: Iterator[Any], caller: CallerState, name: str, first: int) -> Iterator[Any]:
    """The items of each item."""
    for item in items:
        if item is PENDING:
            yield item
            continue
        if type(item) is Failure:
            yield item
        else:
            # It may be a generator, with a state of its own.
            parts = SyncSource(item, caller, name, position=first)
            try:
                yield from parts
            finally:
                parts.close()
        first += 1
        del item


def unlisted(items: Iterator[Any]) -> Iterator[Any]:
    """The items of each list. It runs nobody's code, so it may be stepped on the event loop."""
    for item in items:
        if item is PENDING or type(item) is Failure:
            yield item
        else:
            yield from item
        del item


def batched(items: Iterator[Any], size: int, *, drop_last: bool) -> Iterator[Any]:
    """Lists of `size` items; the last may be shorter."""
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
    """In another order: each is drawn from the `buffer_size` items that are next."""
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
    """Without the first `count`, which were delivered before; failures are not counted."""
    for item in items:
        if count and item is not PENDING and type(item) is not Failure:
            count -= 1
            continue
        yield item
        del item
