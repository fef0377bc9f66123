"""Observers of an executor: tracing, metrics, progress."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from .._base.forking import ReentrantLock, Registry, after_fork_in_child
from .._base.tracebacks import log_callback_error, logger

O = TypeVar("O")  # noqa: E741  # an observer


@dataclass(slots=True, eq=False)
class CallInfo:
    """One call, as observers see it. All events of a call have the same object.

    Attributes:
        fn: The function of the call.
        device: The device of its worker.
        worker: The index of its worker in the executor; None until one of several workers runs it.
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


class Listeners(Generic[O]):
    """The observers of one call, item or batch, in their order; each sees all of its events.

    Observers that do not override a method of `kind`, their base class, are not called for that
    event: most events have few listeners, and there are several events per item. Immutable.
    """

    __slots__ = ("_listening", "observers")

    def __init__(self, observers: Iterable[O], kind: type[O]) -> None:
        self.observers = tuple(observers)
        self._listening = {
            event: [
                observer
                for observer in self.observers
                if getattr(getattr(observer, event), "__func__", None) is not nothing
            ]
            for event, nothing in vars(kind).items()
            if not event.startswith("_")
        }

    def any_for(self, *events: str) -> bool:
        """Whether an observer overrides the method of one of these events."""
        return any(self._listening[event] for event in events)

    def tell(self, event: str, *args: Any) -> None:
        """Call the method `event` of each observer; their errors are logged."""
        _tell(self._listening[event], event, args)

    def tell_last_first(self, event: str, *args: Any) -> None:
        """As `tell`, in the opposite order."""
        _tell(reversed(self._listening[event]), event, args)


def _tell(observers: Iterable[object], event: str, args: tuple[Any, ...]) -> None:
    for observer in observers:
        try:
            getattr(observer, event)(*args)
        except BaseException as error:  # noqa: BLE001  # logged
            log_callback_error(error, logger, "observer %r failed in %s()", observer, event)


class Observers(Generic[O]):
    """The observers of one object. Thread-safe.

    Read `current` once for all events of one call, item or batch. The makers of `everywhere` add
    observers too, now and later. A maker gets `name`, the name of the observed object.
    """

    def __init__(self, everywhere: "ProcessObservers[O]", name: str = "") -> None:
        self.current: Listeners[O] | None = None
        """None without observers."""
        self.name = name
        self._kind = everywhere.kind
        self._made: dict[Callable[[str], O], O] = {}
        self._lock = ReentrantLock()  # a destructor that interrupts `add` may call `remove`
        everywhere.include(self)

    def add(self, observer: O) -> None:
        """Add an observer, after the present ones."""
        with self._lock:
            present = () if self.current is None else self.current.observers
            self.current = Listeners((*present, observer), self._kind)

    def remove(self, observer: O) -> None:
        """Remove an observer, if it was added."""
        with self._lock:
            present = () if self.current is None else self.current.observers
            others = [one for one in present if one is not observer]
            self.current = Listeners(others, self._kind) if others else None

    def add_made(self, make: Callable[[str], O]) -> None:
        """Add the observer that `make` returns, unless it was added."""
        with self._lock:
            if make not in self._made:
                observer = self._made[make] = make(self.name)
                self.add(observer)

    def remove_made(self, make: Callable[[str], O]) -> None:
        """Remove the observer that `make` has returned, if it was added."""
        with self._lock:
            if make in self._made:
                self.remove(self._made.pop(make))


class ProcessObservers(Generic[O]):
    """Makers of observers, of one base class, for all executors or all batchers in this process.

    A maker gets the name of an executor or batcher, and returns the observer for it.
    """

    def __init__(self, kind: type[O]) -> None:
        self.kind = kind
        self._all: Registry[Observers[O]] = Registry()
        self._makers: dict[Callable[[str], O], None] = {}
        after_fork_in_child(self._makers.clear)

    # No lock. Each method publishes first, then looks: an object and a maker that come at once find
    # each other at least once. `include` looks at the end whether the maker is still there.

    def include(self, observers: Observers[O]) -> None:
        """Let the makers observe one more object."""
        self._all.add(observers)
        for make in self._makers.copy():
            observers.add_made(make)
            if make not in self._makers:
                observers.remove_made(make)

    def add(self, make: Callable[[str], O]) -> None:
        """Observe every object, and those that are made later."""
        self._makers[make] = None
        for observers in self._all:
            observers.add_made(make)

    def remove(self, make: Callable[[str], O]) -> None:
        """Observe no object any more."""
        self._makers.pop(make, None)
        for observers in self._all:
            observers.remove_made(make)


all_executors: ProcessObservers[ExecutorObserver] = ProcessObservers(ExecutorObserver)


class CallWatch:
    """One call and its observers."""

    __slots__ = ("_observers", "call")

    def __init__(self, observers: Listeners[ExecutorObserver], call: CallInfo) -> None:
        self._observers = observers
        self.call = call
        self.tell("enqueue")

    def tell(self, event: str, *args: Any) -> None:
        """Call the method `event` of each observer."""
        self._observers.tell(event, self.call, *args)
