"""`ContinuousBatcher`: many event loops, closed loops, a fork, the caller's state, observers."""

import asyncio
import os
import threading
import traceback
from contextvars import ContextVar
from typing import Any

import pytest
import torch

import aiopar
from aiopar.serve import BatchInfo, BatchObserver, ItemInfo
from aiopar.testing import Gate
from tests.lost_loops import closed_under_tasks

from .batches import current_executor, running, until
from .replicas import RUNNERS
from .steppers import Counting, Item
from .streams import ENDLESS, read_all

VARIABLE: ContextVar[str] = ContextVar("VARIABLE", default="unset")


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_loop_after_the_other(runner: str) -> None:
    batcher: Any = aiopar.ContinuousBatcher(Counting())

    async def main() -> None:
        assert await batcher(Item("a")) == "a done"
        assert await read_all(batcher.stream(Item("b"))) == Item("b").parts()

    for _ in range(3):
        RUNNERS[runner](main)
    RUNNERS[runner](batcher.aclose)
    assert batcher.stats().answered == 6


def test_several_loops_share_a_batch() -> None:
    sizes: set[int] = set()
    together = threading.Barrier(3)
    stepper = Counting(lambda names: sizes.add(len(names)))
    results: dict[str, list[Any]] = {}

    def run(name: str) -> None:
        async def main() -> None:
            stream = batcher.stream(Item(name, 2000))
            first = await anext(stream)
            together.wait(30)
            results[name] = [first, *await read_all(stream)]

        RUNNERS[name[:-1]](main)

    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor):
        batcher: Any = aiopar.ContinuousBatcher(stepper)
        asyncio.run(batcher.__aenter__())
        threads = [
            threading.Thread(target=run, args=[f"{name}{n}"])
            for n, name in enumerate(["asyncio", "trio", "asyncio"])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        asyncio.run(batcher.aclose())
    assert results == {name: Item(name, 2000).parts() for name in ["asyncio0", "trio1", "asyncio2"]}
    assert max(sizes) == 3
    assert stepper.live == set()


def test_callers_in_two_loops_share_an_error_and_no_traceback() -> None:
    gate, raised = Gate(), threading.Event()
    stepper = Counting(lambda names: fail(gate()) if len(names) == 2 else gate())
    errors: dict[str, str] = {}

    def fail(_: None) -> None:
        raise ValueError("bad")

    async def first_caller() -> None:
        try:
            await batcher(Item("first"))
        except ValueError as error:
            errors["first"] = "".join(traceback.format_exception(error))

    async def second_caller() -> None:
        calling = asyncio.ensure_future(batcher(Item("second")))
        await until(lambda: batcher.stats().queued == 1)
        gate.open()
        raised.wait(30)  # this loop is blocked until the other one has raised the error
        try:
            await calling
        except ValueError as error:
            errors["second"] = "".join(traceback.format_exception(error))

    def run_first() -> None:
        asyncio.run(first_caller())
        raised.set()

    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor), gate:
        batcher: Any = aiopar.ContinuousBatcher(stepper)
        asyncio.run(batcher.__aenter__())
        thread = threading.Thread(target=run_first)
        thread.start()
        gate.wait_entered()
        asyncio.run(second_caller())
        thread.join()
        asyncio.run(batcher.aclose())
    assert "in first_caller" in errors["first"]
    assert "in second_caller" in errors["second"]
    assert "in first_caller" not in errors["second"]


def test_streams_of_a_closed_loop_give_up_their_places() -> None:
    stepper = Counting()
    batcher: Any = aiopar.ContinuousBatcher(stepper, max_batch_size=1, read_timeout=0.05)
    tasks: list[Any] = []
    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor):
        with closed_under_tasks() as loop:

            async def read() -> None:
                async for _ in batcher.stream(Item("left", ENDLESS), buffer=1):
                    await asyncio.Event().wait()

            async def main() -> None:
                tasks.append(asyncio.create_task(read()))
                await until(lambda: len(stepper.steps) > 0)

            loop.run_until_complete(main())
        asyncio.run(batcher(Item("next")))
        asyncio.run(batcher.aclose())
    assert stepper.live == set()
    assert running(batcher) == 0


