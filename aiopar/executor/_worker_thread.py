"""`ThreadWorker`: a worker whose thread takes calls and runs them."""

import enum
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import InvalidStateError
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeVar
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
from ._call import Call, CallQueue
from ._streams import Launches
from ._worker import Worker, WorkerStats, set_current_thread

T = TypeVar("T")

# A waiting call may run other calls inside itself, which nest on one stack. Past this depth, the
# waiting thread blocks, and a new thread serves the queues.
_MAX_HELPING_DEPTH = 24


class _ThreadState(enum.Enum):
    r"""The states of a worker's thread. Only the thread itself changes its state.

    It serves the worker while it is awake or asleep:

        AWAKE <--> ASLEEP (no call waits)
          |           \
          v            v
        DETACHED --> ENDED
    """

    AWAKE = enum.auto()
    """It runs a call, or looks for one."""
    ASLEEP = enum.auto()
    """It waits for a hint."""
    DETACHED = enum.auto()
    """It ends after its call, because it has handed over to a new thread."""
    ENDED = enum.auto()


@dataclass(slots=True)
class _Counts:
    """Counts of ended calls. Each object has one writing thread, so that no count is lost."""

    completed: int = 0
    failed: int = 0
    busy_seconds: float = 0.0

    def add(self, counts: "_Counts") -> None:
        self.completed += counts.completed
        self.failed += counts.failed
        self.busy_seconds += counts.busy_seconds


