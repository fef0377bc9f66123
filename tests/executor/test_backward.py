"""`backward`: torch's gradients and errors, on a worker, also for many calls at once."""

import asyncio
import contextvars
import copy
import ctypes
import gc
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from typing import Any
from unittest.mock import Mock

import anyio
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import aiopar
from aiopar.testing import Gate
from tests import simdevice
from tests.caller_states import snapshot
from tests.freeing import survivors, without_gc
from tests.gradients import leaf, on_gradient
from tests.workers import worker_device

Devices = tuple[torch.device, ...]


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor, aiopar.use_executor(executor):
        yield executor


def doubles(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class TestGradients:
    @pytest.mark.anyio
    async def test_equal_those_of_torch(self, devices: Devices) -> None:
        linear = nn.Linear(3, 4, device=devices[0], dtype=torch.float64)
        ours = nn.Sequential(linear, nn.Tanh())
        theirs = copy.deepcopy(ours)
        x = torch.randn(5, 3, dtype=torch.float64, device=devices[0])
        theirs(x).square().sum().backward()
        loss = await aiopar.run_sync(lambda: ours(x).square().sum(), device=devices[0])
        await aiopar.backward(loss)
        for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (lambda w: [[w.sum(), (w * 3).sum()]], [4, 4]),
            (lambda w: [(w[0] * factor for factor in (10, 100))], [110, 0]),
            (lambda w: [w * 1, doubles(10, 100)], [10, 100]),
            (lambda w: [(w * 1, w.sum()), [doubles(1, 0), None]], [2, 1]),
            (lambda w: [[get_gradient_edge((w * 2).sum()), w.sum()]], [3, 3]),
        ],
    )
    async def test_of_several_losses_are_added(
        self,
        executor: aiopar.DeviceExecutor,
        arguments: Callable[[Tensor], Any],
        expected: list[float],
    ) -> None:
        weight = leaf(1, 2)
        await aiopar.backward(*arguments(weight))
        assert weight.grad is not None
        assert weight.grad.tolist() == expected

    @pytest.mark.asyncio
    async def test_retain_graph(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(3)
        loss = weight.square().sum()
        await aiopar.backward(loss, retain_graph=True)
        await aiopar.backward(loss)
        assert weight.grad is not None
        assert weight.grad.tolist() == [12]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            await aiopar.backward(loss)

    @pytest.mark.asyncio
    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    async def test_gradients_of_gradients(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(2)
        await aiopar.backward(weight.pow(3).sum(), create_graph=True)
        first, weight.grad = weight.grad, None  # no reference cycle
        assert first is not None
        await aiopar.backward(first.sum())
        assert weight.grad is not None
        assert (first.item(), weight.grad.item()) == (12, 12)

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "as_inputs",
        [
            pytest.param(lambda tensor: tensor, id="tensor"),
            pytest.param(lambda tensor: [tensor], id="list"),
            pytest.param(lambda tensor: {"weight": tensor}, id="mapping"),
            pytest.param(get_gradient_edge, id="edge"),
        ],
    )
    async def test_of_given_inputs_only(
        self, executor: aiopar.DeviceExecutor, as_inputs: Callable[[Tensor], Any]
    ) -> None:
        wanted, other = leaf(1, 2), leaf(3, 4)
        await aiopar.backward((wanted * other).sum(), inputs=as_inputs(wanted))
        assert wanted.grad is not None
        assert wanted.grad.tolist() == [3, 4]
        assert other.grad is None


class TestBadArguments:
    """`backward` itself raises, and makes no coroutine."""

    @pytest.mark.parametrize(
        ("args", "error", "message"),
        [
            ((3,), TypeError, "losses must be a tensor or several, not int"),
            (([leaf(1), 3],), TypeError, r"losses\[1\] must be a tensor, not int"),
            (([],), ValueError, "losses is empty"),
            ((leaf(1), 3), TypeError, "grad_tensors must be a tensor or several, not int"),
            ((leaf(1), [3]), TypeError, r"grad_tensors\[0\] must be a tensor or None, not int"),
            (
                ([leaf(1), leaf(1)], [torch.ones(1)]),
                ValueError,
                "grad_tensors has 1 entries, but there are 2 losses",
            ),
            ((leaf(1), None, None, False, 3), TypeError, "inputs must be a tensor or several"),
            ((leaf(1), None, None, False, [3]), TypeError, r"inputs\[0\] must be a tensor"),
            ((leaf(1), None, None, False, {}), ValueError, "inputs is empty"),
        ],
    )
    def test_raise_at_the_call(self, args: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            aiopar.backward(*args)  # type: ignore[unused-coroutine]  # it raises

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "losses", [torch.ones(1), leaf(1, 2), [leaf(1), torch.ones(1)]], ids=str
    )
    async def test_torch_itself_checks_the_losses(self, losses: Any) -> None:
        with pytest.raises(RuntimeError) as ours:
            await aiopar.backward(losses)
        with pytest.raises(RuntimeError) as theirs:
            torch.autograd.backward(losses)
        assert str(ours.value) == str(theirs.value)


class TestWorker:
    @pytest.mark.asyncio
    async def test_is_one_of_the_device_of_the_first_loss(self) -> None:
        seen = []

        def note(_: Tensor) -> None:
            seen.append(worker_device())

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

    @pytest.mark.asyncio
    async def test_hooks_run_in_the_replica_of_the_caller(
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
    async def test_is_captured_at_the_call(self, executor: aiopar.DeviceExecutor) -> None:
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
    async def test_the_executor_is_captured_and_no_grad_mode_changes_nothing(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        weight = leaf(1, 2)
        loss = weight.sum()
        async with aiopar.DeviceExecutor(["cpu"]) as other:
            with aiopar.use_executor(other), torch.no_grad():
                call = aiopar.backward(loss)
            await call
            assert other.stats().workers[0].completed == 1
        assert weight.grad is not None
        assert weight.grad.tolist() == [1, 1]


@pytest.mark.anyio
async def test_a_cancelled_backward_that_runs_is_awaited(executor: aiopar.DeviceExecutor) -> None:
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


@pytest.mark.asyncio
async def test_losses_are_freed_by_reference_counting(executor: aiopar.DeviceExecutor) -> None:
    with without_gc():
        weight = leaf(1, 2)
        loss, gradient = weight * 2, torch.ones(2, dtype=torch.float64)
        alive = [weakref.ref(one) for one in (loss, gradient)]
        await aiopar.backward(loss, gradient)
        del loss, gradient
        assert await survivors(alive) == []


class FailingBackward:
    """Its backward fails in a hook, while the rest of the graph waits in autograd's queue."""

    def __init__(self) -> None:
        self.saved: list[weakref.ref[torch.UntypedStorage]] = []

    def loss(self) -> Tensor:
        def pack(tensor: Tensor) -> Tensor:
            self.saved.append(weakref.ref(tensor.untyped_storage()))
            return tensor

        def fail(_: Tensor) -> None:
            raise LookupError("in a hook")

        x = leaf(1, 2)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            for _ in range(100):
                x = x.sin()
        newest = leaf(1, 2) * 1  # the backward begins with it
        on_gradient(newest, fail)
        return (x + newest).sum()

    def run(self) -> None:
        torch.autograd.backward(self.loss())

    def caught(self) -> None:
        with suppress(LookupError):
            self.run()

    def wrapped(self) -> None:
        try:
            self.run()
        except LookupError as error:
            raise LookupError("in the function") from error

    @torch.inference_mode()
    def wait_for_another(self) -> None:
        aiopar.wait(aiopar.get_executor().on(worker=0).submit(self.run_in_normal_mode))

    @torch.inference_mode(False)
    @torch.enable_grad()
    def run_in_normal_mode(self) -> None:
        self.run()

    def generate(self) -> Iterator[int]:
        with torch.no_grad():
            yield 1
            self.run_in_normal_mode()

    async def iterate(self) -> None:
        async for _ in aiopar.get_executor().iterate(self.generate):
            pass


FAILED: dict[str, Callable[[FailingBackward], Coroutine[Any, Any, object]]] = {
    "backward": lambda failing: aiopar.backward(failing.loss()),
    "a whole step": lambda failing: aiopar.run_sync(failing.run),
    "wrapped": lambda failing: aiopar.run_sync(failing.wrapped),
    "helped": lambda failing: aiopar.get_executor().on(worker=0).run_sync(failing.wait_for_another),
    "iterate": FailingBackward.iterate,
}


@pytest.mark.asyncio
@pytest.mark.parametrize("how", FAILED)
async def test_a_failed_backward_leaves_nothing(executor: aiopar.DeviceExecutor, how: str) -> None:
    failing = FailingBackward()
    try:
        await FAILED[how](failing)
    except LookupError:
        gc.collect()
    else:
        pytest.fail("it did not fail")
    assert len(failing.saved) == 100
    assert await survivors(failing.saved) == []


@pytest.mark.asyncio
async def test_a_backward_that_fails_unseen_leaves_nothing_when_its_thread_ends() -> None:
    failing = FailingBackward()
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        await executor.run_sync(failing.caught)
    assert len(failing.saved) == 100
    assert await survivors(failing.saved) == []


class Shared(nn.Module):
    """Dense and sparse parameters; losses are small integers, so that sums are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(8)]
        )
        self.table = nn.Embedding(5, 4, sparse=True, dtype=torch.float64)

    def forward(self, factor: int) -> Tensor:
        row = self.table(torch.tensor([factor % 5])).sum()
        total: Tensor = sum((weight * factor).sum() for weight in self.weights) + row
        return total

    def gradients(self) -> list[list[float]]:
        found = [parameter.grad for parameter in self.parameters()]
        return [gradient.to_dense().tolist() for gradient in found if gradient is not None]


class TestConcurrency:
    @settings(max_examples=15)
    @given(
        factors=st.lists(st.integers(1, 9), min_size=2, max_size=40),
        begun=st.booleans(),
        together=st.integers(1, 3),
    )
    def test_shared_parameters_get_the_gradients_of_a_serial_run(
        self, factors: list[int], begun: bool, together: int
    ) -> None:
        module, expected = Shared(), Shared()
        if begun:  # otherwise all calls race for the first gradient
            for shared in module, expected:
                shared(1).backward()
        for factor in factors:
            expected(factor).backward()

        async def main() -> None:
            async with aiopar.DeviceExecutor(["cpu"] * 4, num_threads=1) as executor:
                with aiopar.use_executor(executor):
                    losses = [module(factor) for factor in factors]
                    calls = [
                        aiopar.backward(losses[start : start + together])
                        for start in range(0, len(losses), together)
                    ]
                await asyncio.gather(*calls)

        asyncio.run(main())
        assert module.gradients() == expected.gradients()

    @pytest.mark.anyio
    async def test_while_other_forwards_run(self) -> None:
        # Forward, backward and the end of graphs come in all orders: the AccumulateGrad nodes are
        # made and freed meanwhile.
        module, expected = Shared(), Shared()
        factors = list(range(1, 101))
        for factor in factors:
            expected(factor).backward()
        async with aiopar.DeviceExecutor(["cpu"] * 4, num_threads=1) as executor:

            async def step(factor: int) -> None:
                with aiopar.use_executor(executor):
                    await aiopar.backward(await aiopar.run_sync(module, factor))

            async with anyio.create_task_group() as tasks:
                for factor in factors:
                    tasks.start_soon(step, factor)
        assert module.gradients() == expected.gradients()


@pytest.mark.sim
class TestAccelerators:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("output", ["sim:0", "sim:1", "cpu"])
    @pytest.mark.parametrize("workers", [["sim:0", "sim:1", "cpu"], ["sim:0"]])
    async def test_gradients_are_complete_on_every_device(
        self, output: str, workers: list[str]
    ) -> None:
        weights = [
            torch.ones(3, device=device, requires_grad=True) for device in ("sim:0", "sim:1")
        ]

        def forward() -> Tensor:
            moved: Tensor = sum((weight * 3).to(output) for weight in weights)  # type: ignore[assignment]  # not 0
            return moved.sum()

        async with aiopar.DeviceExecutor(workers) as executor:
            with aiopar.use_executor(executor):
                loss = await aiopar.run_sync(forward)
                simdevice.set_kernel_latency(0.02)
                await aiopar.backward(loss)
                assert [_memory(weight.grad) for weight in weights] == [[3.0] * 3] * 2

    @pytest.mark.asyncio
    @pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
    async def test_two_streams_add_to_one_gradient_in_order(self) -> None:
        simdevice.set_inline(False)
        weight = torch.ones(3, device="sim:0", requires_grad=True)

        def forward(factor: float) -> Tensor:
            return (weight * factor).sum()

        async with aiopar.DeviceExecutor(["sim:0", "sim:0"]) as executor:
            first, second = executor.on(worker=0), executor.on(worker=1)
            loss = await first.run_sync(forward, 10.0)
            # The kernels of the first backward are paused: its gradient exists, but is not written,
            # and only its call holds the graph. Then a second backward runs on another stream.
            with simdevice.paused(await first.run_sync(torch.accelerator.current_stream, 0)):
                call = _backward_on(first, loss)
                del loss
                one = await _launched(executor, call)
                call = _backward_on(second, await second.run_sync(forward, 100.0))
                other = await _launched(executor, call)
            await asyncio.gather(one, other)
        assert weight.grad is not None
        assert weight.grad.tolist() == [110.0] * 3


def _memory(tensor: Tensor | None) -> list[float]:
    """The present content of the simulated memory; `tolist` would wait for the kernels."""
    assert tensor is not None
    return list((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


def _backward_on(worker: aiopar.DeviceExecutor, loss: Tensor) -> Coroutine[Any, Any, None]:
    with aiopar.use_executor(worker):
        return aiopar.backward(loss)


async def _launched(
    executor: aiopar.DeviceExecutor, call: Coroutine[Any, Any, None]
) -> "asyncio.Task[None]":
    """Start a call, and return its task when all its kernels are launched."""
    launched: aiopar.Future[None] = aiopar.Future()
    observer = Mock(spec=aiopar.ExecutorObserver)
    observer.launched.side_effect = lambda _: launched.set_result(None)
    executor.add_observer(observer)
    task = asyncio.create_task(call)
    await launched
    executor.remove_observer(observer)
    return task
