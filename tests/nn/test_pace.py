"""When the replicas of a module take turns."""

import asyncio
import copy
import pickle
import threading
from functools import partial

import pytest
import torch
from torch import nn

import aiopar
from aiopar.executor._turns import Turns
from aiopar.nn._pace import _PERIOD, _SAMPLES, Pace

from .sample_modules import TakesTurns

FEW, MANY = 1.2, 1.9  # threads at a time


def run(pace: Pace, *, at_once: float, in_turn: float, threads: float) -> str:
    """A call of two replicas, which takes as many seconds as is said of the way that it goes."""
    turns = pace.turns(2)
    if turns is None:
        return "at once"
    seconds = in_turn if turns.limit else at_once
    turns.ended(0.0, seconds, 0.0)
    turns.ended(0.0, seconds, seconds * threads)
    return "in turn" if turns.limit else "at once"


def runs(pace: Pace, calls: int, *, at_once: float, in_turn: float, threads: float) -> list[str]:
    """Some such calls."""
    return [run(pace, at_once=at_once, in_turn=in_turn, threads=threads) for _ in range(calls)]


LOOK = ["at once"] * 2 * _SAMPLES  # warming up, and measured
REST = _PERIOD - 2 * _SAMPLES


def test_those_bound_by_the_interpreter_take_turns() -> None:
    pace = Pace()
    period = runs(pace, _SAMPLES + _PERIOD, at_once=2.0, in_turn=1.0, threads=FEW)
    assert period == LOOK + ["in turn"] * (_SAMPLES + REST)


def test_those_that_compute_at_the_same_time_never_do() -> None:
    pace = Pace()
    assert runs(pace, 3 * _PERIOD, at_once=2.0, in_turn=1.0, threads=MANY) == (
        ["at once"] * 3 * _PERIOD
    )


def test_those_that_wait_for_something_never_do() -> None:
    pace = Pace()
    assert runs(pace, _PERIOD, at_once=2.0, in_turn=1.0, threads=0.2) == ["at once"] * _PERIOD


@pytest.mark.parametrize("in_turn", [1.9, 4.0])
def test_turns_that_gain_little_are_tried_only(in_turn: float) -> None:
    pace = Pace()
    period = runs(pace, _SAMPLES + _PERIOD, at_once=2.0, in_turn=in_turn, threads=FEW)
    assert period == LOOK + ["in turn"] * _SAMPLES + ["at once"] * REST


def test_a_call_that_was_slow_by_chance_decides_nothing() -> None:
    pace = Pace()
    runs(pace, 2 * _SAMPLES - 1, at_once=2.0, in_turn=1.9, threads=FEW)
    run(pace, at_once=50.0, in_turn=50.0, threads=FEW)
    period = runs(pace, 2 * _SAMPLES, at_once=2.0, in_turn=1.9, threads=FEW)
    assert period == ["in turn"] * _SAMPLES + ["at once"] * _SAMPLES


def test_it_looks_again() -> None:
    pace = Pace()
    runs(pace, _SAMPLES + _PERIOD, at_once=2.0, in_turn=1.0, threads=FEW)
    period = runs(pace, _PERIOD, at_once=2.0, in_turn=1.0, threads=MANY)
    assert period == ["at once"] * _PERIOD


def test_what_is_never_measured_runs_at_once() -> None:
    pace = Pace()
    asked = [pace.turns(2) for _ in range(_SAMPLES + _PERIOD)]  # each fails, or is cancelled
    assert [turns for turns in asked if turns is not None and turns.limit] == []


def test_turns_that_are_never_measured_are_tried_only() -> None:
    pace = Pace()
    runs(pace, 2 * _SAMPLES, at_once=2.0, in_turn=1.0, threads=FEW)
    asked = [pace.turns(2) for _ in range(_PERIOD - _SAMPLES)]
    assert [turns is None for turns in asked] == [False] * _SAMPLES + [True] * (
        _PERIOD - 2 * _SAMPLES
    )


