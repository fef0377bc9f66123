"""`run_sync`: from `await` to a worker and back, on any kind of event loop."""

import asyncio
import functools
import traceback

import anyio
import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests.home import AtHome
from tests.workers import MakeWorkers, Workers

ON_RAY = True


def _fail(message: str) -> None:
    raise LookupError(message)


@pytest.mark.anyio
async def test_returns_the_result_of_the_function(workers: Workers) -> None:
    assert await workers.run_sync(pow, 2, 5) == 32
    assert await workers.run_sync(functools.partial(int, "101", base=2)) == 5
    assert (await workers.run_sync(torch.ones(3).sum)).item() == 3


@pytest.mark.anyio
async def test_an_error_keeps_its_type(workers: Workers) -> None:
    with pytest.raises(LookupError, match="mine") as caught:
        await workers.run_sync(_fail, "mine")
    assert caught.value.args == ("mine",)
    shown = "".join(traceback.format_exception(caught.value))
    assert "in _fail" in shown
    assert "_run_claimed" not in shown, "aiopar's own frames are left out"


@pytest.mark.anyio
async def test_a_call_is_queued_by_its_await(workers: Workers) -> None:
    executor = workers.on(worker=0)
    before = executor.stats().workers[0].completed
    with Gate() as gate:
        held = executor.submit(AtHome(gate))
        await gate.entered()
        call = executor.run_sync(str)
        assert executor.stats().workers[0].queued == 0
        call.close()  # never awaited, never run
    await held
    assert executor.stats().workers[0].completed == before + 1


@pytest.mark.asyncio
async def test_a_call_made_in_a_loop_can_be_awaited_in_another(workers: Workers) -> None:
    in_thread = workers.run_sync(pow, 2, 5)
    in_trio = workers.run_sync(pow, 2, 6)

    async def main() -> int:
        return await in_trio

    def run_trio() -> int:
        return anyio.run(main, backend="trio")

    assert await asyncio.to_thread(aiopar.wait, in_thread) == 32
    assert await asyncio.to_thread(run_trio) == 64


@pytest.mark.parametrize("max_pending", [None, 1])
def test_a_cancelled_trio_task_queues_nothing(
    make_workers: MakeWorkers, max_pending: int | None
) -> None:
    """Like calls of anyio and trio, which check for cancellation first."""
    ran: list[int] = []

    async def main() -> None:
        async with make_workers(2, max_pending=max_pending) as executor:
            for number in range(50):
                with anyio.CancelScope() as scope:
                    scope.cancel()
                    await executor.run_sync(AtHome(ran.append), number)
                assert scope.cancelled_caught

    anyio.run(main, backend="trio")
    assert not ran
