"""State machines: whatever happens to a continuous batch, each caller gets its own parts."""

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import aiopar
from aiopar.serve._step_batch import StepBatch, Ticked
from aiopar.testing import Gate

from .batches import Bad, outcomes_in
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
            new.append((self.key, replace(item, name=self.key)))
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


class Reader:
    """A task that reads one stream, or awaits one item, when the machine lets it."""

    def __init__(self, item: Item, buffer: int | None) -> None:
        self.item, self.buffer = item, buffer
        self.parts: list[Any] = []
        self.outcome: Any = None
        """The result, the error, or "left"."""
        self.credit = asyncio.Semaphore(0)
        self.may_leave = self.may_fail = False

    async def __call__(self, batcher: Any, **options: Any) -> None:
        try:
            if self.buffer is None:
                self.outcome = await batcher(self.item, **options)
            else:
                async with batcher.stream(self.item, buffer=self.buffer, **options) as stream:
                    await self._read(stream)
                self.outcome = self.item.result
        except asyncio.CancelledError:
            self.outcome = "left"
        except Exception as error:  # noqa: BLE001  # to be looked at
            self.outcome = error

    async def _read(self, stream: Any) -> None:
        while True:
            await self.credit.acquire()
            try:
                self.parts.append(await anext(stream))
            except StopAsyncIteration:
                return

    def check(self, bounded: bool) -> None:
        """Check what it has got so far."""
        assert self.parts == self.item.parts(len(self.parts))
        if self.outcome in (None, "left"):
            return
        if self.outcome == self.item.result:
            assert self.buffer is None or self.parts == self.item.parts()
        elif isinstance(self.outcome, aiopar.DeadlineExceeded | aiopar.ReaderTooSlow):
            assert self.may_leave
        elif isinstance(self.outcome, aiopar.Overloaded):
            assert bounded or "queue is full" in str(self.outcome)
        else:
            assert isinstance(self.outcome, Bad | torch.OutOfMemoryError)
            assert self.may_fail

    @property
    def end(self) -> str:
        """How its request has ended, in the words of `stats()`."""
        match self.outcome:
            case None:
                return "waits"
            case aiopar.DeadlineExceeded():
                return "expired"
            case aiopar.Overloaded() if "queue is full" in str(self.outcome):
                return "refused"
            case Exception():
                return "failed"
        return "cancelled" if self.outcome == "left" else "answered"


