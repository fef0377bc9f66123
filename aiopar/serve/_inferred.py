"""What type checkers infer of a `Batcher`: the types of its items and outputs."""

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, ValuesView
from typing import TYPE_CHECKING, Any, Never, Protocol, TypeAlias, TypeVar, overload

from torch import Tensor

if TYPE_CHECKING:
    import typing_extensions

    In_contra = typing_extensions.TypeVar("In_contra", contravariant=True, default=Any)
    Part_co = typing_extensions.TypeVar("Part_co", covariant=True, default=Any)
    Out_co = typing_extensions.TypeVar("Out_co", covariant=True, default=Any)
else:  # type variables have defaults since CPython 3.13
    In_contra = TypeVar("In_contra", contravariant=True)
    Part_co = TypeVar("Part_co", covariant=True)
    Out_co = TypeVar("Out_co", covariant=True)
Arg_contra = TypeVar("Arg_contra", contravariant=True)
Result_co = TypeVar("Result_co", covariant=True)


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

AnyFunction: TypeAlias = Callable[
    ...,
    Outputs[Out_co]
    | Awaitable[Outputs[Out_co]]
    | Iterator[Outputs[Out_co]]
    | AsyncIterator[Outputs[Out_co]],
]
"""A function of any `FunctionKind`."""


class Unary(Protocol[Arg_contra, Result_co]):
    """A function of one argument."""

    # There are two overloads, because pyright would use a single one as the type of a lambda, and
    # report errors in the lambda's body.
    @overload
    def __call__(self, arg: Never, /) -> Result_co: ...
    @overload
    def __call__(self, arg: Arg_contra, /) -> Result_co: ...
