"""Who watches an executor work: tracing, metrics, progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from .._base.tracebacks import log_callback_error, logger


@dataclass(slots=True, eq=False)
class CallInfo:
    """One call, as observers see it; the same object in each of its events.

    Attributes:
        fn: The function that it runs.
        device: The device of its worker.
        worker: The worker's index in the executor; None until it starts, where any of several may
            run it.
    """

    fn: Callable[..., Any]
    device: torch.device
    worker: int | None


class ExecutorObserver:
    """Base class for observers: override what you want to see.

    Each method is called in the thread where the event happens and delays it, so be brief; an
    exception is logged and otherwise ignored.

    Example:
        >>> import aiopar
        >>> class Devices(aiopar.ExecutorObserver):
        ...     def start(self, call):
        ...         print(call.fn.__name__, "on", call.device)
        >>> with aiopar.DeviceExecutor(["cpu"]) as executor:
        ...     executor.add_observer(Devices())
        ...     executor.submit(pow, 2, 3).result()
        pow on cpu
        8
    """

    def enqueue(self, call: CallInfo) -> None:
        """The call was queued, by the calling thread."""

    def start(self, call: CallInfo) -> None:
        """The worker begins to run it."""

    def launched(self, call: CallInfo) -> None:
        """The function ended; on an accelerator its kernels may still run."""

    def completed(self, call: CallInfo, error: BaseException | None) -> None:
        """Its result is complete on the device and goes to who awaits it, or its error does.

        A call that was cancelled before it started comes here too, with a `CancelledError`.
        """


class CallWatch:
    """One call and the observer that watches it, through all its events."""

    __slots__ = ("_call", "_observer")

    def __init__(self, observer: ExecutorObserver, call: CallInfo) -> None:
        self._observer = observer
        self._call = call
        observer.enqueue(call)

    def start(self, worker: int) -> None:
        self._call.worker = worker
        self._observer.start(self._call)

    def launched(self) -> None:
        self._observer.launched(self._call)

    def completed(self, error: BaseException | None) -> None:
        self._observer.completed(self._call, error)


def tell(observers: Iterable[object], event: str, *args: Any) -> None:
    """Call the method `event` of each; none can disturb the caller, nor another observer."""
    for observer in observers:
        try:
            getattr(observer, event)(*args)
        except BaseException as error:  # noqa: BLE001  # seen to there
            log_callback_error(error, logger, "observer %r failed in %s()", observer, event)


class Observers(ExecutorObserver):
    """Several observers as one, none of which can disturb a call."""

    def __init__(self, observers: tuple[ExecutorObserver, ...]) -> None:
        self.observers = observers

    def enqueue(self, call: CallInfo) -> None:
        tell(self.observers, "enqueue", call)

    def start(self, call: CallInfo) -> None:
        tell(self.observers, "start", call)

    def launched(self, call: CallInfo) -> None:
        tell(self.observers, "launched", call)

    def completed(self, call: CallInfo, error: BaseException | None) -> None:
        tell(self.observers, "completed", call, error)