@pytest.mark.parametrize(("at_once", "limit"), [(0.01, 0.02), (10.0, 0.25)])
def test_how_long_a_replica_waits_for_its_turn(at_once: float, limit: float) -> None:
    pace = Pace()
    runs(pace, 2 * _SAMPLES, at_once=at_once, in_turn=at_once / 2, threads=FEW)
    turns = pace.turns(2)
    assert turns is not None
    assert turns.limit == limit


class Noted(nn.Module):
    """Notes when it starts and returns."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events
        self.linear = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append("starts")
        y: torch.Tensor = self.linear(x)
        self.events.append("returns")
        return y


@pytest.mark.asyncio
@pytest.mark.parametrize("grad", [True, False])
async def test_a_wrapper_whose_replicas_take_turns(grad: bool) -> None:
    events: list[str] = []
    module = Noted(events)
    dp = aiopar.DataParallel(module, ["cpu"] * 3)
    dp._pace = TakesTurns()
    x = torch.randn(6, 4)
    with torch.set_grad_enabled(grad):
        for _ in range(20):
            events.clear()
            y = await dp(x)
            assert events == ["starts", "returns"] * 3
    assert torch.allclose(y, module.linear(x))


@pytest.mark.asyncio
async def test_replicas_that_meet_take_no_turns() -> None:
    torch.manual_seed(0)
    norm = aiopar.SynchronizedBatchNorm1d(4)
    dp = aiopar.DataParallel(norm, ["cpu", "cpu"])
    dp._pace = TakesTurns()
    x = torch.randn(6, 4)
    expected = nn.BatchNorm1d(4)(x)
    for _ in range(3):
        assert torch.allclose(await dp(x), expected, atol=1e-6)


@pytest.mark.asyncio
async def test_it_is_asked_once_a_call_of_several_replicas() -> None:
    class Counting(Pace):
        asked = 0

        def turns(self, count: int) -> Turns | None:
            type(self).asked += 1
            return super().turns(count)

    dp = aiopar.DataParallel(nn.Linear(4, 2), ["cpu", "cpu"])
    dp._pace = Counting()
    await asyncio.gather(*(dp(torch.ones(4, 4)) for _ in range(20)))
    await dp(torch.ones(1, 4))  # a single piece
    assert Counting.asked == 20


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_copy_finds_out_for_itself(protocol: int) -> None:
    pace = Pace()
    runs(pace, _PERIOD, at_once=2.0, in_turn=1.0, threads=FEW)
    for other in (copy.deepcopy(pace), pickle.loads(pickle.dumps(pace, protocol))):
        assert run(pace, at_once=2.0, in_turn=1.0, threads=FEW) == "in turn"
        assert run(other, at_once=2.0, in_turn=1.0, threads=FEW) == "at once"


def test_the_first_calls_of_all_are_not_measured() -> None:
    pace = Pace()
    assert [pace.turns(2) for _ in range(_SAMPLES)] == [None] * _SAMPLES
    assert pace.turns(2) is not None


def test_what_is_told_in_the_next_period_goes_nowhere() -> None:
    pace = Pace()
    late = [pace.turns(2) for _ in range(_SAMPLES + _PERIOD)][_SAMPLES:]
    assert pace.turns(2) is not None
    for turns in late:
        assert turns is not None
        turns.ended(0.0, 1.0, 1.0)
        turns.ended(0.0, 1.0, 0.0)
    turns = pace.turns(2)
    assert turns is not None
    assert not turns.limit


def test_asked_and_told_by_many_threads() -> None:
    pace = Pace()
    times = {"at_once": 2.0, "in_turn": 1.0, "threads": FEW}
    many = [threading.Thread(target=partial(runs, pace, 4 * _PERIOD, **times)) for _ in range(4)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    assert "in turn" in runs(pace, _PERIOD, **times)


class NeverAsked(Pace):
    """Fails a call that asks."""

    def turns(self, count: int) -> Turns:
        raise AssertionError("asked")


@pytest.mark.sim
@pytest.mark.asyncio
async def test_on_accelerators_replicas_run_at_once() -> None:
    devices = ["sim:0", "sim:1"]
    dp = aiopar.DataParallel(nn.Linear(4, 2).to(devices[0]), devices)
    dp._pace = NeverAsked()
    assert (await dp(torch.ones(4, 4, device=devices[0]))).shape == (4, 2)
