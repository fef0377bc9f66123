"""What kind of function a `Batcher` was given: where it runs, and whether it streams."""

import inspect
from enum import Enum
from typing import Any

from .._callables import check_callable, function_of, is_async


class Kind(Enum):
    """How a function is called, and what comes of it."""

    FUNCTION = "a function"
    GENERATOR = "a generator function"
    COROUTINE = "a coroutine function"
    ASYNC_GENERATOR = "an async generator function"

    @property
    def streams(self) -> bool:
        """Whether it yields outputs part by part."""
        return self in (Kind.GENERATOR, Kind.ASYNC_GENERATOR)

    @property
    def on_loop(self) -> bool:
        """Whether it runs on an event loop, not on a worker."""
        return self in (Kind.COROUTINE, Kind.ASYNC_GENERATOR)


def kind_of(fn: Any) -> Kind:
    """The kind of `fn`, which is not called.

    Raises:
        TypeError: It is not callable.
    """
    if is_async(fn):
        return Kind.COROUTINE
    function = function_of(fn)
    if inspect.isasyncgenfunction(function):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return Kind.GENERATOR
    check_callable(fn)
    return Kind.FUNCTION
