"""The checked options of a batcher; names and conditions of batchers and pools."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from .._base.arguments import (
    as_list,
    check_callable,
    check_instance,
    check_int,
    check_number,
    generator_kind,
    gives_async,
    name_of,
)
from .._base.collate import collate


class FunctionKind(NamedTuple):
    """How a function is called, and what it returns."""

    streams: bool = False  # it yields outputs part by part: a generator function
    on_loop: bool = False  # it runs on an event loop, not on a worker: an async function


def kind_of(fn: Any) -> FunctionKind:
    """The kind of `fn`, which is not called. Raises TypeError if it is not callable."""
    kind = FunctionKind(streams=generator_kind(fn) is not None, on_loop=gives_async(fn))
    if not any(kind):
        check_callable(fn)
    return kind


def fixed_sizes(
    batch_sizes: Iterable[int] | None, max_batch_size: int | None
) -> tuple[tuple[int, ...] | None, int]:
    """The sizes that batches are padded to, ascending, and the most items in a batch."""
    if batch_sizes is None:
        return None, 32 if max_batch_size is None else max_batch_size
    given = as_list("batch_sizes", batch_sizes, "ints")
    sizes = tuple(sorted({check_int("batch_sizes", size, at_least=1) for size in given}))
    if not sizes:
        raise ValueError("batch_sizes is empty: it needs at least one size")
    if max_batch_size not in (None, sizes[-1]):
        raise ValueError(
            f"max_batch_size must be the largest of batch_sizes, {sizes[-1]}, or be left out; "
            f"got {max_batch_size}"
        )
    return sizes, sizes[-1]


_COUNTS = ("max_batch_size", "max_pending", "concurrency")
_NUMBERS = ("max_queue_delay", "max_wait", "max_batch_cost", "timeout", "read_timeout")
_FUNCTIONS = ("unbatch_fn", "batch_key", "cost")
_OPTIONAL = ("concurrency", "max_wait", "max_batch_cost", "timeout", *_FUNCTIONS)


@dataclass(frozen=True, slots=True)
class BatcherSettings:
    """The options of a batcher, with the meaning that they have there."""

    max_batch_size: int
    max_pending: int
    max_wait: float | None
    max_batch_cost: float | None
    timeout: float | None
    read_timeout: float
    max_queue_delay: float = 0.0
    concurrency: int | None = None
    collate_fn: Callable[[list[Any]], Any] = collate
    unbatch_fn: Callable[[Any], Sequence[Any]] | None = None
    batch_key: Callable[[Any], Hashable] | None = None
    cost: Callable[[Any], float] | None = None
    padded: bool = False
    batch_sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "batch_sizes" or (value is None and name in _OPTIONAL):
                continue
            if name in _COUNTS:
                value = check_int(name, value, at_least=1)
            elif name in _NUMBERS:
                value = check_number(name, value, zero=name in ("max_queue_delay", "max_wait"))
            elif name == "padded":
                check_instance(name, value, bool)
            elif not callable(value):
                raise TypeError(f"{name} must be callable, got {value!r}")
            elif gives_async(value):
                raise TypeError(f"{name} must be a plain function, not an async one: {value!r}")
            object.__setattr__(self, name, value)  # the dataclass is frozen
        if self.padded and self.max_batch_cost is None:
            raise ValueError("padded needs max_batch_cost, the bound that it is about")


def name_for(named: object, name: str | None) -> str:
    """`name`, or the name of the function, or of the class of the object."""
    if name is None:
        return str(name_of(named))
    check_instance("name", name, str)
    return name


def condition(closing: bool, opened: bool, ready: bool) -> str:
    """The condition that a `repr` shows."""
    if closing:
        return "closed"
    if not opened:
        return "not open"
    return "ready" if ready else "out of service"
