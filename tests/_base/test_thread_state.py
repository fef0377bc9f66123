"""The state of a caller: captured, applied in other threads and for a coroutine, undone."""

import asyncio
import contextlib
import contextvars
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks

import aiopar
from aiopar._base.thread_state import (
    FRESH_STATE,
    CallerState,
    SuspendedState,
    applied,
    capture_torch_state,
    fresh,
    thread_torch_state,
    undo_leaks,
)
from aiopar.testing import Gate
from tests import simdevice
from tests.caller_states import PLAIN, STATES, nested_hooks, pack, snapshot

# The torch state of a thread


all_states = pytest.mark.parametrize("state", STATES)


def in_thread(fn: Callable[[], Any]) -> Any:
    """Run `fn()` in a new thread, and check that it leaves a new thread's state there."""
    results: list[Any] = []

    def run() -> None:
        results.append(fn())
        results.append(snapshot())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    result, left_behind = results
    assert left_behind == PLAIN
    return result


def test_plain_is_the_state_of_a_new_thread() -> None:
    assert in_thread(snapshot) == PLAIN
    assert in_thread(capture_torch_state) is None
    assert capture_torch_state() is None


@all_states
def test_applied_in_another_thread(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
        expected = snapshot()
    assert captured not in (None, FRESH_STATE)
    assert expected != PLAIN

    def under_it() -> dict[str, Any]:
        with applied(captured):
            return snapshot()

    assert in_thread(under_it) == expected


@all_states
def test_fresh_sets_a_new_threads_state_and_then_restores_the_old_one(state: str) -> None:
    with STATES[state]():
        expected = snapshot()
        with fresh():
            assert snapshot() == PLAIN
        assert snapshot() == expected
    assert snapshot() == PLAIN


def test_changes_inside_fresh_do_not_change_the_outer_state() -> None:
    torch.set_default_device("meta")
    try:
        with fresh():
            torch.set_default_device("cpu")
            torch._C._set_grad_enabled(False)
            undo_leaks()
            assert snapshot() == PLAIN
        assert torch.get_default_device() == torch.device("meta")
    finally:
        torch.set_default_device(None)
    assert snapshot() == PLAIN


def test_nested_hooks_are_kept_in_order() -> None:
    with nested_hooks():
        with fresh():
            pass
        assert torch._C._autograd._top_saved_tensors_default_hooks(True)[0] is pack
    # If a pair of hooks were missing, torch would fail an assertion when its block is left.


@all_states
def test_undo_leaks(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
    assert captured is not None

    def leave_behind() -> None:
        applied(captured).__enter__()  # a block that is never left
        undo_leaks()
        assert snapshot() == PLAIN

    in_thread(leave_behind)


@all_states
def test_taking_a_suspended_state_restores_the_outer_state(state: str) -> None:
    with STATES[state]():
        captured, inside = capture_torch_state(), snapshot()

    def leave_behind() -> None:
        torch._C._set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        SuspendedState.take(captured)
        assert snapshot() == inside
        SuspendedState.take(None)
        assert snapshot() == PLAIN

    in_thread(leave_behind)


def test_undo_leaks_of_a_default_device() -> None:
    def leave_behind() -> None:
        for _ in range(2):
            torch.set_default_device("meta")
            undo_leaks()
            assert snapshot() == PLAIN

    in_thread(leave_behind)


def test_undone_inference_mode_stays_off_when_its_block_is_collected() -> None:
    def leave_late() -> None:
        block = torch.inference_mode()
        block.__enter__()
        undo_leaks()
        assert not torch.is_inference_mode_enabled()
        assert not torch.ones(1).is_inference()

    in_thread(leave_late)


def test_inference_mode_may_be_left_on_again_and_again() -> None:
    with torch.inference_mode():
        inference = capture_torch_state()

    def leave_on() -> None:
        for _ in range(100):
            torch.inference_mode().__enter__()
            undo_leaks()
            assert snapshot() == PLAIN
            SuspendedState.take(inference)
            assert snapshot() == PLAIN | {"grad": False, "inference": True}
            SuspendedState.take(inference)
            undo_leaks()

    in_thread(leave_on)


# Modes that stay with the code that has entered them


MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "dispatch": FakeTensorMode,
    "disabled hooks": lambda: disable_saved_tensors_hooks("not here"),
    "one thread": lambda: torch.autograd.set_multithreading_enabled(False),
}
all_modes = pytest.mark.parametrize("mode", MODES)


def seen() -> tuple[str, str | None, bool]:
    """Everything that a mode changes."""
    return (
        type(torch.ones(1)).__name__,
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch._C._is_multithreading_enabled(),
    )


NO_MODES = ("Tensor", None, True)


@all_modes
def test_a_mode_is_taken_off_one_thread_and_put_on_another(mode: str) -> None:
    assert thread_torch_state() is None
    with MODES[mode]():
        inside, state = seen(), thread_torch_state()
        assert inside != NO_MODES
        suspended = SuspendedState.take(None)
        assert seen() == NO_MODES
        assert thread_torch_state() is None

        def elsewhere() -> tuple[Any, Any]:
            with suspended:
                there = seen()
            return there, seen()

        with ThreadPoolExecutor(1) as thread:
            assert thread.submit(elsewhere).result() == (inside, NO_MODES)
        SuspendedState.take(state)
        assert seen() == inside
    assert seen() == NO_MODES


@all_modes
def test_a_call_that_a_waiting_worker_runs_is_outside_its_modes(mode: str) -> None:
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
    assert helped == NO_MODES
    assert before == after != NO_MODES


def within(mode: str) -> Iterator[Any]:
    with MODES[mode]():
        for _ in range(3):
            yield seen()
    yield seen()


@all_modes
@pytest.mark.asyncio
async def test_a_generator_keeps_its_modes_between_steps(mode: str) -> None:
    expected = list(within(mode))
    found = []
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        executor.iterate(within, mode, buffer=0) as steps,
    ):
        async for step in steps:
            found.append(step)
            assert await executor.run_sync(seen) == NO_MODES
    assert found == expected


