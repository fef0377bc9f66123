"""The calls of one gang: they run at the same time and may meet."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

from .._base.devices import current_stream, is_accelerator, record_event, share_memory
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, log_callback_error, logger
from .._base.tree import tensors
from ..errors import ReplicaAborted
from ..futures._future import thread_hooks
from ._call import FutureCall

T = TypeVar("T")


class Replica:
    """One of the calls that `parallel_apply` (or `submit_all`) runs at the same time.

    Calls may meet through it: `barrier` and `exchange` wait for the others, and are released with
    `ReplicaAborted` when another call fails, returns without coming, or the whole is cancelled.
    The n-th meeting of one replica is the n-th of all. What a replica forks belongs to it.
    """

    __slots__ = ("_gang", "_round", "_stream", "device", "index")

    def __init__(self, gang: "Gang", index: int) -> None:
        self._gang = gang
        self._round = 0
        self._stream: torch.Stream | None = None
        self.index: int = index
        """The position of this call, from 0."""
        self.device: torch.device = torch.device("cpu")
        """The device of its worker."""

    def __repr__(self) -> str:
        return f"<Replica {self.index} of {self.count} on {self.device}>"

    @property
    def count(self) -> int:
        """How many calls run together."""
        return self._gang.count

    def barrier(self) -> None:
        """Wait until every replica has come here.

        Raises:
            ReplicaAborted: Another replica failed, returned without coming, or all was cancelled.
        """
        self.exchange(None)

    def exchange(self, value: T) -> list[T]:
        """Wait until every replica has come here, and get everyone's `value`, in order.

        The replicas' own tensors are handed over, not copies: on other devices, and on this
        replica's stream complete. `value` of replica `i` is at index `i`.

        Raises:
            ReplicaAborted: Another replica failed, returned without coming, or all was cancelled.
        """
        # On the stream of who calls: that of a call which a replica has forked is another one.
        event = None if self._stream is None else record_event(current_stream(self.device))
        self._round += 1
        brought = self._gang.meet(self.index, self._round, (value, event))
        return [self._received(*one) for one in brought]

    def _received(self, value: T, event: torch.Event | None) -> T:
        if event is not None:
            # The others' kernels may still run: what this replica launches comes after them, here
            # and, to copy it here, on their devices.
            found = [tensor for tensor in tensors(value) if is_accelerator(tensor.device)]
            for stream in {current_stream(tensor.device) for tensor in found}:
                stream.wait_event(event)
                share_memory(found, stream)
        return value

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when another replica fails or the call is cancelled, or now if it has.

        It is what releases a wait that aiopar knows nothing of: `on_abort(my_barrier.abort)`. It
        is called in the thread of who failed or cancelled; what it raises is logged.
        """
        self._gang.on_abort(callback)


_current: ContextVar[Replica | None] = ContextVar("aiopar_replica", default=None)


def current_replica() -> Replica:
    """The replica that the calling code runs in, inside `parallel_apply` and its kin.

    Raises:
        RuntimeError: The calling code does not run in a replica.

    Example:
        >>> import asyncio, aiopar
        >>> def meet(x):
        ...     replica = aiopar.current_replica()
        ...     return replica.index, sum(replica.exchange(x))
        >>> asyncio.run(aiopar.parallel_apply([meet, meet], [1, 2], devices=["cpu", "cpu"]))
        [(0, 3), (1, 3)]
    """
    replica = _current.get()
    if replica is None:
        raise RuntimeError("current_replica() was called outside of a parallel call")
    return replica


