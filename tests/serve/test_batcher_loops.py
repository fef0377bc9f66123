"""One `Batcher` and many event loops, which may end or be closed while its batches run there."""

import asyncio
import gc
import importlib.util
import itertools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import anyio
import pytest
import torch
import trio

import aiopar
from aiopar import DeadlineExceeded
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate
from tests.lost_loops import Left, closed_under_tasks, left_on_a_closed_loop

from ..freeing import collect_without_gil, without_gc
from .batches import Recorder, coroutine, current_executor, running, until
from .replicas import CPUS, Scale, X

RUNNERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "trio": trio.run,
}
if importlib.util.find_spec("uvloop") is not None:  # not all platforms have it
    RUNNERS["uvloop"] = lambda main: importlib.import_module("uvloop").run(main())


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_after_the_other(runner: str, on_loop: bool) -> None:
    batcher = Batcher(coroutine(Recorder()) if on_loop else Recorder(), collate_fn=list)

    async def main() -> None:
        assert await batcher(1) == "1"

    for _ in range(3):
        RUNNERS[runner](main)
    RUNNERS[runner](batcher.aclose)
    assert batcher.stats().answered == 3


def test_other_threads_call_it_while_it_is_opened_again() -> None:
    outcomes: list[Future[Any]] = []

    async def call() -> Any:
        with suppress(aiopar.ServiceClosed):
            return await batcher(1)

    class Stepped(Batcher[Any, Any]):
        """Another thread calls it after each change of its attributes."""

        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if closed:
                outcomes.append(threads.submit(asyncio.run, call()))
                wait(outcomes[-1:], timeout=0.2)  # the call may wait for this thread

    closed = False
    with ThreadPoolExecutor() as threads:
        batcher = Stepped(Recorder(), collate_fn=list)
        asyncio.run(batcher.__aenter__())
        asyncio.run(batcher.aclose())
        closed = True
        asyncio.run(batcher.__aenter__())
    answers = [outcome.result() for outcome in outcomes]
    assert {*answers} == {None, "1"}
    stats = batcher.stats()
    assert (stats.answered, stats.in_flight) == (answers.count("1"), 0)


@pytest.mark.parametrize("on_loop", [False, True])
def test_several_at_once(on_loop: bool) -> None:
    recorder = Recorder()
    fn = coroutine(recorder) if on_loop else recorder
    batcher = Batcher(fn, collate_fn=list, max_batch_size=16, concurrency=2)
    together = threading.Barrier(6)

    def run(number: int) -> dict[Any, Any]:
        results: dict[Any, Any] = {}

        async def call(item: tuple[int, int]) -> None:
            results[item] = await batcher(item)

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                for n in range(100):
                    tasks.start_soon(call, (number, n))

        together.wait(30)
        [*RUNNERS.values()][number % len(RUNNERS)](main)
        return results

    with ThreadPoolExecutor(6) as threads:
        for number, results in enumerate(threads.map(run, range(6))):
            assert results == {(number, n): str((number, n)) for n in range(100)}
    # If a loop ends under its batch, the items of other loops run again.
    assert sum(map(len, recorder.runs)) == 600 or on_loop
    assert batcher.stats().queued == batcher.stats().in_flight == 0


