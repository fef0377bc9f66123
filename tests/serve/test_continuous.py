"""`ContinuousBatcher`: requests join and leave a running batch, one outcome for each."""

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.testing import Gate

from .batches import Bad, current_executor, outcomes_of, until
from .steppers import Counting, Item
from .streams import ENDLESS, Readers, read_all

pytestmark = pytest.mark.anyio


class Steps:
    """Holds each step at a gate, and records the names of its states; in the test's process."""

    def __init__(self, on_step: Callable[[list[Any]], object] = lambda _: None) -> None:
        self.gate = Gate()
        self.seen: list[list[Any]] = []
        self.on_step = on_step

    def __call__(self, names: list[Any]) -> None:
        self.seen.append(names)
        self.gate()
        self.on_step(names)

    async def next(self) -> list[Any]:
        """Let the held step on, and wait for the next one; returns its names."""
        count = len(self.seen)
        self.gate.let_on()
        await self.gate.entered(count + 1)
        return self.seen[count]


class Serving(Readers):
    """Readers of a continuous batcher whose steps are held."""

    batcher: Any

    def __init__(self, batcher: Any, tasks: Any, stepper: Counting, steps: Steps) -> None:
        super().__init__(batcher, tasks)
        self.stepper = stepper
        self.steps = steps

    async def join(self, *names: Any, count: int = ENDLESS, **options: Any) -> list[Any]:
        """Queue streams, and let steps on until all have joined; returns the names of the step."""
        await self.queue(*(Item(name, count) for name in names), **options)
        step: list[Any] = []
        while not set(names) <= set(step):
            step = await self.steps.next()
        return step


@asynccontextmanager
async def serving(
    make: Callable[..., Counting] = Counting,
    *,
    on_step: Callable[[list[Any]], object] = lambda _: None,
    resumable: bool = False,
    **options: Any,
) -> AsyncIterator[Serving]:
    """A batcher held in a step of the endless stream "first"; left, the callers are cancelled."""
    steps = Steps(on_step)
    stepper = make(steps, resumable=resumable)
    first = Item("first", ENDLESS, grows=0)
    async with (
        current_executor(["cpu"]),
        aiopar.ContinuousBatcher(stepper, **options) as batcher,
        anyio.create_task_group() as tasks,
    ):
        served = Serving(batcher, tasks, stepper, steps)
        served.read(first, buffer=ENDLESS)
        with steps.gate:
            await steps.gate.entered()
            yield served
        tasks.cancel_scope.cancel()
    stats = batcher.stats()
    assert (stats.queued, stats.in_flight) == (0, 0)
    assert stepper.misuse == []
    assert stepper.live == set()


# Joining and leaving.


async def test_requests_join_and_leave_between_steps() -> None:
    async with serving() as served:
        assert await served.join("a", count=2) == ["first", "a"]
        await served.queue(Item("b", 1))
        assert await served.steps.next() == ["first", "a", "b"]
        assert await served.steps.next() == ["first"]
        await until(lambda: len(served.outcomes) == 2)
        assert served.parts[Item("a", 2)] == [("a", 0), ("a", 1)]
        assert served.parts[Item("b", 1)] == [("b", 0)]
        assert served.stepper.stopped == {"a": 1, "b": 1}


async def test_an_awaited_item_gets_the_result_and_a_stream_gets_the_parts() -> None:
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(Counting()) as batcher:
        item = Item("a", 3, prompt=2)
        assert await read_all(batcher.stream(item)) == item.parts()
        assert await batcher(item) == "a done"
        stats = batcher.stats()
        assert (stats.steps, stats.parts, stats.batch_sizes) == (10, 6, {1: 10})
        assert (stats.answered, stats.queued, stats.in_flight) == (2, 0, 0)


