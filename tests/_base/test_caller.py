"""`CallerState`: work done later, under the state of when it was called."""

import asyncio
import contextlib
import contextvars
import gc
import pickle
import weakref
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import aiopar
from aiopar._base.thread_state import CallerState, applied
from tests import simdevice
from tests.caller_states import PLAIN, STATES, snapshot

variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


class Pause:
    """Awaited, it hands `value` to who drives the coroutine, and returns what that sends."""

    def __init__(self, value: object = None) -> None:
        self.value = value

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield self.value)


@pytest.mark.parametrize("state", STATES)
def test_every_step_runs_under_the_state_and_nothing_else_does(state: str) -> None:
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
def test_plain_steps_within_another_state(state: str) -> None:
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


def test_context_variables_are_those_of_the_caller_and_what_is_set_stays_inside() -> None:
    async def steps() -> list[int]:
        first = variable.get()
        variable.set(10)
        await Pause()
        return [first, variable.get()]

    token = variable.set(1)
    state = CallerState()
    variable.reset(token)
    for _ in range(2):  # each drive has a copy of its own
        coroutine = state.drive(steps)
        coroutine.send(None)
        assert variable.get() == 0
        with pytest.raises(StopIteration) as finished:
            coroutine.send(None)
        assert finished.value.value == [1, 10]


def test_values_go_in_and_out() -> None:
    async def steps(first: object) -> tuple[object, object]:
        return await Pause(first), await Pause("second")

    coroutine = CallerState().drive(steps, "first")
    assert coroutine.send(None) == "first"
    assert coroutine.send(1) == "second"
    with pytest.raises(StopIteration) as finished:
        coroutine.send(2)
    assert finished.value.value == (1, 2)


def test_an_error_thrown_in_can_be_handled() -> None:
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


def test_closed_early_its_blocks_are_left_under_the_state() -> None:
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


def test_closed_before_it_began_nothing_was_made() -> None:
    async def steps() -> None:
        raise AssertionError("never started")

    # A coroutine made inside would warn that it was never awaited, which is an error here.
    CallerState().drive(steps).close()


def test_an_error_thrown_in_leaves_no_cycle() -> None:
    # Not with a task: asyncio makes a cycle of its own when one is cancelled.
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


def test_an_error_that_was_waited_for_holds_nothing_of_the_drive() -> None:
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
    """Unlike built-in ones, it can be referred to weakly."""


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
def test_who_called_before_accelerators_were_in_use_had_the_default_streams(
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


def test_the_portable_part_goes_through_pickle() -> None:
    with (
        torch.no_grad(),
        torch.autocast("cpu", torch.float16, cache_enabled=False),
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
                torch.is_autocast_cache_enabled(),
                torch.empty(1).device.type,
            )

    with ThreadPoolExecutor(1) as host:
        assert host.submit(on_host).result() == (False, True, torch.float16, False, "meta")
    with torch.inference_mode():
        assert CallerState().portable.inference
    assert pickle.loads(pickle.dumps(CallerState().portable)) == CallerState().portable
