"""A gang: calls that run at the same time, each on a worker of its own, and may meet."""

import threading
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeVar

import torch

from .._base.devices import current_stream, is_accelerator, record_event, share_memory
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, log_callback_error, logger
from .._base.tree import tensors
from ..errors import ReplicaAborted
from ..futures._future import Future, thread_hooks
from ._call import FutureCall

T = TypeVar("T")


class Replica:
    """One of the calls that `parallel_apply` or `submit_all` runs at the same time.

    The calls may meet: `barrier` and `exchange` wait until every replica has called them. The n-th
    meeting of one replica is the n-th meeting of all. A call that a replica forks belongs to it.
    """

    __slots__ = ("_gang", "_round", "_stream", "device", "index")

    def __init__(self, gang: "Gang", index: int) -> None:
        self._gang = gang
        self._round = 0
        self._stream: torch.Stream | None = None
        self.index: int = index
        """The position of this call among the calls, from 0."""
        self.device: torch.device = torch.device("cpu")
        """The device of the worker that runs this call."""

    def __repr__(self) -> str:
        return f"<Replica {self.index} of {self.count} on {self.device}>"

    @property
    def count(self) -> int:
        """The number of calls that run together."""
        return self._gang.count

    def barrier(self) -> None:
        """Wait until every replica has called `barrier`; raises as `exchange` does."""
        self.exchange(None)

    def exchange(self, value: T) -> list[T]:
        """Wait until every replica has called `exchange`, and return the values of all replicas.

        The list has the value of replica `i` at index `i`. Tensors are not copied: they stay on the
        device of their replica. Kernels that this replica launches afterwards see complete tensors.

        Raises:
            ReplicaAborted: Another replica failed or has returned, or the call was cancelled.
        """
        # `self._stream` would be wrong: a forked call of this replica may run on another stream.
        event = None if self._stream is None else record_event(current_stream(self.device))
        self._round += 1
        values = self._gang.meet(self.index, self._round, (value, event))
        return [self._received(*value_and_event) for value_and_event in values]

    def _received(self, value: T, event: torch.Event | None) -> T:
        if event is not None:
            # Kernels of the other replica may still write the tensors. Later kernels
            # and copies that this thread launches on the tensors' devices must wait for them.
            found = [tensor for tensor in tensors(value) if is_accelerator(tensor.device)]
            for stream in {current_stream(tensor.device) for tensor in found}:
                stream.wait_event(event)
                share_memory(found, stream)
        return value

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call `callback()` when another replica fails or the parallel call is cancelled.

        If this has happened already, `callback` is called now. The callback can end a wait that
        aiopar does not know: `on_abort(my_barrier.abort)`. Its errors are logged.
        """
        self._gang.on_abort(callback)


_current: ContextVar[Replica | None] = ContextVar("aiopar_replica", default=None)
_host = ""


def become_host(kind: str) -> None:
    """Note that this process is a host of this kind: its calls have no replicas that can meet."""
    global _host  # noqa: PLW0603  # a setting of the process
    _host = kind


def on_host() -> bool:
    """Whether this process runs the calls of another process."""
    return bool(_host)


def current_replica() -> Replica:
    """The replica that this code runs in, inside `parallel_apply`, `submit_all` or `DataParallel`.

    Raises:
        RuntimeError: This code does not run in a replica.
        NotImplementedError: This code runs in a worker process or in an actor.

    Example:
        >>> import asyncio, aiopar
        >>> def meet(x):
        ...     replica = aiopar.current_replica()
        ...     return replica.index, sum(replica.exchange(x))
        >>> asyncio.run(aiopar.parallel_apply([meet, meet], [1, 2], devices=["cpu", "cpu"]))
        [(0, 3), (1, 3)]
    """
    replica = _current.get()
    if replica is None and _host:
        raise NotImplementedError(f"replicas cannot meet in {_host}: use a DeviceExecutor")
    if replica is None:
        raise RuntimeError("current_replica() was called outside of a parallel call")
    return replica


class Gang:
    """The shared state of the calls of one gang: their meetings, and whether one has failed.

    A gang refers to a member only until the member starts or is dropped. Later the member may have
    an error whose traceback refers to the gang: the reference cycle would keep tensors.
    """

    def __init__(self) -> None:
        self.count: int = 0
        self.trigger: int | None = None
        """The replica that failed first, and caused all other errors."""
        self.dropped: set[int] = set()
        """The replicas that did not start, and have the error of another replica."""
        self._unstarted: dict[int, GangCall[Any]] = {}
        # Reentrant: the garbage collector may run while the lock is held, and drop a member.
        self._lock = threading.RLock()
        self._gates: list[threading.Lock] = []
        """A locked lock for each member that waits in a meeting; its release wakes the member."""
        self._rounds: dict[int, dict[int, Any]] = {}
        """The values of each meeting that is not complete: by round, then by replica."""
        self._returned: set[int] = set()
        self._aborted = False
        self._blocked = False
        self._callbacks: list[Callable[[], object]] = []

    def add(self, member: "GangCall[Any]") -> int:
        """Add a member, before any member is queued; return its index."""
        index = self.count
        self._unstarted[index] = member
        self.count += 1
        return index

    def started(self, index: int) -> None:
        """Forget member `index`: it runs, or is dropped."""
        self._unstarted.pop(index, None)

    def meet(self, index: int, round_number: int, value: T) -> list[T]:
        """Give the value of replica `index` to a meeting; return the values of all replicas."""
        with self._lock:
            arrived = self._rounds.setdefault(round_number, {})
            arrived[index] = value
            if len(arrived) == self.count:
                del self._rounds[round_number]
                self._open_gates()
        while True:
            gate = threading.Lock()
            gate.acquire()
            with self._lock:
                # Append first: a garbage collection may interrupt the checks and abort the gang.
                self._gates.append(gate)
                if len(arrived) == self.count:
                    return [arrived[replica] for replica in range(self.count)]
                if self._aborted:
                    cancelled = "the parallel call was cancelled"
                    raise ReplicaAborted(
                        cancelled if self.trigger is None else f"replica {self.trigger} failed"
                    )
                if missing := self._returned - arrived.keys():
                    raise ReplicaAborted(f"replica {min(missing)} returned before the meeting")
            if self._blocked:  # a member waits for a call that may be queued behind this member
                thread_hooks.about_to_block()
            gate.acquire()

    def _open_gates(self) -> None:
        """Wake the waiting members, which look again; called with the lock held."""
        while self._gates:
            self._gates.pop().release()

    def blocked(self) -> None:
        """Record that a member is about to wait for something other than a meeting."""
        if not self._blocked:
            with self._lock:
                self._blocked = True
                self._open_gates()

    def on_abort(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the gang is aborted, or now if it is already."""
        with self._lock:
            if not self._aborted:
                self._callbacks.append(callback)
                return
        _call_back(callback)

    def abort(self, failed: Future[Any] | None = None) -> None:
        """End every wait and drop the members that have not started; later calls do nothing.

        The dropped members get the error of `failed`. None: the parallel call is cancelled.
        """
        with self._lock:
            if self._aborted:
                return
            self._aborted = True
            callbacks, self._callbacks = self._callbacks, []
            self._open_gates()
        # `ExitStack` runs all steps, last first, and raises a Ctrl-C in one of them at the end.
        with ExitStack() as steps:
            for callback in reversed(callbacks):
                steps.callback(_call_back, callback)
            # `list` copies a view in one step, also without a GIL; `tuple` does not.
            for member in reversed(list(self._unstarted.values())):
                steps.callback(member.cancel if failed is None else partial(member.fail_as, failed))

    def failed(self, index: int) -> None:
        """Record that replica `index` has failed, before its future is done."""
        with self._lock:
            if self.trigger is None and not self._aborted:
                self.trigger = index

    def ended(self, index: int) -> None:
        """Record that replica `index` has returned or failed."""
        with self._lock:
            self._returned.add(index)
            self._open_gates()
            if len(self._returned) == self.count:
                self._callbacks.clear()  # a user may keep the `Replica`, but not the callbacks


