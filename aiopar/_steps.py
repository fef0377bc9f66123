"""A synchronous generator that is stepped on workers, and the state that it carries."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from ._caller import CallerState
from ._context import FRESH_STATE, applied, capture_torch_state, fresh

T = TypeVar("T")

END: Any = object()
"""What comes in the place of an item, when there is none any more."""


class Steps(Generic[T]):
    """A generator and the state that it carries from step to step; run on a worker."""

    def __init__(self, make: Callable[[], Iterable[T]], caller: CallerState) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._iterator: Any = None
        self._context = caller.context()
        self._torch_state = caller.torch_state or FRESH_STATE
        self._autocast_nesting = 0
        self.ended = False
        """Whether there is nothing left to step; set before the last step's future is done."""

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: it may be inside of `with` and `try` blocks."""
        return self._iterator is not None and not self.ended

    def step(self) -> T:
        """The next item, or `END`."""
        with self._stashed():
            return self._context.run(self._advance)

    def close(self) -> None:
        """Leave the generator's `with` and `finally` blocks; nothing if it never began."""
        self.ended = True
        self._make = None
        close = getattr(self._iterator, "close", None)
        if close is not None:
            with self._stashed():
                self._context.run(close)

    @contextmanager
    def _stashed(self) -> Iterator[None]:
        # What the generator has entered and not left (grad mode, autocast, ...) is its own: put
        # on before each step, taken off the thread after it.
        with fresh(), applied(self._torch_state):
            nesting = autocast_nesting()
            set_autocast_nesting(nesting + self._autocast_nesting)
            try:
                yield
            finally:
                self._torch_state = capture_torch_state() or FRESH_STATE
                self._autocast_nesting = autocast_nesting() - nesting
                set_autocast_nesting(nesting)

    def _advance(self) -> T:
        try:
            make, self._make = self._make, None
            if make is not None:
                self._iterator = iter(make())
            # A default, for a StopIteration could not pass through a future.
            item: T = next(self._iterator, END)
        except BaseException:
            self.ended = True
            raise
        if item is END:
            self.ended = True
        return item


def autocast_nesting() -> int:
    """How many `autocast` blocks torch counts this thread to be in.

    When it leaves the outermost, torch drops the casts of weights that it keeps.
    """
    # There is no reading it but by counting.
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_nesting(wanted: int) -> None:
    """Have torch count `wanted` of them."""
    nesting = autocast_nesting()
    for _ in range(wanted - nesting):
        torch.autocast_increment_nesting()
    for _ in range(nesting - wanted):
        torch.autocast_decrement_nesting()
