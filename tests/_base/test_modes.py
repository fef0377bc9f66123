"""Dispatch modes, disabled hooks, backward in one thread: they stay with the code in them."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.utils.flop_counter import FlopCounterMode

import aiopar
from aiopar._base.thread_state import SuspendedState, thread_torch_state
from aiopar.testing import Gate

MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dispatch": FakeTensorMode,
    "disabled hooks": lambda: disable_saved_tensors_hooks("not here"),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
}
all_modes = pytest.mark.parametrize("mode", MODES)


def seen() -> tuple[str, str | None, bool]:
    """What each of them would change."""
    return (
        type(torch.ones(1)).__name__,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._is_multithreading_enabled(),
    )


PLAIN = ("Tensor", None, True)


@all_modes
def test_taken_off_and_put_elsewhere(mode: str) -> None:
    assert thread_torch_state() is None
    with MODES[mode]():
        inside, state = seen(), thread_torch_state()
        assert inside != PLAIN
        suspended = SuspendedState.take(None)
        assert seen() == PLAIN
        assert thread_torch_state() is None

        def elsewhere() -> tuple[Any, Any]:
            with suspended:
                there = seen()
            return there, seen()

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(elsewhere).result() == (inside, PLAIN)
        SuspendedState.take(state)
        assert seen() == inside
    assert seen() == PLAIN


@all_modes
def test_a_call_that_a_waiter_runs_is_outside_of_what_that_is_in(mode: str) -> None:
    def wait_within(of_another: "aiopar.Future[Any]") -> tuple[Any, Any, Any]:
        with MODES[mode]():
            before = seen()
            return before, of_another.wait(), seen()

    with aiopar.DeviceExecutor(["cpu"]) as executor, Gate() as gate:
        executor.submit(gate)
        gate.wait_entered()
        futures: list[aiopar.Future[Any]] = []
        waiting = executor.submit(lambda: wait_within(futures[0]))
        futures.append(executor.submit(seen))
        gate.open()
        before, helped, after = waiting.result()
    assert helped == PLAIN
    assert before == after != PLAIN


def within(mode: str) -> Iterator[Any]:
    with MODES[mode]():
        for _ in range(3):
            yield seen()
    yield seen()


@all_modes
@pytest.mark.asyncio
async def test_a_generator_keeps_them_from_step_to_step_and_to_itself(mode: str) -> None:
    expected = list(within(mode))
    found = []
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        executor.iterate(within, mode, buffer=0) as steps,
    ):
        async for step in steps:
            found.append(step)
            assert await executor.run_sync(seen) == PLAIN
    assert found == expected


@all_modes
@pytest.mark.asyncio
async def test_a_source_keeps_them_to_itself(mode: str) -> None:
    def items() -> Iterator[int]:
        with MODES[mode]():
            yield from range(20)

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            stream = aiopar.map(lambda _: seen(), items())
        assert [each async for each in stream] == [PLAIN] * 20


@pytest.mark.asyncio
async def test_flops_are_counted_over_all_steps() -> None:
    def counted() -> Iterator[int]:
        square = torch.ones(8, 8)
        with FlopCounterMode(display=False) as counter:
            for _ in range(3):
                square @ square
                yield counter.get_total_flops()

    async with aiopar.get_executor().iterate(counted) as steps:
        assert [flops async for flops in steps] == list(counted())


@pytest.mark.asyncio
async def test_who_suspends_in_disabled_hooks_disturbs_nobody() -> None:
    def suspended() -> Iterator[None]:
        with disable_saved_tensors_hooks("not here"):
            yield

    def uses_hooks() -> None:
        with save_on_cpu():
            torch.autograd.backward(torch.ones(1, requires_grad=True).exp())

    async with aiopar.DeviceExecutor(["cpu"]) as executor, executor.iterate(suspended) as steps:
        await anext(steps)
        await executor.run_sync(uses_hooks)


def test_saved_tensors_that_may_be_written_to_stay_with_their_mode() -> None:
    """It clones them before, on the thread that is in it: elsewhere gradients would be wrong."""

    def gradient(run: Callable[[Callable[[], torch.Tensor]], Any]) -> Any:
        x = torch.arange(1.0, 4.0, requires_grad=True)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            y = run(x.exp)
            z = y * y
            run(lambda: y.mul_(3.0))
            torch.autograd.backward((z + y).sum())
        return x.grad

    assert gradient(lambda fn: fn()).isfinite().all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradient(lambda fn: asyncio.run(aiopar.run_sync(fn)))


def test_forward_grad_mode_goes_with_grad_mode() -> None:
    """torch switches both off in the forward of a function that has its own `jvp`."""

    class Sine(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> Any:
            return aiopar.wait(aiopar.fork(torch.sin, x))

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_forward(*inputs)

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> Any:
            [x] = ctx.saved_tensors
            return x.cos() * tangent

    forward_ad: Any = torch.autograd.forward_ad
    with forward_ad.dual_level():
        x = forward_ad.make_dual(torch.ones(2), torch.ones(2))
        tangent = forward_ad.unpack_dual(Sine.apply(x)).tangent  # type: ignore[no-untyped-call]
    torch.testing.assert_close(tangent, torch.ones(2).cos())
