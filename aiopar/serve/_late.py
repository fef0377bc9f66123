"""Requests that nobody could answer in time any more."""

from math import inf
from time import monotonic

from ._queue import RequestQueue
from ._readers import StreamRequest
from ._request import Request
from ._tally import Tally


def pass_over(queue: RequestQueue[Request], batch_size: int, tally: Tally) -> None:
    """Let those at the head of the queue who are too late make room, where others fill a batch.

    Under overload the oldest are about to expire: begun with them, each batch would end past their
    deadline, and in the end nobody would be answered. Too late is who has less time left than the
    quickest of the latest batches took. Their timers tell them, as those who expire in the queue.

    Only where all are alike: what batches of one key took says nothing of those of another. And
    not of streams, whose first part comes long before the last.
    """
    while len(queue) > batch_size and queue.is_uniform:
        oldest = queue.oldest
        if oldest is None or oldest.deadline == inf or isinstance(oldest, StreamRequest):
            return
        if oldest.deadline > monotonic() + tally.quickest:
            return
        queue.discard(oldest)
        oldest.overdue = True
