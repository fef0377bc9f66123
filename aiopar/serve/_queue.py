"""The queue of a batcher: which waiting requests make the next batch, and how many fit into it."""

from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice
from math import ceil, inf
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeAlias, TypeVar


class Queued(Protocol):
    """What the queue needs of a request, which is hashed and compared by identity.

    Group, priority and cost must not change while the request is queued.
    """

    group: "RequestGroup"
    """Only requests of one group share a batch."""
    priority: int
    """The lowest goes first."""
    cost: float
    """Finite, not negative; in the unit of `max_batch_cost`."""

    def __hash__(self) -> int: ...


R = TypeVar("R", bound=Queued)

Entry: TypeAlias = tuple[int, float, int, R, int]
"""Priority, cost, number of arrival, request, and how many batches had left when it came.

The cost is 0 if costs are not used. The numbers are unique, so no requests compare.
"""

_priority: Callable[[Entry[Any]], int] = itemgetter(0)
_number: Callable[[Entry[Any]], int] = itemgetter(2)

PATIENCE = 32
"""How many batches may pass over a request before a batch is made for it."""

_FIRST_TRIAL = 32
_LAST_TRIAL = 4096

_ROUNDING = 1e-9  # the shares of a batch do not add up to exactly 1
_FULL = 1 - _ROUNDING


