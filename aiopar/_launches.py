"""Launched work: calls whose function has returned while their kernels still run."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from ._call import Call
from ._devices import share_memory
from ._tree import tensors

_Launched = tuple[list[torch.Event], Call[Any]]


class Launches:
    """Finishes the calls of one accelerator worker when the device has finished them.

    The worker goes on to launch the next call; a thread of its own waits here for the event of
    each, in the order of the stream. Waiting in `synchronize` lets the GIL go, polling would not.
    """

    def __init__(self, stream: torch.Stream, outstanding: "deque[None]", thread_name: str) -> None:
        self._stream = stream
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

    def put(self, call: Call[Any], events: list[torch.Event]) -> None:
        """Finish `call` when `events` are done, or now if it asked for no synchronization."""
        if not call.synchronize:
            self._finish_now(call, events)
            return
        self._outstanding.append(None)
        with self._lock:
            self._launched += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name=self._thread_name, daemon=True
                )
                self._thread.start()
        self._queue.put((events, call))

    def _finish_now(self, call: Call[Any], events: list[torch.Event]) -> None:
        for event in events:
            for caller in call.streams:
                if caller.stream != self._stream:
                    caller.stream.wait_event(event)
        # Nobody waits for the kernels, so nobody can hold the arguments for them.
        share_memory(tensors((call.args, call.kwargs)), self._stream)
        self._share_result(call)
        call.end()

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
                for event in events:
                    event.synchronize()
                self._share_result(call)
            except BaseException as error:  # noqa: BLE001  # what a kernel raised is its caller's
                call.error = call.error or error
            self._finished += 1
            self._outstanding.pop()
            # Only now it lets go of the arguments: the kernels read them until here.
            call.end()
            # Nothing of a finished call may live in an idle thread.
            del launched, events, call

    def _share_result(self, call: Call[Any]) -> None:
        for caller in call.streams:
            if caller.stream != self._stream:
                share_memory(tensors(call.result), caller.stream)
