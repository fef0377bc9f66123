"""A sync source: an iterator that many workers step in turn, and the state that it carries."""

from collections.abc import Iterable, Iterator
from typing import Any, Self

from .._caller import CallerState
from .._context import autocast_nesting, capture_torch_state
from .._modes import in_modes
from .._steps import CarriedState, nesting_under
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
        self._callers = caller.torch_state
        self._nesting = nesting_under(self._callers)
        self._carried: CarriedState | None = None
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
            item = self._context.run(self._step) if self._carried is None else self._step_carried()
        except BaseException as error:  # noqa: BLE001  # whatever it is, who reads the stream gets it
            self._over = True
            if self._position is not None:
                return failure(error, self._name, self._position)
            return failure(error, self._name, self.taken, fatal=True)
        if self._carried is None and self._left_something():
            self._carried = CarriedState.taken_off(self._callers)
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

    def _left_something(self) -> bool:
        """Whether a step has left something behind: the source's own from here on."""
        state = capture_torch_state(own=True)
        if in_modes() or (state is not self._callers and state != self._callers):
            return True
        # An autocast block that changes nothing is counted all the same.
        return autocast_nesting() != self._nesting

    def _step_carried(self) -> Any:
        assert self._carried is not None  # noqa: S101
        with self._carried:
            return self._context.run(self._step)

    @property
    def suspended(self) -> bool:
        """Whether it has begun and not ended: there may be something to close."""
        return self._iterator is not None and not self._over and hasattr(self._iterator, "close")

    def close(self) -> None:
        """Leave a generator's `with` and `finally` blocks; called when nobody takes items."""
        if self.suspended:
            self._over = True
            carried = self._carried or CarriedState(self._callers)
            with carried:
                self._context.run(self._iterator.close)  # type: ignore[union-attr]
        self._iterator = self._source = None
