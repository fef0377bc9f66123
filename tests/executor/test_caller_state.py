"""The caller's state: every verb captures it when the verb is called."""

import asyncio
import contextvars
import functools
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import aiopar
from aiopar._base.thread_state import in_transform
from aiopar.testing import Gate
from tests.caller_states import PLAIN, STATES, snapshot

CPUS = ["cpu", "cpu"]


@pytest.fixture(autouse=True)
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(CPUS) as executor, aiopar.use_executor(executor):
        yield executor


class Seen:
    """What a replica has seen; `gather` does not take it apart."""

    def __init__(self) -> None:
        self.state = snapshot()


class Snapshot(nn.Module):
    def forward(self) -> Seen:
        return Seen()


class Overridden(aiopar.DataParallel[Any]):
    """Its steps return the state that they see, in place of an output."""

    async def parallel_apply(self, *_: Any) -> Any:
        await aiopar.run_sync(int)
        return snapshot()

    def gather(self, outputs: Any, _: Any) -> Any:
        assert outputs == snapshot()  # as seen on the loop, and here on a worker
        return outputs


def hooked() -> Awaitable[Any]:
    dp = aiopar.DataParallel(Snapshot(), CPUS)
    dp.register_forward_hook(lambda _module, _args, output: [*output, Seen()])
    return dp()


VERBS: dict[str, Callable[[], Awaitable[Any]]] = {
    "run_sync": lambda: aiopar.run_sync(snapshot),
    "executor.run_sync": lambda: aiopar.get_executor().run_sync(snapshot),
    "submit": lambda: aiopar.get_executor().submit(snapshot),
    "submit-with-kwargs": lambda: aiopar.get_executor().submit(lambda **_: snapshot(), key=1),
    "submit_all": lambda: asyncio.gather(*aiopar.get_executor().submit_all([snapshot] * 2)),
    "fork": lambda: aiopar.fork(snapshot),
    "parallel_apply": lambda: aiopar.parallel_apply([snapshot] * 2, [()] * 2),
    "fork_apply": lambda: asyncio.gather(*aiopar.fork_apply([snapshot] * 2, [()] * 2)),
    "DataParallel": aiopar.DataParallel(Snapshot(), CPUS),
    "DataParallel-alone": aiopar.DataParallel(Snapshot(), ["cpu"]),
    "DataParallel-overridden": Overridden(Snapshot(), CPUS),
    "DataParallel-hooked": hooked,
    "data_parallel": lambda: aiopar.data_parallel(Snapshot(), (), CPUS),
}
COROUTINES = {
    name: verb for name, verb in VERBS.items() if "fork" not in name and "submit" not in name
}


async def seen_by(call: Awaitable[Any]) -> dict[str, Any]:
    """The state that a call has seen: the same in all replicas."""
    found = await call
    found = found if isinstance(found, list) else [found]
    first, *others = [one.state if isinstance(one, Seen) else one for one in found]
    assert all(other == first for other in others)
    return first


async def assert_nothing_is_left(executor: aiopar.DeviceExecutor) -> None:
    assert snapshot() == PLAIN
    for worker in range(2):
        assert await executor.on(worker=worker).run_sync(snapshot) == PLAIN


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("state", STATES)
async def test_captured_when_called_not_when_awaited(
    verb: str, state: str, executor: aiopar.DeviceExecutor
) -> None:
    outside = VERBS[verb]()
    with STATES[state]():
        expected = snapshot()
        inside = VERBS[verb]()
    assert await seen_by(inside) == expected
    with STATES[state]():
        assert await seen_by(outside) == PLAIN
        # The state of the loop's thread is unchanged, also between the awaits.
        assert snapshot() == expected
    await assert_nothing_is_left(executor)


@pytest.mark.anyio
@pytest.mark.parametrize("verb", COROUTINES)
async def test_captured_for_another_task(verb: str, executor: aiopar.DeviceExecutor) -> None:
    async def task() -> None:
        assert await seen_by(call) == expected

    async with anyio.create_task_group() as tasks:
        with STATES["everything"]():
            expected = snapshot()
            call = COROUTINES[verb]()
            tasks.start_soon(task)
    await assert_nothing_is_left(executor)


