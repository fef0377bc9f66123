"""The requests with one batch key, in the order in which they go into batches."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from heapq import merge
from itertools import chain, islice
from math import inf
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar


class Queued(Protocol):
    """What a queue needs of a request, which is hashed and compared by identity.

    While a request is queued, its key, priority and cost stay as they are.
    """

    key: Hashable
    """Only requests with equal keys share a batch."""
    priority: int
    """The lowest goes first."""
    cost: float
    """Finite, not negative; in the unit of `max_batch_cost`."""

    def __hash__(self) -> int: ...


R = TypeVar("R", bound=Queued)
K = TypeVar("K", bound=float)
V = TypeVar("V")

Line = OrderedDict[R, int]
"""Requests in the order of their arrival, each with its number; any of them leaves in O(1)."""


class SortedDict(dict[K, V]):
    """A dict that keeps its keys sorted, and makes the value of a key that it has not."""

    __slots__ = ("_make", "order")

    def __init__(self, make: Callable[[], V]) -> None:
        super().__init__()
        self._make = make
        self.order: list[K] = []

    def __missing__(self, key: K) -> V:
        insort(self.order, key)
        made = self[key] = self._make()
        return made

    def __delitem__(self, key: K) -> None:
        super().__delitem__(key)
        del self.order[bisect_left(self.order, key)]

    def up_to(self, key: float) -> Iterator[V]:
        """The values of all keys up to this one, in their order."""
        return map(self.__getitem__, self.order[: bisect_right(self.order, key)])


class Lane(ABC, Generic[R]):
    """The requests with one key, the lowest priority first; what they amount to is the owner's."""

    __slots__ = ("batches", "cost", "count")

    def __init__(self) -> None:
        self.count = 0
        self.cost = 0.0
        """What they take of batches, in the unit of `max_batch_cost`; 0 where costs are unused."""
        self.batches = 0
        """How many batches they make."""

    @property
    @abstractmethod
    def first(self) -> tuple[R, int]:
        """The first to come of the lowest priority, with its number."""

    @abstractmethod
    def line(self, request: R) -> Line[R]:
        """The line where `request` waits, or is about to."""

    @abstractmethod
    def remove(self, requests: Iterable[R]) -> None:
        """Take `requests` out."""

    @abstractmethod
    def batch(self, leader: R, size: int, most: float) -> list[R]:
        """The next batch, `leader` first; they stay in the lane.

        They are at most `size`, and cost at most `most` (in sum, or padded), but for a leader that
        costs more.
        """


class ArrivalLane(Lane[R]):
    """Those of one priority leave in the order of their arrival; costs are unused."""

    __slots__ = ("_lines",)

    def __init__(self) -> None:
        super().__init__()
        self._lines: SortedDict[int, Line[R]] = SortedDict(OrderedDict)

    @property
    def first(self) -> tuple[R, int]:
        return next(iter(self._lines[self._lines.order[0]].items()))

    def count_up_to(self, priority: int) -> int:
        """How many are of no higher priority than this."""
        return sum(map(len, self._lines.up_to(priority)))

    def line(self, request: R) -> Line[R]:
        return self._lines[request.priority]

    def remove(self, requests: Iterable[R]) -> None:
        remove(self._lines, requests)

    def batch(self, leader: R, size: int, most: float) -> list[R]:
        in_order = chain.from_iterable(map(self._lines.__getitem__, self._lines.order))
        batch = list(islice(in_order, size))
        if batch[0] is not leader:
            others = [request for request in batch if request is not leader]
            batch = [leader, *others[: size - 1]]
        return batch


class Room:
    """What the next request may cost, so that those of the batch cost at most `most` in sum."""

    __slots__ = ("left",)

    def __init__(self, most: float) -> None:
        self.left = most

    def take(self, cost: float) -> None:
        """A request that costs so much is in the batch."""
        self.left -= cost


class PaddedRoom(Room):
    """The same where each of a batch costs as much as the dearest, to which it is padded."""

    __slots__ = ("_count", "_dearest", "_most")

    def __init__(self, most: float) -> None:
        super().__init__(most)
        self._most = most
        self._count = 0
        self._dearest = 0.0

    def take(self, cost: float) -> None:
        self._count += 1
        self._dearest = max(self._dearest, cost)
        share = self._most / (self._count + 1)  # what each may cost if one more joins
        # Else not even one that costs nothing: it would be padded.
        self.left = share if self._dearest <= share else -inf


class CostLane(Lane[R]):
    """Those of one priority leave by the nearness of their cost to the leader's."""

    __slots__ = ("_levels", "_padded")

    def __init__(self, *, padded: bool) -> None:
        super().__init__()
        self._padded = padded
        self._levels: SortedDict[int, SortedDict[float, Line[R]]] = SortedDict(_lines_by_cost)

    @property
    def first(self) -> tuple[R, int]:
        lines = self._levels[self._levels.order[0]].values()
        return min((next(iter(line.items())) for line in lines), key=itemgetter(1))

    def line(self, request: R) -> Line[R]:
        return self._levels[request.priority][request.cost]

    def remove(self, requests: Iterable[R]) -> None:
        for request in requests:
            lines = self._levels[request.priority]
            line = lines[request.cost]
            del line[request]
            if not line:
                del lines[request.cost]
                if not lines:
                    del self._levels[request.priority]

    def batch(self, leader: R, size: int, most: float) -> list[R]:
        batch = [leader]
        room = PaddedRoom(most) if self._padded else Room(most)
        room.take(leader.cost)
        for priority in self._levels.order:
            lines = self._levels[priority]
            if lines.order[0] <= room.left:
                _add_nearest(batch, lines, size, room)
            if len(batch) == size:
                break
        return batch


def remove(lines: SortedDict[int, Line[R]], requests: Iterable[R]) -> None:
    """Take `requests` out of the lines of their priorities."""
    for request in requests:
        line = lines[request.priority]
        del line[request]
        if not line:
            del lines[request.priority]


def _lines_by_cost() -> SortedDict[float, Line[Any]]:
    return SortedDict(OrderedDict)


def _add_nearest(batch: list[R], lines: SortedDict[float, Line[R]], size: int, room: Room) -> None:
    """Add to `batch` who fits, the nearest to the leader's cost first."""
    costs, cost = lines.order, batch[0].cost
    right = bisect_left(costs, cost)
    left = right - 1
    while len(batch) < size:
        # Costs that leave no room are passed over by bisection: to look at each takes too long.
        if left >= 0 and costs[left] > room.left:
            left = bisect_right(costs, room.left, 0, left) - 1
        below = cost - costs[left] if left >= 0 else inf
        above = costs[right] - cost if right < len(costs) and costs[right] <= room.left else inf
        if below < above:
            _add(batch, lines[costs[left]], size, room, costs[left])
            left -= 1
        elif above < below:
            _add(batch, lines[costs[right]], size, room, costs[right])
            right += 1
        elif above == below < inf:
            both = merge(*(lines[costs[k]].items() for k in (left, right)), key=itemgetter(1))
            _add(batch, map(itemgetter(0), both), size, room, costs[left])
            left -= 1
            right += 1
        else:
            break


def _add(batch: list[R], requests: Iterable[R], size: int, room: Room, cheapest: float) -> None:
    for request in requests:
        if len(batch) == size or cheapest > room.left:
            break
        if request.cost <= room.left and request is not batch[0]:
            batch.append(request)
            room.take(request.cost)
