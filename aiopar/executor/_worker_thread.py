"""`ThreadWorker`: a worker whose thread takes calls and runs them."""

import enum
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Literal, TypeAlias, TypeVar
from weakref import WeakMethod

import torch

from .._base.arguments import NOT_BEGUN, not_begun
from .._base.devices import slot_stream, supported_accelerator
from .._base.forking import ReentrantLock, after_fork_in_child
from .._base.operator_threads import CoreShares, operator_threads, set_operator_threads
from .._base.thread_state import (
    CallerState,
    applied,
    free_failed_backwards,
    fresh,
    in_transform,
    make_fresh,
)
from .._base.tracebacks import logger, own_traceback
from ..errors import WorkerLost
from ..futures._future import Future, running_future, thread_hooks
from ._call import Call, Queue
from ._shared_queue import SharedQueue
from ._streams import Launches
from ._worker import Worker, WorkerCapabilities, WorkerStats, set_current_thread

T = TypeVar("T")

# Calls that a waiting call runs inside itself nest on one stack. Past this depth, the waiting
# thread blocks, and a new thread serves the queue.
_MAX_HELPING_DEPTH = 24


class _Token(enum.Enum):
    WAKE = enum.auto()


_WAKE: Final = _Token.WAKE
_Item: TypeAlias = Call[Any] | Literal[_Token.WAKE] | None
"""An item of a worker's own queue: a call; a hint to look at the shared queue; None: the end."""


@dataclass(slots=True)
class _Counts:
    """Counts of ended calls. Each object has one writing thread, so that no count is lost."""

    completed: int = 0
    failed: int = 0
    busy_seconds: float = 0.0


