"""Who reads what one generator yields for a batch, and for how much more each has room."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from .._awaiter import Awaiter
from .._steps import END
from ._request import Request


class StreamRequest(Request):
    """One item whose output comes in parts; its results are these parts, and then `END`."""

    buffer = 1
    """The most parts that may wait to be read."""
    _readers: "Readers | None" = None

    def __init__(self, item: Any, awaiter: Awaiter) -> None:
        super().__init__(item, awaiter)
        self.parts: deque[Any] = deque()
        """Those that have come and were not read; touched on its caller's loop only."""

    def resolve(self, result: Any) -> None:
        """It has another part, or has all of them."""
        if self.done:
            return
        if result is END:
            self._settle()
            return
        self.item = None  # the generator has it
        self.parts.append(result)
        self.awaiter.deliver()

    def read(self) -> Any:
        """Take the next of `parts`."""
        part = self.parts.popleft()
        if self._readers is not None:
            self._readers.read(self)
        return part

    def expire(self, *, in_queue: bool) -> None:
        """Its deadline has passed: that is raised now, not behind the parts that wait."""
        if not self.done:
            self.parts.clear()
            super().expire(in_queue=in_queue)

    def abandon(self) -> None:
        """Its caller has gone."""
        super().abandon()
        # Its batch, which goes on, knows it still; and an error may know the batch.
        self.parts.clear()
        self.error = self._traceback = None
        self._leave()

    def _settle(self) -> None:
        self._leave()
        super()._settle()

    # It joins on a worker and leaves on its loop, perhaps at once: the first to write the name
    # decides, which is atomic.

    def join(self, readers: "Readers") -> bool:
        """It reads what comes now; False: its caller has gone."""
        return self.__dict__.setdefault("_readers", readers) is readers

    def _leave(self) -> None:
        readers = self.__dict__.setdefault("_readers", None)
        if readers is not None:
            readers.leave(self)


class Readers:
    """Those who still read, of the requests that joined; any thread may call each method.

    The next step is due when each of them has room for another part, or when there is none of
    them: a slow one slows the others of its batch, and parts never pile up.
    """

    def __init__(self, requests: Iterable[StreamRequest]) -> None:
        self._lock = threading.Lock()
        self._due: Callable[[], object] | None = None
        self._full = 0
        """How many have no room."""
        with self._lock:  # who leaves from now on waits until it is here
            self._room = {request: request.buffer for request in requests if request.join(self)}

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return not self._room

    def when_due(self, fn: Callable[[], object]) -> None:
        """Call `fn` when the next step is due: now, or once in the thread where that happens."""
        with self._lock:
            if self._full:
                self._due = fn
                return
        fn()

    def send(self) -> None:
        """Each of them is about to get a part."""
        with self._lock:
            for request in self._room:
                self._room[request] -= 1
                self._full += not self._room[request]

    def read(self, request: StreamRequest) -> None:
        """One of them has read a part."""
        with self._lock:
            if request not in self._room:
                return
            self._room[request] += 1
            due = self._one_less_full() if self._room[request] == 1 else None
        if due is not None:
            due()

    def leave(self, request: StreamRequest) -> None:
        """One of them reads no more."""
        with self._lock:
            due = self._one_less_full() if self._room.pop(request, 1) == 0 else None
        if due is not None:
            due()

    def _one_less_full(self) -> Callable[[], object] | None:
        self._full -= 1
        due = None
        if not self._full:
            due, self._due = self._due, None
        return due
