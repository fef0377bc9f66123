"""The results of a batch, and how they reach the callers."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from .._base.collate import unbatch
from .._base.tracebacks import add_note_once
from ..futures._wakeup import Waker
from ._request import Request


@dataclass(slots=True, eq=False)
class PartOutcome:
    """The outcome of requests that ran together: their outputs, or the error that they share."""

    requests: Sequence[Request]
    outputs: Any = None
    """The function's output for all of them or, if `unbatched`, one output per request."""
    unbatched: bool = False
    step: int = 0
    """The number of the step of a stream."""
    error: BaseException | None = None
    traceback: TracebackType | None = None
    """The error's traceback before any caller raised it: every raise adds frames."""

    def __post_init__(self) -> None:
        if self.error is not None:
            self.traceback = self.error.__traceback__

    def unbatch(self) -> None:
        """Split the outputs into one per request; these are views, so it takes little time."""
        if self.error is not None or self.unbatched:
            return
        try:
            self.outputs = unbatch(self.outputs, len(self.requests))
            self.unbatched = True
        except Exception as error:  # noqa: BLE001  # a user's type of output may raise any error
            note = f"while the batch's outputs, {type(self.outputs)}, were taken apart"
            add_note_once(error, note)
            # The frames of the traceback hold this outcome.
            self.error = error.with_traceback(None)


def deliver_soon(outcomes: Sequence[PartOutcome]) -> None:
    """Deliver `outcomes` to the callers, on their event loops; from any thread."""
    wakers = {request.awaiter.waker for outcome in outcomes for request in outcome.requests}
    if len(wakers) > 1:
        for outcome in outcomes:  # here, because two loops may call `_deliver` at the same time
            outcome.unbatch()
    # One callback for all requests of a loop, because waking a loop costs most.
    for waker in wakers:
        waker.post(partial(_deliver, outcomes, waker))


def _deliver(outcomes: Sequence[PartOutcome], waker: Waker) -> None:
    """Deliver `outcomes` to the callers on the loop of `waker`; again if Ctrl-C interrupts it."""
    for outcome in outcomes:
        outcome.unbatch()
        for index, request in enumerate(outcome.requests):
            if request.awaiter.waker is not waker:
                continue
            if outcome.error is not None:
                request.fail(outcome.error, outcome.traceback)
            else:
                request.resolve(outcome.outputs[index], outcome.step)
