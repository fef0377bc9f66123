"""What kind of function a `Batcher` was given: where it runs, and whether it streams."""

import inspect
import types
from enum import Enum
from functools import partial
from typing import Any

from torch import nn

from .._call import check_callable
from ..nn import DataParallel

_FUNCTIONS = (types.FunctionType, types.MethodType)


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
    function = _function_of(fn)
    if isinstance(function, DataParallel) or inspect.iscoroutinefunction(function):
        return Kind.COROUTINE
    if inspect.isasyncgenfunction(function):
        return Kind.ASYNC_GENERATOR
    if inspect.isgeneratorfunction(function):
        return Kind.GENERATOR
    check_callable(fn)
    return Kind.FUNCTION


def _function_of(fn: Any) -> Any:
    """What Python runs when `fn` is called, as far as it says what kind of function it is."""
    while isinstance(fn, partial):
        fn = fn.func
    if isinstance(fn, (*_FUNCTIONS, DataParallel)) or not callable(fn):
        return fn
    # The `__call__` of a module returns whatever its `forward` does.
    return fn.forward if isinstance(fn, nn.Module) else type(fn).__call__
