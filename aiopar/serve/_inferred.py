"""What type checkers infer of a `Batcher`: the types of its items and outputs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, ValuesView
from typing import Any, Generic, Never, Protocol, TypeAlias, TypedDict, TypeVar, overload

from torch import Tensor

In_contra = TypeVar("In_contra", contravariant=True)
Batch_contra = TypeVar("Batch_contra", contravariant=True)
Arg_contra = TypeVar("Arg_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)
Out_co = TypeVar("Out_co", covariant=True)


class _Rows(Protocol[Out_co]):
    """A tensor, array or list: an output per row. Not a tuple, which has no `__setitem__`."""

    def __getitem__(self, index: int, /) -> Out_co: ...
    def __setitem__(self, index: int, value: Any, /) -> None: ...


class _Tensors(Protocol[Out_co]):
    """A dict of tensors: each output is a dict of the same type."""

    def values(self) -> ValuesView[Tensor]: ...
    def copy(self) -> Out_co: ...


Outputs: TypeAlias = _Rows[Out_co] | _Tensors[Out_co]
"""The result for a batch, which `unbatch` splits into outputs."""

_Result: TypeAlias = (
    Outputs[Out_co]
    | Awaitable[Outputs[Out_co]]
    | Iterator[Outputs[Out_co]]
    | AsyncIterator[Outputs[Out_co]]
)

AnyFunction: TypeAlias = Callable[..., _Result[Out_co]]
"""A function of any `FunctionKind`."""


class Unary(Protocol[Arg_contra, Result_co]):
    """A function of one argument."""

    # With two overloads, because pyright would take the only one for the type of a lambda, and
    # report errors in the lambda's body.
    @overload
    def __call__(self, arg: Never, /) -> Result_co: ...
    @overload
    def __call__(self, arg: Arg_contra, /) -> Result_co: ...


Function: TypeAlias = Unary[Batch_contra, _Result[Out_co]]
"""A function of any `FunctionKind` whose batch has this type."""


class Module(Protocol[Batch_contra, Out_co]):
    """A module whose `forward` takes a batch as its one argument."""

    @property
    def forward(self) -> Callable[[Batch_contra], Outputs[Out_co]]: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


class Options(TypedDict, Generic[In_contra], total=False):
    """The options of `Batcher` that change no type, with the meaning that they have there."""

    max_batch_size: int
    max_queue_delay: float
    max_pending: int
    max_wait: float | None
    concurrency: int | None
    batch_key: Unary[In_contra, Hashable] | None
    cost: Unary[In_contra, float] | None
    max_batch_cost: float | None
    padded: bool
    timeout: float | None
    read_timeout: float
    name: str | None