def _call_back(callback: Callable[[], object]) -> None:
    try:
        callback()
    except BaseException as error:  # noqa: BLE001  # logged
        log_callback_error(error, logger, "exception calling on_abort callback %r", callback)


class GangCall(FutureCall[T]):
    """One member of a gang."""

    # Inside a waiting call, this member could wait for another one that waits for that call.
    helpable = False

    def __init__(
        self,
        gang: Gang,
        fn: Callable[..., T],
        args: tuple[Any, ...],
        state: CallerState | None = None,
    ) -> None:
        super().__init__(fn, args, state)
        self.replica: Replica = Replica(gang, gang.add(self))
        context = self.state.context()
        context.run(_current.set, self.replica)
        self.state = self.state.with_context(context)

    def claim(self) -> bool:
        queue = self.queue
        if not super().claim():
            return False
        self.replica._gang.started(self.replica.index)
        if queue is not None:
            self.replica.device, self.replica._stream = queue.device, queue.stream
        return True

    def blocks(self) -> None:
        self.replica._gang.blocked()

    def finish(self) -> None:
        replica, gang = self.replica, self.replica._gang
        error, self.error = self.error, None
        if error is None:
            gang.ended(replica.index)
            super().finish()
            return
        add_note_once(error, f"in replica {replica.index} on device {replica.device}")
        gang.failed(replica.index)
        # First the waiters get this error, so that a waiter for all members sees no other error.
        # Then the other members end; then callbacks run, which may wait for the other members.
        try:
            if not self.future._fail(error, then=partial(gang.abort, self.future)):
                gang.abort()  # the future was completed from outside
        finally:
            gang.ended(replica.index)
            del error

    def fail_as(self, failed: Future[Any]) -> None:
        """Drop the call, unless somebody has claimed it, with the error of another member."""
        if self.claim():
            self.replica._gang.dropped.add(self.replica.index)
            self.drop()
            self.future._fail_as(failed)

    def drop(self) -> None:
        self.replica._gang.started(self.replica.index)
        super().drop()
        self.replica._gang.abort()  # the other members must not wait for this one
