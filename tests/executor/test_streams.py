"""Calls that launch on accelerators, or read from there."""

import asyncio
import copy
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch

import aiopar
from aiopar._base.devices import _devices_of
from aiopar.testing import Gate
from tests import programs, simdevice

pytestmark = pytest.mark.sim


@pytest.fixture
def side() -> torch.Stream:
    """A stream of the caller."""
    return torch.Stream(device="sim:0")


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def double_async(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def batched(fn: Any, x: torch.Tensor) -> torch.Tensor:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with aiopar.serve.Batcher(fn) as batcher:
                result: torch.Tensor = await batcher(x)
    assert simdevice.recorded_streams(x) == {0}, "the worker's"
    return result


CALLS: dict[str, Callable[[torch.Tensor], Coroutine[Any, Any, torch.Tensor]]] = {
    "run_sync": lambda x: aiopar.run_sync((x + x).cpu, device="cpu"),
    "gather": lambda x: aiopar.gather([x + x], "cpu"),
    "batch": functools.partial(batched, double),
    "batch of a coroutine": functools.partial(batched, double_async),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.anyio
async def test_a_call_waits_for_kernels_of_its_caller(name: str, side: torch.Stream) -> None:
    with side:
        x = torch.zeros(2, device="sim:0")
        simdevice.sleep(0.05, "sim:0")
        x += 7
        result = await CALLS[name](x)
        assert result.tolist() == [14, 14]


def test_a_call_that_reads_on_the_host_waits_for_kernels(side: torch.Stream) -> None:
    """Also if no kernel of the call would wait for them."""
    x, y = torch.ones(2, device="sim:0"), torch.empty(2).pin_memory()
    with aiopar.DeviceExecutor(["cpu"]) as executor, side:
        simdevice.sleep(0.05, "sim:0")
        y.copy_(x, non_blocking=True)
        assert executor.submit(y.tolist).result(10) == [1, 1]


def test_other_calls_do_not_wait_for_the_caller(side: torch.Stream) -> None:
    x = torch.ones(2, device="sim:0")
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        with simdevice.paused(side):
            with side:
                double(x)
                waits = executor.submit(abs, -1)
            with pytest.raises(TimeoutError):
                waits.result(0.05)
            assert executor.submit(double(x).tolist).result(10) == [2, 2]
        assert waits.result(10) == 1


def test_a_result_on_an_accelerator_is_complete() -> None:
    x = torch.ones(2, device="sim:0")
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor:
        with simdevice.paused():
            launched = executor.submit(double, x)
            with pytest.raises(TimeoutError):
                launched.result(0.05)
            assert executor.submit(abs, -1).result(10) == 1, (
                "a call without such a result does not wait"
            )
        launched.result(10)
        assert not simdevice.pending_streams()


def test_a_result_without_synchronize_is_ordered(side: torch.Stream) -> None:
    with aiopar.DeviceExecutor(["cpu"], synchronize=False) as executor:
        default = torch.accelerator.current_stream("sim:0")
        x = torch.ones(2, device="sim:0")
        with simdevice.paused(default), side:
            result = executor.submit(double, x).result(10)
            after = result + 1
        torch.accelerator.synchronize()
        assert after.tolist() == [3, 3]


def multiplied_aside(executor: aiopar.DeviceExecutor, side: torch.Stream) -> torch.Tensor:
    """The call runs inside a waiting call that is on a stream of its own."""
    x = torch.zeros(2, device="sim:0")
    simdevice.sleep(0.05, "sim:0")
    x += 7
    doubled = executor.submit(double, x)
    with side:
        return doubled.wait()


def test_a_worker_may_be_on_a_side_stream(side: torch.Stream) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        helped = executor.submit(multiplied_aside, executor, side).result(10)
        assert helped.tolist() == [14, 14]
        executor.submit(torch.accelerator.set_stream, side).result(10)  # the call leaves it so
        x = torch.zeros(2, device="sim:0")
        torch.accelerator.synchronize()
        simdevice.sleep(0.05, "sim:0")
        x += 7
        assert executor.submit(double, x).result(10).tolist() == [14, 14]
        assert simdevice.recorded_streams(x) == {side.stream_id}


def test_memory_is_kept_for_the_streams_that_read_it(side: torch.Stream) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with side:
            x = torch.ones(2, device="sim:0")
            result = executor.submit(double, x).result(10)
        assert simdevice.recorded_streams(x) == {0}, "the worker's"
        assert simdevice.recorded_streams(result) == {side.stream_id}
        plain = executor.submit(double, x).result(10)
        assert not simdevice.recorded_streams(plain)


def test_memory_of_arguments_and_weights_is_kept(side: torch.Stream) -> None:
    with side, torch.Stream(device="sim:1"):
        module = torch.nn.BatchNorm1d(2, device="sim:0").eval()
        weights = [*module.parameters(), *module.buffers()]
        xs = [torch.ones(2, 2, device=f"sim:{index}") for index in range(2)]
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            executor.submit(functools.partial(module, xs[0])).result(10)
            executor.submit(functools.partial(len), xs[1:]).result(10)
    kept = [x for x in (*weights, *xs) if x.is_floating_point()]
    assert [simdevice.recorded_streams(x) for x in kept] == [{0}] * len(kept)


def test_a_result_may_contain_itself(side: torch.Stream) -> None:
    loop: list[Any] = [torch.ones(2, device="sim:0"), {}]
    loop[1]["self"] = loop
    with aiopar.DeviceExecutor(["cpu"]) as executor, side:
        result = executor.submit(copy.copy, loop).result(10)
    assert result[1]["self"] is loop
    assert simdevice.recorded_streams(loop[0]) == {side.stream_id}


def test_the_error_of_a_kernel_reaches_its_caller() -> None:
    def fail() -> torch.Tensor:
        simdevice.fail_next_sync("device-side assert triggered", "sim:0")
        return torch.ones(2, device="sim:0")

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        with pytest.raises(RuntimeError, match="device-side assert triggered"):
            executor.submit(fail).result(10)
        assert executor.submit(abs, -1).result(10) == 1


@pytest.mark.asyncio
async def test_an_error_before_a_batch_fails_that_batch(side: torch.Stream) -> None:
    """If the batch stayed in the queue, it would begin again and again."""
    with side:
        simdevice.fail_next_sync("device-side assert triggered", "sim:0")
        batcher = aiopar.serve.Batcher(double)
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with batcher:
                with pytest.raises(RuntimeError, match="device-side assert triggered"):
                    await batcher(torch.ones(2))
                assert (await batcher(torch.ones(2))).tolist() == [2, 2]
                assert batcher.stats().in_flight == 0


def test_an_accelerator_that_is_initialized_later(
    monkeypatch: pytest.MonkeyPatch, side: torch.Stream
) -> None:
    """A backend is registered after the default executor was made."""
    aiopar.get_executor().shutdown()
    with monkeypatch.context() as before:
        before.setattr(torch.accelerator, "current_accelerator", lambda: None)
        executor = aiopar.get_executor()
    x = torch.zeros(2, device="sim:0")
    torch.accelerator.synchronize()
    with executor:
        executor.on("sim:0")
        with side:
            simdevice.sleep(0.05, "sim:0")
            x += 7
            assert executor.submit(x.cpu).result(10).tolist() == [7, 7]


def test_unused_accelerators_are_not_queried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not even for their number: a query makes the driver unusable in a forked child."""
    module = torch.get_device_module("sim")
    _devices_of.cache_clear()
    monkeypatch.setattr(module, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", None)
    monkeypatch.setattr(torch.accelerator, "current_stream", None)
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        assert executor.submit(abs, -1).result(10) == 1
        assert asyncio.run(executor.run_sync(abs, -1)) == 1


def test_a_forked_child_forgets_the_streams_of_its_parent() -> None:
    program = """
        from tests import simdevice
        simdevice.load()

        async def child(batcher, stream):
            async with aiopar.DeviceExecutor(["cpu"]) as executor:
                with aiopar.use_executor(executor):
                    async with batcher:
                        assert (await batcher(torch.ones(2))).tolist() == [-1, -1]
                    async with stream:
                        assert [item async for item in stream] == [1, 2]

        async def negative(x):
            return -x

        for fn in (torch.neg, negative):
            with torch.Stream(device="sim:0"):
                x = torch.ones(2, device="sim:0")
                batcher = aiopar.serve.Batcher(fn)
                stream = aiopar.data.map(abs, [-1, -2])
            if (pid := os.fork()) == 0:
                asyncio.run(child(batcher, stream))
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        print("done")
    """
    assert programs.run(program)[1:] == ("done\n", "")


# Calls of accelerator workers end when their kernels have run.


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["sim:0"]) as executor:
        yield executor
        [stats] = executor.stats().workers
        assert (stats.queued, stats.running) == (0, 0)


def doubled(x: float) -> torch.Tensor:
    return torch.full((2,), x, device="sim:0") * 2


def test_without_a_completion_thread_the_worker_waits_for_kernels(
    executor: aiopar.DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Gate()
    start = threading.Thread.start

    def start_the_workers_only(thread: threading.Thread) -> None:
        if thread.name.endswith("completions"):
            tried()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched, simdevice.paused():
        patched.setattr("threading.Thread.start", start_the_workers_only)
        future = executor.submit(doubled, 1.0)
        tried.wait_entered()
        tried.open()
        assert not future.done(), "its kernels have not run"
    assert future.result(10).tolist() == [2.0, 2.0]
    assert executor.submit(doubled, 2.0).result(10).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("step", ["bind_thread", "order_after", "result_events"])
def test_an_error_of_the_device_reaches_the_awaiter(
    step: str, synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device-side assert triggered")

    with aiopar.DeviceExecutor(["sim:0"], synchronize=synchronize) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(f"aiopar.executor._streams.{step}", fail)
            with pytest.raises(RuntimeError, match="device-side assert triggered"):
                executor.submit(doubled, 1.0).result(10)
        assert executor.submit(doubled, 1.0).result(10).tolist() == [2.0, 2.0]
