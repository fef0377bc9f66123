"""What `ContinuousBatcher` says of a stepper that it cannot run."""

from typing import Any

import pytest
from torch import nn

import aiopar


class Countdown:
    def start(self, item: int) -> list[int]:
        return [item]

    def step(self, states: list[list[int]]) -> list[int | aiopar.Done[str]]:
        for state in states:
            state[0] -= 1
        return [state[0] or aiopar.Done("lift-off") for state in states]


class Asynchronous(Countdown):
    async def step(self, states: list[list[int]]) -> Any:  # type: ignore[override]  # refused
        return []


class StopsLater(Countdown):
    async def stop(self, state: list[int]) -> None:
        pass


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "class": (Countdown, TypeError, "expected a stepper, .* got the class Countdown"),
    "module": (nn.Linear(1, 1), TypeError, "start and step, got Linear"),
    "async step": (Asynchronous(), TypeError, "Asynchronous.step is a coroutine function"),
    "async stop": (StopsLater(), TypeError, "StopsLater.stop is a coroutine function"),
    "no held": (Countdown(), ValueError, "the method held, and Countdown has none"),
}
each_refused = pytest.mark.parametrize(("given", "error", "message"), REFUSED.values(), ids=REFUSED)


@each_refused
def test_a_stepper_that_cannot_run_is_refused_at_once(
    given: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        aiopar.ContinuousBatcher(given, max_batch_cost=4.0)


@pytest.mark.asyncio
@each_refused
async def test_a_stepper_of_a_replica_that_cannot_run_fails_its_requests(
    given: Any, error: type[Exception], message: str
) -> None:
    pool = aiopar.ReplicaPool(nn.Linear(1, 1), ["cpu"])
    batcher = aiopar.ContinuousBatcher(pool, stepper=lambda _: given, max_batch_cost=4.0)
    async with pool, batcher:
        with pytest.raises(error, match=message):
            await batcher(3)


def test_a_pool_needs_a_factory_of_steppers_and_a_stepper_none() -> None:
    pool = aiopar.ReplicaPool(nn.Linear(1, 1), ["cpu"])
    with pytest.raises(ValueError, match="a pool needs stepper="):
        aiopar.ContinuousBatcher(pool, stepper=None)  # type: ignore[call-overload]  # refused
    with pytest.raises(TypeError, match="as its class does, not Countdown"):
        aiopar.ContinuousBatcher(pool, stepper=Countdown())  # type: ignore[call-overload]  # refused
    with pytest.raises(ValueError, match="stepper= is for a pool"):
        aiopar.ContinuousBatcher(Countdown(), stepper=Countdown)  # type: ignore[call-overload]  # refused