class ThreadWorker:
    """A worker for one slot of one device, served by one thread at a time.

    The thread starts with the first call. Before a call blocks, a new thread takes over the queue,
    and the blocked thread ends after its call. So no queued call is stuck behind a waiting call,
    and calls that wait for calls cannot deadlock, on any number of workers.

    The arguments are those of `WorkerFactory`.
    """

    capabilities = WorkerCapabilities(streams=True, iterate=True, shared_memory=True)
    spare = False

    def __init__(
        self, device: torch.device, index: int, name: str, shares: CoreShares, shared: SharedQueue
    ) -> None:
        self.device = device
        self.index = index
        self.name = name
        self.shared = shared
        """The queue that it serves with other workers; after `leave`, a queue of its own."""
        self._offers = shared
        """The queue for calls that other workers may run."""
        self.owner = shared.owner
        self.stream = self.open_stream()
        self.shares = shares if self.stream is None else None
        self.launches: Launches | None = None
        if self.stream is not None or supported_accelerator() is not None:
            self.expect_launches()
        self.queue: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        # One token per call in its own queue and per running call: `append` and `pop` are atomic,
        # and `len` is the count.
        self.outstanding: deque[None] = deque()
        self.thread: _WorkerThread | None = None
        """The one thread that takes the next call."""
        self.idle_in: SharedQueue | None = shared
        """The shared queue in which it is registered as idle."""
        self.on_idle: Callable[[], object] | None = None
        self.on_host_lost: set[WeakMethod[Callable[[Worker, WorkerLost], None]]] = set()
        # Re-entrant: a signal handler or a destructor that interrupts this thread may queue calls.
        # It must not wait for them: the interrupted thread may be starting this worker's thread.
        self._lock = ReentrantLock()
        self._threads: list[_WorkerThread] = []
        self._ending: list[_WorkerThread] = []  # threads with a few steps left
        self._detached = 0
        """How many threads run a waiting call, and take no more calls."""
        self._past = _Counts()
        self._stopping = False
        self.ended: Future[None] = running_future()
        shared.join(self)
        shared.wake_for_rest()  # last: its thread may start now

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        result: Any = None
        try:
            context = state.context()
            if state.torch_state is None:
                torch.set_autocast_cache_enabled(False)  # see `TorchState.autocast_cache`
                result = context.run(fn, *args, **kwargs)
            else:
                with applied(state.torch_state):
                    result = context.run(fn, *args, **kwargs)
            if type(result) in NOT_BEGUN:
                raise not_begun(result, on_worker=True)
            return result
        except BaseException as error:
            free_failed_backwards(error)
            raise
        finally:
            # An error's traceback holds this frame.
            del fn, args, kwargs, state, context, result

    def open_stream(self) -> torch.Stream | None:
        """The stream of this slot of its device; None: its calls launch on the default streams."""
        return slot_stream(self.device)

    def keep(self, value: T, *, replica: bool = False) -> T:
        return value

    @property
    def label(self) -> str:
        return str(self.device)

    @property
    def load(self) -> float:
        launched = 0 if self.launches is None else self.launches.pending
        return len(self.outstanding) + launched + len(self.shared.calls) / len(self.shared.workers)

    @property
    def idle(self) -> bool:
        with self._lock:
            asleep = self.thread is None or self.thread.asleep
            return asleep and not (self.outstanding or self._detached)

    def enter_idle(self) -> bool:
        """Register as idle in the shared queue; False if it is registered there."""
        if self.idle_in is not None:
            return False
        self.idle_in = shared = self.shared
        shared.enter_idle(self)
        return True

    def leave_idle(self, *, woken: bool = False) -> None:
        """Unregister, because it takes a call or has ended; `woken`: it looks for a call."""
        shared, self.idle_in = self.idle_in, None
        if shared is None:
            return
        # A late hint finds it still registered.
        was_idle = shared.leave_idle(self)
        if shared is not self.shared or not (was_idle or woken):
            shared.wake_for_rest()  # it was woken for a call that it does not take

    def became_idle(self) -> None:
        """Call `on_idle`: the worker may have become idle."""
        on_idle = self.on_idle  # read once: another thread sets it to None
        if on_idle is not None:
            on_idle()

    def expect_launches(self) -> None:
        if self.launches is None:
            self.launches = Launches(self.stream, f"{self.name}-completions")

    # Queueing.

    def put(self, call: Call[Any]) -> None:
        try:
            # Counted before it starts: a call that starts first must leave cores for it.
            if self.shares is not None:
                self.shares.running.add(self)
            self._ensure_thread()  # first: if no thread can be started, nothing was queued
            # Before the call has a queue: from then on a canceller may take it off the count.
            self.outstanding.append(None)
            call.queue = self
            self.queue.put(call)
        except BaseException:
            if self.shares is not None:
                self.shares.running.discard(self)
            raise

    def offer(self, call: Call[Any]) -> None:
        if self.stream is None:
            self._offers.put(call)
        else:
            call.movable = True
            self.put(call)

    def leave(self) -> None:
        with self._lock:
            shared = self.shared
            if len(shared.workers) > 1:
                # First: its thread leaves the old queue when it sees the new one.
                self.shared = SharedQueue(self.device, self.owner)
                self.shared.workers.append(self)
                shared.leave(self)

    def wake(self) -> None:
        """Make its thread look into the shared queue."""
        self._ensure_thread()
        self.queue.put(_WAKE)

    def withdrawn(self) -> None:
        self.outstanding.pop()
        self.became_idle()  # its thread may have gone to sleep before the count was corrected

    def cancel_queued(self) -> None:
        self.shared.cancel_queued()
        kept: list[_Item] = []
        with suppress(queue.Empty):
            while True:
                item = self.queue.get_nowait()
                if isinstance(item, Call):
                    item.cancel()
                    item.withdraw()  # it still counts if it was cancelled before it was queued
                else:
                    kept.append(item)
        for item in kept:
            self.queue.put(item)

    # Threads.

    def _ensure_thread(self) -> None:
        if self.thread is None:
            with self._lock:
                if self.thread is None:
                    self._start_thread(None)

    def _start_thread(self, before: "_WorkerThread | None") -> bool:
        """Start a thread that serves instead of `before`; with the lock held.

        False: a signal handler that interrupted this has started one.

        Raises:
            RuntimeError: No thread can be started; `before` serves on.
        """
        thread = _WorkerThread(self)
        thread.start()
        if self.thread is not before:
            return False  # `serves` tells the new thread to end
        self.thread = thread
        self._threads.append(thread)
        return True

    def serves(self, thread: "_WorkerThread") -> bool:
        """Whether `thread`, which begins, serves; False if its start was interrupted."""
        with self._lock:  # until `_start_thread` has recorded it
            return self.thread is thread

    def hand_over(self, thread: "_WorkerThread") -> None:
        """Start a thread that takes over the queue, once, because `thread` is about to block.

        Raises:
            RuntimeError: No thread can be started. Then the call must not block: the call that it
                would wait for may be queued behind it.
        """
        with self._lock:
            if self.thread is thread and self._start_thread(thread):
                self._detached += 1
                if thread.call is not None:  # else the thread runs callbacks after a call
                    self.outstanding.pop()  # a waiting call does not count as load

    def thread_ended(self, thread: "_WorkerThread") -> None:
        """Note the end of `thread`: it handed over, it was stopped, or aiopar itself failed."""
        with self._lock:
            self._threads.remove(thread)
            self._ending = [*filter(_WorkerThread.is_alive, self._ending), thread]
            _add(self._past, thread.counts)
            if self.thread is not thread:
                self._detached -= 1
            elif not self._stopping:  # aiopar itself failed
                self.thread = None
                if self.shares is not None:
                    self.shares.running.discard(self)
            last = self._stopping and not self._threads
            by_error = self.thread is None
        if by_error:
            self._recover()
        self.became_idle()
        if last:
            self._all_ended()

    def _recover(self) -> None:
        """Serve the queued calls after an error has ended the serving thread."""
        self.enter_idle()
        self.shared.wake_for_rest()
        if not self.queue.empty():
            with suppress(RuntimeError):  # if no thread can be started, the next call tries again
                self._ensure_thread()

    # The end.

    def kill(self, *, left_only: bool = False) -> None:
        pass

    def stop(self) -> None:
        with self._lock:
            if self._stopping:
                return
            self._stopping = True
            self.queue.put(None)
            idle = not self._threads
        if idle:
            self._all_ended()

    def _all_ended(self) -> None:
        self.leave_idle()
        # `WorkerPool.put` takes back a call that was queued too late.
        if self.launches is None:
            self._set_ended()
        else:
            self.launches.stop(then=self._set_ended)

    def _set_ended(self) -> None:
        with suppress(InvalidStateError):
            self.ended.set_result(None)

    @property
    def ready(self) -> bool:
        return True

    @property
    def alive(self) -> bool:
        launches = self.launches is not None and self.launches.alive
        return launches or any(thread.is_alive() for thread in (*self._threads, *self._ending))

    def join(self) -> None:
        own = threading.current_thread()
        # First, because until `ended` a thread may hand over to another thread. A call of another
        # executor that waits here hands its own worker over.
        if not any(thread is own for thread in self._threads):
            self.ended.result()
        for thread in (*self._threads, *self._ending):
            if thread is not own:
                thread.join()

    @property
    def seconds_in_call(self) -> float:
        thread = self.thread
        # `call` first: it is set after `began`.
        return 0.0 if thread is None or thread.call is None else perf_counter() - thread.began

    def stats(self) -> WorkerStats:
        with self._lock:
            total = _Counts()
            for counts in (self._past, *(thread.counts for thread in self._threads)):
                _add(total, counts)
            active = self.thread is not None and self.thread.call is not None
            outstanding = len(self.outstanding)
            running = min(outstanding, active)
            detached = self._detached
            rank, workers = self.shared.workers.index(self), len(self.shared.workers)
            shared = (self.shared.queued + workers - 1 - rank) // workers
        return WorkerStats(
            self.device,
            outstanding - running + shared,
            running + detached + (0 if self.launches is None else self.launches.pending),
            total.completed,
            total.failed,
            total.busy_seconds,
        )


