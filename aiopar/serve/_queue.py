"""Requests wait here, and leave in batches."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from math import inf
from typing import Generic

from ._lane import R
from ._lanes import Lanes

PATIENCE = 32
"""How many batches may pass over a request before one is made for it."""


class RequestQueue(Generic[R]):
    """Requests that wait for a worker, which takes a batch of them.

    A batch has a leader, and the others have its key. The leader is the first request of the
    lowest priority; but where 32 batches have passed over a request, the oldest such. So nobody
    waits for ever: only for 32 batches, and those that are made for who was overdue before.

    It has neither a lock nor a clock: its owner lets one thread in at a time.

    Args:
        max_batch_size: How many requests make a batch at most.
        max_batch_cost: What the requests of a batch cost at most, together; a request that costs
            more goes alone. Unused without `by_cost`.
        by_cost: Requests whose cost is near the leader's go with it, not those that came first.
        padded: Each of a batch costs as much as the dearest of them; with the two above only.
        limit: How many requests with a key make a batch at most, if fewer: at least one. It may
            change; where keys differ, what waits is counted anew when one of its key comes or goes.
    """

    def __init__(
        self,
        *,
        max_batch_size: int,
        max_batch_cost: float | None = None,
        by_cost: bool = False,
        padded: bool = False,
        limit: Callable[[Hashable], int] | None = None,
    ) -> None:
        self._max_batch_size = max_batch_size
        self._limit = limit
        self._max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._by_cost = by_cost
        self._padded = padded
        self._popped = 0  # batches, ever
        # All, in the order of their arrival, with the number of batches that were popped before.
        self._waiting: OrderedDict[R, int] = OrderedDict()
        # None as long as those that come have one key and one priority, which is the common case by
        # far: then they leave as they came, and nothing else is to be known of them.
        self._lanes: Lanes[R] | None = None
        self._key: Hashable = None
        self._priority = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: R) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[R]:
        return iter(self._waiting)

    @property
    def is_uniform(self) -> bool:
        """Whether all that wait have one key and one priority, and leave as they came."""
        return self._lanes is None

    @property
    def oldest(self) -> R | None:
        """The request that has waited the longest."""
        return next(iter(self._waiting), None)

    def push(self, request: R) -> None:
        """`request` waits from now on."""
        lanes = self._lanes_for(request)
        self._waiting[request] = self._popped
        if lanes is not None:
            lanes.add(request)

    def push_front(self, requests: Sequence[R]) -> None:
        """`requests`, popped before, wait again: in their order, before others of their priority.

        They count as passed over as often as the oldest of the others, which came after them.
        """
        popped_before = next(iter(self._waiting.values()), self._popped)
        for request in reversed(requests):
            lanes = self._lanes_for(request)
            self._waiting[request] = popped_before
            self._waiting.move_to_end(request, last=False)
            if lanes is not None:
                lanes.add_front(request)

    def discard(self, request: R) -> bool:
        """`request` waits no more; False: it did not."""
        if request not in self._waiting:
            return False
        del self._waiting[request]
        self._removed([request])
        return True

    def pop_batch(self, *, full: bool = False) -> list[R]:
        """The next batch, which waits no more; empty if nobody waits.

        With `full`, the next of those that are as large as a batch may be; empty if none is.
        """
        waiting = self._waiting
        if not waiting:
            return []
        if self._lanes is None:
            size = self._size(self._key)
            if full and len(waiting) < size:
                return []
            if len(waiting) <= size:
                batch = self.clear()
            else:
                batch = [waiting.popitem(last=False)[0] for _ in range(size)]
        else:
            leader = self._full_leader(self._lanes) if full else self._leader(self._lanes)
            if leader is None:
                return []
            batch = self._lanes.batch(leader)
            for request in batch:
                del waiting[request]
            self._removed(batch)
        self._popped += 1
        return batch

    def clear(self) -> list[R]:
        """All requests, which wait no more, in the order of their arrival."""
        requests = list(self._waiting)
        self._waiting.clear()
        self._forget()
        return requests

    def full(self) -> bool:
        """Whether there is a batch as large as one may be."""
        if not self._waiting:
            return False
        if self._lanes is None:
            return len(self._waiting) >= self._size(self._key)
        return self._full_leader(self._lanes) is not None

    def batches(self) -> int:
        """About how many batches make up what waits."""
        if self._lanes is None:
            return -(-len(self._waiting) // self._size(self._key))
        return self._lanes.batches

    def batches_before(self, request: R) -> int:
        """About how many leave before that of `request`, the last of its priority that waits."""
        lanes = self._lanes
        batches = self.batches() if lanes is None else lanes.batches_up_to(request.priority)
        return max(0, batches - 1)  # its own may have room for others

    def _leader(self, lanes: Lanes[R]) -> R:
        oldest, popped_before = next(iter(self._waiting.items()))
        return oldest if self._popped - popped_before >= PATIENCE else lanes.leader

    def _full_leader(self, lanes: Lanes[R]) -> R | None:
        """Of the next batch if that is full, else of another that is."""
        leader = self._leader(lanes)
        if lanes.full(leader.key):
            return leader
        return lanes.full_leader

    def _size(self, key: Hashable) -> int:
        limit, most = self._limit, self._max_batch_size
        return most if limit is None else min(most, limit(key))

    def _lanes_for(self, request: R) -> Lanes[R] | None:
        """Where `request`, which is about to wait, is to be added; None: it is like all others."""
        if self._lanes is not None:
            return self._lanes
        if not self._by_cost:
            if not self._waiting:
                self._key, self._priority = request.key, request.priority
                return None
            if request.priority == self._priority and _same(request.key, self._key):
                return None
        self._key = None
        self._lanes = Lanes(
            self._waiting,
            size=self._size,
            max_batch_cost=self._max_batch_cost,
            by_cost=self._by_cost,
            padded=self._padded,
        )
        return self._lanes

    def _removed(self, requests: list[R]) -> None:
        if not self._waiting:
            self._forget()
        elif self._lanes is not None:
            self._lanes.remove(requests)

    def _forget(self) -> None:
        """Nobody waits: nothing of who did is kept."""
        self._lanes = self._key = None


def _same(key: Hashable, other: Hashable) -> bool:
    # As a dict finds it: what has another hash is never compared, as a tensor cannot be.
    return key is other or (hash(key) == hash(other) and key == other)
