"""Requests wait here, and leave in batches."""

from abc import ABC, abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import merge
from itertools import chain, islice
from math import ceil, inf
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
