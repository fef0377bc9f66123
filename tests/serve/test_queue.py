"""`RequestQueue` beside a model of it: whatever is called, both make the same batches."""

import gc
import math
import sys
import types
import weakref
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aiopar.serve._queue import RequestGroup, RequestQueue


@dataclass(eq=False)
class Item:
    """An item with the attributes that the queue reads."""

    key: Hashable = None
    priority: int = 0
    cost: float = 1.0
    group: RequestGroup = field(init=False)


class Queue(RequestQueue[Item]):
    """Gives its items the group of their key."""

    def __init__(self, *, max_batch_size: int, **options: Any) -> None:
        super().__init__(**options)
        self.size = max_batch_size
        self.groups: dict[Hashable, RequestGroup] = {}

    def push(self, item: Item) -> None:
        item.group = self.group_of(item.key)
        super().push(item)

    def group_of(self, key: Hashable) -> RequestGroup:
        return self.groups.setdefault(key, RequestGroup(self.size, key))

    def batches_before(self, item: Item) -> int:
        item.group = self.group_of(item.key)
        return super().batches_before(item)


class Model:
    """The rules of the queue in simple, slow code."""

    def __init__(self, size: int, most: float, *, by_cost: bool, padded: bool) -> None:
        self.size = size
        self.limits: dict[Hashable, int] = {}
        self.most = most if by_cost else math.inf
        self.by_cost = by_cost
        self.padded = padded
        self.waiting: list[Item] = []  # in the order of arrival
        self.passed_over: dict[Item, int] = {}

    def push(self, item: Item) -> None:
        self.waiting.append(item)
        self.passed_over[item] = 0

    def push_front(self, items: list[Item]) -> None:
        as_often = self.passed_over[self.waiting[0]] if self.waiting else 0
        self.waiting[:0] = items
        self.passed_over |= dict.fromkeys(items, as_often)

    def discard(self, item: Item) -> None:
        self.waiting.remove(item)
        del self.passed_over[item]

    def leader(self) -> Item:
        overdue = [item for item in self.waiting if self.passed_over[item] >= 32]
        return overdue[0] if overdue else min(self.waiting, key=lambda item: item.priority)

    def full_leader(self) -> Item | None:
        """The leader of the next batch if that is full, else of another full batch."""
        leader = self.leader()
        full = [item for item in self.waiting if self.is_full(item.key)]
        return leader if leader in full else min(full, key=lambda it: it.priority, default=None)

    def size_of(self, key: Hashable) -> int:
        return min(self.size, self.limits.get(key, self.size))

    def cost_of(self, batch: list[Item]) -> float:
        costs = [item.cost for item in batch]
        return len(costs) * max(costs) if self.padded else sum(costs)

    def pop_batch(self, *, full: bool = False) -> list[Item]:
        if not self.waiting:
            return []
        leader = self.full_leader() if full else self.leader()
        if leader is None:
            return []

        def rank(item: Item) -> tuple[int, float]:
            return item.priority, abs(item.cost - leader.cost) if self.by_cost else 0

        batch = [leader]
        for item in sorted(self.waiting, key=rank):
            if item.key == leader.key and item is not leader:
                fits = self.cost_of([*batch, item]) <= self.most
                if fits and len(batch) < self.size_of(leader.key):
                    batch.append(item)
        for item in batch:
            self.discard(item)
        for item in self.waiting:
            self.passed_over[item] += 1
        return batch

    def taken(self, key: Hashable) -> list[Fraction]:
        """How many batches the requests with this key fill; padded: as if all cost the same."""
        costs = [Fraction(item.cost) for item in self.waiting if item.key == key]
        if not self.padded:
            return costs
        most = Fraction(self.most)
        return [most / max(1, most // cost) if cost else cost for cost in costs]

    def full(self) -> bool:
        return any(self.is_full(item.key) for item in self.waiting)

    def is_full(self, key: Hashable) -> bool:
        taken = self.taken(key)
        return len(taken) >= self.size_of(key) or sum(taken) >= self.most


ITEMS = st.builds(
    Item,
    key=st.integers(0, 2),
    priority=st.integers(-1, 1),
    cost=st.integers(0, 10).map(lambda halves: halves / 2),  # sums of these are exact
)


class QueueMachine(RuleBasedStateMachine):
    """The queue follows the rules, and no request is lost or leaves twice."""

    @initialize(
        size=st.integers(1, 5),
        most=st.integers(3, 12),
        limits=st.dictionaries(st.integers(0, 2), st.integers(1, 6)),
        by=st.sampled_from(("arrival", "cost", "padded cost")),
    )
    def make(self, size: int, most: int, limits: dict[int, int], by: str) -> None:
        by_cost, padded = by != "arrival", by == "padded cost"
        self.queue = Queue(max_batch_size=size, max_batch_cost=most, by_cost=by_cost, padded=padded)
        self.model = Model(size, most, by_cost=by_cost, padded=padded)
        self.popped: list[list[Item]] = []  # and not given back
        for key, limit in limits.items():
            self.set_limit(key, limit)

    @rule(key=st.integers(0, 2), limit=st.integers(1, 6))
    def set_limit(self, key: int, limit: int) -> None:
        self.model.limits[key] = limit
        self.queue.group_of(key).limit = min(limit, self.model.size)

    @rule(items=st.lists(ITEMS, min_size=1, max_size=8))
    def push(self, items: list[Item]) -> None:
        for item in items:
            self.queue.push(item)
            self.model.push(item)

    @rule()
    def pop(self, full: bool = False) -> None:
        expected = self.model.pop_batch(full=full)
        assert self.queue.pop_batch(full=full) == expected
        if expected:
            self.popped.append(expected)

    @rule()
    def pop_full(self) -> None:
        self.pop(full=True)

    @rule(item=ITEMS, batches=st.integers(20, 40))
    def stream(self, item: Item, batches: int) -> None:
        for _ in range(batches):
            self.push([replace(item)])
            self.pop()

    @precondition(lambda self: self.popped)
    @rule(data=st.data())
    def push_front(self, data: st.DataObject) -> None:
        batch = self.popped.pop(data.draw(st.integers(0, len(self.popped) - 1)))
        self.queue.push_front(batch)
        self.model.push_front(batch)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = self.model.waiting[data.draw(st.integers(0, len(self.model.waiting) - 1))]
        assert self.queue.discard(item)
        self.model.discard(item)
        assert not self.queue.discard(item)

    @rule()
    def pop_all(self) -> None:
        while self.model.waiting:
            self.pop()
        self.pop()

    @rule()
    def clear(self) -> None:
        assert self.queue.clear() == self.model.waiting
        self.model.waiting.clear()

    @invariant()
    def it_looks_like_the_model(self) -> None:
        assert len(self.queue) == len(self.model.waiting)
        assert self.queue.oldest is next(iter(self.model.waiting), None)
        assert self.queue.full() == self.model.full()
        assert all(item in self.queue for item in self.model.waiting)
        gone = [item for batch in self.popped for item in batch]
        assert not any(item in self.queue for item in gone)
        assert not (gone and self.queue.discard(gone[-1]))


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},  # takes minutes here
)