@pytest.mark.parametrize("others", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
def test_items_of_several_loops_share_a_batch(runner: str, others: str) -> None:
    gate = Gate()

    def fn(items: list[int]) -> list[int]:
        if len(items) == 1:
            gate()
        return [-item for item in items]

    batcher = Batcher(fn, collate_fn=list)

    async def call(item: int) -> int:
        result: int = await batcher(item)
        return result

    with ThreadPoolExecutor(3) as threads, gate:
        first = threads.submit(RUNNERS[runner], partial(call, 1))
        gate.wait_entered()
        rest = [
            threads.submit(RUNNERS[name], partial(call, n))
            for n, name in enumerate([runner, others], 2)
        ]
        while batcher.stats().queued < 2:
            pass
        gate.open()
        assert [future.result(30) for future in (first, *rest)] == [-1, -2, -3]
    assert batcher.stats().batch_sizes == {1: 1, 2: 1}


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_loop_that_ends_does_not_stop_the_timers_of_other_loops(runner: str) -> None:
    batcher = Batcher(Recorder(), collate_fn=list, max_queue_delay=0.2)

    async def give_up() -> None:
        with anyio.move_on_after(0.001):
            await batcher(1)

    async def main() -> str:
        with anyio.fail_after(30):
            result: str = await batcher(2)
        return result

    RUNNERS[runner](give_up)
    assert RUNNERS[runner](main) == "2"


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_an_interrupt_in_the_step_of_a_caller_leaves_the_other_callers_their_outputs(
    module: str,
) -> None:
    loop = pytest.importorskip(module).new_event_loop()
    batcher = Batcher(Recorder(), collate_fn=list, max_batch_size=5, max_queue_delay=1000)

    async def call(item: int) -> str:
        result: str = await batcher(item)
        if item == 2:
            raise KeyboardInterrupt
        return result

    tasks = [loop.create_task(call(item)) for item in range(5)]
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(asyncio.wait(tasks))
    outcomes = loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    assert [type(outcome) for outcome in outcomes] == [str, str, KeyboardInterrupt, str, str]
    loop.run_until_complete(batcher.aclose())
    loop.close()


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_a_loop_closed_with_items_in_queue_and_batch(module: str) -> None:
    gate = Gate()

    def fn(items: list[int]) -> list[int]:
        if 1 in items:
            gate()
        return items

    batcher = Batcher(fn, collate_fn=list, max_batch_size=2)
    loop = pytest.importorskip(module).new_event_loop()

    async def main() -> list[asyncio.Task[int]]:
        tasks = [asyncio.ensure_future(batcher(1))]
        await gate.entered()
        tasks += [asyncio.ensure_future(batcher(item)) for item in (2, 3, 4)]
        await asyncio.sleep(0)
        return tasks

    with gate:
        tasks = loop.run_until_complete(main())  # left behind without being cancelled
        loop.close()
        assert batcher.stats().queued == 3

    async def others() -> int:
        result: int = await batcher(5)
        await batcher.aclose()
        return result

    assert asyncio.run(others()) == 5
    assert batcher.stats().queued == running(batcher) == 0
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task._log_destroy_pending = False  # on purpose


def doubled(batch: Any) -> Any:
    return batch * 2


def steps(batch: Any) -> Iterator[Any]:
    yield batch
    yield batch * 2


async def last_of(batcher: Batcher[Any, Any], item: Any) -> Any:
    return [part async for part in batcher.stream(item)][-1]


ASKED: dict[str, tuple[Callable[[], Any], Callable[[Batcher[Any, Any], Any], Any]]] = {
    "function": (lambda: doubled, Batcher.__call__),
    "pool": (lambda: ReplicaPool(Scale(2.0), CPUS[:1]), Batcher.__call__),
    "stream": (lambda: steps, last_of),
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.anyio
async def test_from_the_loop_of_a_call_on_the_only_worker(runner: str, asked: str) -> None:
    make, ask = ASKED[asked]
    async with current_executor(["cpu"]) as executor:
        batcher = Batcher(make())

        async def main() -> Any:
            return await ask(batcher, X)

        for _ in range(2):  # the first opens it
            output = await executor.submit(RUNNERS[runner], main)
            assert torch.equal(output[0] if asked == "pool" else output, 2 * X)


@pytest.mark.parametrize("asked", ["function", "pool"])
@pytest.mark.anyio
async def test_driven_by_wait_in_a_worker(asked: str) -> None:
    make, ask = ASKED[asked]
    async with current_executor(["cpu"]) as executor:
        batcher = Batcher(made := make(), timeout=30)
        if isinstance(made, ReplicaPool):
            # Where it is opened, replicas that fail are rebuilt: not in a loop that goes.
            with pytest.raises(RuntimeError, match="open the pool in an event loop first"):
                await executor.run_sync(lambda: aiopar.wait(ask(batcher, X)))
            await batcher(X)
        for _ in range(2):
            output = await executor.run_sync(lambda: aiopar.wait(ask(batcher, X)))
            assert torch.equal(output[0] if asked == "pool" else output, 2 * X)


def test_driven_by_wait_without_a_loop() -> None:
    def fails(_: Any) -> Any:
        raise KeyError("none")

    assert aiopar.wait(Batcher(doubled)(torch.ones(()))) == 2
    with pytest.raises(KeyError):
        aiopar.wait(Batcher(fails)(torch.ones(())))
    with pytest.raises(DeadlineExceeded):
        aiopar.wait(Batcher(doubled)(torch.ones(()), timeout=0))


def test_driven_by_wait_it_leaves_nothing_behind() -> None:
    class Item:
        pass

    def fails(_: Any) -> Any:
        raise KeyError("none")

    batcher = Batcher(fails, collate_fn=list)
    item = Item()
    gone = threading.Event()
    weakref.finalize(item, gone.set)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        with without_gc():
            with suppress(KeyError):
                aiopar.wait(batcher(item))
            del item
            for _ in range(300):  # its worker lets go of it last, perhaps
                if gone.wait(0.1):
                    break
                collect_without_gil()
            assert gone.is_set()
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


# Loops that end or are closed while a batch of a coroutine function runs there, or waits to.


class Lasting:
    """A coroutine function whose first batch with "lost" never ends; other batches are returned."""

    def __init__(self) -> None:
        self.runs: list[list[Any]] = []
        self.may_end: Callable[[], bool] = lambda: True
        """Whether batches without "lost" may end."""

    async def __call__(self, items: list[Any]) -> list[Any]:
        lost = "lost" in items and not any("lost" in run for run in self.runs)
        self.runs.append(sorted(items))
        await until(lambda: not lost and self.may_end())
        return items


def lost_behind_others(
    loop: asyncio.AbstractEventLoop, fn: Lasting, batcher: Batcher[Any, Any], concurrency: int = 1
) -> asyncio.Task[Any]:
    """Call on `loop`, behind as many batches as run at once; these end when two items wait."""
    fn.may_end = lambda: batcher.stats().queued == 2 or len(fn.runs) > concurrency
    tasks = []
    for _ in range(concurrency):
        tasks.append(loop.create_task(batcher("first")))
        loop.run_until_complete(until(lambda: len(fn.runs) == len(tasks)))
    lost = loop.create_task(batcher("lost"))
    loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
    return lost


@pytest.mark.parametrize("other", RUNNERS)
def test_a_batch_whose_loop_was_closed_does_not_delay_the_next(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list)
    with closed_under_tasks() as loop:
        lost = loop.create_task(batcher("lost"))
        loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))
    assert running(batcher) == 1, "nobody has looked yet"

    async def main() -> None:
        assert await batcher("next", timeout=30) == "next"
        await batcher.aclose(timeout=30)

    RUNNERS[other](main)
    assert fn.runs == [["lost"], ["next"]]
    assert not lost.done()
    assert batcher.stats().queued == running(batcher) == 0