class ThreadWorker:
    """A worker for one slot of one device, served by one thread at a time.

    The thread starts with the first call. Before a call blocks, a new thread takes over the queues,
    and the blocked thread ends after its call. So no queued call is stuck behind a waiting call,
    and calls that wait for calls cannot deadlock, on any number of workers.

    The worker has number `index` in its pool. The CPU workers of the pool share the cores by
    `shares`. The worker serves `queues`: its own, and perhaps one that its device's workers share.
    """

    shares_memory = True

    def __init__(
        self,
        device: torch.device,
        index: int,
        name: str,
        shares: CoreShares,
        queues: tuple[CallQueue, ...],
    ) -> None:
        self.device = device
        self.index = index
        self.name = name
        self.queues = queues
        """The queues that it serves: its own queue first, because no other worker serves it."""
        queues[0].stream = stream = self.open_stream()
        self.shares = shares if stream is None else None
        self.launches: Launches | None = None
        if stream is not None or supported_accelerator() is not None:
            self.expect_launches()
        self.thread: _WorkerThread | None = None
        """The one thread that takes the next call."""
        self._threads: list[_WorkerThread] = []
        """That thread, and others that have handed over."""
        self.hints: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Each item wakes the thread: a call may be queued, or the worker was stopped."""
        self.on_idle: Callable[[], object] | None = None
        self.on_host_lost: set[WeakMethod[Callable[[Worker, WorkerLost], None]]] = set()
        # Re-entrant: a signal handler or destructor that interrupts this thread may queue calls.
        # But it must not wait for these calls: perhaps it has interrupted `_start_thread`.
        self._lock = ReentrantLock()
        self.stopping = False
        """Whether it ends when its queues are empty."""
        self.ended: Future[None] = running_future()
        for each in self.queues:
            each.workers.append(self)
            each.idle.appendleft(self)  # idle threads are woken before a new one is started
        self._wake_for_rest()  # last: its thread may start now

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
        # First: a call that is taken meanwhile counts twice then, and not never.
        queued = sum(len(q.calls) / len(q.workers) for q in self.queues)
        thread = self.thread
        running = thread is not None and thread.call is not None
        launched = 0 if self.launches is None else self.launches.pending
        return queued + running + launched

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self.queues[0].calls and all(
                thread.state in (_ThreadState.ASLEEP, _ThreadState.ENDED)
                for thread in self._threads
            )

    def became_idle(self) -> None:
        """Call `on_idle`: the worker may have become idle."""
        on_idle = self.on_idle  # read once: another thread sets the attribute to None
        if on_idle is not None:
            on_idle()

    def expect_launches(self) -> None:
        if self.launches is None:
            self.launches = Launches(self.queues[0].stream, f"{self.name}-completions")

    def put(self, call: Call[Any]) -> None:
        self.queues[0].put(call)

    def cancel_queued(self) -> None:
        for each in self.queues:
            each.cancel_queued()

    def leave(self) -> None:
        with self._lock:
            shared = self.queues[-1]
            if len(shared.workers) > 1:
                self.queues = self.queues[:1]
                shared.leave(self)

    def wait_in(self, queue: CallQueue) -> None:
        """Register as idle in one of its queues."""
        queue.idle.append(self)  # the last worker is woken first: its caches are warm

    def _wake_for_rest(self) -> None:
        for each in self.queues:
            each.wake_for_rest()

    def wake(self) -> None:
        shares = self.shares
        try:
            # Before the thread starts: workers that begin meanwhile leave cores for this worker.
            if shares is not None:
                shares.running.add(self)
            if self.thread is None:
                with self._lock:
                    if self.thread is None:
                        self._start_thread(None)
        except BaseException:
            if shares is not None:
                shares.running.discard(self)
            raise
        self.hints.put(None)

    def _start_thread(self, before: "_WorkerThread | None") -> bool:
        """Start a thread that serves instead of `before`; with the lock held.

        False: a signal handler has interrupted this method, and has started a thread. If no thread
        can be started (RuntimeError), `before` serves on.
        """
        thread = _WorkerThread(self)
        gone = [one for one in self._threads if not one.is_alive()]
        for one in gone:
            thread.counts.add(one.counts)
        thread.start()
        if self.thread is not before:
            return False  # `serves` tells the new thread to end
        self._threads = [*(one for one in self._threads if one not in gone), thread]
        self.thread = thread
        return True

    def serves(self, thread: "_WorkerThread") -> bool:
        """Whether the new `thread` serves this worker; False if its start was interrupted."""
        with self._lock:  # waits until `_start_thread` has recorded it
            return self.thread is thread

    def hand_over(self, thread: "_WorkerThread") -> bool:
        """Start a thread that takes over the queues; False if `thread` has handed over before.

        After a RuntimeError `thread` must not block: it might wait for a call in these queues.
        """
        with self._lock:
            return self.thread is thread and self._start_thread(thread)

    def thread_ended(self, thread: "_WorkerThread") -> None:
        """Note the end of `thread`: it has handed over, was stopped, or has failed."""
        with self._lock:
            thread.state = _ThreadState.ENDED
            failed = self.thread is thread and not self.stopping
            if self.thread is thread and self.shares is not None:
                self.shares.running.discard(self)
            if failed:
                self.thread = None
            last = self.stopping and self._all_have_ended()
        if failed:
            for each in self.queues:
                self.wait_in(each)
            self._wake_for_rest()
        self.became_idle()
        if last:
            self._all_ended()

    def _all_have_ended(self) -> bool:
        return all(thread.state is _ThreadState.ENDED for thread in self._threads)

    def kill(self, *, left_only: bool = False) -> None:
        pass

    def stop(self) -> None:
        with self._lock:
            if self.stopping:
                return
            self.stopping = True
            self.hints.put(None)
            no_thread = self._all_have_ended()
        if no_thread:
            self._all_ended()

    def _all_ended(self) -> None:
        for each in self.queues:
            each.leave_idle(self)
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
        return launches or any(thread.is_alive() for thread in self._threads.copy())

    def join(self) -> None:
        own = threading.current_thread()
        # Wait for `ended` first: until then a thread of this worker may hand over to a new thread.
        # In a call of another executor, `result` also hands over the queues of that call's worker.
        if not any(thread is own for thread in self._threads):
            self.ended.result()
        for thread in self._threads.copy():
            if thread is not own:
                thread.join()

    @property
    def seconds_in_call(self) -> float:
        thread = self.thread
        # Look at `call` first: the thread sets `began` before `call`.
        return 0.0 if thread is None or thread.call is None else perf_counter() - thread.began

    def stats(self) -> WorkerStats:
        with self._lock:
            queued = 0  # before `running`, as in `load`
            for each in self.queues:  # its part of the calls of each queue
                workers, rank = len(each.workers), each.workers.index(self)
                queued += (each.queued + workers - 1 - rank) // workers
            total = _Counts()
            running = 0
            for thread in self._threads:
                total.add(thread.counts)
                running += thread.state is _ThreadState.DETACHED or thread.call is not None
        return WorkerStats(
            self.device,
            queued,
            running + (0 if self.launches is None else self.launches.pending),
            total.completed,
            total.failed,
            total.busy_seconds,
        )


class _WorkerThread(threading.Thread):
    """Serves a worker until the worker is stopped, or another thread takes over."""

    def __init__(self, worker: ThreadWorker) -> None:
        # Daemon: the interpreter awaits other threads before the exit handler that stops this one.
        super().__init__(name=worker.name, daemon=True)
        self.worker = worker
        self.state = _ThreadState.AWAKE
        self.counts = _Counts()
        self.call: Call[Any] | None = None
        """The call that the thread took from a queue; None when that call has ended."""
        self._helped: list[Call[Any] | None] = []
        """The calls that run inside `call`, the innermost last; None for an ended call."""
        # If this thread replaces another thread, the worker is busy.
        self._idle_in = worker.queues if worker.thread is None else ()
        """The queues in which the worker is registered as idle; empty while it is busy."""
        self._sharing = 0
        """How many workers shared the cores when its operator threads were last set."""
        self._operator_threads = 0
        self.began = 0.0
        """When the present call began, or the thread woke up, or the last call ended."""

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
            self._go_on()
            while self.state is _ThreadState.AWAKE:
                call = self._next()
                if call is None:
                    return
                call.queue = None
                if call.on_claimed is not None:
                    call.leave_queue()
                self._run_claimed(call)
                del call  # an idle worker must keep neither function, arguments nor result
        finally:
            free_failed_backwards()
            self._leave_idle()
            worker.thread_ended(self)

    # Taking calls.

    def _next(self) -> Call[Any] | None:
        """The next call, claimed; None if the worker was stopped and no call is left."""
        woken = stopping = False
        while (call := self._take()) is None and not stopping:
            if not self._idle_in:
                self._become_idle()
            elif woken:  # for a call that another thread has taken: register in all queues again
                self._leave_idle()
                woken = False
            else:
                self._sleep()
                woken = True
            stopping = self.worker.stopping  # then look once more: calls queued before it run
        self.call = call  # now, so that it counts for the load: what follows takes long
        if self._idle_in:
            self._leave_idle(call.queue if woken and call is not None else None)
        return call

    def _take(self) -> Call[Any] | None:
        for each in self.worker.queues:
            # A busy worker looks without the lock of the deque, which is cheaper.
            if self._idle_in or each.calls:
                call = each.take()
                if call is not None:
                    return call
        return None

    def _become_idle(self) -> None:
        """Register the worker as idle. The caller looks for a call afterwards."""
        self._idle_in = self.worker.queues
        for each in self._idle_in:
            self.worker.wait_in(each)

    def _leave_idle(self, woken_for: CallQueue | None = None) -> None:
        """Unregister the worker; `woken_for` is the queue of the call that it was woken for."""
        queues, self._idle_in = self._idle_in, ()
        for each in queues:
            each.leave_idle(self.worker)
            if each is not woken_for:
                each.wake_for_rest()  # perhaps the worker was woken for a call of this queue, too

    def _sleep(self) -> None:
        worker = self.worker
        if worker.shares is not None:
            worker.shares.running.discard(worker)
        self.state = _ThreadState.ASLEEP
        worker.became_idle()
        worker.hints.get()
        self.state = _ThreadState.AWAKE
        self._go_on()

    def _go_on(self) -> None:
        """Begin to run calls; between two calls without a sleep, the thread keeps its cores."""
        if self.worker.shares is not None:
            self.worker.shares.running.add(self.worker)
        self.began = perf_counter()

    def _share_cores(self, shares: CoreShares) -> None:
        """Let operators use this worker's part of the cores."""
        sharing = shares.sharing
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
                call.watch.call.worker = worker.index
                call.watch.tell("start")
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
        # The traceback of the error of a helped call refers to this frame. So this frame, and that
        # of `help`, must refer to neither the call nor its future.
        del call

    def _end(self, call: Call[Any]) -> None:
        worker = self.worker
        if call.watch is not None:
            call.watch.tell("launched")
        ends_later = worker.launches is not None and _finish_launches(call, worker.launches)
        if self._helped:
            self._helped[-1] = None
        else:
            if worker.launches is not None:
                self.began = perf_counter()  # the thread may have waited for the device
            # This worker counts as free before a caller can see the result.
            self.call = None
            if self.state is _ThreadState.AWAKE and not (
                worker.queues[0].calls or worker.queues[-1].calls
            ):
                self._become_idle()
        if not ends_later:
            try:
                call.end()
            except BaseException:  # noqa: BLE001  # the user may have completed its future
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
        call.leave_queue()
        self._helped.append(call)
        try:
            with fresh():
                self._run_claimed(call)
        finally:
            self._helped.pop()
            del call, future

    def _may_run(self, call: Call[Any], place: CallQueue) -> bool:
        """Whether `call`, queued in `place`, may run inside a call of this worker."""
        worker = self.worker
        if len(self._helped) >= _MAX_HELPING_DEPTH:
            return False
        if place in worker.queues:
            return True
        # A call for another device would launch on this worker's stream.
        if place.device != worker.device or place.owner not in (None, worker.queues[0].owner):
            return False
        return call.movable or len(place.workers) > 1

    def about_to_block(self) -> None:
        """Let another thread serve the queue, because the running call is about to block."""
        if self.call is not None:
            self.call.blocks()
        self._leave_idle()  # callbacks run on an idle worker; the new thread registers again
        if self.worker.hand_over(self):
            self.state = _ThreadState.DETACHED


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
    set_current_thread(None)