class Gang:
    """What the calls of one gang share: who is there, and whether it was aborted.

    It refers to its members only until they are started or dropped. Later a member's error, whose
    traceback may hold the gang, would make a cycle that keeps its tensors.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.trigger: int | None = None
        """The replica whose failure aborted the gang; its error is its own, not a consequence."""
        self._unstarted: dict[int, GangCall[Any]] = {}
        # May be taken again: who is interrupted with it held, by the garbage collector, say, may
        # drop another member there.
        self._lock = threading.RLock()
        self._waiting: list[threading.Lock] = []
        """One for each member that waits in a meeting, released when it should look again."""
        self._rounds: dict[int, dict[int, Any]] = {}
        self._returned: set[int] = set()
        self._aborted = False
        self._blocked = False
        self._callbacks: list[Callable[[], object]] = []

    def add(
        self, fn: Callable[..., T], args: tuple[Any, ...], state: CallerState | None = None
    ) -> "GangCall[T]":
        """One more member, before any is queued."""
        member = GangCall(self, self.count, fn, args, state)
        self._unstarted[self.count] = member
        self.count += 1
        return member

    def started(self, index: int) -> None:
        """Member `index` was claimed: it runs, or is dropped."""
        self._unstarted.pop(index, None)

    def meet(self, index: int, round_number: int, value: T) -> list[T]:
        """Replica `index` has come to its `round_number`-th meeting, bringing `value`."""
        with self._lock:
            arrived = self._rounds.setdefault(round_number, {})
            arrived[index] = value
            if len(arrived) == self.count:
                # Nobody else comes: whoever still has to read it has its own reference.
                del self._rounds[round_number]
                self._wake_all()
        if not self._complete(arrived, unless_blocked=True):
            # A member waits for other calls, one of which may be queued behind this one.
            thread_hooks.about_to_block()
            self._complete(arrived, unless_blocked=False)
        return [arrived[other] for other in range(self.count)]

    def _complete(self, arrived: dict[int, Any], *, unless_blocked: bool) -> bool:
        """Wait until all have arrived; False if a member blocked first."""
        while len(arrived) < self.count:
            gate = threading.Lock()
            gate.acquire()
            with self._lock:
                # First: who changes something from here on, be it this very thread where it is
                # interrupted, opens the gate.
                self._waiting.append(gate)
                if len(arrived) == self.count:
                    break
                if self._aborted or self._missing(arrived):
                    raise ReplicaAborted(self._why(arrived))
                if self._blocked and unless_blocked:
                    return False
            gate.acquire()
        return True

    def _wake_all(self) -> None:
        """Let those look again who wait; with the lock held."""
        while self._waiting:
            self._waiting.pop().release()

    def blocked(self) -> None:
        """A member is about to wait for something that is no meeting."""
        if not self._blocked:
            with self._lock:
                self._blocked = True
                self._wake_all()

    def _missing(self, arrived: dict[int, Any]) -> set[int]:
        return self._returned - arrived.keys()

    def _why(self, arrived: dict[int, Any]) -> str:
        if self._aborted:
            if self.trigger is None:
                return "the parallel call was cancelled"
            return f"replica {self.trigger} failed"
        return f"replica {min(self._missing(arrived))} returned without coming"

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call `callback` at an abort; at once if it was aborted already."""
        with self._lock:
            if not self._aborted:
                self._callbacks.append(callback)
                return
        _call_back(callback)

    def abort(self, trigger: int | None) -> None:
        """Release every wait and drop what has not started; the first abort counts."""
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            self.trigger = trigger
            callbacks, self._callbacks = self._callbacks, []
            self._wake_all()
        # All of them, though Ctrl-C may come to one: it comes out after the last.
        with ExitStack() as steps:
            for callback in reversed(callbacks):
                steps.callback(_call_back, callback)
            for member in reversed(tuple(self._unstarted.values())):
                steps.callback(member.cancel)

    def ended(self, index: int, *, failed: bool) -> None:
        """Replica `index` has returned, or failed."""
        with self._lock:
            self._returned.add(index)
            self._wake_all()
            if len(self._returned) == self.count:
                # Whoever keeps a `Replica` must not keep what was met with.
                self._callbacks.clear()
        if failed:
            self.abort(index)


def _call_back(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException as error:  # noqa: BLE001  # seen to there
        log_callback_error(error, logger, "exception calling on_abort callback %r", callback)


class GangCall(FutureCall[T]):
    """One member of a gang."""

    # It may wait for the others: within another call, those might wait for that one.
    helpable = False

    def __init__(
        self,
        gang: Gang,
        index: int,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        state: CallerState | None,
    ) -> None:
        super().__init__(fn, args, state)
        self._gang = gang
        self.replica: Replica = Replica(gang, index)
        self.context.run(_current.set, self.replica)

    def claim(self) -> bool:
        queue = self.queue
        if not super().claim():
            return False
        self._gang.started(self.replica.index)
        if queue is not None:
            self.replica.device, self.replica._stream = queue.device, queue.stream
        return True

    def blocks(self) -> None:
        self._gang.blocked()

    def finish(self) -> None:
        replica = self.replica
        if self.error is not None:
            add_note_once(self.error, f"in replica {replica.index} on device {replica.device}")
        try:
            # First: who sees the outcome of the last one has to find what triggered an abort.
            self._gang.ended(replica.index, failed=self.error is not None)
        finally:
            super().finish()

    def drop(self) -> None:
        self._gang.started(self.replica.index)
        super().drop()
        # Without it the gang cannot come together: the others must not wait for it.
        self._gang.abort(None)
