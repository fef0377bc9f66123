"""Tasks that outlive the code that started them: how they close an async iterator."""

import logging

import pytest

from aiopar.data import Pipeline


class Source:
    """Numbers without end; closing the iterator raises an error."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def __aiter__(self) -> "Source":
        return self

    async def __anext__(self) -> int:
        return 0

    async def aclose(self) -> None:
        raise self._error


def task_group_error(*errors: Exception) -> BaseException:
    """The error of a task group in an async generator that is closed."""
    return BaseExceptionGroup("unhandled errors in a TaskGroup", [GeneratorExit(), *errors])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "logged"),
    [
        (LookupError("mine"), True),
        (task_group_error(LookupError("mine")), True),
        (task_group_error(), False),
    ],
)
async def test_an_error_of_aclose_is_logged(
    error: BaseException, logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with Pipeline(Source(error)) as stream:
        await anext(stream)
    messages = [(record.getMessage(), record.levelno) for record in caplog.records]
    assert messages == [("an async source failed when it was closed", logging.ERROR)] * logged
    assert ("LookupError: mine" in caplog.text) == logged
    assert "GeneratorExit" not in caplog.text
