"""`parallel_apply` and `fork_apply`: results, arguments, meetings."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import pytest_asyncio
import torch
from torch import nn

import aiopar
from aiopar import current_replica

from ..freeing import survivors, without_gc

CPUS = ["cpu", "cpu"]


@pytest_asyncio.fixture
async def executor() -> AsyncIterator[aiopar.DeviceExecutor]:
    """Only the workers that the parallel calls in these tests need."""
    async with aiopar.DeviceExecutor(CPUS) as executor:
        yield executor


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(3, 2), nn.Linear(3, 4)]


class TestResults:
    @pytest.mark.anyio
    async def test_equal_those_of_the_modules_in_order(self) -> None:
        modules, inputs = nn.ModuleList(layers()), [torch.randn(5, 3), torch.randn(1, 3)]
        for given in modules, (module for module in modules):
            outputs = await aiopar.parallel_apply(given, inputs)
            for output, module, x in zip(outputs, modules, inputs, strict=True):
                assert torch.equal(output, module(x))

    @pytest.mark.asyncio
    async def test_gather_of_fork_apply_is_equal(self) -> None:
        modules, inputs = layers(), [torch.randn(5, 3), torch.randn(1, 3)]
        kwargs: list[dict[str, Any] | None] = [None, {}]
        applied = await aiopar.parallel_apply(modules, inputs, kwargs, CPUS)
        forked = await asyncio.gather(*aiopar.fork_apply(modules, inputs, kwargs, CPUS))
        assert all(torch.equal(a, b) for a, b in zip(applied, forked, strict=True))

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("inputs", "kwargs", "expected"),
        [
            ([1, 2], None, [((1,), {}), ((2,), {})]),
            ([(1, 2), [3]], None, [((1, 2), {}), ((3,), {})]),
            ([(), None], None, [((), {}), ((None,), {})]),
            ([{"a": 1}, "text"], None, [(({"a": 1},), {}), (("text",), {})]),
            ([(), 1], [{"a": 1}, None], [((), {"a": 1}), ((1,), {})]),
            (((1,), (2,)), ({}, {"b": 2}), [((1,), {}), ((2,), {"b": 2})]),
        ],
    )
    async def test_arguments(self, inputs: Any, kwargs: Any, expected: object) -> None:
        def given(*args: object, **named: object) -> object:
            return args, named

        assert await aiopar.parallel_apply([given] * 2, inputs, kwargs) == expected

    @pytest.mark.asyncio
    async def test_without_modules(self) -> None:
        assert await aiopar.parallel_apply([], []) == []
        assert aiopar.fork_apply([], []) == []

    @pytest.mark.asyncio
    async def test_devices(self) -> None:
        def on() -> torch.device:
            return current_replica().device

        async with aiopar.DeviceExecutor(["meta", "cpu"]) as executor:
            x = torch.ones(1, device="meta")
            with aiopar.use_executor(executor):
                given = aiopar.parallel_apply([on] * 2, [()] * 2, devices=["cpu", "meta"])
                found = aiopar.parallel_apply(
                    [lambda _: on(), lambda y: on()],
                    [([{"x": x}],), ()],
                    [None, {"y": torch.ones(1)}],
                )
                partly = aiopar.parallel_apply([on, lambda _: on()], [(), x], devices=["cpu", None])
            assert [device.type for device in await given] == ["cpu", "meta"]
            assert [device.type for device in await found] == ["meta", "cpu"]
            assert [device.type for device in await partly] == ["cpu", "meta"]


class TestBadArguments:
    """They raise when the call is made; no coroutine is left that was never awaited."""

    @pytest.mark.asyncio
    @pytest.mark.parametrize("verb", [aiopar.parallel_apply, aiopar.fork_apply])
    @pytest.mark.parametrize(
        ("args", "error", "message"),
        [
            (([abs], [1, 2]), ValueError, "inputs has 2 entries, but there are 1 modules"),
            (([abs], [1], []), ValueError, "kwargs_tup has 0 entries, but there are 1 modules"),
            (([abs], [1], None, CPUS), ValueError, "devices has 2 entries, but there are 1"),
            ((5, [1]), TypeError, "modules must be an iterable of modules or functions, not int"),
            ((nn.Linear(2, 3), [1]), TypeError, "modules must be an iterable .* not Linear"),
            (([3], [1]), TypeError, "expected a callable, got 3"),
            (([asyncio.sleep], [1]), TypeError, "coroutine function"),
            (([abs], 3), TypeError, "inputs must be a sequence .* not int"),
            (([abs], {1}), TypeError, "inputs must be a sequence .* not set"),
            (([abs], [1], 3), TypeError, "kwargs_tup must be a sequence .* not int"),
            (([abs], [1], [3]), TypeError, r"kwargs_tup\[0\] must be a dict or None, not int"),
            (([abs], [1], None, ["nowhere"]), ValueError, "unknown device 'nowhere'"),
            (([abs], [1], None, [99]), ValueError, "99"),
            (([abs], [1], None, [1.5]), TypeError, "device must be"),
        ],
    )
    async def test_they_raise_at_once(
        self, verb: Any, args: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            verb(*args)

    @pytest.mark.asyncio
    async def test_more_calls_than_workers(self, executor: aiopar.DeviceExecutor) -> None:
        verb: Any
        for verb in aiopar.parallel_apply, aiopar.fork_apply:
            with (
                aiopar.use_executor(executor),
                pytest.raises(ValueError, match=r"3 workers.*has 2"),
            ):
                verb([abs] * 3, [1] * 3, devices=["cpu"] * 3)
            with aiopar.use_executor(executor), pytest.raises(ValueError, match="on meta"):
                verb([abs], [1], devices=["meta"])

    @pytest.mark.asyncio
    async def test_after_shutdown_inputs_are_freed(self) -> None:
        executor = aiopar.DeviceExecutor(CPUS)
        await executor.aclose()
        with without_gc():
            x = torch.ones(1)
            alive = [weakref.ref(x)]
            with aiopar.use_executor(executor):
                call = aiopar.parallel_apply([torch.neg] * 2, [x, x])
            with contextlib.suppress(aiopar.ExecutorShutdown):
                await call
                pytest.fail("it ran")
            del x, call
            assert await survivors(alive) == []


class TestMeetings:
    @pytest.mark.anyio
    async def test_modules_that_meet_from_eight_calls_at_once(self) -> None:
        def meet(barrier: threading.Barrier) -> int:
            return barrier.wait(timeout=30)

        results: list[list[int]] = []

        async def one() -> None:
            barrier = threading.Barrier(4)
            results.append(
                await aiopar.parallel_apply([meet] * 4, [barrier] * 4, devices=["cpu"] * 4)
            )

        async with anyio.create_task_group() as tasks:
            for _ in range(8):
                tasks.start_soon(one)
        assert [sorted(result) for result in results] == [[0, 1, 2, 3]] * 8
