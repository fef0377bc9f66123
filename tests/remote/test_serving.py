"""`ReplicaPool` and `Batcher` on worker processes: weights, batches, lost processes."""

import operator
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar import Batcher, ProcessExecutor, ReplicaPool
from tests.serve.batches import outcomes_of


class Scale(nn.Module):
    """Returns its input times a parameter, and the pid; fails for scalars, dies for NaN."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor))

    def forward(self, x: Tensor, *, plus: float = 0.0) -> tuple[Tensor, Tensor]:
        if x.ndim == 0:
            raise KeyError("of the module")
        if x.isnan().any():
            os.kill(os.getpid(), signal.SIGKILL)
        return x * self.factor + plus, torch.full((len(x),), os.getpid())


async def until(condition: Callable[[], bool]) -> None:
    """Wait; without spinning, which would take the GIL from the worker threads."""
    with anyio.fail_after(200):  # on a busy machine an actor takes a minute to start
        while not condition():  # noqa: ASYNC110  # no event tells of it
            await anyio.sleep(0.001)


def pids(executor: aiopar.DeviceExecutor) -> set[int]:
    return {stats.host.pid for stats in executor.stats().workers if stats.host is not None}


class Load:
    """Clients of a pool and of its batcher, which check every answer."""

    def __init__(self, pool: ReplicaPool[Any], batcher: Batcher[Any, Any]) -> None:
        self.longest = 0.0
        """The longest wait for an answer, in seconds."""
        self.factors = {2.0}
        """By what the replicas may multiply."""
        self._calls: list[Any] = [pool, batcher] * 4
        self._answered = [0] * len(self._calls)
        self._goes_on = True

    async def client(self, number: int) -> None:
        x = torch.tensor([float(number)])
        while self._goes_on:
            began, factors = anyio.current_time(), self.factors
            output, _ = await self._calls[number](x)
            self.longest = max(self.longest, anyio.current_time() - began)
            assert output.item() in {factor * number for factor in factors | self.factors}
            self._answered[number] += 1
            await anyio.sleep(0.01)  # the processors are left to new processes, which start

    async def all_answered(self, times: int = 3) -> None:
        """Wait until every client has got some more answers."""
        before = [count + times - 1 for count in self._answered]
        await until(lambda: all(map(operator.gt, self._answered, before)))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            for number in range(len(self._calls)):
                tasks.start_soon(self.client, number)
            await self.all_answered()
            yield
            await self.all_answered()
            self._goes_on = False


def replaced(victim: int, executor: aiopar.DeviceExecutor) -> bool:
    """Whether another host is in the place of one of two."""
    return victim not in pids(executor) and len(pids(executor)) == 2


@pytest.mark.anyio
async def test_modules_of_a_pool_run_in_the_processes() -> None:
    async with (
        ProcessExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
    ):
        output, pid = await pool(torch.ones(2), plus=1.0)
        assert output.tolist() == [3.0, 3.0]
        assert set(pid.tolist()) <= pids(executor)
        await pool.load_state_dict({"factor": torch.tensor(5.0)})
        output, _ = await pool(torch.ones(1))
        assert output.tolist() == [5.0]
        await pool.swap(Scale(7.0))
        output, _ = await pool(torch.ones(1))
        assert output.tolist() == [7.0]
        with pytest.raises(KeyError, match="of the module") as caught:
            await pool(torch.tensor(1.0))
        assert caught.value.__notes__[-1] == "in replica 0 on device process:0/cpu"
        assert [replica.device for replica in pool.stats().replicas] == [
            "process:0/cpu",
            "process:1/cpu",
        ]


class DiesAtFirst(nn.Module):
    """Returns its input; each process that runs it dies, until `deaths` files are in `folder`."""

    def __init__(self, folder: Path, deaths: int) -> None:
        super().__init__()
        self.folder, self.deaths = folder, deaths

    def forward(self, x: Tensor) -> Tensor:
        died = len([*self.folder.iterdir()])
        if died < self.deaths:
            (self.folder / str(died)).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x


@pytest.mark.anyio
async def test_a_pool_opens_although_processes_end_in_its_warm_up(tmp_path: Path) -> None:
    module = DiesAtFirst(tmp_path, deaths=3)
    async with (
        ProcessExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(module, executor=executor, warmup=torch.ones(1)) as pool,
    ):
        assert [replica.state for replica in pool.stats().replicas] == ["ready", "ready"]
        assert torch.equal(await pool(torch.ones(2)), torch.ones(2))


@pytest.mark.anyio
async def test_a_pool_does_not_open_if_its_warm_up_ends_every_process(tmp_path: Path) -> None:
    module = DiesAtFirst(tmp_path, deaths=100)
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        pool = ReplicaPool(module, executor=executor, warmup=torch.ones(1))
        with pytest.raises(aiopar.WorkerLost, match="SIGKILL"):
            await pool.__aenter__()


def in_words(numbers: list[float]) -> Tensor:
    if -1.0 in numbers:
        raise ValueError("of the collate function")
    return torch.tensor([*numbers, float(os.getpid())])


class Doubled(nn.Module):
    """Doubles all but the last number, which is the pid of the collate function."""

    def forward(self, x: Tensor) -> Tensor:
        assert x[-1].item() == float(torch.tensor(float(os.getpid())))
        return 2 * x[:-1]


@pytest.mark.anyio
async def test_a_batch_is_collated_where_its_replica_is() -> None:
    async with (
        ProcessExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Doubled(), executor=executor) as pool,
        Batcher(pool, collate_fn=in_words, max_queue_delay=0.01) as batcher,
    ):
        one, bad, two = await outcomes_of(batcher, [1.0, -1.0, 2.0])
        assert (one, two) == (2.0, 4.0)
        assert isinstance(bad, ValueError)
        assert [replica.state for replica in pool.stats().replicas] == ["ready", "ready"]


class Loaded:
    """Counts in each process how often it was loaded there."""

    here = 0

    def __reduce__(self) -> Any:
        return Loaded._load, ()

    @staticmethod
    def _load() -> "Loaded":
        Loaded.here += 1
        return Loaded()


@pytest.mark.anyio
async def test_functions_without_a_name_are_sent_once() -> None:
    loaded = Loaded()
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            batcher = Batcher(
                lambda batch: [(loaded.here, os.getpid())] * len(batch),
                collate_fn=lambda items: [loaded, *items][1:],
                max_batch_size=1,
            )
            async with batcher:
                answers = await outcomes_of(batcher, list(range(20)))
    for count, _ in answers:
        assert 1 <= count <= 2, "once for each function"


def double(batch: Tensor) -> list[tuple[float, int]]:
    if batch.isnan().any():
        raise KeyError("of the function")
    if batch.isinf().any():
        os.kill(os.getpid(), signal.SIGKILL)
    return [(x.item() * 2, os.getpid()) for x in batch]


def count_down(batch: Tensor) -> Iterator[Tensor]:
    yield batch


@pytest.mark.anyio
async def test_functions_of_a_batcher_run_in_the_processes() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(double, max_batch_size=3, max_queue_delay=1000) as batcher:
                good, bad, other = await outcomes_of(
                    batcher, [torch.tensor(1.0), torch.tensor(torch.nan), torch.tensor(2.0)]
                )
            refused = pytest.raises(NotImplementedError, match="generator function cannot run on")
            with refused:
                await anext(Batcher(count_down).stream(torch.ones(1)))
        assert (good[0], other[0]) == (2.0, 4.0)
        assert {good[1], other[1]} <= pids(executor)
        assert isinstance(bad, KeyError)


@pytest.mark.anyio
@pytest.mark.parametrize("through_pool", [True, False])
async def test_an_item_that_ends_every_process_fails_alone(through_pool: bool) -> None:
    deadly, good = (torch.nan, 2.0) if through_pool else (torch.inf, 2.0)
    items = [torch.tensor(good), torch.tensor(deadly), torch.tensor(good)]

    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        if through_pool:
            async with (
                ReplicaPool(Scale(), executor=executor) as pool,
                Batcher(pool, max_batch_size=3, max_queue_delay=0.1) as batcher,
            ):
                found = await outcomes_of(batcher, items)
        else:
            with aiopar.use_executor(executor):
                async with Batcher(double, max_batch_size=3, max_queue_delay=0.1) as batcher:
                    found = await outcomes_of(batcher, items)
        assert isinstance(found[1], aiopar.WorkerLost)
        assert [value for value, _ in (found[0], found[2])] == [4.0, 4.0]


@pytest.mark.anyio
async def test_no_request_is_lost_when_processes_are_killed_under_load() -> None:
    async with (
        ProcessExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool, max_batch_size=4) as batcher,
    ):
        load = Load(pool, batcher)
        async with load.running():
            for turn in range(3):
                await load.all_answered(1)
                victim = sorted(pids(executor))[turn % 2]
                os.kill(victim, signal.SIGKILL)
                await until(partial(replaced, victim, executor))
                await until(lambda: all(one.state == "ready" for one in pool.stats().replicas))
        assert load.longest < 3.0  # 0.1 on idle cores


@pytest.mark.anyio
async def test_calls_wait_when_all_processes_were_killed() -> None:
    async with (
        ProcessExecutor(["cpu", "cpu"]) as executor,
        ReplicaPool(Scale(), executor=executor, warmup=torch.ones(1)) as pool,
        Batcher(pool) as batcher,
    ):
        for call in (pool, batcher):
            for victim in pids(executor):
                os.kill(victim, signal.SIGKILL)
            output, _ = await call(torch.ones(1))
            assert output.tolist() == [2.0]


@pytest.mark.anyio
async def test_a_pool_is_closed_while_a_call_waits_for_a_new_process() -> None:
    async def call() -> None:
        with pytest.raises(aiopar.ServiceClosed):
            await pool(torch.tensor([torch.nan]))

    async with ProcessExecutor(["cpu"]) as executor:
        pool = ReplicaPool(Scale(), executor=executor)
        async with pool, anyio.create_task_group() as tasks:
            tasks.start_soon(call)
            await until(lambda: [one.state for one in pool.stats().replicas] == ["rebuilding"])
            with anyio.fail_after(30):
                await pool.aclose()


@pytest.mark.anyio
async def test_calls_at_the_same_time_run_in_processes_of_their_own() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        with aiopar.use_executor(executor), torch.no_grad():
            outputs = await aiopar.parallel_apply([Scale(2.0), Scale(3.0)], [torch.ones(1)] * 2)
            dp = aiopar.DataParallel(Scale(), ["cpu", "cpu"])
            joined, where = await dp(torch.ones(4))
        assert [y.item() for y, _ in outputs] == [2.0, 3.0]
        assert {pid.item() for _, pid in outputs} == pids(executor) == set(where.tolist())
        assert joined.tolist() == [2.0] * 4
        with aiopar.use_executor(executor), pytest.raises(NotImplementedError, match="no_grad"):
            await dp(torch.ones(4))


def meet() -> None:
    aiopar.current_replica().barrier()


@pytest.mark.anyio
async def test_calls_in_processes_cannot_meet() -> None:
    async with ProcessExecutor(["cpu", "cpu"]) as executor:
        futures = executor.submit_all([meet, meet])
        with pytest.raises(NotImplementedError, match="in a worker process: use a DeviceExecutor"):
            await futures[0]
