"""The queue of a batcher: which waiting requests make the next batch."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from math import ceil, inf
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar


class Queued(Protocol):
    """What the queue needs of a request, which is hashed and compared by identity.

    Key, priority and cost must not change while the request is queued.
    """

    key: Hashable
    """Only requests with equal keys share a batch."""
    priority: int
    """The lowest goes first."""
    cost: float
    """Finite, not negative; in the unit of `max_batch_cost`."""

    def __hash__(self) -> int: ...


R = TypeVar("R", bound=Queued)

Entry: TypeAlias = tuple[int, float, int, R]
"""Priority, cost, number of arrival, request. The numbers are unique, so no requests compare."""

_number: Callable[[Entry[Any]], int] = itemgetter(2)

PATIENCE = 32
"""How many batches may pass over a request before a batch is made for it."""

_ROUNDING = 1e-9  # the shares of a batch do not add up to exactly 1


class _Lane(Generic[R]):
    """The requests with one key, sorted by priority, then cost, then arrival."""

    __slots__ = ("batches", "cost", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry[R]] = []
        self.cost = 0.0
        """The sum of the requests' shares of a batch's cost; 0 if costs are not used."""
        self.batches = 0
        """How many batches the requests make."""


class RequestQueue(Generic[R]):
    """Requests that wait for a batch.

    All requests of a batch have the key of its leader. The leader is the oldest request of the
    lowest priority value. When 32 batches have passed over a request, the oldest such request leads
    instead: no request waits forever. The lowest priority values join the leader first; among equal
    ones the requests nearest in cost to the leader, or without costs the oldest.

    The queue has no lock and no clock. Its owner serializes the calls.

    Args:
        max_batch_size: The most requests in a batch.
        max_batch_cost: The most that the requests of a batch may cost together. A request that
            costs more goes alone. Not used without `by_cost`.
        by_cost: Whether requests near in cost go together.
        padded: Whether every request of a batch costs as much as the most expensive one; only with
            `max_batch_cost` and `by_cost`.
        limit: The most requests with a key in a batch, if that is fewer; at least 1. It may change:
            the queue uses the new value when a request with the key comes or goes.
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
        self._popped = 0
        """How many batches have left since the queue was made."""
        self._waiting: OrderedDict[R, tuple[int, int]] = OrderedDict()
        """In order of arrival: the request's number, and `_popped` when it came."""
        self._first = self._last = 0
        """The lowest and the highest number of a request."""
        # While all requests have one key and one priority, and costs are not used, they leave in
        # order of arrival. This common case does not use the fields below.
        self._uniform = not by_cost
        self._key: Hashable = None
        self._priority = 0
        self._order: list[tuple[int, int, R]] = []
        """Priority, number and request of all, sorted."""
        self._lanes: dict[Hashable, _Lane[R]] = {}
        self._full_lanes: dict[Hashable, _Lane[R]] = {}
        """Lanes that make a batch as large as allowed."""
        self._batches = 0
        """The sum of `batches` of all lanes."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[R]:
        return iter(self._waiting)

    @property
    def is_uniform(self) -> bool:
        """Whether the requests have one key and one priority, and leave in order of arrival."""
        return self._uniform

    @property
    def oldest(self) -> R | None:
        """The request that has waited longest."""
        return next(iter(self._waiting), None)

    def push(self, request: R) -> None:
        """Queue `request`."""
        self._last += 1
        self._push(request, self._last, self._popped)

    def push_front(self, requests: Sequence[R]) -> None:
        """Put `requests` back, in their order, before other requests of their priority.

        They count as passed over by as many batches as the oldest request in the queue.
        """
        popped = next(iter(self._waiting.values()), (0, self._popped))[1]
        for request in reversed(requests):
            self._first -= 1
            self._push(request, self._first, popped)
            self._waiting.move_to_end(request, last=False)

    def discard(self, request: R) -> bool:
        """Take `request` out of the queue; False if it was not there."""
        if request not in self._waiting:
            return False
        self._remove([request])
        return True

    def pop_batch(self, *, full: bool = False) -> list[R]:
        """Take the next batch out of the queue; empty if no request waits.

        With `full`, the next batch that is as large as allowed; empty if there is none.
        """
        if not self._waiting:
            return []
        if self._uniform:
            size = self._size(self._key)
            if full and len(self._waiting) < size:
                return []
            if len(self._waiting) <= size:
                batch = self.clear()
            else:
                batch = [self._waiting.popitem(last=False)[0] for _ in range(size)]
        else:
            leader = self._full_leader() if full else self._leader()
            if leader is None:
                return []
            batch = self._batch_of(leader)
            self._remove(batch)
        self._popped += 1
        return batch

    def clear(self) -> list[R]:
        """Take all requests out of the queue, in order of arrival."""
        requests = list(self._waiting)
        self._waiting.clear()
        self._forget_lanes()
        return requests

    def full(self) -> bool:
        """Whether there is a batch as large as allowed."""
        if not self._waiting:
            return False
        if self._uniform:
            return len(self._waiting) >= self._size(self._key)
        return self._full_leader() is not None

    def batches(self) -> int:
        """About how many batches the requests make."""
        if self._uniform:
            return self._count_batches(self._key, len(self._waiting), 0.0)
        return self._batches

    def batches_before(self, request: R) -> int:
        """About how many batches would leave before that of `request`, which is not queued."""
        if not self._waiting:
            return 0
        key, priority = request.key, request.priority
        if self._uniform:
            if priority < self._priority:
                return 0
            before = self._amount(self._key, len(self._waiting), 0.0)
            return int(before) if _same(key, self._key) else ceil(before)
        own = self._lanes.get(key)
        if priority >= self._order[-1][0]:
            others = self._batches - (0 if own is None else own.batches)
        else:
            lanes = self._lanes.values()
            others = sum(ceil(self._before(lane, priority)) for lane in lanes if lane is not own)
        # The batch that is not full yet has room for the request.
        return others if own is None else others + int(self._before(own, priority) + _ROUNDING)

    def _before(self, lane: _Lane[R], priority: int) -> float:
        """How many batches the requests of `lane` make that have no higher priority value."""
        count = len(lane.entries)
        share = bisect_left(lane.entries, (priority + 1,)) / count
        return self._amount(lane.entries[0][3].key, count, lane.cost) * share - _ROUNDING

    def _push(self, request: R, number: int, popped: int) -> None:
        if self._uniform and not self._stays_uniform(request):
            self._uniform = False
            for other, (earlier, _) in self._waiting.items():
                self._add_to_lane(other, earlier)
            self._key = None
        self._waiting[request] = number, popped
        if not self._uniform:
            self._add_to_lane(request, number)

    def _stays_uniform(self, request: R) -> bool:
        if not self._waiting:
            self._key, self._priority = request.key, request.priority
            return True
        return request.priority == self._priority and _same(request.key, self._key)

    def _add_to_lane(self, request: R, number: int) -> None:
        lane = self._lanes.get(request.key)
        if lane is None:
            lane = self._lanes[request.key] = _Lane()
        insort(self._order, (request.priority, number, request))
        insort(lane.entries, self._entry(request, number))
        lane.cost += self._share(request)
        self._recount(lane, request.key)

    def _entry(self, request: R, number: int) -> Entry[R]:
        return request.priority, request.cost if self._by_cost else 0.0, number, request

    def _remove(self, requests: list[R]) -> None:
        """Take `requests`, which have one key, out of the queue."""
        numbers = [self._waiting.pop(request)[0] for request in requests]
        if not self._waiting:
            self._forget_lanes()
        elif not self._uniform:
            key = requests[0].key
            lane = self._lanes[key]
            for request, number in zip(requests, numbers, strict=True):
                del self._order[bisect_left(self._order, (request.priority, number))]
                # Its first three fields find an entry: no other entry has this number.
                found = bisect_left(lane.entries, self._entry(request, number)[:3])
                del lane.entries[found]
                lane.cost -= self._share(request)
            self._recount(lane, key)

    def _recount(self, lane: _Lane[R], key: Hashable) -> None:
        """Update the counts of `lane`, after a request came or went."""
        count = len(lane.entries)
        batches = self._count_batches(key, count, lane.cost)
        self._batches += batches - lane.batches
        lane.batches = batches
        if not count:
            del self._lanes[key]
        if count and self._is_full(lane, key):
            self._full_lanes[key] = lane
        else:
            self._full_lanes.pop(key, None)

    def _forget_lanes(self) -> None:
        """Drop all lanes: no request waits."""
        self._uniform = not self._by_cost
        self._key = None
        self._order.clear()
        self._lanes.clear()
        self._full_lanes.clear()
        self._batches = 0

    def _count_batches(self, key: Hashable, count: int, cost: float) -> int:
        # Without requests, `cost` is a rounding error.
        return ceil(self._amount(key, count, cost) - _ROUNDING) if count else 0

    def _amount(self, key: Hashable, count: int, cost: float) -> float:
        """How many batches requests with `key` make; the last one may count as a fraction."""
        return max(count / self._size(key), cost / self._max_batch_cost)

    def _share(self, request: R) -> float:
        """The share of a batch's cost that `request` takes; padded: among equal requests."""
        if not self._by_cost:
            return 0.0
        if not (self._padded and request.cost):
            return request.cost
        return self._max_batch_cost / max(1.0, self._max_batch_cost // request.cost)

    def _size(self, key: Hashable) -> int:
        limit, most = self._limit, self._max_batch_size
        return most if limit is None else min(most, limit(key))

    def _is_full(self, lane: _Lane[R], key: Hashable) -> bool:
        most = self._max_batch_cost * (1 - _ROUNDING)
        return len(lane.entries) >= self._size(key) or lane.cost >= most

    def _leader(self) -> R:
        oldest, (_, popped) = next(iter(self._waiting.items()))
        return oldest if self._popped - popped >= PATIENCE else self._order[0][2]

    def _full_leader(self) -> R | None:
        """The leader of the next batch if that is full, else of another full batch."""
        leader = self._leader()
        if self._is_full(self._lanes[leader.key], leader.key):
            return leader
        if not self._full_lanes:
            return None
        return next(one for _, _, one in self._order if one.key in self._full_lanes)

    def _batch_of(self, leader: R) -> list[R]:
        """The batch that `leader` leads; the requests stay in the queue."""
        size = self._size(leader.key)
        entries = self._lanes[leader.key].entries
        if self._by_cost:
            return self._nearest_in_cost(leader, size, entries)
        others = (request for *_, request in entries if request is not leader)
        return [leader, *islice(others, size - 1)]

    def _nearest_in_cost(self, leader: R, size: int, entries: list[Entry[R]]) -> list[R]:
        batch, total, highest, end = [leader], leader.cost, leader.cost, 0
        while end < len(entries) and len(batch) < size:
            # One priority after the other.
            start, priority = end, entries[end][0]
            end = bisect_left(entries, (priority + 1,), start)
            left = right = bisect_left(entries, (priority, leader.cost), start, end)
            while len(batch) < size:
                # Skip all costs without room at once: to look at each would take too long.
                room = self._room(len(batch), total, highest)
                fits = bisect_right(entries, (priority, room, inf), start, end)
                left, stop = min(left, fits), max(right, fits)
                below = leader.cost - entries[left - 1][1] if left > start else inf
                above = entries[right][1] - leader.cost if right < stop else inf
                if below == above == inf:
                    break
                group: list[Entry[R]] = []  # equally near; the first to come goes first
                if below <= above:
                    first = bisect_left(entries, (priority, entries[left - 1][1]), start, left)
                    group += entries[first:left]
                    left = first
                if above <= below:
                    last = bisect_right(entries, (priority, entries[right][1], inf), right, stop)
                    group += entries[right:last]
                    right = last
                for _, cost, _, request in sorted(group, key=_number):
                    if len(batch) == size:
                        break
                    if request is leader or cost > self._room(len(batch), total, highest):
                        continue
                    batch.append(request)
                    total, highest = total + cost, max(highest, cost)
        return batch

    def _room(self, count: int, total: float, highest: float) -> float:
        """The most that one more request of a batch may cost."""
        if not self._padded:
            return self._max_batch_cost - total
        share = self._max_batch_cost / (count + 1)
        # Padding makes even a request without cost as expensive as the others.
        return share if highest <= share else -inf


def _same(key: Hashable, other: Hashable) -> bool:
    # As a dict compares: keys with different hashes are never compared, because `==` of tensors
    # has no truth value.
    return key is other or (hash(key) == hash(other) and key == other)
