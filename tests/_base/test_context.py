"""The caller's torch state: read, applied elsewhere, put back."""

import contextvars
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from aiopar._base.thread_state import (
    FRESH_STATE,
    SuspendedState,
    applied,
    capture_torch_state,
    copy_context,
    fresh,
    undo_leaks,
)
from tests.caller_states import PLAIN, STATES, nested_hooks, pack, snapshot

all_states = pytest.mark.parametrize("state", STATES)


def in_thread(fn: Callable[[], Any]) -> Any:
    """The result of `fn()` in a fresh thread, whose state is then a fresh thread's again."""
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


def test_plain_is_what_a_fresh_thread_has() -> None:
    assert in_thread(snapshot) == PLAIN
    assert in_thread(capture_torch_state) is None
    assert capture_torch_state() is None


@all_states
def test_every_state_is_seen(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
        assert captured is not None
        assert snapshot() != PLAIN
    assert captured != FRESH_STATE
    assert snapshot() == PLAIN


@all_states
def test_applied_in_another_thread(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
        expected = snapshot()
    assert captured is not None

    def under_it() -> dict[str, Any]:
        with applied(captured):
            return snapshot()

    assert in_thread(under_it) == expected


@all_states
def test_applied_is_left_by_an_exception(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
    assert captured is not None

    def fail() -> None:
        with pytest.raises(ZeroDivisionError), applied(captured):
            1 / 0  # noqa: B018

    in_thread(fail)


@all_states
def test_fresh_is_a_fresh_thread_and_then_the_state_is_back(state: str) -> None:
    with STATES[state]():
        expected = snapshot()
        with fresh():
            assert snapshot() == PLAIN
        assert snapshot() == expected
    assert snapshot() == PLAIN


def test_what_runs_within_fresh_leaves_the_state_below_alone() -> None:
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
    # Both blocks have left: were one missing, torch would have failed an assertion.


@all_states
def test_what_a_call_leaves_behind_is_undone(state: str) -> None:
    with STATES[state]():
        captured = capture_torch_state()
    assert captured is not None

    def leave_behind() -> None:
        applied(captured).__enter__()  # a block that was entered and is never left
        undo_leaks()
        assert snapshot() == PLAIN

    in_thread(leave_behind)


@all_states
def test_a_state_is_put_back_whatever_was_left_behind(state: str) -> None:
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


def test_a_default_device_that_was_left_behind_is_undone() -> None:
    def leave_behind() -> None:
        for _ in range(2):
            torch.set_default_device("meta")
            undo_leaks()
            assert snapshot() == PLAIN

    in_thread(leave_behind)


def test_inference_mode_that_was_undone_stays_so_when_the_block_is_left_late() -> None:
    def leave_late() -> None:
        block = torch.inference_mode()
        block.__enter__()
        undo_leaks()
        assert not torch.is_inference_mode_enabled()
        assert not torch.ones(1).is_inference()

    in_thread(leave_late)


def test_autocast_blocks_inside_do_not_drop_the_callers_cache_and_the_end_does() -> None:
    weight = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture_torch_state()
    assert captured is not None

    def step() -> torch.Tensor:
        with applied(captured):
            torch.mm(weight, weight)
            with torch.autocast("cpu", torch.bfloat16):
                pass
            return torch.mm(weight, weight).float()

    assert torch.equal(step(), torch.full((2, 2), 2.0))
    with torch.no_grad():
        weight.mul_(2)
    # A cast that outlived its call would be out of date now.
    assert torch.equal(step(), torch.full((2, 2), 8.0))


def test_context_variables_are_copied() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
    variable.set(1)
    context = copy_context()
    variable.set(2)
    assert context[variable] == 1
    context.run(variable.set, 3)
    assert variable.get() == 2


@pytest.mark.anyio
async def test_a_copied_context_does_not_say_which_loop_runs() -> None:
    context = copy_context()

    async def nothing() -> str:
        return anyio.get_current_task().name or "anonymous"

    names: list[str] = []
    thread = threading.Thread(target=lambda: names.append(context.run(anyio.run, nothing)))
    thread.start()
    while thread.is_alive():
        await anyio.lowlevel.checkpoint()
    assert names


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
