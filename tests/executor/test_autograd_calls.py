"""`backward` as a call: on which worker, under whose state, and what it leaves when it ends."""

import asyncio
import contextvars
import weakref
from collections.abc import Iterator

import anyio
import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import aiopar
from aiopar.executor._worker import current_worker
from aiopar.testing import Gate
from tests.caller_states import snapshot
from tests.freeing import survivors, without_gc
from tests.gradients import leaf, on_gradient


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor, aiopar.use_executor(executor):
        yield executor


class TestWhere:
    @pytest.mark.asyncio
    async def test_on_a_worker_of_the_first_loss_s_device(self) -> None:
        seen = []

        def note(_: Tensor) -> None:
            worker = current_worker()
            assert worker is not None
            seen.append(worker.device.type)

        weight = leaf(1, 2)
        on_gradient(weight, note)
        on_meta = torch.ones(1, device="meta", requires_grad=True)
        async with aiopar.DeviceExecutor(["meta", "cpu"]) as both:
            with aiopar.use_executor(both):
                await aiopar.backward([weight.sum(), on_meta.sum()])
                await aiopar.backward([on_meta.sum(), weight.sum()])
                await aiopar.backward([get_gradient_edge(weight.sum()), on_meta.sum()])
        async with aiopar.DeviceExecutor(["meta"]) as elsewhere:
            with aiopar.use_executor(elsewhere):
                await aiopar.backward(weight.sum())
        assert seen == ["cpu", "meta", "cpu", "meta"]

    @pytest.mark.anyio
    async def test_the_loop_goes_on_meanwhile(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        ran = []
        with Gate() as gate:
            on_gradient(weight, gate)

            async def while_it_runs() -> None:
                await gate.entered()
                ran.append(weight.grad)
                gate.open()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(while_it_runs)
                await aiopar.backward(weight.sum())
        assert ran == [None]
        assert weight.grad is not None

    def test_from_inside_of_a_call(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)

        def step(factor: float) -> None:
            aiopar.wait(aiopar.backward((weight * factor).sum()))

        aiopar.wait_all([aiopar.fork(step, factor) for factor in (1, 10, 100)])
        assert weight.grad is not None
        assert weight.grad.tolist() == [111, 111]

    @pytest.mark.asyncio
    async def test_hooks_know_the_replica_that_called(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        seen = {}

        def step(factor: float) -> int:
            weight = leaf(factor)

            def note(gradient: Tensor) -> None:
                seen[aiopar.current_replica().index] = gradient.item()

            on_gradient(weight, note)
            aiopar.wait(aiopar.backward(weight.square().sum()))
            return aiopar.current_replica().index

        assert await aiopar.parallel_apply([step] * 2, [3.0, 4.0]) == [0, 1]
        assert seen == {0: 6, 1: 8}


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class TestCallerState:
    @pytest.mark.asyncio
    async def test_is_that_of_the_moment_of_the_call(self, executor: aiopar.DeviceExecutor) -> None:
        seen = []

        def note(_: Tensor) -> None:
            seen.append((torch.is_autocast_enabled("cpu"), variable.get()))

        weight = leaf(1, 2)
        on_gradient(weight, note)
        token = variable.set("the caller's")
        with torch.autocast("cpu", torch.bfloat16):
            inside = aiopar.backward(weight.sum())
        variable.reset(token)
        outside = aiopar.backward(weight.sum())
        with torch.autocast("cpu", torch.bfloat16):
            await outside
            before = snapshot()
            await asyncio.create_task(inside)
            assert snapshot() == before
        assert seen == [(False, "unset"), (True, "the caller's")]

    @pytest.mark.asyncio
    async def test_the_executor_is_captured_too(self, executor: aiopar.DeviceExecutor) -> None:
        async with aiopar.DeviceExecutor(["cpu"]) as other:
            with aiopar.use_executor(other):
                call = aiopar.backward(leaf(1).sum())
            await call
            assert other.stats().workers[0].completed == 1

    @pytest.mark.asyncio
    async def test_in_no_grad_mode(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        loss = weight.sum()
        with torch.no_grad():
            call = aiopar.backward(loss)
        await call
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1]


class TestCancellation:
    @pytest.mark.anyio
    async def test_one_that_runs_is_awaited_first(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        with Gate() as gate:
            on_gradient(weight, gate)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(aiopar.backward, weight.sum())
                await gate.entered()
                tasks.cancel_scope.cancel()
                gate.open()
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1]

    @pytest.mark.anyio
    async def test_one_that_has_not_started_changes_nothing(self) -> None:
        weight = leaf(1, 2)
        async with aiopar.DeviceExecutor(["cpu"]) as one:
            with Gate() as gate, aiopar.use_executor(one):
                one.submit(gate)
                await gate.entered()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(aiopar.backward, weight.sum())
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
        assert weight.grad is None

    @pytest.mark.asyncio
    async def test_an_error_keeps_its_type_and_the_worker_lives(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        def fail(_: Tensor) -> None:
            raise LookupError("in a hook")

        weight = leaf(1, 2)
        handle = on_gradient(weight, fail)
        with pytest.raises(LookupError, match="in a hook"):
            await aiopar.backward(weight.sum())
        handle.remove()
        await aiopar.backward(weight.sum())
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1]


@pytest.mark.asyncio
async def test_losses_are_freed_by_reference_counting(executor: aiopar.DeviceExecutor) -> None:
    with without_gc():
        weight = leaf(1, 2)
        loss, gradient = weight * 2, torch.ones(2, dtype=torch.float64)
        alive = [weakref.ref(one) for one in (loss, gradient)]
        await aiopar.backward(loss, gradient)
        del loss, gradient
        assert await survivors(alive) == []
