"""The order of kernels between callers and calls; the wait for results on accelerators."""

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
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

_Launched = tuple[list[torch.Event], Call[Any]]


class Launches:
    """The kernels that the calls of one worker launch on accelerators.

    The kernels of a call run after all kernels that its callers had launched. The call ends when
    its result is complete on the device. The worker of an accelerator has a stream of its own, and
    takes the next call after a launch. A second thread, the completion thread, waits for the events
    of each call, in the order of the stream; it waits by `synchronize`, which releases the GIL. A
    CPU worker has no stream: its calls launch on the default streams, and it waits for them itself.
    """

    def __init__(self, stream: torch.Stream | None, name: str) -> None:
        self.stream = stream
        self._name = name
        self._queue: queue.SimpleQueue[_Launched | Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        # One thread at a time writes each number: their difference needs no lock.
        self._launched = 0
        self._finished = 0

    @property
    def pending(self) -> int:
        """The number of calls that have returned and are not complete on the device."""
        return self._launched - self._finished

    @property
    def alive(self) -> bool:
        """Whether the completion thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, call: Call[Any]) -> None:
        """Order the kernels that `call` will launch after the kernels of its callers."""
        try:
            if self.stream is None:
                self.order(_callers(call), _operands(call))
                return
            bind_thread(self.stream)
            order_after(_callers(call), self.stream)
            # Autograd may keep the operands longer than the call and its callers do. A backward
            # frees the operands while its kernels on this stream may still be pending.
            if call.state.torch_state is None or call.state.torch_state.grad:
                share_memory(_operands(call), self.stream)
        finally:
            del call  # an error's traceback holds this frame; the same below

    def order(self, callers: Iterable[CallerStream], used: Iterable[torch.Tensor]) -> None:
        """Order the next kernels of this thread, which use `used`, after those of `callers`."""
        try:
            if self.stream is not None:
                order_after(callers, self.stream)
                return
            others = set()
            # A wait on a default stream would delay all other users of that stream. So this thread
            # blocks until the kernels of callers on other streams are done.
            for caller in callers:
                if caller.event is not None:
                    caller.event.synchronize()
                    others.add(caller.stream.device)
            for device in _devices_off_default():
                current_stream(device).wait_event(record_event(default_stream(device)))
                others.add(device)
            if others:
                handed_over = [*used]
                for device in others:
                    share_memory(handed_over, current_stream(device))
        finally:
            del used

    def finish(self, call: Call[Any]) -> bool:
        """Let the completion thread end `call`, which has returned, when its kernels are done.

        False: there is nothing to wait for any more. The worker must end the call now.
        """
        try:
            if self.stream is None and not accelerators_in_use():
                return False
            events = result_events(tensors(call.result), self.stream)
            if self.stream is not None and call.synchronize and self._count_launched():
                self._queue.put((events, call))
                return True
            # If a CPU worker is not on the default stream, wait even without `synchronize`: the
            # call may run inside another call, and no caller can be ordered after its stream.
            if call.synchronize or (self.stream is None and _devices_off_default()):
                _synchronize(events)
            self._order_callers(call, events)
            if self.stream is not None:
                # The callers may free the arguments while the kernels still read them.
                share_memory(tensors((call.args, call.kwargs)), self.stream)
            return False
        finally:
            del call

    def stop(self, then: Callable[[], None]) -> None:
        """Call `then` when all launched calls have ended; no call may be launched afterwards."""
        with self._lock:
            if self._thread is not None:
                self._queue.put(then)
                return
        then()

    def _count_launched(self) -> bool:
        """Count a call for the completion thread; False if that thread cannot be started."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._complete, name=self._name, daemon=True)
                with suppress(RuntimeError):
                    thread.start()
                    self._thread = thread
            self._launched += self._thread is not None
            return self._thread is not None

    def _complete(self) -> None:
        while True:
            item = self._queue.get()
            if not isinstance(item, tuple):
                item()
                return
            events, call = item
            try:
                _synchronize(events)
                self._share_result(call)
            except BaseException as error:  # noqa: BLE001  # an error of a kernel is its caller's
                call.error = error if call.error is None else call.error
            self._finished += 1
            try:
                call.end()  # it drops the arguments, which the kernels have read until now
            except BaseException:  # noqa: BLE001  # the user may have completed its future
                logger.exception("a call could not be ended in %s", self._name)
            # An idle thread must not keep a finished call.
            del item, events, call

    def _order_callers(self, call: Call[Any], events: list[torch.Event]) -> None:
        """Order the next kernels of the callers after the events of the result."""
        for caller in self._other_callers(call):
            for event in events:
                caller.stream.wait_event(event)
        if events:
            self._share_result(call)

    def _share_result(self, call: Call[Any]) -> None:
        for caller in self._other_callers(call):
            share_memory(tensors(call.result), caller.stream)

    def _other_callers(self, call: Call[Any]) -> list[CallerStream]:
        """The callers on other streams than the stream of this worker."""
        if self.stream is None:
            return [caller for caller in _callers(call) if caller.event is not None]
        return [caller for caller in _callers(call) if caller.stream != self.stream]


def _callers(call: Call[Any]) -> tuple[CallerStream, ...]:
    if call.streams is None:
        call.streams = call.state.streams
    return call.streams


def _operands(call: Call[Any]) -> Iterator[torch.Tensor]:
    """The tensors of a call's arguments and the weights of the module that it calls."""
    yield from tensors((call.args, call.kwargs))
    fn = call.fn
    if isinstance(fn, partial):
        yield from tensors((fn.args, fn.keywords))
        fn = fn.func
    if isinstance(fn, torch.nn.Module):
        for weights in (fn.parameters(), fn.buffers()):
            yield from (weight for weight in weights if not is_lazy(weight))


def _synchronize(events: list[torch.Event]) -> None:
    for event in events:
        event.synchronize()


def _devices_off_default() -> list[torch.device]:
    """The accelerators whose current stream on this thread is not the default stream.

    The waiting call around this call may have set another stream, or an earlier call has left one.
    """
    return [device for device in accelerators_in_use() if not on_stream(default_stream(device))]
