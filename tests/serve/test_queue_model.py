"""`RequestQueue` beside a model of it: whatever is called, both make the same batches."""

import math
from collections.abc import Hashable
from dataclasses import replace
from fractions import Fraction

from hypothesis import Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from .queues import Item, Queue


class Model:
    """The rules of the queue in simple, slow code."""

    def __init__(
        self, size: int, most: float, limits: dict[Hashable, int], *, by_cost: bool, padded: bool
    ) -> None:
        self.size = size
        self.limits = limits
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
    cost=st.integers(0, 20).map(lambda quarters: quarters / 4),  # sums of these are exact
)


class QueueMachine(RuleBasedStateMachine):
    """The queue follows the rules: no request is lost, leaves twice, or waits forever."""

    @initialize(
        size=st.integers(1, 5),
        most=st.integers(3, 12),
        limits=st.dictionaries(st.integers(0, 2), st.integers(1, 6)),
        by=st.sampled_from(("arrival", "cost", "padded cost")),
    )
    def make(self, size: int, most: int, limits: dict[Hashable, int], by: str) -> None:
        by_cost, padded = by != "arrival", by == "padded cost"
        self.queue = Queue(
            max_batch_size=size,
            max_batch_cost=most,
            by_cost=by_cost,
            padded=padded,
            limits=limits,
        )
        self.model = Model(size, most, limits, by_cost=by_cost, padded=padded)
        self.popped: list[list[Item]] = []  # and not given back
        self.passed_over: dict[Item, int] = {}
        self.at_most: dict[Item, int] = {}

    @rule(items=st.lists(ITEMS, min_size=1, max_size=8))
    def push(self, items: list[Item]) -> None:
        for item in items:
            self.queue.push(item)
            self.model.push(item)
            self.passed_over[item] = 0
            self.at_most[item] = 32

    @rule()
    def pop(self) -> None:
        expected = self.model.pop_batch()
        batch = self.queue.pop_batch()
        assert batch == expected
        if batch:
            self.pass_over(batch)

    @rule()
    def pop_full(self) -> None:
        expected = self.model.pop_batch(full=True)
        batch = self.queue.pop_batch(full=True)
        assert batch == expected
        if batch:
            self.pass_over(batch)
            for item in self.model.waiting:
                self.at_most[item] += 1  # these do not keep to it: their owner has a clock

    def pass_over(self, batch: list[Item]) -> None:
        self.popped.append(batch)
        for place, item in enumerate(self.model.waiting):
            self.passed_over[item] += 1
            if self.passed_over[item] == 32:
                self.at_most[item] += place  # those before it are overdue too

    @rule(item=ITEMS, batches=st.integers(20, 40))
    def stream(self, item: Item, batches: int) -> None:
        for _ in range(batches):
            self.push([replace(item)])
            self.pop()

    @precondition(lambda self: self.popped)
    @rule(data=st.data())
    def push_front(self, data: st.DataObject) -> None:
        batch = self.popped.pop(data.draw(st.integers(0, len(self.popped) - 1)))
        for item in self.model.waiting:
            if self.passed_over[item] >= 32:
                self.at_most[item] += len(batch)
        self.queue.push_front(batch)
        self.model.push_front(batch)
        self.passed_over |= dict.fromkeys(batch, 0)
        self.at_most |= dict.fromkeys(batch, 32)

    @precondition(lambda self: self.model.waiting)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        item = self.model.waiting[data.draw(st.integers(0, len(self.model.waiting) - 1))]
        assert self.queue.discard(item)
        self.model.discard(item)
        assert not self.queue.discard(item)

    @precondition(lambda self: self.popped)
    @rule()
    def discard_a_request_that_has_left(self) -> None:
        assert not self.queue.discard(self.popped[-1][0])

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

    @invariant()
    def no_request_is_lost(self) -> None:
        assert all(item in self.queue for item in self.model.waiting)
        assert not any(item in self.queue for batch in self.popped for item in batch)

    @invariant()
    def no_batch_is_over_its_bounds(self) -> None:
        for batch in self.popped:
            assert len(batch) <= self.model.size_of(batch[0].key)
            assert len({item.key for item in batch}) == 1
            assert self.model.cost_of(batch) <= self.model.most or len(batch) == 1

    @invariant()
    def no_request_is_passed_over_forever(self) -> None:
        assert all(self.passed_over[item] <= self.at_most[item] for item in self.model.waiting)


TestQueue = QueueMachine.TestCase
TestQueue.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    report_multiple_bugs=False,
    phases=set(Phase) - {Phase.explain},  # takes minutes here
)
