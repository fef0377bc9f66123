"""A synchronous generator that is stepped on workers, and the state that it carries."""

import contextvars
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from ._context import (
    FRESH_STATE,
    TorchState,
    applied,
    autocast_nesting,
    capture_torch_state,
    fresh,
    put_back,
    set_autocast_nesting,
)
from ._modes import Modes, take_modes

T = TypeVar("T")

END: Any = object()
"""What comes in the place of an item, when there is none any more."""


class CarriedState:
    """torch's state as a generator has it: what it has entered and not left, its caller's below.

    Each step is run `with` it; what the step leaves behind is a part of it from then on.
    """

    def __init__(self, state: TorchState | None) -> None:
        self._state = state or FRESH_STATE
        self._modes: Modes | None = None
        self._autocast_nesting = 0

    @classmethod
    def taken_off(cls, callers: TorchState | None) -> "CarriedState":
        """What a step has left on this thread, to which `callers` was applied, and is again."""
        modes = take_modes()
        carried = cls(capture_torch_state(own=True))
        carried._modes = modes
        nesting = nesting_under(callers)
        carried._autocast_nesting = autocast_nesting() - nesting
        set_autocast_nesting(nesting)
        put_back(callers)
        return carried

    def __enter__(self) -> None:
        self._below = (fresh(), applied(self._state))
        for entered in self._below:
            entered.__enter__()
        self._outside = autocast_nesting()
        set_autocast_nesting(self._outside + self._autocast_nesting)
        if self._modes is not None:
            self._modes.put()

    def __exit__(self, *error: object) -> None:
        self._modes = take_modes()
        self._state = capture_torch_state(own=True) or FRESH_STATE
        self._autocast_nesting = autocast_nesting() - self._outside
        set_autocast_nesting(self._outside)
        for entered in reversed(self._below):
            entered.__exit__(*error)


def nesting_under(callers: TorchState | None) -> int:
    """How many autocast blocks a worker's thread is in that runs a call under `callers`."""
    return 0 if callers is None else 1  # by `applied`


class Steps(Generic[T]):
    """A generator and the state that it carries from step to step; run on a worker.

    Args:
        make: Makes it.
        context: Its context variables, which are its own from then on.
        torch_state: What it begins with.
    """

    def __init__(
        self,
        make: Callable[[], Iterable[T]],
        context: contextvars.Context,
        torch_state: TorchState | None,
    ) -> None:
        self._make: Callable[[], Iterable[T]] | None = make
        self._iterator: Any = None
        self._context = context
        self._carried = CarriedState(torch_state)
        self.ended = False
        """Whether there is nothing left to step; set before the last step's future is done."""

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: it may be inside of `with` and `try` blocks."""
        return self._iterator is not None and not self.ended

    def step(self) -> T:
        """The next item, or `END`."""
        with self._carried:
            return self._context.run(self._advance)

    def close(self) -> None:
        """Leave the generator's `with` and `finally` blocks; nothing if it never began."""
        self.ended = True
        self._make = None
        close = getattr(self._iterator, "close", None)
        if close is not None:
            with self._carried:
                self._context.run(close)

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
