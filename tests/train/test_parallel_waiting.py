"""`Parallel`: who waits for room in `put`, or for a result in `get`, also when cancelled."""

from time import monotonic

import anyio
import pytest

import aiopar
from aiopar.testing import Gate
from tests.no_threads import NO_THREAD, no_more_threads
from tests.train.units import fetched, same, units


class TestMaxPending:
    @pytest.mark.anyio
    async def test_put_waits_while_that_many_are_unfetched(self) -> None:
        done = anyio.Semaphore(0)
        async with aiopar.Parallel(2, units(same), max_pending=2) as parallel:

            async def produce() -> None:
                for n in range(5):
                    await parallel.put(n)
                    done.release()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(produce)
                await done.acquire()
                for _ in range(3):
                    await done.acquire()
                    await anyio.wait_all_tasks_blocked()
                    assert (done.value, parallel.pending) == (0, 2)
                    await parallel.get()
            assert len(await fetched(parallel, 2)) == 2

    @pytest.mark.anyio
    async def test_first_come_first_served(self) -> None:
        async with (
            aiopar.Parallel(1, units(same), max_pending=1) as parallel,
            anyio.create_task_group() as tasks,
        ):
            for n in range(5):
                tasks.start_soon(parallel.put, n)
                await anyio.wait_all_tasks_blocked()
            assert [await anext(parallel) for _ in range(5)] == list(range(5))

    @pytest.mark.anyio
    @pytest.mark.parametrize("room", [False, True])
    async def test_a_cancelled_put_is_not_queued_and_takes_no_room(self, room: bool) -> None:
        """Also (`room`) when it is cancelled just after it got room, before it could take it."""
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            await parallel.put("first")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parallel.put, "cancelled")
                await anyio.wait_all_tasks_blocked()
                if room:
                    assert await parallel.get() == "first"
                tasks.cancel_scope.cancel()
            if not room:
                assert await parallel.get() == "first"
            assert parallel.pending == 0
            await parallel.put("next")
            assert await parallel.get() == "next"

    @pytest.mark.anyio
    async def test_a_unit_that_no_thread_can_be_had_for_is_refused(self) -> None:
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                await parallel.put("refused")
            assert parallel.pending == 0
            await parallel.put("next")
            assert await parallel.get() == "next"

    @pytest.mark.anyio
    async def test_who_waits_for_room_is_turned_away_at_the_end(self) -> None:
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            await parallel.put("first")

            async def put() -> None:
                with pytest.raises(aiopar.ExecutorShutdown, match="after close"):
                    await parallel.put("too late")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                tasks.start_soon(put)
                await anyio.wait_all_tasks_blocked()
                parallel.close()
            assert parallel.pending == 1
            assert [x async for x in parallel] == ["first"]


class TestCancelledGet:
    @pytest.mark.anyio
    async def test_loses_no_unit(self) -> None:
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate)) as parallel:
                await parallel.put("kept")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(parallel.get)
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                gate.open()
                assert await parallel.get() == "kept"

    @pytest.mark.may_block("holds the loop until the result is on its way to the task")
    @pytest.mark.anyio
    @pytest.mark.parametrize("others", [0, 1])
    async def test_in_the_moment_when_the_result_comes(self, others: int) -> None:
        found = []
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate)) as parallel:
                for n in range(others + 1):
                    await parallel.put(n)

                async def get(scope: anyio.CancelScope) -> None:
                    with scope:
                        found.append(await parallel.get())

                scope = anyio.CancelScope()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(get, scope)
                    await anyio.wait_all_tasks_blocked()
                    for _ in range(others):
                        tasks.start_soon(get, anyio.CancelScope())
                    await anyio.wait_all_tasks_blocked()
                    gate.let_on()
                    deadline = monotonic() + 30
                    while len(parallel._results._getters) > others and monotonic() < deadline:
                        pass
                    scope.cancel()
                # The result went on to who waited next, or is there for who comes next.
                assert found == [0] * others
                gate.open()
                assert await parallel.get() == others
                assert parallel.pending == 0