def filled(items: Iterable[Item], *, size: int, **options: Any) -> Queue:
    queue = Queue(max_batch_size=size, **options)
    for item in items:
        queue.push(item)
    return queue


PRIORITIES = [Item(priority=priority) for priority in [1] * 5 + [3] * 3]
KEYS = [*(Item(key=n) for n in range(9)), *(Item(key="bulk", priority=1) for _ in range(5))]


@pytest.mark.parametrize(
    ("waiting", "size", "request_", "before"),
    [
        *((PRIORITIES, 2, Item(priority=n), before) for n, before in enumerate([0, 2, 2, 4])),
        (KEYS, 3, Item(key="own"), 9),
        (KEYS, 3, Item(key="own", priority=1), 11),
        ([Item(), Item()], 2, Item(), 1),
        ([Item(), Item()], 2, Item(key="other"), 1),
        ([Item(), Item()], 2, Item(priority=-1), 0),
        ([], 2, Item(), 0),
    ],
)
def test_batches_before(waiting: list[Item], size: int, request_: Item, before: int) -> None:
    assert filled(waiting, size=size).batches_before(request_) == before


@pytest.mark.parametrize(("priority", "before"), [(0, 2), (1, 2), (2, 3)])
def test_batches_before_by_cost(priority: int, before: int) -> None:
    waiting = [Item(cost=4), Item(cost=5), Item(cost=6), Item(cost=5, priority=1)]
    waiting.append(Item(cost=8, priority=2))
    queue = filled(waiting, size=9, max_batch_cost=8, by_cost=True)
    assert queue.batches_before(Item(cost=1, priority=priority)) == before


