"""Ctrl-C at every point of aiopar's code on an event loop: no outcome is lost, nothing hangs."""

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import trio

import aiopar
from aiopar.data import Pipeline
from aiopar.futures._semaphore import Semaphore
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests.interruptions import at_every_point
from tests.train.units import units

# A destructor may be interrupted; a coroutine may be made, and not awaited any more.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module", autouse=True)
def _collected_here() -> Iterator[None]:
    """The collector must not find such coroutines in a test of another file."""
    yield
    gc.collect()


# Not asyncio's code, which may lose a callback.
INSIDE = str(Path(aiopar.__file__).parent)

Calls: TypeAlias = list[Coroutine[Any, Any, Any]]
"""Coroutines that end together when the gate is opened. The n-th returns `[n]`."""
CALLERS = 3


def _batch(gate: Gate) -> Calls:
    batcher = Batcher(gate, collate_fn=list, max_batch_size=CALLERS, max_queue_delay=100)
    return [batcher([n]) for n in range(CALLERS)]


def _failed_batch(gate: Gate) -> Calls:
    def fail(batch: list[int]) -> list[Any]:
        raise ConnectionError(*gate(batch))

    async def call(n: int) -> Any:
        try:
            await batcher(n)
        except ConnectionError as error:
            return [n] if n in error.args else error.args

    batcher = Batcher(fail, collate_fn=list, max_batch_size=CALLERS, max_queue_delay=100)
    return [call(n) for n in range(CALLERS)]


def _stream(gate: Gate) -> Calls:
    def generate(batch: list[int]) -> Iterator[list[Any]]:
        yield gate(batch)
        yield ["end"] * len(batch)

    async def read(n: int) -> Any:
        parts = [part async for part in batcher.stream(n)]
        assert parts.pop() == "end"
        return parts

    batcher = Batcher(generate, collate_fn=list, max_batch_size=CALLERS, max_queue_delay=100)
    return [read(n) for n in range(CALLERS)]


def _run_sync(gate: Gate) -> Calls:
    return [aiopar.run_sync(gate, [n]) for n in range(CALLERS)]


def _submit(gate: Gate) -> Calls:
    async def call(n: int) -> Any:
        return [(await future)[n]]

    future = aiopar.get_executor().submit(gate, [*range(CALLERS)])
    return [call(n) for n in range(CALLERS)]


def _pipeline(gate: Gate) -> Calls:
    async def read(n: int) -> Any:
        return [item async for item in Pipeline([n]).map(gate).map(_same)]

    return [read(n) for n in range(CALLERS)]


async def _same(item: Any) -> Any:
    return item


CALLS: dict[str, Callable[[Gate], Calls]] = {
    "batch": _batch,
    "failed batch": _failed_batch,
    "stream": _stream,
    "run_sync": _run_sync,
    "submit": _submit,
    "pipeline": _pipeline,
}


async def _begin(calls: Callable[[Gate], Calls], gate: Gate) -> list[asyncio.Task[Any]]:
    tasks = [asyncio.create_task(call) for call in calls(gate)]
    await gate.entered()
    return tasks


async def _first_of(tasks: list[asyncio.Task[Any]]) -> None:
    with suppress(BaseException):
        await tasks[0]
    await asyncio.wait(tasks)


async def _outcomes(tasks: list[asyncio.Task[Any]]) -> list[Any]:
    await asyncio.wait(tasks, timeout=10)
    assert all(task.done() for task in tasks), "a caller waits for ever"
    return await asyncio.gather(*tasks, return_exceptions=True)


def _cancel_the_main_task() -> None:
    signal.raise_signal(signal.SIGINT)  # `asyncio.run` has a handler for the first one


def _interrupt() -> None:
    raise KeyboardInterrupt


# A stream's own tasks on the loop move its items: a KeyboardInterrupt ends them, as any task.
@pytest.mark.parametrize(
    ("kind", "ctrl_c"),
    [
        *((kind, _cancel_the_main_task) for kind in CALLS),
        *((kind, _interrupt) for kind in CALLS if kind != "pipeline"),
    ],
)
def test_other_callers_get_their_outcomes(kind: str, ctrl_c: Callable[[], None]) -> None:
    """The first caller awaits in the main task, which may be cancelled or interrupted."""
    for interruption in at_every_point():
        executor = aiopar.DeviceExecutor(["cpu"] * CALLERS)
        with executor, aiopar.use_executor(executor), asyncio.Runner() as runner, Gate() as gate:
            tasks = runner.run(_begin(CALLS[kind], gate))
            gate.open()
            with suppress(KeyboardInterrupt), interruption.by(ctrl_c, inside=INSIDE):
                runner.run(_first_of(tasks))
            outcomes = runner.run(_outcomes(tasks))
        lost = [n for n, outcome in enumerate(outcomes) if outcome != [n]]
        assert len(lost) <= interruption.came, outcomes


async def _read(stream: Any) -> None:
    async for _ in stream:
        if stream.delivered == 5:
            return


async def _map(fn: Callable[[Any], Any], gate: Gate) -> None:
    async with aiopar.map(fn, range(10**9), concurrency=2) as stream:
        await _read(stream)


async def _semaphore(gate: Gate) -> None:
    async def use() -> None:
        async with semaphore:
            await aiopar.run_sync(gate)

    semaphore = Semaphore(1)
    async with trio.open_nursery() as nursery:
        for _ in range(CALLERS):
            nursery.start_soon(use)


async def _parallel(gate: Gate) -> None:
    async with aiopar.Parallel(2, units(gate)) as parallel:
        for n in range(CALLERS):
            await parallel.put(n)
            await parallel.get()


async def _closed_batcher(gate: Gate) -> None:
    async with Batcher(gate, collate_fn=list) as batcher:
        await batcher(1)


async def _all(calls: Callable[[Gate], Calls], gate: Gate) -> None:
    async def run(call: Coroutine[Any, Any, Any]) -> None:
        await call

    async with trio.open_nursery() as nursery:
        for call in calls(gate):
            nursery.start_soon(run, call)


IN_TRIO: dict[str, Callable[[Gate], Coroutine[Any, Any, None]]] = {
    **{kind: partial(_all, calls) for kind, calls in CALLS.items() if kind != "pipeline"},
    "map": partial(_map, abs),
    "map of an async function": partial(_map, _same),
    "semaphore": _semaphore,
    "Parallel": _parallel,
    "closed batcher": _closed_batcher,
}


@pytest.mark.parametrize("kind", IN_TRIO)
def test_it_ends_a_trio_program(kind: str) -> None:
    """trio raises KeyboardInterrupt in the code that runs."""

    async def main() -> None:
        with interruption.by(partial(signal.raise_signal, signal.SIGINT), inside=INSIDE):
            await IN_TRIO[kind](gate)

    for interruption in at_every_point():
        executor = aiopar.DeviceExecutor(["cpu"] * CALLERS)
        with executor, aiopar.use_executor(executor), Gate() as gate:
            gate.open()
            interrupted = False
            try:
                trio.run(main)
            except* KeyboardInterrupt:
                interrupted = True
            assert interrupted == interruption.came
