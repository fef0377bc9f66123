"""The options of a `Batcher`, checked."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from .._callables import gives_async, name_of
from .._checks import check_instance, check_int, check_number

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
