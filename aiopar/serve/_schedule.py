"""What the runners of a `Batcher` and its scheduler know of each other."""

from collections.abc import Sequence
from typing import Protocol

from .._executor import DeviceExecutor
from ._observer import BatchObservers
from ._part import Part
from ._request import Request


class Runner(Protocol):
    """Where batches run, one at a time."""

    began: float
    """When its last batch began, by `time.monotonic`."""
    batch: Sequence[Request]
    """What it has taken and not ended."""
    executor: DeviceExecutor
    """On whose workers it makes batches, and mostly runs them."""

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""

    def start(self) -> None:
        """Take the next batch, soon, and run it; from any thread that runners or callers are in."""

    def fail(self, error: BaseException) -> None:
        """Its replica has failed: take it out of service."""

    def cancel(self) -> None:
        """Nobody waits for what it runs: end that where it can be ended; from any thread."""


class Schedule(Protocol):
    """Who gives them batches; each method may be called from any thread."""

    observers: BatchObservers | None
    """Who watches the batches that are taken from now on."""

    def take(self, runner: Runner) -> list[Request]:
        """The next batch, which is the runner's `batch` from now on; empty if there is none."""

    def out_of_memory(self, requests: Sequence[Request]) -> None:
        """A batch of these did not fit."""

    def ended(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> bool:
        """The runner has run a batch; whether there is another for it now.

        If not, it calls `told` when what the batch has come to is on its way to the callers.
        """

    def told(self) -> None:
        """So it is: who closes the batcher is not told before them that all has ended."""

    def lost(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        """The runner's replica has failed under a batch, which is given back."""

    def refused(self, runner: Runner, error: BaseException) -> None:
        """The executor takes no more calls, or has no thread for them."""


class LoopSchedule(Schedule, Protocol):
    """Who gives batches to runners that do not go on by themselves, on event loops."""

    def released(self, runner: Runner, batch: Sequence[Request], parts: Sequence[Part]) -> None:
        """As `ended`; the runner then calls `told`."""

    def interrupted(self, runner: Runner, batch: Sequence[Request], error: BaseException) -> None:
        """The runner was cancelled, by others, under a batch, which is given back."""

    def withdrawn(self, runner: Runner) -> None:
        """The runner was cancelled before it took a batch."""