def _add(total: _Counts, counts: _Counts) -> None:
    total.completed += counts.completed
    total.failed += counts.failed
    total.busy_seconds += counts.busy_seconds


class _WorkerThread(threading.Thread):
    """Serves a worker until the worker is stopped, or another thread has taken over."""

    def __init__(self, worker: ThreadWorker) -> None:
        # Daemon: the interpreter waits for other threads before it runs the exit handler that stops
        # this one.
        super().__init__(name=worker.name, daemon=True)
        self.worker = worker
        self.counts = _Counts()
        self.asleep = False
        """Whether it waits for a call."""
        self.call: Call[Any] | None = None
        """The call that it took from a queue; None when that call has ended."""
        self._helped: list[Call[Any] | None] = []
        """The calls that it runs inside that call, the innermost last; None for an ended call."""
        self._sharing = 0
        """How many workers shared the cores when its operator threads were last set."""
        self._operator_threads = 0
        self._paused = True
        self.began = 0.0
        """When its present call has begun, or its busy time since a call ended."""

    @property
    def innermost(self) -> Call[Any] | None:
        return self._helped[-1] if self._helped else self.call

    def run(self) -> None:
        worker = self.worker
        if not worker.serves(self):
            return
        set_current_thread(self)
        thread_hooks.help = self.help
        thread_hooks.about_to_block = self.about_to_block
        if worker.shares is not None:
            self._operator_threads = operator_threads()
        try:
            while worker.thread is self:
                call = self._next()
                if call is None:
                    return
                if self._paused:
                    self._go_on()
                call.queue = None
                self.call = call
                if call.on_claimed is not None:
                    call.leave_queue()
                self._run_claimed(call)
                del call  # an idle worker must keep neither function, arguments nor result
        finally:
            free_failed_backwards()
            worker.thread_ended(self)

    # Taking calls.

    def _next(self) -> Call[Any] | None:
        """The next call, claimed; None if the worker was stopped and no call is left."""
        worker, own = self.worker, self.worker.queue
        while True:
            shared = worker.shared  # another one since the worker has left
            if worker.idle_in is not None and worker.idle_in is not shared:
                worker.leave_idle()
            # The worker's own queue first: no other worker serves it.
            if own.empty():
                call = shared.take(worker.outstanding)
                if call is not None:
                    worker.leave_idle()
                    return call
                if worker.enter_idle():
                    continue  # a call may have come before it was registered as idle
                self._pause()
            item = own.get()
            self.asleep = False
            if item is _WAKE:
                worker.leave_idle(woken=True)
            elif item is None:
                call = worker.shared.take(worker.outstanding)  # a call may have come before the end
                if call is None:
                    self._pause()
                    return None
                own.put(None)
                worker.leave_idle()
                return call
            elif item.claim():
                worker.leave_idle()
                worker.shared.wake_for_rest()  # the hint for a call there may be behind this item
                return item
            else:
                item.withdraw()  # it still counts if it was cancelled before it was queued
            del item

    # Between calls without a pause the thread keeps its cores and reads the clock once per call.

    def _pause(self) -> None:
        worker = self.worker
        self._paused = True
        if worker.shares is not None:
            worker.shares.running.discard(worker)
            if worker.outstanding:  # a call was put meanwhile; it was counted before
                worker.shares.running.add(worker)
        self.asleep = True
        worker.became_idle()

    def _go_on(self) -> None:
        if self.worker.shares is not None:
            self.worker.shares.running.add(self.worker)
        self._paused = False
        self.began = perf_counter()

    def _share_cores(self, shares: CoreShares) -> None:
        """Let operators use this worker's part of the cores."""
        worker = self.worker
        sharing = len(shares.running)
        waiting = len(worker.shared.calls)
        if waiting:  # the first of several queued calls leaves cores for the next ones
            sharing = max(sharing, min(sharing + waiting, len(worker.shared.workers)))
        if sharing != self._sharing:
            self._sharing = sharing
            count = shares.share(sharing)
            if count != self._operator_threads:
                set_operator_threads(count)
                self._operator_threads = count

    # Running calls.

    def _run_claimed(self, call: Call[Any]) -> None:
        worker = self.worker
        try:
            if worker.shares is not None:
                self._share_cores(worker.shares)
            if worker.launches is not None:
                worker.launches.begin(call)
            if call.watch is not None:
                call.watch.start(worker.index)
            if call.internal:
                call.result = call.fn(*call.args)
            else:
                call.result = worker.run(call.fn, call.args, call.kwargs, call.state)
            self.counts.completed += 1
        except BaseException as error:  # noqa: BLE001  # the awaiter gets every error
            call.error = own_traceback(error)
            self.counts.failed += 1
        make_fresh()
        if not self._helped:
            now = perf_counter()
            self.counts.busy_seconds += now - self.began
            self.began = now
        self._end(call)
        if thread_hooks.called_back:
            thread_hooks.called_back = False
            make_fresh()
        # The traceback of a helped call's error holds this frame, which must not hold the call and
        # its future. Likewise in `help`.
        del call

    def _end(self, call: Call[Any]) -> None:
        worker = self.worker
        if call.watch is not None:
            call.watch.launched()
        ends_later = worker.launches is not None and _finish_launches(call, worker.launches)
        if self._helped:
            self._helped[-1] = None
        else:
            if worker.launches is not None:
                self.began = perf_counter()  # it may have waited for the device
            # Before a caller can see the result: by then this worker is free. After a hand-over
            # the call was taken off the count already.
            if worker.thread is self:
                worker.outstanding.pop()
                if not worker.shared.calls and worker.queue.empty():
                    worker.enter_idle()
            self.call = None
        if not ends_later:
            try:
                call.end()
            except BaseException:  # noqa: BLE001  # perhaps its future was completed from outside
                logger.exception("a call could not be ended in %s", worker.name)

    # Waiting.

    def help(self, future: Future[Any]) -> None:
        """Run the call of `future` here if it has not started."""
        call = future.call
        if not isinstance(call, Call) or not call.helpable:
            return
        place = call.queue  # read once: a worker may take the call at any moment
        if place is None or not self._may_run(call, place) or in_transform() or not call.claim():
            return
        call.withdraw()
        self._helped.append(call)
        try:
            with fresh():
                self._run_claimed(call)
        finally:
            self._helped.pop()
            del call, future

    def _may_run(self, call: Call[Any], place: Queue) -> bool:
        """Whether `call`, queued in `place`, may run inside a call of this worker."""
        worker = self.worker
        if len(self._helped) >= _MAX_HELPING_DEPTH:
            return False
        if place is worker or place is worker.shared:
            return True
        # A call for another device would launch on this worker's stream.
        if place.device != worker.device or place.owner not in (None, worker.owner):
            return False
        return call.movable or isinstance(place, SharedQueue)

    def about_to_block(self) -> None:
        """Let another thread serve the queue, because the running call is about to block."""
        if self.call is not None:
            self.call.blocks()
        self.worker.hand_over(self)


def _finish_launches(call: Call[Any], launches: Launches) -> bool:
    """Call `launches.finish(call)`; an error of the device becomes the error of the call."""
    try:
        return launches.finish(call)
    except BaseException as error:  # noqa: BLE001  # the awaiter gets it
        call.error = own_traceback(error) if call.error is None else call.error
        return False
    finally:
        del call  # an error's traceback may hold this frame


@after_fork_in_child
def _forget_after_fork() -> None:
    # In a child that was forked inside a call, the only thread serves no worker.
    thread_hooks.clear()
