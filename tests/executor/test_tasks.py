"""The tasks of one piece of work: how they close what they have read."""

import logging

import anyio
import pytest

from aiopar._base.thread_state import CallerState
from aiopar.executor._loop_tasks import Tasks


class Failing:
    """An async iterator that cannot be closed."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    async def aclose(self) -> None:
        raise self._error


async def raised_by_close(error: BaseException) -> list[BaseException]:
    tasks, raised, ended = Tasks(CallerState()), [], anyio.Event()

    async def close() -> None:
        try:
            await tasks.close(Failing(error), "a source")
        except BaseException as out:  # noqa: BLE001  # told to the test
            raised.append(out)

    tasks.spawn(close, ended.set)
    with anyio.fail_after(30):
        await ended.wait()
    return raised


def left(*errors: BaseException) -> BaseException:
    """What a task group raises that a generator was left in."""
    return BaseExceptionGroup("unhandled errors in a TaskGroup", [GeneratorExit(), *errors])


@pytest.mark.anyio
@pytest.mark.parametrize("error", [LookupError("mine"), left(LookupError("mine"))])
async def test_what_fails_when_it_is_closed_is_logged(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    assert await raised_by_close(error) == []
    [record] = caplog.records
    assert record.getMessage() == "a source failed when it was closed"
    assert record.levelno == logging.ERROR
    assert "LookupError: mine" in caplog.text
    assert "GeneratorExit" not in caplog.text


@pytest.mark.anyio
async def test_that_a_generator_was_left_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    assert await raised_by_close(left()) == []
    assert caplog.records == []


@pytest.mark.anyio
@pytest.mark.parametrize("error", [KeyboardInterrupt(), left(KeyboardInterrupt())])
async def test_an_interrupt_comes_out(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    assert await raised_by_close(error) == [error]
    assert caplog.records == []