class Batcher(RuleBasedStateMachine):
    """A whole batcher on an event loop; each step waits for the machine."""

    @initialize(
        resumable=st.booleans(),
        bounded=st.booleans(),
        size=st.sampled_from([4, 3, 2, 1]),
        patient=st.booleans(),
    )
    def begin(self, resumable: bool, bounded: bool, size: int, patient: bool) -> None:
        self.runner = asyncio.Runner()
        self.gate = Gate()
        self.stepper = Counting(self.on_step, resumable=resumable)
        self.size, self.bounded = size, bounded
        self.executor = aiopar.DeviceExecutor(["cpu"])
        self.batcher: Any = aiopar.ContinuousBatcher(
            self.stepper,
            max_batch_size=size,
            max_pending=12,
            max_batch_cost=MOST_HELD if bounded else None,
            read_timeout=1000.0 if patient else 0.001,
        )
        self.patient = patient
        self.bad: set[int] = set()
        self.memory = 100
        self.readers: list[Reader] = []
        self.tasks: list[asyncio.Task[None]] = []
        self.runner.run(self.open())

    async def open(self) -> None:
        with aiopar.use_executor(self.executor):
            await self.batcher.__aenter__()

    def on_step(self, names: list[int]) -> None:
        self.gate()
        assert len(names) <= self.size
        if len(names) > self.memory:
            raise torch.OutOfMemoryError("full")
        if not self.bad.isdisjoint(names):
            raise Bad

    async def settle(self) -> None:
        """Wait until the worker is held in a step, or has nothing to do."""
        quiet = 0
        while quiet < 3:
            for _ in range(5):
                await asyncio.sleep(0)
            [worker] = self.executor.stats().workers
            quiet = quiet + 1 if self.gate.held or not (worker.queued or worker.running) else 0

    @rule(
        calls=st.lists(
            st.tuples(
                st.builds(
                    Item,
                    name=st.none(),
                    count=st.integers(2, 8),
                    prompt=st.integers(0, 1),
                    grows=st.sampled_from([0.0, 3.0]),
                ),
                st.sampled_from([16, 2, 1, None]),
                st.sampled_from([None] * 6 + [0.0, 0.002]),
            ),
            min_size=1,
            max_size=3,
        ),
        priority=st.integers(0, 1),
    )
    def call(self, calls: list[tuple[Item, int | None, float | None]], priority: int) -> None:
        async def begin() -> None:
            for item, buffer, timeout in calls:
                reader = Reader(replace(item, name=len(self.readers)), buffer)
                reader.may_leave = timeout is not None or not self.patient
                self.readers.append(reader)
                called = reader(self.batcher, priority=priority, timeout=timeout)
                self.tasks.append(asyncio.create_task(called))
            await self.settle()

        self.runner.run(begin())

    @rule(number=st.integers(0, 30), count=st.integers(1, 6))
    @precondition(lambda self: self.readers)
    def read(self, number: int, count: int) -> None:
        async def read() -> None:
            for _ in range(count):
                self.readers[number % len(self.readers)].credit.release()
            await self.settle()

        self.runner.run(read())

    @rule(number=st.integers(0, 30))
    @precondition(lambda self: self.readers)
    def cancel(self, number: int) -> None:
        async def cancel() -> None:
            self.tasks[number % len(self.tasks)].cancel()
            await self.settle()

        self.runner.run(cancel())

    @rule(
        count=st.integers(1, 6),
        memory=st.sampled_from([100, 2, 1, 0]),
        bad=st.sampled_from([None, 0, 1]),
    )
    def step(self, count: int, memory: int, bad: int | None) -> None:
        """Let steps on; with little memory, or with a bad request among the oldest ones."""
        self.memory = memory
        waiting = [number for number, one in enumerate(self.readers) if one.outcome is None]
        self.bad = set() if bad is None else {*waiting[bad : bad + 1]}
        for number, reader in enumerate(self.readers):
            repeats = self.stepper.resumable
            failing = memory < 100 or bad is not None
            if number in self.bad or not memory or (failing and not repeats):
                reader.may_fail = True

        async def step() -> None:
            for _ in range(count):
                if self.gate.held:
                    entered = self.gate.count
                    self.gate.let_on()
                    while self.gate.held and self.gate.count == entered:  # noqa: ASYNC110  # a thread changes it
                        await asyncio.sleep(0)
                    await self.settle()

        self.runner.run(step())

    @rule()
    def wait(self) -> None:
        """Let deadlines and stalled readers expire."""

        async def wait() -> None:
            await asyncio.sleep(0.004)
            await self.settle()

        self.runner.run(wait())

    @invariant()
    def each_caller_has_its_own(self) -> None:
        for reader in getattr(self, "readers", ()):
            reader.check(self.bounded)

    @invariant()
    def each_request_counts_once(self) -> None:
        if hasattr(self, "readers"):
            stats = self.batcher.stats()
            ends = Counter(reader.end for reader in self.readers)
            assert stats.queued + stats.in_flight == ends.pop("waits", 0)
            assert outcomes_in(stats) == ends
            assert stats.in_flight >= 0
            assert bool(stats.errors) == bool(stats.failed)

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            with self.runner, self.executor:
                self.memory = 100
                self.bad.clear()
                self.gate.open()
                self.runner.run(self.end())
                self.each_caller_has_its_own()

    async def end(self) -> None:
        for reader in self.readers:
            for _ in range(10):
                reader.credit.release()
        async with asyncio.timeout(20):
            await self.batcher.aclose()
            await asyncio.gather(*self.tasks)
        assert all(reader.outcome is not None for reader in self.readers)
        assert self.stepper.misuse == []
        assert self.stepper.live == set()
        stats = self.batcher.stats()
        assert (stats.queued, stats.in_flight) == (0, 0)
        assert asyncio.all_tasks() == {asyncio.current_task()}


TestBatcher = Batcher.TestCase
TestBatcher.settings = settings(max_examples=60, stateful_step_count=25)
