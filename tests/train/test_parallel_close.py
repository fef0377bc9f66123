"""`Parallel`: how it ends: closed, left by an error, cancelled, dropped."""

import asyncio
import threading

import anyio
import pytest
from anyio.abc import TaskGroup

import aiopar
from aiopar.testing import Gate
from tests.train.units import Failure, all_of, fetched, same, units


class TestEnd:
    @pytest.mark.anyio
    async def test_leaving_waits_for_what_was_put_and_it_can_be_fetched_later(self) -> None:
        with Gate() as gate:
            async with (
                anyio.create_task_group() as tasks,
                aiopar.Parallel(2, units(gate)) as parallel,
            ):
                for n in range(5):
                    await parallel.put(n)
                await gate.entered()
                tasks.start_soon(_open, gate)
            assert gate.count == 5
        assert parallel.pending == 5
        assert sorted([await parallel.get(), *[x async for x in parallel]]) == list(range(5))

    @pytest.mark.anyio
    @pytest.mark.parametrize("serial_init", [False, True])
    async def test_left_by_an_error_drops_what_is_queued_and_waits_for_what_runs(
        self, serial_init: bool
    ) -> None:
        seen: list[int] = []
        released: list[str] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(x)
                return gate(x)

            async def get() -> None:
                with pytest.raises(RuntimeError, match="dropped"):
                    await fetched(parallel, 2)
                released.append("get")

            async def read() -> None:
                assert await all_of(parallel) == []  # the reader comes last
                released.append("async for")

            async def leave(tasks: TaskGroup) -> None:
                async with parallel:
                    for n in range(5):
                        await parallel.put(n)
                    await gate.entered()
                    for waiting in get, get, get, read:
                        tasks.start_soon(waiting)
                        await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(_open, gate)
                    raise Failure

            parallel = aiopar.Parallel(1, units(enter), serial_init)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(Failure):
                    await leave(tasks)
                assert seen == [0]
        assert sorted(released) == ["async for", "get", "get", "get"]
        assert parallel.pending == 0
        with pytest.raises(aiopar.ExecutorShutdown):
            await parallel.put(1)

    @pytest.mark.anyio
    @pytest.mark.parametrize("inside", [False, True])
    async def test_cancelled_inside_or_while_it_waits_for_what_was_put(self, inside: bool) -> None:
        seen: list[int] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(x)
                return gate(x)

            parallel = aiopar.Parallel(2, units(enter), serial_init=False)
            scope = anyio.CancelScope()

            async def hold() -> None:
                with scope:
                    async with parallel:
                        for n in range(6):
                            await parallel.put(n)
                        if inside:
                            await anyio.sleep_forever()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold)
                await gate.entered(2)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.wait_all_tasks_blocked()  # what is queued is dropped
                gate.open()
            assert scope.cancelled_caught
        assert sorted(seen) == [0, 1]
        assert sorted([x async for x in parallel]) == [0, 1]

    def test_the_threads_end(self) -> None:
        async def main() -> list[threading.Thread]:
            async with aiopar.Parallel(2, units(lambda _: threading.current_thread())) as parallel:
                for _ in range(4):
                    await parallel.put(None)
                return await fetched(parallel, 4)

        for thread in asyncio.run(main()):
            assert thread.name.startswith("aiopar-parallel-cpu-")
            thread.join(30)
            assert not thread.is_alive()

    @pytest.mark.asyncio
    async def test_more_than_once(self) -> None:
        async with aiopar.Parallel(1, units(same)) as parallel:
            await parallel.put(1)
            parallel.close()
            parallel.close()
            await parallel.aclose()
            await parallel.aclose()
        assert await parallel.get() == 1

    @pytest.mark.asyncio
    async def test_put_after_it(self) -> None:
        async with aiopar.Parallel(1, units(same)) as parallel:
            begun = parallel.put(1)
            parallel.close()
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                parallel.put(2)  # type: ignore[unused-coroutine]  # there is none
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                await begun
        assert parallel.pending == 0

    @pytest.mark.asyncio
    async def test_dropped_unclosed_its_units_run_and_its_threads_end(self) -> None:
        ran: list[int] = []
        with Gate() as gate:

            def note(x: int) -> None:
                gate()
                ran.append(x)

            parallel = aiopar.Parallel(2, units(note))
            for n in range(4):
                await parallel.put(n)
            await gate.entered()
            workers = parallel._dispatcher.workers
            del parallel
        for worker in workers:
            await worker.ended
        assert sorted(ran) == [0, 1, 2, 3]


async def _open(gate: Gate) -> None:
    await anyio.wait_all_tasks_blocked()
    gate.open()
