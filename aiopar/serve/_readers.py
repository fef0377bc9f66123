"""Who reads what one generator yields for a batch, and for how much more each has room."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

from .._awaiter import Awaiter
from .._steps import END
from ._request import Request

_Change: TypeAlias = Callable[[], Callable[[], object] | None]
"""What is done with the lock held; returns what is due by it, to be called without."""


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
        # May be taken again: a reader that is lost is closed by the garbage collector, which may
        # come at any point of any thread, of that one too that has the lock.
        self._lock = threading.RLock()
        self._changing = False
        """Whether who has the lock is within a change."""
        self._due: Callable[[], object] | None = None
        self._full = 0
        """How many have no room."""
        self._room: dict[StreamRequest, int] = {}
        self._left: deque[StreamRequest] = deque()
        """Those who have gone and may still be in `_room`."""
        self._change(partial(self._join, requests))

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more."""
        return not self._room

    def when_due(self, fn: Callable[[], object]) -> None:
        """Call `fn` when the next step is due: now, or once in the thread where that happens."""
        self._change(partial(self._wait, fn))

    def send(self) -> None:
        """Each of them is about to get a part."""
        self._change(self._take_room)

    def read(self, request: StreamRequest) -> None:
        """One of them has read a part."""
        self._change(partial(self._give_room, request))

    def leave(self, request: StreamRequest) -> None:
        """One of them reads no more."""
        self._left.append(request)
        self._let_go()

    def _change(self, change: _Change) -> None:
        self._alone(change)
        self._let_go()  # of those who left meanwhile

    def _let_go(self) -> None:
        while self._left and self._alone(self._one_out):
            pass

    def _alone(self, change: _Change) -> bool:
        """Make `change`, and call what is due by it; False: this thread is within another one.

        Only who leaves may come there: once that change is made, it is let go.
        """
        with self._lock:
            if self._changing:
                return False
            try:
                self._changing = True
                due = change()
            finally:
                self._changing = False
        if due is not None:
            due()
        return True

    # Changes.

    def _join(self, requests: Iterable[StreamRequest]) -> None:
        self._room = {request: request.buffer for request in requests if request.join(self)}

    def _wait(self, fn: Callable[[], object]) -> Callable[[], object] | None:
        if not self._full:
            return fn
        self._due = fn
        return None

    def _take_room(self) -> None:
        for request in self._room:
            self._room[request] -= 1
            self._full += not self._room[request]

    def _give_room(self, request: StreamRequest) -> Callable[[], object] | None:
        if request not in self._room:
            return None
        self._room[request] += 1
        return self._one_less_full() if self._room[request] == 1 else None

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
