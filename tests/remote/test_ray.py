"""`RayExecutor`: calls in Ray actors."""

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import ray
import torch
from torch import Tensor, nn

import aiopar
from aiopar.ray import RayExecutor
from tests.remote.test_serving import until
from tests.remote.test_wire import same

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def executor(cluster: object) -> Iterator[RayExecutor]:
    """Two actors, for the tests that leave them alive."""
    with RayExecutor(2) as executor:
        yield executor


def pids(executor: aiopar.DeviceExecutor) -> list[int]:
    """The processes of the actors that have started, in order."""
    hosts = [stats.host for stats in executor.stats().workers]
    return [*dict.fromkeys(host.pid for host in hosts if host is not None)]


# Calls.


@pytest.mark.anyio
async def test_calls_run_in_the_actors(executor: RayExecutor) -> None:
    assert (await executor.submit(torch.add, torch.ones(2), 1, alpha=2)).tolist() == [3.0, 3.0]
    assert await executor.run_sync(lambda x: x * 2, torch.ones(1)) == 2
    assert await executor.run_sync(os.getpid) in pids(executor)
    assert os.getpid() not in pids(executor)
    await executor.on(worker=0).run_sync(int)
    host = executor.stats().workers[0].host
    assert host is not None
    assert (host.name, bool(host.node)) == ("ray:0/cpu", True)


def wait_for(path: Path) -> int:
    """Return the pid when the file exists."""
    while not path.exists():
        threading.Event().wait(0.01)
    return os.getpid()


def test_an_idle_actor_gets_a_call_before_a_busy_one(executor: RayExecutor, tmp_path: Path) -> None:
    list(executor.map(abs, range(20)))
    calls = [executor.submit(wait_for, tmp_path / "go") for _ in range(2)]
    (tmp_path / "go").touch()
    assert calls[0].result() != calls[1].result()


def test_actors_have_different_random_numbers(executor: RayExecutor) -> None:
    numbers = [executor.on(worker=index).submit(torch.rand, 4).result() for index in (0, 2)]
    assert not torch.equal(*numbers)


async def outcome(executor: RayExecutor, fn: Callable[..., object], *args: object) -> Any:
    """The result of a call, or its error."""
    try:
        return await executor.run_sync(fn, *args)
    except BaseException as error:  # noqa: BLE001  # the caller looks at it
        return error


@pytest.mark.asyncio
async def test_errors_keep_type_arguments_and_notes(executor: RayExecutor) -> None:
    class Local(Exception):
        pass

    def fail_locally() -> None:
        error = Local(torch.ones(2))
        error.add_note("a note")
        raise error

    error = await outcome(executor, fail_locally)
    assert (type(error), error.args[0].tolist()) == (Local, [1.0, 1.0])
    assert error.__notes__ == ["a note"]
    assert "in fail_locally" in str(error.__cause__)
    assert isinstance(await outcome(executor, exit), SystemExit)


@pytest.mark.asyncio
async def test_what_a_worker_cannot_do_is_refused(executor: RayExecutor) -> None:
    with pytest.raises(NotImplementedError, match=r"iterate\(\) cannot run on worker ray:0/cpu"):
        executor.iterate(iter, [1])
    with pytest.raises(NotImplementedError, match="in a Ray actor: use a DeviceExecutor"):
        await executor.run_sync(aiopar.current_replica)


# Tensors.


def test_tensors_and_arrays_arrive_as_they_were(executor: RayExecutor) -> None:
    sent: list[Any] = [
        torch.arange(6.0).reshape(2, 3).T,
        torch.ones(2, 3, 40, 50).to(memory_format=torch.channels_last),
        torch.full((50_000,), 2, dtype=torch.bfloat16),
        torch.full((20_000,), 1 + 2j),
        torch.empty(0, 3),
        torch.ones(100_000)[::3],
        nn.Parameter(torch.ones(100_000)),
        np.arange(100_000.0).reshape(100, -1)[:, ::2],
    ]
    found = executor.submit(lambda x: x, sent).result()
    assert all(map(same, sent, found))
    assert found[1].is_contiguous(memory_format=torch.channels_last)


def test_what_is_written_in_place_changes_nothing_elsewhere(executor: RayExecutor) -> None:
    one = executor.on(worker=0)
    x = torch.ones(300_000)
    array = np.ones(300_000)

    def fill(number: float, x: Tensor, array: Any) -> Any:
        x.fill_(number)
        array.fill(number)
        return x, array

    results = [one.submit(fill, number, x, array).result() for number in (2.0, 3.0)]
    results[0][0].zero_()
    results[0][1].fill(0)
    assert x.eq(1).all()
    assert (array == 1).all()
    assert results[1][0].eq(3).all()
    assert (results[1][1] == 3).all()