@pytest.mark.parametrize(
    "way", ["cancel", "cancel an await", "break", "aclose", "drop", "deadline"]
)
async def test_a_caller_that_leaves_frees_its_slot_within_a_step(way: str) -> None:
    async with serving(max_batch_size=2) as served:
        batcher, steps = served.batcher, served.steps
        item, leave, left = Item("leaves", ENDLESS), anyio.Event(), anyio.Event()

        async def call() -> None:
            if way == "cancel an await":
                await batcher(item)
            stream = batcher.stream(item, timeout=0.5 if way == "deadline" else None)
            with anyio.CancelScope() as scope:
                await anext(stream)
                if way == "deadline":
                    with pytest.raises(aiopar.DeadlineExceeded, match="in a batch"):
                        await read_all(stream)
                    left.set()
                    return
                await leave.wait()
                if way == "cancel":
                    scope.cancel()
                    await anext(stream)
            if way == "break":
                async with stream:
                    pass
            elif way == "aclose":
                await stream.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: batcher.stats().queued == 1)
            while await steps.next() != ["first", "leaves"]:
                pass
            await served.queue(Item("waits", 1))
            await steps.next()  # the stream has a part
            leave.set()
            if way == "cancel an await":
                tasks.cancel_scope.cancel()
            elif way == "deadline":
                await left.wait()
            await anyio.wait_all_tasks_blocked()
        gc.collect()
        await anyio.lowlevel.checkpoint()
        assert await steps.next() == ["first", "waits"]
        assert served.stepper.stopped == {"leaves": 1}
        assert batcher.stats().in_flight == 2


async def test_priorities_and_patience() -> None:
    async with serving(max_batch_size=2) as served:
        await served.queue(Item("last", 1), priority=1)
        await served.queue(*(Item(number, 1) for number in range(40)))
        await served.queue(Item("urgent", 1), priority=-1)
        served.steps.gate.open()
        await until(lambda: len(served.outcomes) == 42)
        order = [names[-1] for names in served.steps.seen if len(names) == 2]
        assert order == ["urgent", *range(31), "last", *range(31, 40)]


async def test_deadlines_in_the_queue() -> None:
    async with serving(max_batch_size=1) as served:
        with pytest.raises(aiopar.DeadlineExceeded, match="in the queue"):
            await served.batcher(Item("late"), timeout=0.01)
        assert served.batcher.stats().queued == 0
        with pytest.raises(aiopar.DeadlineExceeded):
            await served.batcher(Item("too late"), timeout=-1)
        assert served.stepper.started == {"first": 1}


async def test_a_full_queue_refuses_newcomers_only() -> None:
    async with serving(max_batch_size=1, max_pending=2) as served:
        await served.queue(Item("a", 1), Item("b", 1))
        with pytest.raises(aiopar.Overloaded, match="2 items wait"):
            await served.batcher(Item("c"))
        assert await served.steps.next() == ["first"]
        assert served.outcomes == {}
        assert served.batcher.stats().refused == {"queue_full": 1}


# The end.


async def test_aclose_lets_streams_and_waiting_items_go_to_their_end() -> None:
    stepper, gate = Counting(), Gate()
    stepper.on_step = lambda _: gate()
    async with (
        current_executor(["cpu"]),
        aiopar.ContinuousBatcher(stepper, max_batch_size=1) as batcher,
        anyio.create_task_group() as tasks,
    ):
        served = Serving(batcher, tasks, stepper, Steps())
        with gate:
            served.read(Item("a"), buffer=1)
            await gate.entered()
            await served.queue(Item("b"))
            tasks.start_soon(batcher.aclose)
            await until(lambda: batcher.closed)
            with pytest.raises(aiopar.ServiceClosed):
                await batcher(Item("c"))
            gate.open()
            await batcher.aclose()
        assert served.parts == {Item(name): Item(name).parts() for name in "ab"}
        assert served.outcomes == {Item("a"): None, Item("b"): None}