@pytest.mark.asyncio
async def test_interleaved_tasks(executor: aiopar.DeviceExecutor) -> None:
    # Before and after each await, all tasks are at the same point.
    together = asyncio.Barrier(len(STATES))

    async def task(state: Callable[[], AbstractContextManager[Any]]) -> None:
        for _ in range(10):
            assert snapshot() == PLAIN
            with state():
                expected = snapshot()
                call = aiopar.DataParallel(Snapshot(), CPUS)()
            await together.wait()
            assert snapshot() == PLAIN
            assert await seen_by(call) == expected

    await asyncio.gather(*map(task, STATES.values()))
    await assert_nothing_is_left(executor)


@pytest.mark.asyncio
async def test_calls_within_a_call_have_states_of_their_own() -> None:
    def outer() -> list[Any]:
        plain = aiopar.fork(snapshot)
        with torch.autocast("cpu", torch.float16):
            inner = aiopar.fork(snapshot)
        with STATES["everything"](), torch.inference_mode():
            before = snapshot()
            # There is one worker: the waiting call runs the other calls inside itself.
            return [*aiopar.wait_all([plain, inner]), snapshot() == before]

    async with aiopar.DeviceExecutor(["cpu"]) as one:
        with aiopar.use_executor(one), torch.no_grad():
            call = one.run_sync(outer)
        plain, inner, unchanged = await call
    assert plain == PLAIN | {"grad": False}
    assert inner == PLAIN | {"grad": False, "autocast": True, "dtype": torch.float16}
    assert unchanged


def leave_behind() -> None:
    torch.set_grad_enabled(False)
    torch.inference_mode().__enter__()
    torch.autocast("cpu").__enter__()  # type: ignore[no-untyped-call]  # torch does not say
    torch.set_default_device("meta")


@pytest.mark.asyncio
async def test_a_worker_undoes_the_state_that_a_call_leaves(workers: aiopar.DeviceExecutor) -> None:
    for _ in range(3):
        await asyncio.gather(*workers.submit_all([leave_behind] * 2))
        await assert_nothing_is_left(workers)


@pytest.mark.asyncio
async def test_a_worker_undoes_the_state_that_a_callback_leaves() -> None:
    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with Gate() as gate:
            future = executor.submit(gate)
            future.add_done_callback(lambda _: torch.set_grad_enabled(False))
        await future
        assert await executor.run_sync(torch.is_grad_enabled)


@pytest.mark.asyncio
async def test_a_call_may_reset_the_default_device_of_its_caller(
    executor: aiopar.DeviceExecutor,
) -> None:
    def take_off() -> torch.device:
        torch.set_default_device(None)
        return torch.empty(0).device

    with STATES["default-device"]():
        calls = [executor.run_sync(take_off), executor.run_sync(aiopar.wait, aiopar.fork(take_off))]
        assert torch.get_default_device() == torch.device("meta")
    assert await asyncio.gather(*calls) == [torch.device("cpu")] * 2
    await assert_nothing_is_left(executor)


@pytest.mark.asyncio
async def test_saved_tensor_hooks_are_called_in_backward() -> None:
    unpacked = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        unpacked.append(tensor)
        return tensor

    weight = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, note):
        call = aiopar.run_sync(torch.dot, weight, weight)
    loss = await call
    await aiopar.run_sync(loss.backward)
    assert len(unpacked) == 2
    assert torch.equal(weight.grad, torch.full((2,), 2.0))  # type: ignore[arg-type]  # it has one


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