@pytest.mark.parametrize("other", RUNNERS)
def test_a_request_behind_a_batch_whose_loop_was_closed_needs_no_other_request(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, read_timeout=0.05)
    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            lost = loop.create_task(batcher("lost"))
            loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))
            waiting = threads.submit(RUNNERS[other], lambda: call(batcher, "waits"))
            loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
        assert waiting.result(30) == "waits"
    assert not lost.done()


async def call(batcher: Batcher[Any, Any], item: str) -> Any:
    return await batcher(item)


@pytest.mark.parametrize("drain", [True, False])
@pytest.mark.parametrize("begun", [True, False])
def test_a_batcher_whose_loop_was_closed_can_be_closed(drain: bool, begun: bool) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, max_batch_size=1)
    with closed_under_tasks() as loop:
        lost = [loop.create_task(batcher(item)) for item in ("lost", "queued")]
        count = 1 if begun else 0
        loop.run_until_complete(until(lambda: len(fn.runs) == count))

    async def main() -> None:
        with anyio.fail_after(30):
            await batcher.aclose(drain=drain)

    asyncio.run(main())
    assert not any(task.done() for task in lost)
    assert fn.runs == [["lost"]] * begun
    assert batcher.stats().queued == running(batcher) == 0


@pytest.mark.parametrize("other", RUNNERS)
def test_a_batcher_whose_loop_was_closed_while_it_drained_opens_again(other: str) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, max_batch_size=1)
    with closed_under_tasks() as loop:
        lost = [loop.create_task(batcher(item)) for item in ("lost", "queued")]
        loop.run_until_complete(until(lambda: batcher.stats().queued == 1))
        lost.append(loop.create_task(batcher.aclose()))
        loop.run_until_complete(until(lambda: not batcher.ready))

    async def main() -> None:
        with anyio.fail_after(30):
            async with batcher:
                assert await batcher("next") == "next"

    RUNNERS[other](main)
    assert not any(task.done() for task in lost)
    assert batcher.stats().answered == 1


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("concurrency", [1, 2])
def test_items_of_other_loops_in_a_batch_whose_loop_was_closed_run_again(
    concurrency: int, other: str
) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list, concurrency=concurrency)
    firsts = [["first"]] * concurrency
    outcomes: list[Any] = []

    async def call(item: str) -> None:
        outcomes.append(await batcher(item, timeout=30))

    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            lost = lost_behind_others(loop, fn, batcher, concurrency)
            staying = threads.submit(RUNNERS[other], lambda: call("stays"))
            loop.run_until_complete(until(lambda: fn.runs == [*firsts, ["lost", "stays"]]))
        asyncio.run(call("next"))
        staying.result(30)
    assert not lost.done()
    assert sorted(outcomes) == ["next", "stays"]
    assert sorted(itertools.chain.from_iterable(fn.runs[concurrency + 1 :])) == ["next", "stays"], (
        "nobody waits for the other"
    )


