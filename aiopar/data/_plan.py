"""What a stream is made of, declared: a source, and the steps that its items take."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

from .._callables import is_async


@dataclass(frozen=True, slots=True)
class Map:
    """A function on each item, `concurrency` at once: a stage with a buffer.

    A plain function runs on workers, an `async def` (or whatever returns an awaitable, with
    `asynchronous`) as tasks on the event loop.
    """

    fn: Callable[[Any], Any] | None
    """None: nothing is done to the items, they are only fetched ahead."""
    concurrency: int = 1
    bound: int | None = None
    """The most items that run or are ready, also where that is less than `concurrency`; None: as
    many ready as run, and at least two."""
    in_order: bool = True
    name: str = "map"
    asynchronous: bool | None = None
    """None: as `fn` is."""
    first: int = 0
    """The position of the first item that comes, for messages."""

    @property
    def buffer(self) -> int:
        """The bound, with its default."""
        if self.bound is None:
            return self.concurrency + max(2, self.concurrency)
        return self.bound

    @property
    def on_loop(self) -> bool:
        """Whether it runs as tasks."""
        return is_async(self.fn) if self.asynchronous is None else self.asynchronous


@dataclass(frozen=True, slots=True)
class Link:
    """An iterator around an iterator, without workers or buffer of its own.

    It is stepped by who takes the items, one step at a time. `PENDING` and every `Failure` that
    comes are to be yielded as they are, at once.
    """

    around: Callable[[Iterator[Any]], Iterator[Any]]
    blocks: bool = True
    """Whether it may take long: it is then stepped on a worker, never on the event loop."""


Step: TypeAlias = Map | Link
