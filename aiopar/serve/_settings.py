"""How a batcher or a pool is, in words."""

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from .._base.arguments import (
    check_callable,
    check_instance,
    check_int,
    check_number,
    function_of,
    gives_async,
    is_async,
    name_of,
)


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


_NEVER_NONE = ("max_batch_size", "max_queue_delay", "max_pending", "collate_fn", "padded")


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """The options of `Batcher`, checked; they mean what they mean there."""

    max_batch_size: int
    max_queue_delay: float
    max_pending: int
    max_wait: float | None
    concurrency: int | None
    collate_fn: Callable[[list[Any]], Any]
    unbatch_fn: Callable[[Any], Sequence[Any]] | None
    """None: the default, which runs on the loop's thread."""
    batch_key: Callable[[Any], Hashable] | None
    cost: Callable[[Any], float] | None
    max_batch_cost: float | None
    padded: bool
    timeout: float | None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and name not in _NEVER_NONE:
                continue
            if name in ("max_batch_size", "max_pending", "concurrency"):
                self._set(name, check_int(name, value, at_least=1))
            elif name in ("max_queue_delay", "max_wait", "max_batch_cost", "timeout"):
                zero = name in ("max_queue_delay", "max_wait")
                self._set(name, check_number(name, value, zero=zero))
            elif name == "padded":
                check_instance(name, value, bool)
            elif not callable(value):
                raise TypeError(f"{name} must be callable, got {value!r}")
            elif gives_async(value):
                raise TypeError(f"{name} must be a plain function, not an async one: {value!r}")
        if self.max_batch_cost is not None and self.cost is None:
            raise ValueError("max_batch_cost needs cost, a function from an item to its cost")
        if self.padded and self.max_batch_cost is None:
            raise ValueError("padded needs max_batch_cost, the bound that it is about")

    def _set(self, name: str, value: float) -> None:
        object.__setattr__(self, name, value)  # of a frozen dataclass, which is not made yet


def name_for(named: object, name: str | None) -> str:
    """`name`, or what `name_of` says."""
    if name is None:
        return str(name_of(named))
    if not isinstance(name, str):
        raise TypeError(f"name must be a str, not {type(name).__name__}")
    return name


def condition(closing: bool, opened: bool, ready: bool) -> str:
    """What its `repr` says."""
    if closing:
        return "closed"
    if not opened:
        return "not open"
    return "ready" if ready else "out of service"
