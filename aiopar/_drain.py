"""How the workers of an executor that takes no more calls come to their end."""

import threading
import weakref
from collections import deque
from typing import Any

from ._call import Call
from ._server import current_server
from ._worker import Worker, current_worker


class Drain:
    """Stops workers when what they have taken is done, and all that this has handed in itself.

    A call that was taken may fork, and those calls may fork in turn: a worker with nothing to do
    may still get some. So the workers are gone through in rounds. In a round each of them gets
    through all that it had before, also what waits. If no running call has handed in another
    meanwhile, nobody is left who could, and the workers are stopped.

    Args:
        workers: Those of the pool; the list may grow.
    """

    def __init__(self, workers: list[Worker]) -> None:
        self._workers = workers
        self._lock = threading.Lock()
        self._again = False
        """Whether another round has to follow."""
        self._over = False
        self._closer: weakref.ref[Call[Any]] | None = None

    def begin(self) -> None:
        """Only calls that run hand in others from now on, and not the one that calls this."""
        call = _current_call()
        self._closer = None if call is None else weakref.ref(call)
        self._go_round()

    def end(self) -> None:
        """From now on running calls hand in no others either; the workers are to be stopped."""
        with self._lock:
            self._over = True

    def joins(self) -> bool:
        """Whether what the calling thread hands in is a part of a call that runs here.

        To be asked (again) when it is queued: who is through may have got it, so that another
        round has to follow. This one lasts until then, as the thread that asks is not through.
        """
        call = _current_call()
        if call is None or current_worker() not in self._workers:
            return False
        if self._closer is not None and self._closer() is call:
            return False
        with self._lock:
            self._again = True
            return not self._over

    def _go_round(self) -> None:
        with self._lock:
            self._again = False
        workers = tuple(self._workers)
        left = deque(range(len(workers)))

        def through() -> None:
            if left.pop() == 0:  # atomic: only the last one finds it
                self._went_round()

        for worker in workers:
            worker.when_through(through)

    def _went_round(self) -> None:
        with self._lock:
            again = self._again and not self._over
        if again:
            self._go_round()
        else:
            self.end()
            for worker in tuple(self._workers):
                worker.stop()


def _current_call() -> Call[Any] | None:
    """The call within which this is; what is called back when one has ended is in none."""
    server = current_server()
    return None if server is None else server.innermost