def pass_over(queue: Queue, batches: int) -> None:
    """Pop batches of requests that came later and are more urgent."""
    for _ in range(batches):
        urgent = Item(key="urgent", priority=-1)
        queue.push(urgent)
        assert queue.pop_batch() == [urgent]


def test_who_is_given_back_has_waited_as_long_as_the_oldest() -> None:
    items = [Item(priority=9), Item(priority=9)]
    queue = filled(items, size=1)
    given_back = queue.pop_batch()
    pass_over(queue, 31)
    queue.push(Item(key="other"))
    queue.push_front(given_back)
    assert queue.pop_batch() == given_back == items[:1]


def test_a_full_batch_of_who_is_overdue_goes_before_a_more_urgent_one() -> None:
    overdue = Item(priority=9)
    queue = filled([overdue], size=1)
    pass_over(queue, 32)
    queue.push(Item(key="other"))
    assert queue.pop_batch(full=True) == [overdue]


def test_of_costs_equally_near_the_first_to_come_goes_first() -> None:
    queue = filled([Item(cost=cost) for cost in (5, 7, 3)], size=2, by_cost=True)
    assert [item.cost for item in queue.pop_batch()] == [5, 7]


def test_a_batch_is_full_although_its_shares_are_rounded() -> None:
    options = {"max_batch_cost": 300, "by_cost": True, "padded": True}
    waiting = [Item(cost=42) for _ in range(7)]  # 7 * (300 / 7) is below 300
    assert filled(waiting, size=9, **options).full()


def test_no_group_is_kept_when_nobody_waits() -> None:
    queue = filled([Item(key=0), Item(key=1)], size=2)
    groups = [*queue.groups.values()]
    queue.groups.clear()
    assert len([*iter(queue.pop_batch, [])]) == 2
    queue.push(Item(key=2))
    groups += queue.groups.values()
    queue.groups.clear()
    queue.clear()
    assert not {id(group) for group in groups} & {id(it) for it in reachable(queue)}


def test_memory_stays_in_proportion_to_what_waits() -> None:
    queue = Queue(max_batch_size=8, max_batch_cost=100, by_cost=True)
    ever: weakref.WeakSet[Item] = weakref.WeakSet()
    waiting: list[Item] = []
    for n in range(100_000):
        item = Item(key=n % 1009, priority=n % 13, cost=n % 97)
        ever.add(item)
        queue.push(item)
        waiting.append(item)
        if len(waiting) > 20:
            queue.discard(waiting.pop(n * 7919 % 20))
        del item
    assert len(queue) == len(ever) == 20
    afresh = filled(waiting, size=8, max_batch_cost=100, by_cost=True)
    queue.groups.clear()
    sizes = [sum(map(sys.getsizeof, reachable(root))) for root in (queue, afresh)]
    assert sizes[0] < 2 * sizes[1]


def reachable(root: object) -> list[object]:
    """All reachable objects, without code."""
    code = (type, types.ModuleType, types.FunctionType)
    found: dict[int, Any] = {}
    new: list[Any] = [root]
    while new:
        found.update((id(thing), thing) for thing in new)
        referents = gc.get_referents(*new)
        new = [it for it in referents if id(it) not in found and not isinstance(it, code)]
    return [*found.values()]
