"""Requests that differ: who of them leads the next batch, and who goes with it."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from math import ceil
from typing import Generic

from ._lane import ArrivalLane, CostLane, Lane, Line, R, SortedDict, remove

_ROUNDING = 1e-9  # shares of a batch do not add up to it exactly
_FEW = 16
"""With how many keys the requests are counted key by key."""


class Lanes(Generic[R]):
    """Requests by key, by priority and, `by_cost`, by cost.

    Args:
        requests: Those that there are, in the order of their arrival.
        size: How many requests with a key make a batch at most.
        max_batch_cost: What those of a batch cost at most.
        by_cost: Those near in cost go together.
        padded: Each of a batch costs as much as the dearest.
    """

    __slots__ = (
        "_by_cost",
        "_by_key",
        "_by_priority",
        "_filled",
        "_first",
        "_last",
        "_max_batch_cost",
        "_padded",
        "_size",
        "batches",
    )

    def __init__(
        self,
        requests: Iterable[R],
        *,
        size: Callable[[Hashable], int],
        max_batch_cost: float,
        by_cost: bool,
        padded: bool,
    ) -> None:
        self._size = size
        self._max_batch_cost = max_batch_cost
        self._by_cost = by_cost
        self._padded = padded
        self._by_priority: SortedDict[int, Line[R]] = SortedDict(OrderedDict)
        self._by_key: dict[Hashable, Lane[R]] = {}
        self._filled: dict[Hashable, Lane[R]] = {}  # those that make up a batch as large as can be
        self._first = 0  # the number of who was given back last: before all others
        self._last = 0  # of who came last
        self.batches = 0
        """About how many batches they make up."""
        for request in requests:
            self.add(request)

    def add(self, request: R) -> None:
        """`request` comes after all others."""
        self._last += 1
        self._add(request, self._last)

    def add_front(self, request: R) -> None:
        """`request` comes before all others of its priority."""
        self._first -= 1
        for line in self._add(request, self._first):
            line.move_to_end(request, last=False)

    @property
    def leader(self) -> R:
        """The first of the lowest priority."""
        return next(iter(self._by_priority[self._by_priority.order[0]]))

    @property
    def full_leader(self) -> R | None:
        """The first of the lowest priority of those whose key makes up a full batch."""
        firsts = [lane.first for lane in self._filled.values()]
        if not firsts:
            return None
        return min(firsts, key=lambda first: (first[0].priority, first[1]))[0]

    def full(self, key: Hashable) -> bool:
        """Whether those with `key` make up a batch as large as one may be."""
        lane = self._by_key[key]
        return self._is_full(lane, self._size(key))

    def batches_up_to(self, priority: int) -> int:
        """About how many batches those make up that are of no higher priority than this."""
        lines = self._by_priority
        if priority >= lines.order[-1]:
            return self.batches
        if len(self._by_key) <= _FEW and not self._by_cost:
            return sum(
                ceil(lane.count_up_to(priority) / self._size(key))
                for key, lane in self._by_key.items()
                if isinstance(lane, ArrivalLane)  # all are
            )
        # Callers wait for the owner's lock meanwhile: of many keys, or costs, by their share.
        waiting = sum(map(len, lines.values()))
        return ceil(self.batches * sum(map(len, lines.up_to(priority))) / waiting)

    def batch(self, leader: R) -> list[R]:
        """The next batch, `leader` first; they stay."""
        size = self._size(leader.key)
        return self._by_key[leader.key].batch(leader, size, self._max_batch_cost)

    def remove(self, requests: list[R]) -> None:
        """`requests`, whose keys are equal, wait no more."""
        key = requests[0].key
        lane = self._by_key[key]
        lane.remove(requests)
        remove(self._by_priority, requests)
        self._count(lane, key, -len(requests), -sum(map(self._taken_by, requests)))

    def _add(self, request: R, arrival: int) -> Iterable[Line[R]]:
        """The lines where `request` is the last now."""
        lane = self._by_key.get(request.key)
        if lane is None:
            lane = CostLane(padded=self._padded) if self._by_cost else ArrivalLane()
            self._by_key[request.key] = lane
        everyone, line = self._by_priority[request.priority], lane.line(request)
        everyone[request] = line[request] = arrival
        self._count(lane, request.key, 1, self._taken_by(request))
        return everyone, line

    def _count(self, lane: Lane[R], key: Hashable, requests: int, cost: float) -> None:
        """So many more, or fewer, wait in `lane`."""
        size = self._size(key)
        lane.count += requests
        lane.cost += cost
        batches = self._batches(size, lane.count, lane.cost)
        if not lane.count:
            del self._by_key[key]
        if lane.count and self._is_full(lane, size):
            self._filled[key] = lane
        elif self._filled:  # mostly there are none, and then no key is hashed once more
            self._filled.pop(key, None)
        self.batches += batches - lane.batches
        lane.batches = batches

    def _taken_by(self, request: R) -> float:
        """What `request` takes of a batch; padded, of one whose requests all cost as much as it."""
        if not self._by_cost:
            return 0.0
        if not (self._padded and request.cost):
            return request.cost
        most = self._max_batch_cost
        return most / max(1.0, most // request.cost)

    def _is_full(self, lane: Lane[R], size: int) -> bool:
        """Whether those in `lane` make up a batch as large as one may be."""
        return lane.count >= size or lane.cost >= self._max_batch_cost * (1 - _ROUNDING)

    def _batches(self, size: int, count: int, cost: float) -> int:
        """About how many batches so many requests with one key make up."""
        if not count:
            return 0  # whatever rounding has left of the cost
        return max(ceil(count / size), ceil(cost / self._max_batch_cost - _ROUNDING))
