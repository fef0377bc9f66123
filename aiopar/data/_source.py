"""A sync source: an iterator that many workers step in turn, and the state that it carries."""

from collections.abc import Iterable, Iterator
from typing import Any, Self

import torch

from .._caller import CallerState
from .._context import (
    FRESH_STATE,
    TorchState,
    _set_torch_state,
    applied,
    capture_torch_state,
    fresh,
    undo_leaks,
)
from .._steps import autocast_nesting, set_autocast_nesting
from ._item import END, failure


class SyncSource:
    """The items of an iterable, to be taken by one thread at a time, whichever.

    An error of the source comes as a `Failure`, and is its end. (With `position`, it is not the end
    of the stream: then this is what came of one item, that of this position.)

    A generator has a state of its own: context variables, and what it has entered and not left
    (`with torch.no_grad(): yield`). The first are kept in one context. The second is rare, and to
    put it on and take it off costs as much as ten steps: so it is looked for after each step, and
    only from the first time that a step has left something behind, each step has it put on.
    """

    def __init__(
        self,
        source: Iterable[Any],
        caller: CallerState,
        name: str = "source",
        *,
        position: int | None = None,
    ) -> None:
        self._source: Iterable[Any] | None = source
        self._iterator: Iterator[Any] | None = None
        self._name = name
        self._context = caller.context()
        self._own = self._callers = caller.torch_state
        self._autocast_nesting = 0
        self._stashed = False
        self._over = False
        self._position = position
        self.taken = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        """The next item; called in a thread that has the caller's state."""
        if self._over:
            raise StopIteration
        try:
            item = self._step_stashed() if self._stashed else self._context.run(self._step)
        except BaseException as error:  # noqa: BLE001  # whatever it is, who reads the stream gets it
            self._over = True
            if self._position is not None:
                return failure(error, self._name, self._position)
            return failure(error, self._name, self.taken, fatal=True)
        state = capture_torch_state()
        if state is not self._callers and state != self._callers:
            self._stash(state)
        if item is END:
            self._over = True
            raise StopIteration
        self.taken += 1
        return item

    def _step(self) -> Any:
        if self._iterator is None:
            assert self._source is not None  # noqa: S101
            self._iterator, self._source = iter(self._source), None
        return next(self._iterator, END)

    def _stash(self, state: TorchState | None) -> None:
        """A step has left something behind: it is the source's own from here on."""
        self._own = state
        # What `applied` has raised for the caller's state is not the generator's.
        callers = 0 if self._callers is None else 1
        self._autocast_nesting = autocast_nesting() - callers
        set_autocast_nesting(callers)
        self._stashed = True
        _put_back(self._callers)

    def _step_stashed(self) -> Any:
        with fresh(), applied(self._own or FRESH_STATE):
            nesting = autocast_nesting()
            set_autocast_nesting(nesting + self._autocast_nesting)
            try:
                return self._context.run(self._step)
            finally:
                self._own = capture_torch_state()
                self._autocast_nesting = autocast_nesting() - nesting
                set_autocast_nesting(nesting)

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: there may be something to close."""
        return self._iterator is not None and not self._over and hasattr(self._iterator, "close")

    def close(self) -> None:
        """Leave a generator's `with` and `finally` blocks; called when nobody takes items."""
        if self.suspended:
            self._over = True
            with fresh(), applied(self._own or FRESH_STATE):
                self._context.run(self._iterator.close)  # type: ignore[union-attr]
        self._iterator = self._source = None


def _put_back(state: TorchState | None) -> None:
    """The calling thread's state as it was before a step of the source left its own there."""
    undo_leaks()
    if state is not None:
        if state.inference:
            guard: Any = torch._C._InferenceMode(True)
            guard.__enter__()
            _guards.append(guard)
        _set_torch_state(state)


# Entered for good: the end of the call sets an absolute value. A guard's destructor would undo it
# on whatever thread drops it.
_guards: list[object] = []