@pytest.mark.parametrize("in_the_next_batch", [True, False])
def test_tasks_of_a_closed_loop_may_be_collected_on_another_loop(in_the_next_batch: bool) -> None:
    fn = Lasting()
    batcher = Batcher(fn, collate_fn=list)
    with closed_under_tasks() as loop:
        left = [loop.create_task(batcher("lost"))]
        loop.run_until_complete(until(lambda: fn.runs == [["lost"]]))

    looks = itertools.count()

    def collect() -> bool:
        left.clear()
        gc.collect()
        return next(looks) == 3  # the batch does not end at once: a cancellation would find it

    async def main() -> None:
        assert await batcher("next", timeout=30) == "next"
        asyncio.get_running_loop().call_soon(collect)  # where no task runs
        await until(lambda: not left)

    if in_the_next_batch:
        fn.may_end = collect
    with mock.patch.object(sys, "unraisablehook") as ignored:
        asyncio.run(main())
    assert ignored.mock_calls == []
    assert fn.runs == [["lost"], ["next"]]


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_batch_that_had_not_begun_on_a_closed_loop_fails_no_request_of_another_loop() -> None:
    batcher = Batcher(Lasting(), collate_fn=list)
    outcomes: list[Any] = []

    async def call(item: str) -> None:
        outcomes.append(await batcher(item, timeout=30))

    with ThreadPoolExecutor(1) as threads:
        with closed_under_tasks() as loop:
            left = loop.create_task(batcher("left"))
            loop.stop()
            loop.run_forever()  # one turn: the batch has a task, which has not begun
            staying = threads.submit(asyncio.run, call("stays"))
            while batcher.stats().queued < 2:
                threading.Event().wait(0.001)
        asyncio.run(call("next"))
        staying.result(30)
    assert not left.done()
    assert sorted(outcomes) == ["next", "stays"]
    del left, loop
    gc.collect()  # here the warning is ignored


@pytest.mark.parametrize("waits", [True, False])
def test_an_async_generator_whose_loop_was_closed_is_collected(waits: bool) -> None:
    left = Left(waits)

    async def read() -> None:
        async for _ in Batcher(left, collate_fn=list).stream(0, buffer=1):
            await asyncio.Event().wait()

    assert left_on_a_closed_loop(read, left) == []


@pytest.mark.parametrize("other", RUNNERS)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("together", [False, True])
def test_a_loop_that_ends_does_not_take_items_of_other_loops_along(
    runner: str, other: str, together: bool
) -> None:
    runs: list[list[str]] = []
    may_come = threading.Event()

    async def fn(batch: list[str]) -> list[str]:
        runs.append(sorted(batch))
        if batch == ["first"]:
            await until(lambda: batcher.stats().queued == 2)
        elif "leaves" in batch:
            await anyio.sleep_forever()
        return batch

    batcher = Batcher(fn, collate_fn=list)

    async def leave() -> None:
        """Run a batch on this loop, and let the loop end before the batch."""
        async with anyio.create_task_group() as tasks:
            if together:
                tasks.start_soon(batcher, "first")
                await until(lambda: runs == [["first"]])
            tasks.start_soon(batcher, "leaves")
            await until(lambda: batcher.stats().queued == 1 or runs == [["leaves"]])
            may_come.set()
            if together:
                await until(lambda: runs[1:] == [["leaves", "stays"]])
            else:
                await until(lambda: batcher.stats().queued == 1)
            tasks.cancel_scope.cancel()

    async def stay() -> str:
        result: str = await batcher("stays")
        return result

    with ThreadPoolExecutor(2) as threads:
        leaving = threads.submit(RUNNERS[runner], leave)
        may_come.wait(30)
        assert threads.submit(RUNNERS[other], stay).result(30) == "stays"
        leaving.result(30)
    assert runs[-1] == ["stays"]
    assert batcher.stats().queued == batcher.stats().in_flight == 0
