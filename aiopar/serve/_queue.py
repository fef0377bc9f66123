"""Requests wait here, and leave in batches."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from math import ceil, inf
from typing import Generic

from ._lane import ArrivalLane, CostLane, Lane, Line, R, SortedDict, remove

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
    """

    def __init__(
        self, *, max_batch_size: int, max_batch_cost: float | None = None, by_cost: bool = False
    ) -> None:
        self._max_batch_size = max_batch_size
        self._max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._by_cost = by_cost
        self._popped = 0  # batches, ever
        self._arrived = 0  # the number of who came last
        self._returned = 0  # of who was given back last: before all others
        self._reset()

    def _reset(self) -> None:
        # All, in the order of their arrival, with the number of batches that were popped before.
        self._waiting: OrderedDict[R, int] = OrderedDict()
        self._by_priority: SortedDict[int, Line[R]] = SortedDict(OrderedDict)
        self._lanes: dict[Hashable, Lane[R]] = {}
        self._batches = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def oldest(self) -> R | None:
        """The request that has waited the longest."""
        return next(iter(self._waiting), None)

    def push(self, request: R) -> None:
        """`request` waits from now on."""
        self._arrived += 1
        self._add(request, self._arrived, self._popped)

    def push_front(self, requests: Sequence[R]) -> None:
        """`requests`, popped before, wait again: in their order, before others of their priority.

        They count as passed over as often as the oldest of the others, which came after them.
        """
        popped_before = next(iter(self._waiting.values()), self._popped)
        for request in reversed(requests):
            self._returned -= 1
            for line in self._add(request, self._returned, popped_before):
                line.move_to_end(request, last=False)

    def discard(self, request: R) -> bool:
        """`request` waits no more; False: it did not."""
        if request not in self._waiting:
            return False
        self._remove([request])
        return True

    def pop_batch(self, limit: Callable[[Hashable], int] | None = None) -> list[R]:
        """The next batch, which waits no more; empty if nobody waits.

        `limit` says how many requests with a key make a batch at most, if fewer: at least one.
        """
        if not self._waiting:
            return []
        leader = self._leader()
        size = self._size(leader.key, limit)
        batch = self._lanes[leader.key].batch(leader, size, self._max_batch_cost)
        self._remove(batch)
        self._popped += 1
        return batch

    def clear(self) -> list[R]:
        """All requests, which wait no more, in the order of their arrival."""
        requests = list(self._waiting)
        for request in requests:
            request.queued = False
        self._reset()
        return requests

    def full(self, limit: Callable[[Hashable], int] | None = None) -> bool:
        """Whether the next batch would be as large as a batch may be; `limit` as in `pop_batch`."""
        if not self._waiting:
            return False
        key = self._leader().key
        lane = self._lanes[key]
        return lane.count >= self._size(key, limit) or lane.cost >= self._max_batch_cost

    def batches(self) -> int:
        """About how many batches make up what waits."""
        return self._batches

    def _leader(self) -> R:
        oldest, popped_before = next(iter(self._waiting.items()))
        if self._popped - popped_before >= PATIENCE:
            return oldest
        return next(iter(self._by_priority[self._by_priority.order[0]]))

    def _size(self, key: Hashable, limit: Callable[[Hashable], int] | None) -> int:
        return self._max_batch_size if limit is None else min(self._max_batch_size, limit(key))

    def _add(self, request: R, arrival: int, popped_before: int) -> Iterable[Line[R]]:
        """`request` waits; the lines where it is the last now."""
        lane = self._lanes.get(request.key)
        if lane is None:
            lane = self._lanes[request.key] = CostLane() if self._by_cost else ArrivalLane()
        everyone, line = self._by_priority[request.priority], lane.line(request)
        self._waiting[request] = popped_before
        everyone[request] = line[request] = arrival
        request.queued = True
        self._count(lane, request.key, 1, request.cost)
        return self._waiting, everyone, line

    def _remove(self, requests: list[R]) -> None:
        """`requests`, whose keys are equal, wait no more."""
        key = requests[0].key
        lane = self._lanes[key]
        lane.remove(requests)
        remove(self._by_priority, requests)
        cost = 0.0
        for request in requests:
            del self._waiting[request]
            request.queued = False
            cost += request.cost
        self._count(lane, key, -len(requests), -cost)

    def _count(self, lane: Lane[R], key: Hashable, requests: int, cost: float) -> None:
        """So many more, or fewer, wait in `lane`."""
        lane.count += requests
        batches = ceil(lane.count / self._max_batch_size)
        if self._by_cost:
            lane.cost += cost
            batches = max(batches, ceil(lane.cost / self._max_batch_cost))
        if not lane.count:
            batches = 0  # whatever rounding has left of the cost
            del self._lanes[key]
        self._batches += batches - lane.batches
        lane.batches = batches
