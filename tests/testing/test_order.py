"""`aiopar.testing`: `Gate` and `Sequencer`, and their time limits."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import islice

import anyio
import pytest

import aiopar
from aiopar.testing import Gate, Sequencer

SOON = 0.01


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.mark.anyio
async def test_gate_holds_a_worker_until_it_is_opened() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            held = executor.submit(gate, "value")
            behind = executor.submit(str)
            await gate.entered()
            assert held.running()
            assert not behind.running()
            assert (gate.count, gate.held) == (1, 1)
            gate.open()
            assert await held == "value"
            assert await behind == ""
            assert (gate.count, gate.held) == (1, 0)
            assert await executor.run_sync(gate, 2) == 2, "open for good"


def test_threads_use_a_gate_without_an_event_loop(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    held = [threads.submit(gate, n) for n in range(3)]
    gate.wait_entered(3)
    assert gate.held == 3
    gate.let_on(2)
    assert len([*islice(as_completed(held, 10), 2)]) == 2
    assert gate.held == 1
    gate.open()
    assert [future.result() for future in held] == [0, 1, 2]


def test_permits_are_kept_for_later_calls(threads: ThreadPoolExecutor) -> None:
    gate = Gate()
    gate.let_on(2)
    assert [gate(n) for n in range(2)] == [0, 1]
    held = threads.submit(gate)
    gate.wait_entered(3)
    assert not held.done()
    gate.let_on()
    held.result(10)


@pytest.mark.anyio
async def test_tasks_wait_for_equal_and_different_counts() -> None:
    gate = Gate()
    seen = []

    async def wait_for(count: int) -> None:
        await gate.entered(count)
        seen.append(count)

    async with aiopar.DeviceExecutor(["cpu"]) as executor, anyio.create_task_group() as tasks:
        gate.let_on()
        await executor.submit(gate)
        for count in (1, 2, 2):
            tasks.start_soon(wait_for, count)
        await anyio.wait_all_tasks_blocked()
        assert seen == [1]
        gate.open()
        await executor.submit(gate)
    assert seen == [1, 2, 2]


@pytest.mark.anyio
async def test_cancelled_task_leaves_other_tasks_waiting() -> None:
    gate = Gate()
    gate.open()
    async with aiopar.DeviceExecutor(["cpu"]) as executor, anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope:
            tasks.start_soon(gate.entered)
            scope.cancel()
            await gate.entered()
        await executor.submit(gate)


@pytest.mark.anyio
async def test_gate_that_is_not_entered_times_out() -> None:
    with pytest.raises(TimeoutError, match=r"0 of 2 calls entered the gate within 0\.01 s"):
        await Gate(timeout=SOON).entered(2)


def test_gate_that_is_not_opened_times_out(threads: ThreadPoolExecutor) -> None:
    gate = Gate(timeout=SOON)
    with pytest.raises(TimeoutError, match="call 1 entered the gate, but was not let on"):
        threads.submit(gate).result()
    assert gate.held == 0
    with pytest.raises(TimeoutError, match="1 of 2 calls entered"):
        gate.wait_entered(2)


@pytest.mark.anyio
async def test_waits_that_would_block_the_loop_raise() -> None:
    gate, sequence = Gate(), Sequencer()
    with pytest.raises(aiopar.BlockingWaitError, match="use it in a worker"):
        gate()
    with pytest.raises(aiopar.BlockingWaitError, match=r"await gate\.entered"):
        gate.wait_entered()
    with pytest.raises(aiopar.BlockingWaitError, match=r"async with sequence\(1\)"):
        sequence(1).__enter__()
    gate.open()
    assert gate("through") == "through"
    gate.wait_entered()


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        *((lambda one=one: Gate(timeout=one), ValueError) for one in (0, -1.0)),
        *((lambda one=one: Sequencer(timeout=one), TypeError) for one in (True, "1")),
        (lambda: Gate().let_on(0), ValueError),
        (lambda: Gate().let_on(True), TypeError),
        (lambda: Gate().wait_entered(1.5), TypeError),  # type: ignore[arg-type]
        (lambda: Sequencer()(-1), ValueError),
        (lambda: Sequencer()(1.0), TypeError),  # type: ignore[arg-type]
    ],
)
def test_wrong_arguments_are_refused(wrong: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error, match=r"(timeout|count|number) must be"):
        wrong()


def test_sequencer_orders_threads(threads: ThreadPoolExecutor) -> None:
    sequence = Sequencer()
    seen: list[int] = []

    def take(*numbers: int) -> None:
        for number in numbers:
            with sequence(number):
                seen.append(number)

    taken = [threads.submit(take, *range(first, 12, 3)) for first in (2, 1, 0)]
    for future in taken:
        future.result()
    assert seen == list(range(12))


@pytest.mark.anyio
async def test_sequencer_orders_tasks_and_workers() -> None:
    sequence = Sequencer()
    seen: list[int] = []

    def in_worker(number: int) -> None:
        with sequence(number):
            seen.append(number)

    async def in_task(number: int) -> None:
        async with sequence(number):
            seen.append(number)

    async with aiopar.DeviceExecutor(["cpu"] * 2) as executor, anyio.create_task_group() as tasks:
        for number in (3, 1):
            executor.submit(in_worker, number)
        for number in (4, 2, 0):
            tasks.start_soon(in_task, number)
    assert seen == [0, 1, 2, 3, 4]


@pytest.mark.anyio
async def test_failing_step_fails_later_steps() -> None:
    sequence = Sequencer()

    async def wait_for_step_2() -> None:
        with pytest.raises(RuntimeError, match="step 2 cannot be taken: step 1 failed"):
            await sequence(2).__aenter__()

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait_for_step_2)
            await anyio.wait_all_tasks_blocked()
            async with sequence(0):
                pass
            with pytest.raises(ZeroDivisionError):
                async with sequence(1):
                    _ = 1 / 0
    with pytest.raises(RuntimeError, match="step 3 cannot be taken: step 1 failed"):
        sequence(3).__enter__()


@pytest.mark.anyio
async def test_step_whose_turn_does_not_come_times_out() -> None:
    sequence = Sequencer(timeout=SOON)
    async with sequence(0):
        with pytest.raises(TimeoutError, match=r"step 1 waited .* step 0 has not ended"):
            await sequence(1).__aenter__()
    sequence = Sequencer(timeout=SOON)
    with pytest.raises(TimeoutError, match=r"step 1 waited .* step 0 has not begun"):
        await sequence(1).__aenter__()


@pytest.mark.asyncio
async def test_cancelled_step_fails_later_steps() -> None:
    sequence = Sequencer()
    step = asyncio.create_task(sequence(1).__aenter__())
    await asyncio.sleep(0)
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step
    async with sequence(0):
        pass  # earlier steps are not affected
    with pytest.raises(RuntimeError, match="step 2 cannot be taken: step 1 failed"):
        await sequence(2).__aenter__()


@pytest.mark.anyio
async def test_step_is_entered_once() -> None:
    sequence = Sequencer(timeout=SOON)
    first, second = sequence(0), sequence(1)
    with first, pytest.raises(ValueError, match="step 0 was entered before"):
        await first.__aenter__()
    async with second:
        pass
    for enter in (first.__enter__, second.__enter__):
        with pytest.raises(ValueError, match="was entered before"):
            enter()
    with pytest.raises(ValueError, match="step 0 was used before"):
        sequence(0)
    async with sequence(2):  # the sequence was not set back, and has not failed
        pass