def test_a_fork_while_a_stream_runs() -> None:
    stepper, gate = Counting(), Gate()
    stepper.on_step = lambda _: gate()
    batcher: Any = aiopar.ContinuousBatcher(stepper)
    parts: list[Any] = []

    async def read() -> None:
        async with batcher:
            parts.extend(await read_all(batcher.stream(Item("parent"))))

    async def in_child() -> None:
        stepper.on_step = lambda _: None
        stepper._busy = threading.Lock()  # a thread of the parent holds the other one
        assert batcher.stats().in_flight == 0
        await batcher.aclose()  # the executor stayed in the parent
        async with batcher:
            assert await batcher(Item("child")) == "child done"

    with gate:
        thread = threading.Thread(target=lambda: asyncio.run(read()))
        thread.start()
        gate.wait_entered()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                asyncio.run(in_child())
                code = 0
            except BaseException:  # noqa: BLE001  # the child must not go on in pytest
                traceback.print_exc()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert parts == Item("parent").parts()


@pytest.mark.asyncio
async def test_the_stepper_runs_under_the_state_in_which_the_batcher_was_made() -> None:
    seen: list[Any] = []

    def on_step(_: list[Any]) -> None:
        seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled(), VARIABLE.get()))
        VARIABLE.set("of a step")

    token = VARIABLE.set("made")
    with torch.inference_mode():
        batcher: Any = aiopar.ContinuousBatcher(Counting(on_step))
    VARIABLE.reset(token)
    async with current_executor(["cpu"]), batcher:
        assert await batcher(Item("a", 2)) == "a done"
    assert seen == [(False, True, "made")] * 2
    assert VARIABLE.get() == "unset"


class Events(BatchObserver):
    """Notes all events."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def enqueue(self, item: ItemInfo) -> None:
        self.seen.append("enqueue")

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        self.seen.append(("completed", type(error)))

    def start(self, batch: BatchInfo) -> None:
        self.seen.append(("start", len(batch.items), len(batch.joined)))

    def compute(self, batch: BatchInfo, size: int) -> None:
        self.seen.append(("compute", size))
        VARIABLE.set("of the observer")

    def computed(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.seen.append("computed")

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.seen.append(("ended", batch.outputs, batch.errors))


@pytest.mark.asyncio
async def test_observers_are_told_of_each_step() -> None:
    events, variables = Events(), list[str]()
    stepper = Counting(lambda _: variables.append(VARIABLE.get()))
    stepper.in_place["bad"] = ValueError("bad")
    async with current_executor(["cpu"]), aiopar.ContinuousBatcher(stepper) as batcher:
        batcher.add_observer(events)
        assert await batcher(Item("a", 2)) == "a done"
        with pytest.raises(ValueError, match="bad"):
            await batcher(Item("bad"))
    steps = [
        [("start", 1, joined), ("compute", 1), "computed", ("ended", *ends)]
        for joined, ends in [(1, (0, 0)), (0, (1, 0)), (1, (0, 1))]
    ]
    done, failed = ("completed", type(None)), ("completed", ValueError)
    expected = ["enqueue", *steps[0], *steps[1], done, "enqueue", *steps[2], failed]
    assert events.seen == expected
    assert variables == ["of the observer"] * 3


@pytest.mark.asyncio
async def test_bad_arguments() -> None:
    make: Any = aiopar.ContinuousBatcher
    for wrong in (object(), Counting, 3):
        with pytest.raises(TypeError, match="stepper"):
            make(wrong)
    for options in ({"max_batch_size": 0}, {"read_timeout": -1}, {"max_batch_cost": 0}):
        with pytest.raises(ValueError, match=next(iter(options))):
            make(Counting(), **options)
    with pytest.raises(ValueError, match="stepper="):
        make(Counting(), stepper=Counting)
    async with make(Counting()) as batcher:
        with pytest.raises(TypeError, match="priority"):
            await batcher(Item("a"), priority=1.5)
        with pytest.raises(ValueError, match="buffer"):
            batcher.stream(Item("a"), buffer=0)
