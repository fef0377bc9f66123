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
        self._left: deque[StreamRequest] = deque()
        """Those who have gone and may still be in `_room`."""
        with self._lock:  # who leaves from now on is let go once it is here
            self._room = {request: request.buffer for request in requests if request.join(self)}
        self._let_go()

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return not self._room

    def when_due(self, fn: Callable[[], object]) -> None:
        """Call `fn` when the next step is due: now, or once in the thread where that happens."""
        with self._lock:
            waits = self._full > 0
            if waits:
                self._due = fn
        self._let_go()
        if not waits:
            fn()

    def send(self) -> None:
        """Each of them is about to get a part."""
        with self._lock:
            for request in self._room:
                self._room[request] -= 1
                self._full += not self._room[request]
        self._let_go()

    def read(self, request: StreamRequest) -> None:
        """One of them has read a part."""
        due = None
        with self._lock:
            if request in self._room:
                self._room[request] += 1
                due = self._one_less_full() if self._room[request] == 1 else None
        self._let_go()
        if due is not None:
            due()

    def leave(self, request: StreamRequest) -> None:
        """One of them reads no more."""
        # Not behind the lock: a reader that is lost is closed by the garbage collector, which may
        # come at any point of any thread, of that one too that has the lock.
        self._left.append(request)
        self._let_go()

    def _let_go(self) -> None:
        """Take out those who have left, unless another does; after every use of the lock."""
        # Who has the lock looks here once more when it has given it back: nobody is overlooked.
        while self._left and self._lock.acquire(blocking=False):
            try:
                due = self._one_out()
            finally:
                self._lock.release()
            if due is not None:
                due()

    def _one_out(self) -> Callable[[], object] | None:
        if not self._left:  # another was quicker
            return None
        had_no_room = self._room.pop(self._left.popleft(), 1) == 0
        return self._one_less_full() if had_no_room else None

    def _one_less_full(self) -> Callable[[], object] | None:
        self._full -= 1
        due = None
        if not self._full:
            due, self._due = self._due, None
        return due