@pytest.mark.parametrize("options", [{"drain": False}, {"timeout": 0.01}])
async def test_aclose_may_end_streams(options: dict[str, Any]) -> None:
    async with serving(max_batch_size=1) as served:
        await served.queue(Item("waits"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: served.batcher.aclose(**options))
            await until(lambda: len(served.outcomes) == 2)
            served.steps.gate.open()  # a step runs to its end
        assert all(type(error) is aiopar.ServiceClosed for error in served.outcomes.values())
        await until(lambda: served.stepper.live == set())
        assert len(served.stepper.steps) == 1


async def test_it_opens_again_after_it_was_closed() -> None:
    batcher: Any = aiopar.ContinuousBatcher(Counting())
    async with current_executor(["cpu"]):
        for _ in range(2):
            async with batcher:
                assert await batcher(Item("a")) == "a done"
            with pytest.raises(aiopar.ServiceClosed):
                await batcher(Item("b"))


# Slow readers.


async def test_a_reader_that_does_not_read_is_left_out_of_steps() -> None:
    async with serving() as served:
        async with served.batcher.stream(Item("slow", 4), buffer=2) as stream:
            names = [await served.steps.next() for _ in range(5)]
            assert names == [["first", "slow"]] * 2 + [["first"]] * 3
            assert await anext(stream) == ("slow", 0)
            await served.steps.next()
            assert await served.steps.next() == ["first"], "it had room for one part"
            served.steps.gate.open()
            assert await read_all(stream) == Item("slow", 4).parts()[1:]
        assert len(served.steps.seen) > 7


async def test_a_batch_rests_while_nobody_reads() -> None:
    async with current_executor(["cpu"]) as executor:
        stepper = Counting()
        async with aiopar.ContinuousBatcher(stepper) as batcher:
            async with batcher.stream(Item("a", 5), buffer=1) as stream:
                for number in range(5):
                    await until(lambda: len(stepper.steps) > number)  # noqa: B023
                    for _ in range(3):
                        await executor.run_sync(str)
                    assert len(stepper.steps) == number + 1
                    assert await anext(stream) == ("a", number)
            assert stepper.live == set()


async def test_a_reader_that_stalls_gives_up_its_place_to_waiting_items() -> None:
    stepper = Counting()
    async with (
        current_executor(["cpu"]),
        aiopar.ContinuousBatcher(stepper, max_batch_size=1, read_timeout=0.05) as batcher,
        batcher.stream(Item("slow", 9), buffer=1) as stream,
    ):
        assert await anext(stream) == ("slow", 0)
        assert await batcher(Item("waits")) == "waits done"
        with pytest.raises(aiopar.ReaderTooSlow, match="has not read for"):
            await anext(stream)
    assert stepper.live == set()


async def test_a_reader_that_stalls_keeps_its_place_while_the_batch_has_room() -> None:
    stepper = Counting(lambda names: gate() if "held" in names else None)
    gate = Gate()
    async with current_executor(["cpu"]):
        options: dict[str, Any] = {"max_batch_size": 8, "read_timeout": 0.01}
        async with (
            aiopar.ContinuousBatcher(stepper, **options) as batcher,
            anyio.create_task_group() as tasks,
        ):
            stream = batcher.stream(Item("slow", 3), buffer=1)
            assert await anext(stream) == ("slow", 0)
            await until(lambda: len(stepper.steps) == 2)
            with gate:
                tasks.start_soon(batcher, Item("held"))
                await gate.entered()
                tasks.start_soon(batcher, Item("joins"))
                await until(lambda: batcher.stats().queued == 1)
                await anyio.sleep(0.05)
                gate.open()
            assert await read_all(stream) == Item("slow", 3).parts()[1:]


async def test_aclose_ends_the_stream_that_nobody_reads() -> None:
    batcher: Any = aiopar.ContinuousBatcher(Counting(), read_timeout=0.05)
    async with current_executor(["cpu"]):
        async with batcher:
            stream = batcher.stream(Item("slow", 9), buffer=1)
            await anext(stream)
        with pytest.raises(aiopar.ReaderTooSlow):
            await read_all(stream)


# A step fails.


async def test_all_requests_of_a_step_fail_and_the_parked_ones_go_on() -> None:
    """Nothing but the batch itself lets the parked requests go on."""
    together = 0

    def on_step(names: list[str]) -> None:
        nonlocal together
        together += len(names) == 2
        if together == 2 and "first" in names:
            raise torch.OutOfMemoryError("full")

    async with serving(on_step=on_step, resumable=True) as served:
        await served.queue(Item("second"))
        served.steps.gate.open()
        await until(lambda: len(served.outcomes) == 2)
        second = Item("second")
        [first] = served.outcomes.keys() - {second}
        assert isinstance(served.outcomes[first], torch.OutOfMemoryError)
        assert served.outcomes[second] is None
        assert served.parts[second] == second.parts()


async def test_a_bad_request_is_found_by_halves_and_the_others_go_on() -> None:
    def on_step(names: list[str]) -> None:
        if "bad" in names:
            raise Bad(f"a step of {len(names)}")

    async with serving(on_step=on_step, resumable=True, max_batch_size=8) as served:
        served.steps.gate.open()
        items = [Item(name) for name in ("a", "b", "bad", "c")]
        outcomes = await outcomes_of(served.batcher, items)
        error = outcomes.pop(2)
        assert outcomes == ["a done", "b done", "c done"]
        assert str(error) == "a step of 1"
        assert error.__cause__ is None or str(error.__cause__) != "a step of 1"


async def test_a_step_that_cannot_be_repeated_fails_its_batch() -> None:
    def on_step(names: list[str]) -> None:
        if "bad" in names:
            raise Bad

    async with serving(on_step=on_step) as served:
        await served.queue(Item("bad"))
        served.steps.gate.open()
        await until(lambda: len(served.outcomes) == 2)
        assert [type(error) for error in served.outcomes.values()] == [Bad, Bad]
        assert await served.batcher(Item("next")) == "next done"


async def test_an_error_in_its_place_fails_one_request() -> None:
    async with serving() as served:
        served.stepper.in_place["bad"] = Bad("in its place")
        await served.queue(Item("bad"))
        assert await served.steps.next() == ["first", "bad"]
        assert await served.steps.next() == ["first"]
        await until(lambda: len(served.outcomes) == 1)
        assert str(served.outcomes[Item("bad")]) == "in its place"


async def test_an_item_that_cannot_start_fails_alone() -> None:
    async with serving() as served:
        served.read("no item")
        await until(lambda: served.batcher.stats().queued == 1)
        assert await served.steps.next() == ["first"]
        assert await served.steps.next() == ["first"]
        await until(lambda: len(served.outcomes) == 1)
        assert isinstance(served.outcomes["no item"], TypeError)


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_wrong_number_of_results_fails_the_batch(resumable: bool) -> None:
    """The states have taken the step, so it cannot be repeated."""
    async with serving(resumable=resumable) as served:
        await served.join("a")
        served.stepper.too_few = True
        served.steps.gate.open()
        await until(lambda: len(served.outcomes) == 2)
        for error in served.outcomes.values():
            assert isinstance(error, aiopar.OutputMismatch)
            assert str(error) == "step returned 1 results for 2 states"
        assert await served.batcher(Item("next")) == "next done"


@pytest.mark.parametrize("step", [lambda _, states: None, lambda _, states: (n for n in states)])
async def test_a_step_that_returns_no_sequence(step: Any) -> None:
    stepper = type("Wrong", (Counting,), {"step": step})()
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        with pytest.raises(aiopar.OutputMismatch, match=r"(NoneType|generator) results for 1 "):
            await batcher(Item("a"))


async def test_an_error_of_stop_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Unstoppable(Counting):
        def stop(self, state: Any) -> None:
            raise Bad("it cannot stop")

    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(Unstoppable()) as batcher:
        assert await batcher(Item("a")) == "a done"
    assert "it cannot stop" in caplog.text


# Memory.


async def test_newcomers_leave_a_tenth_of_the_memory_free() -> None:
    async with serving(max_batch_cost=10) as served:
        await served.queue(Item("a", holds=8, grows=0), Item("b", 1), Item("c", 1))
        assert await served.steps.next() == ["first", "a"]
        assert await served.steps.next() == ["first", "a"], "b would hold the last tenth"
        assert served.stepper.started == {"first": 1, "a": 1, "b": 1}, "b was tried once"
        assert await served.steps.next() == ["first", "a"]
        assert await served.steps.next() == ["first", "b", "c"], "when a is done"


async def test_the_newest_request_is_preempted_and_goes_on_when_there_is_room() -> None:
    async with serving(max_batch_cost=10, resumable=True) as served:
        await served.queue(Item("old", 7), Item("new", 6))
        steps = [await served.steps.next() for _ in range(5)]
        assert steps == [["first", "old", "new"]] * 5
        assert await served.steps.next() == ["first", "old"], "they held 11"
        await served.queue(Item("waits", 1))
        assert await served.steps.next() == ["first", "old"], "nobody joins while one is parked"
        assert await served.steps.next() == ["first", "new"]
        assert served.batcher.stats().preempted == 1
        while len(served.outcomes) < 3:
            await served.steps.next()
        assert served.stepper.stopped == {"old": 1, "new": 2, "waits": 1}
        assert served.parts[Item("new", 6)] == Item("new", 6).parts()


async def test_without_resuming_the_newest_request_fails_if_the_batch_holds_too_much() -> None:
    async with serving(max_batch_cost=5) as served:
        await served.queue(Item("grows", 9))
        served.steps.gate.open()
        with pytest.raises(aiopar.InvalidInput, match="needs 6, and a batch may hold at most 5"):
            await served.batcher(Item("too large", holds=6))
        await until(lambda: Item("grows", 9) in served.outcomes)
        assert isinstance(served.outcomes[Item("grows", 9)], aiopar.Overloaded)


async def test_a_request_that_outgrows_the_memory_alone_fails() -> None:
    async with current_executor(["cpu"]):
        stepper = Counting(resumable=True)
        async with aiopar.ContinuousBatcher(stepper, max_batch_cost=5) as batcher:
            with pytest.raises(aiopar.Overloaded, match="the batch holds 6, and max_batch_cost=5"):
                await batcher(Item("grows", 9))
        assert stepper.live == set()


async def test_out_of_memory_parks_the_newest_half_and_the_limit_is_learned() -> None:
    memory = 4

    def on_step(names: list[Any]) -> None:
        if len(names) > memory:
            raise torch.OutOfMemoryError("full")

    async with serving(on_step=on_step, resumable=True, max_batch_size=8) as served:
        served.steps.gate.open()
        items = [Item(number, 8) for number in range(20)]
        assert await outcomes_of(served.batcher, items) == [item.result for item in items]
        sizes = [len(names) for names in served.steps.seen]
        assert max(sizes) > 4, "until the limit was learned"
        failures = sum(size > 4 for size in sizes)
        assert failures < 20, "larger batches are tried now and then"
        memory = 8
        await outcomes_of(served.batcher, [Item(number, 900) for number in range(7)])
        assert any(len(names) == 8 for names in served.steps.seen[-800:]), "the limit grows again"


async def test_the_limit_is_learned_even_if_the_batch_fails() -> None:
    def on_step(names: list[Any]) -> None:
        if len(names) > 2:
            raise torch.OutOfMemoryError("full")

    async with serving(on_step=on_step, max_batch_size=4) as served:
        served.steps.gate.open()
        items = [Item(number, 3) for number in range(3)]
        first = await outcomes_of(served.batcher, items)
        assert all(isinstance(error, torch.OutOfMemoryError) for error in first)
        assert await outcomes_of(served.batcher, items) == [item.result for item in items]
