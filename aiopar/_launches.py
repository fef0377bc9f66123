"""Launched work: calls whose function has returned while their kernels still run."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ._call import Call
from ._devices import CallerStream, bind_thread, order_after, result_events, share_memory
from ._error_handling import logger
from ._operands import operands
from ._tree import tensors

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
        self.order(call.streams)
        # Autograd may keep them, past the call and past who gave them. It lets go of them in a
        # backward, whose kernels on this stream may still be to come.
        if call.torch_state is None or call.torch_state.grad:
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
            for caller in call.streams:
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
        for caller in call.streams:
            if caller.stream != self.stream:
                share_memory(tensors(call.result), caller.stream)


def _synchronize(events: list[torch.Event]) -> None:
    for event in events:
        event.synchronize()