# Kept values.


class Logged(nn.Module):
    """Says in a folder by which process it was loaded, and that it was dropped."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.weight = nn.Parameter(torch.ones(300_000))
        self.loaded = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.loaded = True
        with (self.folder / "loaded").open("a") as file:
            file.write(f"{os.getpid()}\n")

    def __del__(self) -> None:
        if self.loaded:
            with (self.folder / "dropped").open("a") as file:
                file.write(f"{os.getpid()}\n")

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data[0] += 1
        return x + self.weight.sum()


def lines(path: Path) -> list[int]:
    return sorted(map(int, path.read_text().split())) if path.exists() else []


def wait_for_lines(path: Path, expected: list[int]) -> None:
    while lines(path) != expected:
        threading.Event().wait(0.01)


@pytest.mark.anyio
async def test_weights_go_to_each_actor_once_and_are_dropped(
    executor: RayExecutor, tmp_path: Path
) -> None:
    module = Logged(tmp_path)
    async with aiopar.ReplicaPool(module, executor=executor, warmup=torch.ones(1)) as pool:
        for _ in range(20):
            await pool(torch.ones(1))
        loaded = await aiopar.run_sync(lines, tmp_path / "loaded")
        assert loaded == sorted(pids(executor))
    del pool
    gc.collect()
    await aiopar.run_sync(wait_for_lines, tmp_path / "dropped", sorted(pids(executor)))
    assert module.weight.eq(1).all()


# Lost actors.


@pytest.mark.asyncio
async def test_a_killed_actor_fails_its_calls_and_is_replaced() -> None:
    async with RayExecutor(1) as executor:
        victim = await executor.run_sync(os.getpid)
        error = await outcome(executor, os.kill, victim, signal.SIGKILL)
        assert isinstance(error, aiopar.WorkerLost)
        assert error.may_have_run
        assert f"worker ray:0/cpu (pid {victim} on " in str(error)
        victim = await executor.run_sync(os.getpid)
        os.kill(victim, signal.SIGKILL)  # while it is idle: no call fails
        await until(lambda: victim not in pids(executor) and len(pids(executor)) == 1)
        assert await executor.run_sync(os.getpid) != victim


@pytest.mark.asyncio
async def test_a_running_call_does_not_hold_up_the_end_for_longer_than_its_timeout(
    tmp_path: Path,
) -> None:
    executor = RayExecutor(1)
    running = executor.submit(wait_for, tmp_path / "never")
    queued = [executor.submit(wait_for, tmp_path / "never") for _ in range(3)]
    await until(lambda: bool(pids(executor)))
    await executor.aclose(timeout=0.1)
    assert isinstance(running.exception(), aiopar.WorkerLost)
    assert all(isinstance(call.exception(), aiopar.WorkerLost) for call in queued)


@pytest.mark.asyncio
async def test_closing_gives_up_an_actor_that_finds_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("aiopar.ray._link._GIVES_UP_AFTER", 0.1)
    options = {"resources": {"node:__internal_head__": 1.0}}  # one of it
    async with RayExecutor(2, in_flight=1, ray_actor_options=options) as executor:
        await until(lambda: len(pids(executor)) == 1)
        opened = [stats.host is not None for stats in executor.stats().workers].index(True)
        hopeless = executor.on(worker=1 - opened).submit(abs, -1)
        others = [executor.submit(abs, -1) for _ in range(20)]
    assert [call.result() for call in others] == [1] * 20
    assert isinstance(hopeless.exception(), aiopar.WorkerLost)
    async with RayExecutor(2, ray_actor_options={"resources": {"none": 1}}) as executor:
        calls = [executor.submit(abs, -1) for _ in range(5)]
    assert all(isinstance(call.exception(), aiopar.WorkerLost) for call in calls)


# Callers that leave.


def begin(folder: Path) -> int:
    (folder / "begun").touch()
    return wait_for(folder / "go")


@pytest.mark.asyncio
@pytest.mark.may_block("it creates a file")
async def test_the_actor_of_a_call_whose_caller_has_left_is_replaced(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with RayExecutor(1, kill_after=0) as executor:
        pid = await executor.run_sync(os.getpid)
        running = executor.on(worker=0).submit(begin, tmp_path)
        await until((tmp_path / "begun").exists)
        behind = executor.on(worker=1).submit(wait_for, tmp_path / "never")
        await until(behind.running)
        behind.cancel()
        # First the actor must learn of that: it would end if the call had begun.
        await until(lambda: "a call is ended" in caplog.text)
        worker: Any = executor._dispatcher.workers[1]
        await anyio.to_thread.run_sync(worker.slot.host.link.ping().result)  # answers in order
        (tmp_path / "go").touch()
        with pytest.raises(aiopar.WorkerLost):
            await behind
        assert await running == pid
        pid = await executor.run_sync(os.getpid)
        endless = executor.submit(wait_for, tmp_path / "never")
        await until(endless.running)
        endless.cancel()
        await until(lambda: pid not in pids(executor) and len(pids(executor)) == 1)
        assert await executor.run_sync(abs, -1) == 1


# References of Ray.


def size_of(ref: Any) -> int:
    array: Any = ray.get(ref)
    return int(array.nbytes)


def test_references_are_let_go(executor: RayExecutor) -> None:
    refs = [ray.put(np.zeros(100_000)) for _ in range(3)]
    assert [executor.submit(size_of, ref).result() for ref in refs] == [800_000] * 3
    made = executor.submit(lambda: [ray.put(np.zeros(100_000))]).result()
    assert size_of(made[0]) == 800_000
    names = {ref.hex() for ref in [*refs, *made]}
    del refs, made
    gc.collect()
    worker: Any = ray._private.worker.global_worker
    while names & {*worker.core_worker.get_all_reference_counts()}:
        threading.Event().wait(0.01)


# The executor.


@pytest.mark.asyncio
async def test_calls_go_to_the_actors_that_ray_has_room_for() -> None:
    options = {"resources": {"node:__internal_head__": 0.5}}  # two of it
    async with RayExecutor(3, ray_actor_options=options) as executor:
        await until(lambda: len(pids(executor)) == 2)
        for _ in range(20):
            assert await executor.run_sync(os.getpid) in pids(executor)
        assert [stats.running for stats in executor.stats().workers].count(1) == 2
    # The end has not waited for the third one.


def test_options_of_the_actors() -> None:
    options = {"runtime_env": {"env_vars": {"A": "b"}}}
    with RayExecutor(1, num_cpus=2, ray_actor_options=options) as executor:
        assert executor.submit(lambda: os.environ["A"]).result() == "b"
        assert executor.submit(torch.get_num_threads).result() == 2
    with RayExecutor(1, num_threads=2) as executor:
        assert executor.submit(torch.get_num_threads).result() == 2


def test_an_actor_that_cannot_start_fails_the_calls() -> None:
    # Ray believes that the node has a GPU. This process needs none.
    with RayExecutor(1, num_gpus=0.5, in_flight=1) as executor:
        assert executor.devices == (torch.device("cuda:0"),)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"worker ray:0/cuda:0 cannot start: [^$]*CUDA"):
                executor.submit(int).result()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_actors": 0}, ValueError, "num_actors must be at least 1, got 0"),
        ({"num_gpus": -1}, ValueError, "num_gpus must be at least 0, got -1"),
        ({"num_cpus": "1"}, TypeError, "num_cpus must be a number, not str"),
        ({"in_flight": 0}, ValueError, "in_flight must be at least 1, got 0"),
        ({"address": 1}, TypeError, "address must be a str or None, not int"),
        ({"address": "ray://x:1"}, ValueError, "join it by `ray start"),
        ({"name": 1}, TypeError, "name must be a str or None, not int"),
        ({"name": ""}, ValueError, "name must not be empty"),
        ({"ray_actor_options": 1}, TypeError, "ray_actor_options must be a dict or None"),
        ({"ray_actor_options": {"name": "a"}}, ValueError, "cannot have name: RayExecutor sets"),
        ({"ray_actor_options": {"colour": 1}}, ValueError, "colour"),
    ],
)
def test_bad_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        RayExecutor(**{"num_actors": 1, **arguments})


def test_a_process_joins_one_cluster(cluster: Any) -> None:
    port = cluster.address.rpartition(":")[2]
    for its_own in (cluster.address, f"localhost:{port}", f"127.0.0.1:{port}", "auto", None):
        RayExecutor(1, address=its_own).shutdown()
    for other in ("192.0.2.1:6379", "localhost:1", "no such name:1"):
        with pytest.raises(RuntimeError, match=f"address='{other}', but .* has joined the cluster"):
            RayExecutor(1, address=other)


def test_a_ray_client_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "ray://x:1")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for address in (None, "auto"):
        with pytest.raises(ValueError, match="RAY_ADDRESS"):
            RayExecutor(1, address=address)
