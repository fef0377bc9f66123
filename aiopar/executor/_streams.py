"""What calls on the CPU launch on accelerators, which is complete when they end."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from .._base.devices import (
    CallerStream,
    accelerators_in_use,
    bind_thread,
    current_stream,
    default_stream,
    on_stream,
    order_after,
    record_event,
    result_events,
    share_memory,
)
from .._base.tracebacks import logger
from .._base.tree import tensors
from ._call import Call


def operands(call: Call[Any]) -> Iterator[torch.Tensor]:
    """The tensors of its arguments, and the weights of the module that it calls."""
    yield from tensors((call.args, call.kwargs))
    fn = call.fn
    if isinstance(fn, partial):
        yield from tensors((fn.args, fn.keywords))
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        for weights in (fn.parameters(), fn.buffers()):
            yield from (weight for weight in weights if not is_lazy(weight))


def streams_of(call: Call[Any]) -> tuple[CallerStream, ...]:
    """The streams of the callers of a call, which comes after what they have launched."""
    if call.streams is None:
        call.streams = call.state.streams
    return call.streams


_Launched = tuple[list[torch.Event], Call[Any]]


class Launches:
    """Finishes the calls of one accelerator worker when the device has finished them.

    The worker goes on to launch the next call; a thread of its own waits here for the event of
    each, in the order of the stream. Waiting in `synchronize` lets the GIL go, polling would not.
    """

    def __init__(self, stream: torch.Stream, outstanding: "deque[None]", thread_name: str) -> None:
        self.stream = stream
        self._outstanding = outstanding  # the worker's load: a token for each call
        self._thread_name = thread_name
        self._queue: queue.SimpleQueue[_Launched | Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # Each is written by one side only: their difference needs no lock.
        self._launched = 0
        self._finished = 0

    @property
    def pending(self) -> int:
        """Calls launched and not finished."""
        return self._launched - self._finished

    @property
    def alive(self) -> bool:
        """Whether its thread is there."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, call: Call[Any]) -> None:
        """Order what `call` is to launch, on the calling thread, after what its caller had."""
        bind_thread(self.stream)
        self.order(streams_of(call))
        # Autograd may keep them, past the call and past who gave them. It lets go of them in a
        # backward, whose kernels on this stream may still be to come.
        if call.state.torch_state is None or call.state.torch_state.grad:
            share_memory(operands(call), self.stream)

    def order(self, callers: Iterable[CallerStream], used: Iterable[torch.Tensor] = ()) -> None:
        """Have what comes next wait for what `callers` had launched; `used` is held by who asks."""
        order_after(callers, self.stream)

    def put(self, call: Call[Any]) -> bool:
        """End `call`, which has returned, when its kernels are done; False: it is to be ended now.

        That is so if it asked for no synchronization, or there can be no thread to wait for it.
        """
        try:
            events = result_events(tensors(call.result), self.stream)
            if not call.synchronize:
                self._order_callers(call, events)
                return False
            if not self._expect_one():
                _synchronize(events)
                self._share_result(call)
                return False
            self._outstanding.append(None)
            self._queue.put((events, call))
            return True
        finally:
            del call  # an error's traceback holds this frame

    def _expect_one(self) -> bool:
        """Count one more, for the thread to finish; False if it can have no thread."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._thread_name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    return False
                self._thread = thread
            self._launched += 1
        return True

    def _order_callers(self, call: Call[Any], events: list[torch.Event]) -> None:
        """Nobody waits for the kernels: what the callers launch comes after them."""
        for event in events:
            for caller in streams_of(call):
                if caller.stream != self.stream:
                    caller.stream.wait_event(event)
        # Nor can anybody hold the arguments for them.
        share_memory(tensors((call.args, call.kwargs)), self.stream)
        self._share_result(call)

    def stop(self, then: Callable[[], None]) -> None:
        """End when all that was launched is finished, and call `then`."""
        with self._lock:
            if self._thread is None:
                then()
                return
        self._queue.put(then)

    def _run(self) -> None:
        while True:
            launched = self._queue.get()
            if not isinstance(launched, tuple):
                launched()
                return
            events, call = launched
            try:
                _synchronize(events)
                self._share_result(call)
            except BaseException as error:  # noqa: BLE001  # what a kernel raised is its caller's
                call.error = error if call.error is None else call.error
            self._finished += 1
            self._outstanding.pop()
            # Only now it lets go of the arguments: the kernels read them until here.
            try:
                call.end()
            except BaseException:  # noqa: BLE001  # its future was completed by another, say
                logger.exception("a call could not be ended in %s", self._thread_name)
            # Nothing of a finished call may live in an idle thread.
            del launched, events, call

    def _share_result(self, call: Call[Any]) -> None:
        for caller in streams_of(call):
            if caller.stream != self.stream:
                share_memory(tensors(call.result), caller.stream)


def _synchronize(events: list[torch.Event]) -> None:
    for event in events:
        event.synchronize()


class HostLaunches:
    """Orders the calls of a worker that has no stream of its own, where there are accelerators.

    They launch on the default streams, after what others have launched there: only a caller on
    another one is waited for, here, for what waits on a default stream is in everybody's way.
    Unlike an accelerator's worker it waits for a result itself too: that is rare here, and it has
    nothing to launch ahead of. It does not wait for what is not in the result.
    """

    pending = 0
    alive = False

    def begin(self, call: Call[Any]) -> None:
        """Order what `call` is to launch, on the calling thread, after what its caller had."""
        try:
            self.order(streams_of(call), operands(call))
        finally:
            del call  # an error's traceback holds this frame; likewise below

    def order(self, callers: Iterable[CallerStream], used: Iterable[torch.Tensor]) -> None:
        """Have what comes next come after what `callers` have launched.

        Args:
            callers: Their streams.
            used: What they hand over, which the calling thread is to use.
        """
        try:
            others = set()
            for caller in callers:
                if caller.event is not None:
                    caller.event.synchronize()
                    others.add(caller.stream.device)
            for device in _off_default():
                current_stream(device).wait_event(record_event(default_stream(device)))
                others.add(device)
            if others:
                handed_over = [*used]
                for device in others:
                    share_memory(handed_over, current_stream(device))
        finally:
            del used

    def put(self, call: Call[Any]) -> bool:
        """Wait until the result of `call`, which has returned, is complete; it is to be ended.

        If it asked for no synchronization nobody waits: what its caller launches comes after it.
        """
        try:
            if not accelerators_in_use():
                return False
            events = result_events(tensors(call.result))
            others = [caller.stream for caller in streams_of(call) if caller.event is not None]
            for event in events:
                if call.synchronize or _off_default():
                    event.synchronize()
                for stream in others:
                    stream.wait_event(event)
            if events:
                for stream in others:
                    share_memory(tensors(call.result), stream)
            return False
        finally:
            del call

    def stop(self, then: Callable[[], None]) -> None:
        """Call `then`: nothing launched is left."""
        then()


def _off_default() -> list[torch.device]:
    """Where the calling thread is on another stream than the default one.

    It is inside of a block of the call in which it waits, and helps, or a call has left it so.
    """
    return [device for device in accelerators_in_use() if not on_stream(default_stream(device))]
