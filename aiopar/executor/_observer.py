"""Observers of an executor: tracing, metrics, progress."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from .._base.tracebacks import log_callback_error, logger

O = TypeVar("O")  # noqa: E741  # an observer


@dataclass(slots=True, eq=False)
class CallInfo:
    """One call, as observers see it. All events of a call have the same object.

    Attributes:
        fn: The function of the call.
        device: The device of its worker.
        worker: The index of its worker in the executor. None before the start if several workers
            may run the call.
    """

    fn: Callable[..., Any]
    device: torch.device
    worker: int | None


class ExecutorObserver:
    """Base class for observers: override the events that you need.

    Each method is called in the thread where the event happens, and delays that thread: be brief.
    An exception of an observer is logged and otherwise ignored.

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
        """The call is queued, by the calling thread."""

    def start(self, call: CallInfo) -> None:
        """The worker begins to run the call."""

    def launched(self, call: CallInfo) -> None:
        """The function has returned; on an accelerator its kernels may still run."""

    def completed(self, call: CallInfo, error: BaseException | None) -> None:
        """The result is complete on the device, or the call has failed with `error`.

        If the call is cancelled before its start, `error` is a `CancelledError`.
        """


def tell(observers: Iterable[object], event: str, *args: Any) -> None:
    """Call the method `event` of each observer; their errors are logged."""
    for observer in observers:
        try:
            getattr(observer, event)(*args)
        except BaseException as error:  # noqa: BLE001  # logged
            log_callback_error(error, logger, "observer %r failed in %s()", observer, event)


class Observers(Generic[O]):
    """The observers of one object; from any thread.

    `current` is an immutable tuple: keep it for the events of one call or batch, so that each
    observer sees all of its events or none.
    """

    def __init__(self) -> None:
        self.current: tuple[O, ...] = ()
        self._lock = threading.RLock()  # a destructor that interrupts `add` may call `remove`

    def add(self, observer: O) -> None:
        """Add an observer, after the present ones."""
        with self._lock:
            self.current += (observer,)

    def remove(self, observer: O) -> None:
        """Remove an observer, if it was added."""
        with self._lock:
            self.current = tuple(one for one in self.current if one is not observer)


class CallWatch:
    """One call and its observers."""

    __slots__ = ("_call", "_observers")

    def __init__(self, observers: tuple[ExecutorObserver, ...], call: CallInfo) -> None:
        self._observers = observers
        self._call = call
        tell(observers, "enqueue", call)

    def start(self, worker: int) -> None:
        self._call.worker = worker
        tell(self._observers, "start", self._call)

    def launched(self) -> None:
        tell(self._observers, "launched", self._call)

    def completed(self, error: BaseException | None) -> None:
        tell(self._observers, "completed", self._call, error)
