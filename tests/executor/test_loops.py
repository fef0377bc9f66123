"""Event loops come and go: several at once, many after each other, closed with work in flight."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest
import trio

import aiopar
from aiopar import Future
from aiopar.testing import Gate
from tests.home import AtHome
from tests.programs import run
from tests.workers import Workers

_runners: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "asyncio": lambda main: asyncio.run(main()),
    "asyncio debug": lambda main: asyncio.run(main(), debug=True),
    "uvloop": lambda main: pytest.importorskip("uvloop").run(main()),
    "trio": trio.run,
}
_verbs: dict[str, Callable[..., Awaitable[Any]]] = {
    "run_sync": aiopar.run_sync,
    "submit": lambda fn, *args: aiopar.get_executor().submit(fn, *args),
    "fork": aiopar.fork,
}


@pytest.mark.anyio
@pytest.mark.parametrize("verb", _verbs)
async def test_calls_from_many_tasks(workers: Workers, verb: str) -> None:
    seen: list[int] = []

    async def call(n: int) -> None:
        seen.append(await _verbs[verb](abs, -n))

    with aiopar.use_executor(workers):
        async with anyio.create_task_group() as tasks:
            for n in range(200):
                tasks.start_soon(call, n)
    assert sorted(seen) == list(range(200))


@pytest.mark.anyio
@pytest.mark.parametrize("other", _runners)
async def test_one_future_awaited_from_two_loops(other: str) -> None:
    future: Future[int] = Future()

    async def read() -> int:
        return await future

    def elsewhere() -> None:
        assert _runners[other](read) == 5
        assert _runners[other](read) == 5

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(anyio.to_thread.run_sync, elsewhere)
        tasks.start_soon(read)
        await anyio.wait_all_tasks_blocked()
        future.set_result(5)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts in /proc")
@pytest.mark.parametrize("runner", _runners)
def test_many_loops_after_each_other(workers: Workers, runner: str) -> None:
    async def main() -> int:
        future = workers.submit(abs, -1)
        return await future + await workers.run_sync(abs, -1)

    def run() -> tuple[int, int]:
        assert _runners[runner](main) == 2
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for worker in range(2):  # all have started
        workers.on(worker=worker).submit(str).result(30)
    run()
    grown = run()
    for _ in range(30):
        assert run() <= grown


def test_many_loops_at_once(workers: Workers) -> None:
    async def main(n: int) -> int:
        futures = [workers.submit(pow, n, 2) for _ in range(50)]
        total = sum(await asyncio.gather(*futures))
        assert [f async for f in aiopar.as_completed(futures)] != []
        return total

    with ThreadPoolExecutor(8) as threads:
        seen = list(threads.map(lambda n: asyncio.run(main(n)), range(8)))
    assert seen == [50 * n * n for n in range(8)]


@pytest.mark.parametrize("module", ["asyncio", "uvloop"])
def test_a_loop_closed_with_work_in_flight(workers: Workers, module: str) -> None:
    executor = workers.on(worker=0)
    with Gate() as gate:
        running, queued = executor.submit(AtHome(gate), 1), executor.submit(abs, -2)
        loop = pytest.importorskip(module).new_event_loop()

        async def main() -> list[asyncio.Task[int]]:
            # These tasks are never cancelled.
            tasks = [
                asyncio.ensure_future(running),
                asyncio.ensure_future(queued),
                asyncio.ensure_future(executor.run_sync(abs, -3, abandon_on_cancel=True)),
            ]
            await gate.entered()
            return tasks

        tasks = loop.run_until_complete(main())
        loop.close()
        gate.open()
        assert (running.result(), queued.result()) == (1, 2)
        assert not any(task.done() for task in tasks)
        assert asyncio.run(executor.run_sync(abs, -4)) == 4
        for task in tasks:
            task._log_destroy_pending = False  # on purpose


@pytest.mark.parametrize("runner", _runners)
def test_a_worker_may_run_a_loop_of_its_own(runner: str) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:

        async def inner() -> int:
            # Queued behind the call that awaits it.
            return await executor.submit(abs, -1) + await executor.run_sync(abs, -2)

        async def main() -> int:
            result: int = await executor.run_sync(_runners[runner], inner)
            return result

        assert _runners[runner](main) == 3


def test_a_nested_loop_after_every_await() -> None:
    pytest.importorskip("nest_asyncio")
    code, out, err = run("""
        import nest_asyncio
        nest_asyncio.apply()
        from aiopar.data import AsyncDataLoader, Pipeline

        CPUS, x = ["cpu"] * 2, torch.ones(2)
        dp = aiopar.DataParallel(torch.nn.Identity(), CPUS)

        def nested(_=None):
            asyncio.run(asyncio.sleep(0.001))
            assert asyncio.run(aiopar.run_sync(abs, -1)) == 1
            assert asyncio.run(dp(x)).tolist() == [1, 1]

        async def main():
            executor, batcher = aiopar.get_executor(), aiopar.Batcher(torch.nn.Identity())
            calls = [
                aiopar.run_sync(abs, -1),
                executor.submit(abs, -1),
                aiopar.parallel_apply([abs] * 2, [1, 2], devices=CPUS),
                dp(x),
                batcher(x),
            ]
            for call in calls:
                nested(await call)
            assert asyncio.run(batcher(x)).tolist() == [1, 1]
            for items in (
                Pipeline(range(4)).map(abs, concurrency=2),
                AsyncDataLoader(range(4)),
                executor.iterate(range, 4),
                aiopar.as_completed([executor.submit(abs, -1)]),
            ):
                async for item in items:
                    nested(item)
            await batcher.aclose()

        asyncio.run(main())
        print("nested")
    """)
    assert (code, out.strip()) == (0, "nested"), err
