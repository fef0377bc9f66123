"""One unit of forward and backward work, as a call on a worker of `Parallel`."""

from collections.abc import Callable
from typing import Any

import torch

from ._call import TokenCall
from ._error_handling import add_note_once, awaitable_error


class Unit(TokenCall[Any]):
    """One call of `forward_backward`; then what it came to, until that is fetched."""

    number: int
    device: torch.device
    dropped = False

    def __init__(self, fn: Callable[[Any], Any], x: Any, ended: "Callable[[Unit], None]") -> None:
        super().__init__(fn, (x,))
        self._ended = ended

    def finish(self) -> None:
        if self.error is not None:
            self.error = awaitable_error(self.error)
            add_note_once(self.error, f"in unit {self.number} on device {self.device}")
        ended = self._ended
        del self._ended  # who is told holds this unit from now on
        ended(self)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self.dropped = True
            self.finish()

    def outcome(self) -> Any:
        """What it returned; raises what it raised."""
        result, error = self.result, self.error
        self.result = self.error = None
        if error is None:
            return result
        try:
            raise error
        finally:
            # The error's traceback holds this frame, which must not hold the error.
            del error