@pytest.mark.asyncio
async def test_context_variables(executor: aiopar.DeviceExecutor) -> None:
    def swap() -> str:
        seen = variable.get()
        variable.set("the worker's")
        return seen

    token = variable.set("the caller's")
    # Each call has a copy of its own, also in a gang.
    calls: list[Awaitable[str]] = [executor.run_sync(swap), executor.submit(swap)]
    calls += executor.submit_all([swap] * 2)
    variable.reset(token)
    assert await asyncio.gather(*calls) == ["the caller's"] * 4
    assert variable.get() == "unset"
    assert await executor.run_sync(swap) == "unset"


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", COROUTINES)
async def test_the_executor_is_captured_too(verb: str, executor: aiopar.DeviceExecutor) -> None:
    async with aiopar.DeviceExecutor(CPUS) as other:
        with aiopar.use_executor(other):
            call = COROUTINES[verb]()
        await call
        done = sum(worker.completed for worker in other.stats().workers)
    assert done
    assert not sum(worker.completed for worker in executor.stats().workers)


def _sine(x: Tensor) -> Tensor:
    return torch.sin(x)


def _module(fn: Callable[[Any], Any]) -> nn.Module:
    module = nn.Module()
    module.forward = fn
    return module


_TRANSFORMS: dict[str, Callable[[Callable[[Any], Any]], Callable[[Any], Any]]] = {
    "grad": torch.func.grad,
    "vmap": torch.func.vmap,
    "jit.trace": lambda fn: lambda x: torch.jit.trace(fn, x),  # type: ignore[no-untyped-call]
    "make_fx": make_fx,
    "make_fx, symbolic": functools.partial(make_fx, tracing_mode="symbolic"),
    "export": lambda fn: lambda x: torch.export.export(_module(fn), (x,)),
}


class TestTransforms:
    """A transform of `torch.func` and a trace belong to a thread: a call to another is refused."""

    @pytest.mark.parametrize(
        "verb",
        [
            lambda x: aiopar.wait(aiopar.fork(torch.sin, x)),
            lambda x: aiopar.get_executor().submit(torch.sin, x).result(),
            lambda x: asyncio.run(aiopar.run_sync(torch.sin, x)),
            lambda x: asyncio.run(aiopar.DataParallel(nn.Identity(), ["cpu"] * 2)(x)),
            lambda x: asyncio.run(aiopar.parallel_apply([torch.sin], [x]))[0],
            lambda x: asyncio.run(aiopar.scatter(x, CPUS))[0],
            lambda x: aiopar.wait(aiopar.Batcher(torch.sin)(x)),
        ],
        ids=["fork", "submit", "run_sync", "DataParallel", "parallel_apply", "scatter", "batcher"],
    )
    @pytest.mark.parametrize("transform", _TRANSFORMS)
    def test_a_call_inside_a_transform(self, transform: str, verb: Callable[[Any], Any]) -> None:
        with pytest.raises(RuntimeError, match="would run outside of it"):
            _TRANSFORMS[transform](lambda x: verb(x).sum())(torch.ones(2, 2))

    @pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
    @pytest.mark.parametrize("trace", [symbolic_trace, torch.compile], ids=["fx", "compile"])
    def test_tracers_that_record_a_call(self, trace: Callable[..., Any]) -> None:
        def double(x: Tensor) -> Tensor:
            return aiopar.wait(aiopar.fork(torch.mul, x, 2)) + 1

        options = {"backend": "eager"} if trace is torch.compile else {}
        traced = trace(double, **options)
        for x in torch.ones(2), torch.zeros(2):
            assert traced(x).tolist() == (2 * x + 1).tolist()

    @pytest.mark.parametrize("transform", list(_TRANSFORMS)[2:])
    def test_a_trace_inside_a_call(self, transform: str) -> None:
        traced = aiopar.wait(aiopar.fork(_TRANSFORMS[transform](_sine), torch.zeros(2)))
        if not isinstance(traced, Tensor):
            traced = getattr(traced, "module", lambda: traced)()(torch.zeros(2))
        assert traced.tolist() == [0, 0]

    def test_a_transform_inside_a_call(self) -> None:
        assert aiopar.wait(aiopar.fork(torch.func.grad(torch.sin), torch.tensor(0.0))) == 1

    def test_a_call_that_waits_in_a_transform_runs_no_other_call(self) -> None:
        """The call would run under the transform."""

        def outer() -> Any:
            waited_for = aiopar.fork(in_transform)
            return torch.func.grad(lambda x: x * waited_for.wait())(torch.tensor(1.0))

        with aiopar.DeviceExecutor(["cpu"]) as one, aiopar.use_executor(one):
            assert aiopar.fork(outer).result() == 0


