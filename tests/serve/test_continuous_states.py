"""State machines: whatever happens to a continuous batch, each caller gets its own parts."""

from typing import Any

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiopar
from aiopar.serve._step_batch import StepBatch, Ticked

from .batches import Bad
from .steppers import Counting, Item

MOST_HELD = 20.0


class Steps(RuleBasedStateMachine):
    """`StepBatch` alone, with the machine in the place of the scheduler."""

    @initialize(
        resumable=st.booleans(),
        bounded=st.booleans(),
        size=st.sampled_from([1, 2, 3, 8]),
    )
    def begin(self, resumable: bool, bounded: bool, size: int) -> None:
        self.stepper = Counting(self.on_step, resumable=resumable)
        self.size, self.most = size, MOST_HELD if bounded else None
        self.batch = self.new_batch()
        self.items: dict[int, Item] = {}
        """The requests that run, by key."""
        self.parts: dict[int, int] = {}
        """How many parts each has delivered."""
        self.left: list[int] = []
        self.paused: set[int] = set()
        self.bad: set[int] = set()
        self.in_place: set[int] = set()
        """The requests that fail for themselves, in their next step."""
        self.memory = 100
        self.key = 0
        self.parked = 0
        self.limit = size
        self.fresh = True

    def new_batch(self) -> StepBatch:
        return StepBatch(lambda: self.stepper, self.size, self.most, False)

    def on_step(self, names: list[int]) -> None:
        if len(names) > self.memory:
            raise torch.OutOfMemoryError("full")
        if not self.bad.isdisjoint(names):
            raise Bad

    @rule(key=st.integers(0, 50))
    @precondition(lambda self: self.items)
    def leave(self, key: int) -> None:
        gone = sorted(self.items)[key % len(self.items)]
        del self.items[gone], self.parts[gone]
        self.left.append(gone)

    @rule(key=st.integers(0, 50))
    @precondition(lambda self: self.items)
    def pause_or_read(self, key: int) -> None:
        self.paused ^= {sorted(self.items)[key % len(self.items)]}

    @rule(key=st.integers(0, 50))
    @precondition(lambda self: self.items)
    def turn_bad(self, key: int) -> None:
        self.bad.add(sorted(self.items)[key % len(self.items)])

    @rule(key=st.integers(0, 50))
    @precondition(lambda self: self.items)
    def fail_in_place(self, key: int) -> None:
        failing = sorted(self.items)[key % len(self.items)]
        self.stepper.in_place[failing] = Bad()
        self.in_place.add(failing)

    @rule()
    def return_too_few(self) -> None:
        self.stepper.too_few = True

    @rule()
    @precondition(lambda self: self.items)
    def lose_the_host(self) -> None:
        """The next tick reaches a new host, which knows no state."""
        self.stepper.live.clear()
        self.batch = self.new_batch()
        keys = [*self.items]
        for known in ([], keys):  # also if no reader has room
            assert self.batch.tick(None, len(keys), [], [], known).forgotten
        self.lose_the_batch()

    @rule(size=st.integers(0, 4))
    def lose_memory(self, size: int) -> None:
        self.memory = size

    @rule()
    def get_memory(self) -> None:
        self.memory = 100

    @rule()
    def lose_the_batch(self) -> None:
        """The batch ends for another reason; a new one follows."""
        self.items.clear()
        self.parts.clear()
        self.left.clear()
        self.fresh = True

    @rule(
        joining=st.lists(
            st.builds(
                Item,
                name=st.none(),
                count=st.integers(1, 12),
                prompt=st.integers(0, 2),
                grows=st.sampled_from([0.0, 1.0, 5.0]),
                holds=st.sampled_from([-1.0, 0.0, 1.0, 9.0, 18.5, 21.0]),
            ),
            max_size=3,
        )
    )
    def tick(self, joining: list[Item]) -> None:
        room = 0 if self.parked else max(0, min(self.size, self.limit) - len(self.items))
        new: list[tuple[int, Item]] = []
        for item in joining[:room]:
            self.key += 1
            new.append((self.key, Item(self.key, item.count, item.prompt, item.grows, item.holds)))
        before = len(self.items)
        self.items.update(new)
        self.parts.update(dict.fromkeys(dict(new), 0))
        self.paused &= set(self.items)
        keys = [key for key in self.items if key not in self.paused]
        left, self.left = self.left, []
        if not (left or new or keys):
            self.left = left
            return
        known = 0 if self.fresh else before + len(left)
        began = len(self.stepper.steps)
        ticked = self.batch.tick(None, known, left, [(*one, None) for one in new], keys)
        self.fresh = False
        self.check(ticked, keys, dict(new), before, began)

    def check(
        self, ticked: Ticked, keys: list[int], new: dict[int, Item], before: int, began: int
    ) -> None:
        assert not ticked.forgotten
        refused = [key for key, _ in ticked.refused]
        assert refused == [*new][len(new) - len(refused) :], "the last newcomers"
        for key in refused:
            del self.items[key], self.parts[key]
        seen = [key for key, _ in ticked.parts]
        assert len(set(seen)) == len(seen)
        for key, part in ticked.parts:
            assert part == (key, self.parts[key])
            self.parts[key] += 1
        for key, end in ticked.ended:
            self.ended(key, end)
        stepped = [name for names in self.stepper.steps[began:] for name in names]
        assert ticked.size == len(stepped)
        assert set(stepped) <= set(keys)
        wanted = [key for key in keys if key not in refused]
        if wanted:
            assert ticked.size or ticked.ended, "some request goes on"
        self.bad &= set(self.items)
        self.parked, self.limit = ticked.parked, ticked.limit

    def ended(self, key: int, end: Any) -> None:
        item = self.items.pop(key)
        made = self.parts.pop(key)
        alone = self.stepper.resumable
        if isinstance(end, aiopar.Done):
            assert (end.result, end.part) == (item.result, (key, item.count - 1))
            assert made == item.count - 1
        elif isinstance(end, Bad):
            assert key in self.bad or key in self.in_place or (self.bad and not alone)
        elif isinstance(end, torch.OutOfMemoryError):
            assert not alone or self.memory == 0
        elif isinstance(end, aiopar.OutputMismatch):
            assert made < item.count
        elif isinstance(end, ValueError) and item.holds < 0:
            assert made == 0
            assert self.most is not None
        elif isinstance(end, aiopar.InvalidInput):
            assert self.most is not None
            assert item.holds > self.most
        else:
            assert isinstance(end, aiopar.Overloaded)
            assert self.most is not None
            assert not alone or item.holds + item.grows * item.count > self.most

    @invariant()
    def nothing_is_kept(self) -> None:
        if not hasattr(self, "stepper") or self.fresh or self.left:
            return
        assert self.stepper.misuse == []
        live = {state.name for state in self.stepper.live}
        assert live <= set(self.items)
        assert len(live) == len(self.items) - self.parked
        if self.most is not None:
            assert sum(map(self.stepper.held, self.stepper.live)) <= self.most


TestSteps = Steps.TestCase
TestSteps.settings = settings(max_examples=200, stateful_step_count=40)