@all_modes
@pytest.mark.asyncio
async def test_the_modes_of_a_source_do_not_reach_the_stages(mode: str) -> None:
    def items() -> Iterator[int]:
        with MODES[mode]():
            yield from range(20)

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            stream = aiopar.map(lambda _: seen(), items())
        assert [each async for each in stream] == [NO_MODES] * 20


def test_allow_mutation_on_saved_tensors_does_not_reach_calls() -> None:
    """The mode clones saved tensors on its own thread only. So torch raises for other threads."""

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


def test_forward_grad_mode_reaches_calls() -> None:
    """torch turns both modes off in the forward of a function with its own `jvp`."""

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


# `CallerState`


variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


class Pause:
    """An awaitable that yields `value` to the driver of the coroutine, and returns what is sent."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self.value)


@pytest.mark.parametrize("state", STATES)
def test_drive_applies_the_state_to_every_step_only(state: str) -> None:
    async def steps() -> list[dict[str, Any]]:
        return [snapshot(), await Pause() or snapshot(), await Pause() or snapshot()]

    with STATES[state]():
        expected = snapshot()
        coroutine = CallerState().drive(steps)
    for _ in range(2):
        coroutine.send(None)
        assert snapshot() == PLAIN
    with pytest.raises(StopIteration) as finished:
        coroutine.send(None)
    assert finished.value.value == [expected] * 3
    assert snapshot() == PLAIN


@pytest.mark.parametrize("state", STATES)
def test_drive_applies_a_plain_state_inside_another_state(state: str) -> None:
    async def steps() -> list[dict[str, Any]]:
        return [snapshot(), await Pause() or snapshot()]

    coroutine = CallerState().drive(steps)
    with STATES[state]():
        expected = snapshot()
        coroutine.send(None)
        assert snapshot() == expected
        with pytest.raises(StopIteration) as finished:
            coroutine.send(None)
        assert snapshot() == expected
    assert finished.value.value == [PLAIN] * 2


def test_drive_uses_a_copy_of_the_callers_context_variables() -> None:
    async def steps() -> list[int]:
        first = variable.get()
        variable.set(10)
        await Pause()
        return [first, variable.get()]

    token = variable.set(1)
    state = CallerState()
    variable.reset(token)
    for _ in range(2):  # each drive has its own copy
        coroutine = state.drive(steps)
        coroutine.send(None)
        assert variable.get() == 0
        with pytest.raises(StopIteration) as finished:
            coroutine.send(None)
        assert finished.value.value == [1, 10]


def test_drive_passes_values_in_and_out() -> None:
    async def steps(first: object) -> tuple[object, object]:
        return await Pause(first), await Pause("second")

    coroutine = CallerState().drive(steps, "first")
    assert coroutine.send(None) == "first"
    assert coroutine.send(1) == "second"
    with pytest.raises(StopIteration) as finished:
        coroutine.send(2)
    assert finished.value.value == (1, 2)


def test_drive_passes_errors_in() -> None:
    async def steps() -> dict[str, Any]:
        with pytest.raises(ZeroDivisionError):
            await Pause()
        return snapshot()

    with torch.no_grad():
        coroutine = CallerState().drive(steps)
    coroutine.send(None)
    with pytest.raises(StopIteration) as finished:
        coroutine.throw(ZeroDivisionError())
    assert finished.value.value == PLAIN | {"grad": False}


def test_close_runs_finally_blocks_under_the_state() -> None:
    seen = []

    async def steps() -> None:
        try:
            await Pause()
        finally:
            seen.append(snapshot())

    with torch.no_grad():
        coroutine = CallerState().drive(steps)
    coroutine.send(None)
    coroutine.close()
    assert seen == [PLAIN | {"grad": False}]


def test_close_before_the_first_step_makes_no_coroutine() -> None:
    async def steps() -> None:
        raise AssertionError("never started")

    # A coroutine that was made and never awaited would cause a warning, which is an error here.
    CallerState().drive(steps).close()


def test_an_error_passed_in_leaves_no_cycle() -> None:
    # Without a task: asyncio itself makes a cycle when a task is cancelled.
    tensor = torch.ones(1)
    alive = weakref.ref(tensor)

    async def steps(_: torch.Tensor) -> None:
        await Pause()

    coroutine = CallerState().drive(steps, tensor)
    del tensor
    coroutine.send(None)
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(asyncio.CancelledError):
            coroutine.throw(asyncio.CancelledError())
        del coroutine
        assert alive() is None
    finally:
        gc.enable()


def test_an_error_of_an_awaited_call_leaves_no_cycle() -> None:
    async def failing(executor: aiopar.DeviceExecutor) -> None:
        await executor.run_sync(_fail)

    async def main() -> "weakref.ref[_Failed]":
        with aiopar.DeviceExecutor(["cpu"]) as executor:
            try:
                await CallerState().drive(failing, executor)
            except _Failed as error:
                return weakref.ref(error)
        raise AssertionError("no error came")

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


class _Failed(Exception):
    """Can be referred to weakly, unlike built-in errors."""


def _fail() -> None:
    raise _Failed


@pytest.mark.sim
def test_the_callers_stream_is_current_in_every_step() -> None:
    assert simdevice.available()
    stream = torch.Stream(device="sim:1")

    async def steps() -> list[torch.Stream]:
        first = torch.accelerator.current_stream("sim:1")
        await Pause()
        return [first, torch.accelerator.current_stream("sim:1")]

    before = torch.accelerator.current_stream("sim:1"), torch.accelerator.current_device_index()
    with stream:
        coroutine = CallerState().drive(steps)
    coroutine.send(None)
    after = torch.accelerator.current_stream("sim:1"), torch.accelerator.current_device_index()
    assert after == before
    with pytest.raises(StopIteration) as finished:
        coroutine.send(None)
    assert finished.value.value == [stream, stream]


@pytest.mark.sim
def test_a_capture_before_the_first_use_of_accelerators_means_the_default_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def steps() -> torch.Stream:
        return torch.accelerator.current_stream("sim:1")

    default = torch.accelerator.current_stream("sim:1")
    with monkeypatch.context() as before:
        before.setattr(torch.get_device_module("sim"), "is_initialized", lambda: False)
        caller = CallerState()
        unknown = len(caller.streams)
    assert not unknown
    assert [one.event for one in caller.streams] == [None, None]
    with torch.Stream(device="sim:1"), pytest.raises(StopIteration) as finished:
        caller.drive(steps).send(None)
    assert finished.value.value == default


def test_the_portable_part_can_be_pickled() -> None:
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.float16),
        torch.device("meta"),
        torch.autograd.graph.save_on_cpu(),  # not portable
    ):
        portable = pickle.loads(pickle.dumps(CallerState().portable))

    def on_host() -> tuple[object, ...]:
        with applied(portable.torch_state()):
            return (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.empty(1).device.type,
            )

    with ThreadPoolExecutor(1) as host:
        assert host.submit(on_host).result() == (False, True, torch.float16, "meta")
    with torch.inference_mode():
        assert CallerState().portable.inference
    assert pickle.loads(pickle.dumps(CallerState().portable)) == CallerState().portable