class TestCheckpoint:
    """The second forward of a checkpoint finds the tensors of the first."""

    def test_around_forks_that_end_in_another_order(self) -> None:
        net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh())
        rounds = 0

        def branch(x: Tensor, wait_for: aiopar.Future[None], first: bool) -> Any:
            if not first:
                wait_for.result(30)
            y = net(x)
            if first:
                wait_for.set_result(None)
            return y

        def both(x: Tensor) -> Any:
            nonlocal rounds
            rounds += 1
            late = aiopar.Future[None]()
            calls = [
                aiopar.fork(branch, half, late, (rounds + n) % 2 == 0)
                for n, half in enumerate(x.chunk(2))
            ]
            return torch.cat(aiopar.wait_all(calls)).square()

        x = torch.randn(6, 3)
        net(x).square().sum().backward()
        expected = [weight.grad for weight in net.parameters()]
        for _ in range(10):
            net.zero_grad()
            checkpoint(both, x, use_reentrant=False).sum().backward()
            torch.testing.assert_close([weight.grad for weight in net.parameters()], expected)
        assert rounds == 20


class Product(nn.Module):
    """A product whose factor autocast may cast from its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, gate: Gate | None = None) -> float:
        product = torch.mm(torch.ones(2, 2), self.weight).mean().item()
        if gate is not None:
            gate()
        return product

    def under_autocast(self, gate: Gate | None = None, first: Gate | None = None) -> float:
        if first is not None:
            first()
        with torch.autocast("cpu", torch.bfloat16):
            return self.forward(gate)

    def steps(self) -> Iterator[float]:
        with torch.autocast("cpu", torch.bfloat16):
            while True:
                yield self()

    @torch.no_grad()
    def change(self) -> None:
        self.weight.fill_(3)


class TestAutocastCache:
    @pytest.mark.asyncio
    async def test_a_call_under_captured_autocast_sees_weights_that_changed(self) -> None:
        module = Product()
        async with aiopar.DeviceExecutor(["cpu"] * 3) as executor:
            with Gate() as gate:
                with torch.autocast("cpu", torch.bfloat16):
                    running, later = executor.submit(module, gate), executor.run_sync(module)
                await gate.entered()
                await executor.run_sync(module.change)
                assert await later == 6.0
            assert await running == 2.0

    @pytest.mark.asyncio
    async def test_a_call_that_began_before_the_change_sees_it(self) -> None:
        module = Product()
        async with aiopar.DeviceExecutor(["cpu"] * 3) as executor:
            with Gate() as gate, Gate() as first:
                running = executor.submit(module.under_autocast, gate)
                late = executor.submit(module.under_autocast, None, first)
                await gate.entered()
                await first.entered()
                await executor.run_sync(module.change)
                first.open()
                assert await late == 6.0
                gate.open()
                assert await running == 2.0

    @pytest.mark.asyncio
    async def test_a_generator_sees_weights_that_changed_between_its_steps(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        module = Product()
        async with executor.iterate(module.steps, buffer=0) as products:
            assert await anext(products) == 2.0
            await executor.run_sync(module.change)
            assert await anext(products) == 6.0

    @pytest.mark.asyncio
    async def test_a_function_may_ask_for_it(self) -> None:
        enabled = torch.is_autocast_cache_enabled
        async with aiopar.DeviceExecutor(["cpu"]) as executor:

            def outer() -> list[bool]:
                seen = [enabled()]
                with torch.autocast("cpu", cache_enabled=True):
                    seen.append(enabled())
                    seen.append(aiopar.wait(executor.submit(enabled)))
                    seen.append(enabled())
                torch.set_autocast_cache_enabled(True)
                return seen

            assert await executor.run_sync(outer) == [False, True, False, True]
            assert not await executor.run_sync(enabled)
            with torch.no_grad():
                call = executor.run_sync(enabled)
            assert not await call
        assert enabled(), "on the loop's thread it stays on"
