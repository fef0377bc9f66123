"""What has a state of its own - a source, a dataset, a sampler - is asked for it, and put back."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NoReturn

import torch

from .._error_handling import in_words
from .._tree import children
from ._checks import is_stateful
from ._item import without_frames


class NoState:
    """In place of a state: it was asked for, and `error` came.

    Kept, for who reads need not want to resume: it is raised where somebody asks for the state.
    """

    def __init__(self, error: Exception) -> None:
        self._error = without_frames(error)

    def refuse(self, party: str) -> NoReturn:
        """Raise ValueError: the `party` (source, sampler or dataset) gives no state."""
        # Not the error itself: its traceback would hold who asks, for as long as this is kept.
        words = in_words(self._error)
        raise ValueError(f"the {party} gives no state: {words}") from self._error


def own_state(party: Any, *, iterated: bool = True) -> Any:
    """A copy of its state, or `NoState`; None: it has none.

    Args:
        party: May have one, that can be put back into it.
        iterated: Whether it was. Before that, some have no state yet: as they are made, they are
            where they begin.
    """
    if not is_stateful(party):
        return None
    try:
        # It may be the party's own, which goes on.
        return copy.deepcopy(party.state_dict())
    except Exception as error:  # noqa: BLE001  # whatever it is, it goes to who asks for the state
        return NoState(error) if iterated else None


class PuttingBack:
    """Puts what is iterated back to a state of its own: before its `iter`, or around it.

    Most go on in the `iter` that comes behind. What is its own iterator may start over there, or
    take no state before: as by torchdata's loader, it is put back behind its `iter`.

    Args:
        party: Has the state.
        state: Its; None to leave it as it is.
        begun: Whether the state was taken behind an `iter`, not before.
        around: Makes what the state is loaded in.
    """

    def __init__(
        self,
        party: Any,
        state: Any,
        *,
        begun: bool,
        around: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self._party = party
        self._state = state
        self._begun = begun
        self._around = around
        self.done = state is None
        """Whether it was put back."""

    def before(self) -> None:
        """To be called before `iter`."""
        if self._state is None:
            return
        iterates = hasattr(self._party, "__next__") or hasattr(self._party, "__anext__")
        with suppress(Exception) if iterates else nullcontext():
            self._load()

    def behind(self, iterator: Any) -> None:
        """To be called with what `iter` returned, before anything is read."""
        if self._state is None:
            return
        # One that goes on in its `iter` does so once a loading: another would be for the next.
        again = self._begun and iterator is self._party and not self._is_there()
        if again or not self.done:
            self._load()

    def _is_there(self) -> bool:
        try:
            return _equal(self._party.state_dict(), self._state)
        except Exception:  # noqa: BLE001  # it cannot be compared: nobody knows
            return False

    def _load(self) -> None:
        with self._around():
            # A copy, which it may take for its own.
            self._party.load_state_dict(copy.deepcopy(self._state))
        self.done = True


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    parts, others = children(one), children(other)
    if parts is not None and others is not None:
        keys = list(parts[0]) == list(others[0])
        return keys and all(map(_equal, parts[1], others[1]))
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    same = one == other
    return bool(same.all() if hasattr(same, "all") else same)  # of NumPy's arrays: one for each
