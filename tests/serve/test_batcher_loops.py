"""One `Batcher`, opened by its first use, and many event loops."""

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import anyio
import pytest
import torch
import trio

import aiopar
from aiopar import DeadlineExceeded
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate

from ..freeing import without_gc
from .batches import Recorder, current_executor
from .coroutines import coroutine
from .replicas import CPUS, Scale, X

RUNNERS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "uvloop": lambda main: pytest.importorskip("uvloop").run(main()),
    "trio": trio.run,
}


@pytest.mark.parametrize("on_loop", [False, True])
@pytest.mark.parametrize("runner", RUNNERS)
def test_one_after_the_other(runner: str, on_loop: bool) -> None:
    batcher = Batcher(coroutine(Recorder()) if on_loop else Recorder(), collate_fn=list)

    async def main() -> None:
        assert await batcher(1) == "1"

    for _ in range(3):
        RUNNERS[runner](main)
    RUNNERS[runner](batcher.aclose)
    assert batcher.stats().completed == 3


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
        RUNNERS[["asyncio", "uvloop", "trio"][number % 3]](main)
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
    assert batcher.stats().queued == batcher.stats().in_flight == 0
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
            assert gone.wait(30)  # its worker lets go of it last, perhaps
        assert asyncio.get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()