class RequestGroup:
    """The requests with equal keys, which may share a batch, and the most that fit into one.

    A batch that does not fit halves the limit. After 32 batches that fit, the limit grows by an
    eighth. If that was too much, the limit falls back to what fitted, and the next trial comes
    after twice as many batches. When `max_batch_size` items have fitted again, all is forgotten.
    The owner serializes the calls.
    """

    def __init__(self, max_batch_size: int, key: Hashable = None) -> None:
        self.key = key
        self._max_batch_size = max_batch_size
        self.limit = max_batch_size
        """The most items in a batch."""
        self.entries: list[Entry[Any]] = []
        """The requests that wait, sorted by priority, then cost, then arrival."""
        self.waiting_cost = 0.0
        """The sum of the requests' shares of a batch's cost; 0 if costs are not used."""
        self._good = 0
        """The most items that have fitted since the last failure."""
        self._successes = 0
        """How many batches of `limit` items have fitted since the limit was set."""
        self._trial = 0
        """After how many such batches a larger one is tried; 0: no batch has failed."""

    def out_of_memory(self, count: int) -> None:
        """A batch of `count` items did not fit."""
        if count > self.limit:
            return
        grew = self._good > 0 and count // 2 <= self._good < count
        self.limit = self._good if grew else max(1, count // 2)
        self._trial = min(self._trial * 2, _LAST_TRIAL) if grew else _FIRST_TRIAL
        self._good = min(self._good, self.limit)
        self._successes = 0

    def succeeded(self, count: int) -> None:
        """A batch of `count` items fitted."""
        if not self._trial:
            return
        self._good = max(self._good, count)
        if count < self.limit:  # a smaller batch says nothing of `limit`
            return
        self._successes += 1
        if self._successes >= self._trial:
            self._successes = 0
            if self.limit == self._max_batch_size:
                self._good = self._trial = 0
            self.limit = min(self.limit + max(1, self.limit // 8), self._max_batch_size)


class RequestQueue(Generic[R]):
    """Requests that wait for a batch.

    All requests of a batch have the group of its leader. The leader is the oldest request of the
    lowest priority value. When 32 batches have passed over a request, the oldest such request leads
    instead: no request waits forever. The requests with the lowest priority values join the leader
    first. Among requests of equal priority, those nearest in cost to the leader come first; without
    costs, the oldest do.

    The queue has no lock and no clock. Its owner serializes the calls.

    Args:
        max_batch_cost: The most that the requests of a batch may cost together. A request that
            costs more goes alone. Not used without `by_cost`.
        by_cost: Whether requests near in cost go together.
        padded: Whether every request of a batch costs as much as the most expensive one; only with
            `max_batch_cost` and `by_cost`.
    """

    def __init__(
        self,
        *,
        max_batch_cost: float | None = None,
        by_cost: bool = False,
        padded: bool = False,
    ) -> None:
        self._max_batch_cost = inf if max_batch_cost is None else max_batch_cost
        self._by_cost = by_cost
        self._padded = padded
        self._popped = 0
        """How many batches have left since the queue was made."""
        self._waiting: OrderedDict[R, Entry[R]] = OrderedDict()
        """In order of arrival."""
        self._first = self._last = 0
        """The lowest and the highest number of a request."""
        self._groups: set[RequestGroup] = set()
        """The groups of the requests."""

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, request: object) -> bool:
        return request in self._waiting

    def __iter__(self) -> Iterator[R]:
        return iter(self._waiting)

    @property
    def is_uniform(self) -> bool:
        """Whether all requests have one group, and costs are not used."""
        return len(self._groups) == 1 and not self._by_cost

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
        oldest = self.oldest
        popped = self._popped if oldest is None else self._waiting[oldest][4]
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

    @property
    def leader(self) -> R | None:
        """The request that leads the next batch."""
        return self._leader() if self._waiting else None

    def pop(self, request: R) -> None:
        """Take `request` out of the queue, as a batch of its own."""
        self._remove([request])
        self._popped += 1

    def pop_batch(self, *, full: bool = False) -> list[R]:
        """Take the next batch out of the queue; empty if no request waits.

        With `full`, the next batch that is as large as allowed; empty if there is none.
        """
        if not self._waiting:
            return []
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
        for group in self._groups:
            group.entries.clear()
            group.waiting_cost = 0.0
        self._groups.clear()
        return requests

    def full(self) -> bool:
        """Whether there is a batch as large as allowed."""
        return bool(self._waiting) and self._full_leader() is not None

    def batches_before(self, request: R) -> int:
        """About how many batches would leave before that of `request`, which is not queued."""
        batches = 0
        for group in self._groups:
            share = bisect_left(group.entries, (request.priority + 1,)) / len(group.entries)
            amount = self._amount(group) * share
            # The last batch of the request's own group has room for the request.
            own = group is request.group
            batches += int(amount + _ROUNDING) if own else ceil(amount - _ROUNDING)
        return batches

    def _push(self, request: R, number: int, popped: int) -> None:
        cost = request.cost if self._by_cost else 0.0
        entry = self._waiting[request] = request.priority, cost, number, request, popped
        group = request.group
        self._groups.add(group)
        insort(group.entries, entry)
        if cost:
            group.waiting_cost += self._share(cost)

    def _remove(self, requests: list[R]) -> None:
        """Take `requests`, which have one group, out of the queue."""
        group = requests[0].group
        for request in requests:
            entry = self._waiting.pop(request)
            del group.entries[bisect_left(group.entries, entry)]
            if entry[1]:
                group.waiting_cost -= self._share(entry[1])
        if not group.entries:
            self._groups.remove(group)

    def _amount(self, group: RequestGroup) -> float:
        """How many batches the requests of `group` make; the last one may count as a fraction."""
        amount = len(group.entries) / group.limit
        return max(amount, group.waiting_cost / self._max_batch_cost) if self._by_cost else amount

    def _share(self, cost: float) -> float:
        """The share of a batch's cost that a request takes; if padded, among equal requests."""
        if not self._padded:
            return cost
        return self._max_batch_cost / max(1.0, self._max_batch_cost // cost)

    def _leader(self) -> R:
        _, _, _, oldest, popped = next(iter(self._waiting.values()))
        if self._popped - popped >= PATIENCE:
            return oldest
        lowest = min(group.entries[0][0] for group in self._groups)
        return next(entry[3] for entry in self._waiting.values() if entry[0] == lowest)

    def _full_leader(self) -> R | None:
        """The leader of the next batch if that is full, else of another full batch."""
        leader = self._leader()
        full = {group for group in self._groups if self._amount(group) >= _FULL}
        if leader.group in full:
            return leader
        waiting = (entry for entry in self._waiting.values() if entry[3].group in full)
        found = min(waiting, key=_priority, default=None)  # the first of equal ones is the oldest
        return None if found is None else found[3]

    def _batch_of(self, leader: R) -> list[R]:
        """The batch that `leader` leads; the requests stay in the queue."""
        size = leader.group.limit
        entries = leader.group.entries
        if self._by_cost:
            return self._nearest_in_cost(leader, size, entries)
        others = (entry[3] for entry in entries if entry[3] is not leader)
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
                group: list[Entry[R]] = []  # equally near requests; the oldest goes first
                if below <= above:
                    first = bisect_left(entries, (priority, entries[left - 1][1]), start, left)
                    group += entries[first:left]
                    left = first
                if above <= below:
                    last = bisect_right(entries, (priority, entries[right][1], inf), right, stop)
                    group += entries[right:last]
                    right = last
                for _, cost, _, request, _ in sorted(group, key=_number):
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
