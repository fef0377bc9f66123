"""`aiopar.futures._semaphore`: permits are granted first come, first served."""

import asyncio
import math
import threading
from contextlib import suppress

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, strategies as st

import aiopar
from aiopar.futures._semaphore import Semaphore
from aiopar.futures._wakeup import delivered
from tests.interruptions import at_every_point

# Repeated names are drawn more often.
STEPS = st.lists(
    st.sampled_from(
        ["acquire"] * 6 + ["release"] * 4 + ["cancel first", "cancel last"] * 2
        + ["try_acquire", "settle", "settle", "lift"]
    ),
    max_size=40,
)  # fmt: skip


@given(st.integers(0, 3), STEPS)
def test_permits_go_out_first_come_first_served(permits: int, steps: list[str]) -> None:
    async def main() -> None:
        semaphore, limit, held = Semaphore(permits), float(permits), 0
        waiting: list[asyncio.Task[None]] = []
        granted: list[asyncio.Task[None]] = []
        for step in [*steps, "settle"]:
            unfinished = [task for task in (*granted, *waiting) if not task.done()]
            if step == "acquire":
                waiting.append(asyncio.create_task(semaphore.acquire()))
                await asyncio.sleep(0)  # the task waits now
            elif step == "try_acquire":
                taken = not waiting and held < limit
                assert semaphore.try_acquire() == taken
                held += taken
            elif step == "release" and held:
                semaphore.release()
                held -= 1
            elif step == "lift":
                semaphore.lift()
                limit = math.inf
            elif step == "settle":
                for _ in range(3):  # let every task run until it waits
                    await delivered()
                    await asyncio.sleep(0)
                assert all(task.done() for task in granted)
                assert not any(task.done() for task in waiting)
                assert semaphore.held == held
            elif step.startswith("cancel") and unfinished:
                task = unfinished[0 if step == "cancel first" else -1]
                task.cancel()
                await asyncio.wait([task])
                held -= task in granted  # the task had got a permit, and had not run since
                (granted if task in granted else waiting).remove(task)
            while waiting and held < limit:
                granted.append(waiting.pop(0))
                held += 1
        for task in waiting:
            task.cancel()

    asyncio.run(main())


@pytest.mark.anyio
async def test_wait_idle_returns_when_the_last_permit_is_back() -> None:
    calls = Semaphore(math.inf)
    await calls.wait_idle()
    done: list[str] = []

    async def waiter() -> None:
        await calls.wait_idle()
        done.append("idle")

    async with anyio.create_task_group() as group, calls:
        async with calls:
            group.start_soon(waiter)
            await anyio.wait_all_tasks_blocked()
            assert calls.held == 2
        await anyio.wait_all_tasks_blocked()
        assert done == []
    assert done == ["idle"]


def test_tasks_of_many_loops_share_the_permits() -> None:
    semaphore = Semaphore(2)
    inside: list[int] = []
    most: list[int] = []

    async def client() -> None:
        for _ in range(50):
            async with semaphore:
                inside.append(1)
                most.append(len(inside))
                await anyio.lowlevel.checkpoint()
                inside.pop()

    async def clients() -> None:
        async with anyio.create_task_group() as group:
            for _ in range(4):
                group.start_soon(client)

    def run(backend: str) -> None:
        anyio.run(clients, backend=backend)

    threads = [threading.Thread(target=run, args=(name,)) for name in ("asyncio", "trio") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 2
    assert len(most) == 800
    assert semaphore.held == 0


def test_a_worker_waits_too() -> None:
    semaphore = Semaphore(1)
    assert semaphore.try_acquire()

    def in_worker() -> str:
        aiopar.wait(semaphore.acquire())
        return "got it"

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        future = executor.submit(in_worker)
        semaphore.release()
        assert future.result() == "got it"


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["acquire", "wait_idle"])
async def test_a_destructor_may_release_at_any_point(verb: str) -> None:
    for interruption in at_every_point():
        semaphore = Semaphore(1)
        assert semaphore.try_acquire()
        waits: asyncio.Future[None] | None = None
        coroutine = getattr(semaphore, verb)()
        with interruption.by(semaphore.release), suppress(StopIteration):
            waits = coroutine.send(None)
        if not interruption.came:
            semaphore.release()
        await delivered()
        assert waits is None or waits.done()
        assert semaphore.held == (verb == "acquire")
        coroutine.close()
