"""`aiopar.futures._semaphore`: permits are granted first come, first served."""

import asyncio
import math
import threading
from contextlib import suppress

import anyio
import anyio.abc
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


async def settled() -> None:
    """Let every task run until it waits."""
    for _ in range(3):
        await delivered()
        await asyncio.sleep(0)


class Clients:
    """Tasks that acquire a permit and keep it, beside a model of who must have one."""

    def __init__(self, permits: int) -> None:
        self.semaphore = Semaphore(permits)
        self.permits: float = permits
        self.held = 0
        self.tasks: list[asyncio.Task[None]] = []
        self.waiting: list[asyncio.Task[None]] = []
        self.granted: list[asyncio.Task[None]] = []

    async def step(self, step: str) -> None:
        if step == "acquire":
            task = asyncio.ensure_future(self.semaphore.acquire())
            self.tasks.append(task)
            self.waiting.append(task)
            await asyncio.sleep(0)  # the task waits now
            self._grant()
        elif step == "try_acquire":
            taken = not self.waiting and self.held < self.permits
            assert self.semaphore.try_acquire() == taken
            self.held += taken
        elif step == "release":
            if self.held:
                self.semaphore.release()
                self.held -= 1
                self._grant()
        elif step == "lift":
            self.semaphore.lift()
            self.permits = math.inf
            self._grant()
        elif step == "settle":
            await self.check()
        elif unfinished := [task for task in self.tasks if not task.done()]:
            await self._cancel(unfinished[0 if step == "cancel first" else -1])

    async def check(self) -> None:
        """Exactly the tasks that must have a permit have one."""
        await settled()
        assert {task for task in self.tasks if task.done()} == {*self.granted}
        assert self.semaphore.held == self.held

    async def _cancel(self, task: asyncio.Task[None]) -> None:
        self.tasks.remove(task)
        task.cancel()
        await asyncio.wait([task])
        if task in self.granted:  # the task had got a permit, and had not run since
            self.granted.remove(task)
            self.held -= 1
        else:
            self.waiting.remove(task)
        self._grant()

    def _grant(self) -> None:
        while self.waiting and self.held < self.permits:
            self.granted.append(self.waiting.pop(0))
            self.held += 1


@given(st.integers(0, 3), STEPS)
def test_permits_go_out_first_come_first_served(permits: int, steps: list[str]) -> None:
    async def main() -> None:
        clients = Clients(permits)
        for step in steps:
            await clients.step(step)
        await clients.check()
        for task in clients.waiting:
            task.cancel()

    asyncio.run(main())


@pytest.mark.anyio
async def test_a_waiter_that_is_cancelled_with_its_permit_passes_it_on() -> None:
    semaphore = Semaphore(1)
    await semaphore.acquire()
    got: list[str] = []

    async def client(name: str, scope: anyio.CancelScope) -> None:
        with scope:
            await semaphore.acquire()
            got.append(name)

    first, second = anyio.CancelScope(), anyio.CancelScope()
    async with anyio.create_task_group() as group:
        for name, scope in (("first", first), ("second", second)):
            group.start_soon(client, name, scope)
            await anyio.wait_all_tasks_blocked()
        semaphore.release()
        first.cancel()  # it has got the permit, and has not run since
    assert got == ["second"]
    assert semaphore.held == 1


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
