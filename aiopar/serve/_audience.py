"""Who waits for what runs on an event loop; when nobody is left, it is cancelled."""

from collections.abc import Sequence

from .._tasks import Tasks
from ._request import Request


class Audience:
    """The callers of a batch, or of one generator, that runs in tasks of its own.

    They leave it on their own loops, perhaps several at a time, or where the garbage collector
    finds them, in the midst of anything: so it has no lock, and each of its steps is atomic.

    Args:
        requests: Whose callers they are.
        tasks: Those of this run, and of no other: a cancellation that comes late, when a runner has
            its next batch, finds none of them.
    """

    def __init__(self, requests: Sequence[Request], tasks: Tasks) -> None:
        self._tasks = tasks
        self._waiting = set(requests)
        for request in requests:
            request.attend(self)

    @property
    def gone(self) -> bool:
        """Whether nobody waits any more; of no meaning once it has ended."""
        return not self._waiting

    def leave(self, request: Request) -> None:
        """The caller of one of them has gone, or came to its deadline."""
        try:
            self._waiting.remove(request)
        except KeyError:  # it has ended
            return
        # Of two who leave at the same time each may see that nobody is left: to cancel twice does
        # no harm. On the loop's thread: there the tasks either run still, or have ended.
        if not self._waiting:
            self._tasks.cancel()

    def end(self) -> None:
        """What they waited for has come to an end: who leaves from now on is nobody's concern."""
        self._waiting.clear()  # they refer to this
