"""Objects on their way to other processes: pickles, with the memory of tensors beside them."""

import ctypes
import io
import os
import pickle
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from ._channel import Buffer, Pickled

T = TypeVar("T")

_INLINE = 16 << 10  # up to so many bytes of tensors and arrays are part of the pickle
# Open files. Pickle would send the number of a `Connection`, cloudpickle the text of a file.
_OPEN = (Connection, io.TextIOWrapper)

# A dtype goes by its name here. Pickle would look for a dtype in every module of the process.
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}

_ONE_NUMBER = bytearray(16)  # for empty tensors: `torch.frombuffer` refuses an empty buffer


class Encoder(pickle.Pickler):
    """Pickles one object, apart from the memory of its tensors and arrays.

    A tensor arrives as a tensor of its own on the CPU, with its strides if it was dense. A leaf
    keeps `requires_grad`. A tensor with a graph is refused, because the graph would be lost.

    A function or class goes by its name. If the other process cannot import the name, the function
    goes by value, through `cloudpickle`. A kept value goes as its key.

    Raises:
        TypeError: The object has an open file, or something else that cannot be pickled.
        ValueError: A tensor requires grad and is no leaf.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._buffers = _Buffers()
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.add)
        self.kept: list[Kept[Any]] = []  # the host must have them before the object

    def encode(self, obj: Any) -> Pickled:
        """The pickle of `obj`, and the memory beside it."""
        try:
            try:
                self.dump(obj)
                # No `getbuffer`: since CPython 3.13 the collector warns of a file with such a view.
                return memoryview(self._file.getvalue()), self._buffers.beside
            except (pickle.PicklingError, AttributeError, TypeError):
                if type(self) is not Encoder:
                    raise
            # `cloudpickle` is slow, and most functions go by name. So it is only the second try.
            by_value = _by_value()()
            self.kept = by_value.kept
            return by_value.encode(obj)
        finally:
            del obj  # an error's traceback holds this frame

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if type(obj) is Kept:
            self.kept.append(obj)
            return kept_value, (obj.key,)
        if isinstance(obj, FunctionType | type):
            return self._reduce_named(obj)
        if isinstance(obj, _OPEN):
            raise TypeError(
                f"cannot pickle {type(obj).__name__!r} object: it is an open file of this process"
            )
        return NotImplemented

    def _reduce_named(self, obj: Any) -> Any:
        if obj.__module__ == "__main__" and not main_can_be_imported():
            raise pickle.PicklingError("no other process can import the main module")
        return NotImplemented  # by its name

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                "a tensor that requires grad has a graph, which cannot leave its process: pass "
                "tensor.detach(), or call under torch.no_grad() or torch.inference_mode()"
            )
        is_parameter = type(tensor) is torch.nn.Parameter
        plain = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
        if not (is_parameter or type(tensor) is Tensor) or tensor.is_meta or not plain:
            return NotImplemented  # torch's own way
        dense = _dense(tensor)
        memory = self._buffers.hold(dense)
        rebuilt = (memory, _NAMES[dense.dtype], (*dense.shape,), dense.stride())
        if is_parameter or tensor.requires_grad or tensor.__dict__:
            rebuilt = (*rebuilt, tensor.requires_grad, is_parameter, tensor.__dict__)  # type: ignore[assignment]  # a longer tuple
        return rebuild_tensor, rebuilt


@cache
def main_can_be_imported() -> bool:
    """Whether other processes can import the main module: that of a notebook has no file."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    has_name = getattr(main, "__spec__", None) is not None  # started by `python -m`
    return has_name or (file is not None and os.path.exists(file))


@cache
def _by_value() -> type[Encoder]:
    from cloudpickle import Pickler  # few programs need it

    class ByValueEncoder(Encoder, Pickler):  # type: ignore[misc]  # cloudpickle has no types
        def _reduce_named(self, obj: Any) -> Any:
            try:
                super()._reduce_named(obj)
                pickle.dumps(obj)
            except (pickle.PicklingError, AttributeError):
                return Pickler.reducer_override(self, obj)
            return NotImplemented

    return ByValueEncoder


class _Buffers:
    """The buffers of one pickle. A callback of the `Encoder` itself would be a reference cycle."""

    def __init__(self) -> None:
        self.beside: list[Buffer] = []  # those that are not part of the pickle
        self._inline = 0
        self._held: Any = None

    def _fits(self, size: int) -> bool:
        """Whether a buffer of this size becomes part of the pickle; if so, it is counted."""
        if self._inline + size > _INLINE:
            return False
        self._inline += size
        return True

    def hold(self, dense: Tensor) -> bytearray | pickle.PickleBuffer:
        """What the pickler pickles in place of the memory of a tensor."""
        size = dense.nbytes
        if self._fits(size):
            return bytearray(ctypes.string_at(dense.data_ptr(), size))
        return self.hold_object(dense)

    def hold_object(self, obj: object) -> pickle.PickleBuffer:
        """What the pickler pickles in place of an object that goes beside the pickle."""
        self._held = obj
        return pickle.PickleBuffer(bytearray())

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Called by the pickler for each buffer; True: the buffer becomes part of the pickle."""
        memory, self._held = self._held, None
        if memory is None:
            memory = buffer.raw()
            if self._fits(memory.nbytes):
                return True
        self.beside.append(memory)
        return False


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU, without a graph, with no gaps and no overlaps in its memory."""
    dense = tensor.detach() if tensor.requires_grad else tensor
    if not dense.is_cpu:
        dense = dense.cpu()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    if dense.is_contiguous() or torch.empty_like(dense, device="meta").stride() == dense.stride():
        return dense  # perhaps with other strides, as `channels_last`, but dense
    return dense.contiguous()


def rebuild_tensor(
    memory: bytearray | memoryview,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    is_parameter: bool = False,
    attributes: Mapping[str, Any] | None = None,
) -> Tensor:
    """The tensor of a message, on the memory of the message."""
    flat = torch.frombuffer(memory or _ONE_NUMBER, dtype=_DTYPES[dtype])
    tensor = flat.as_strided(shape, stride)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    if attributes:
        tensor.__dict__.update(attributes)
    return tensor


def decode(data: memoryview | bytes, buffers: Sequence[memoryview]) -> Any:
    """The object of a message, on the memory of `buffers`."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301  # from a process that this one started


# Kept values: weights and functions that many calls use. Each host gets them once.


class Kept(Generic[T]):
    """Stands for a value in the arguments of calls. A host uses its own copy of the value instead.

    The first call that uses the value packs it. Hosts do not see later changes. When this object is
    gone, the hosts forget their copies.

    Args:
        value: The value.
        replica: Whether a module is moved to the device of its host, and needs no gradients.
        pack: Makes a key that no other value of this process has, and the form in which the value
            goes to hosts.
    """

    def __init__(self, value: T, replica: bool, pack: Callable[[T], tuple[str, Any]]) -> None:
        self.replica = replica
        self._pack: Callable[[T], tuple[str, Any]] | None = pack
        self._value: T | None = value
        self._packed: tuple[str, Any] = ("", None)
        self._lock = threading.RLock()  # re-entrant: `pack` runs code of the value

    def pack(self) -> tuple[str, Any]:
        """The key, and the form in which the value goes to hosts."""
        with self._lock:
            if self._pack is not None:
                self._packed = self._pack(self._value)  # type: ignore[arg-type]  # not packed yet
                self._pack = self._value = None
            return self._packed

    def again(self) -> "Kept[T]":
        """Make an object that stands for another copy: hosts load the packed value anew."""
        _, form = self.pack()
        again: Kept[T] = Kept(None, self.replica, lambda _: (uuid.uuid4().hex, form))  # type: ignore[arg-type]  # packed already
        return again

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Make this object pass checks for a callable; only the copies on hosts are called."""
        raise TypeError("a kept value can be called on its hosts only")

    @property
    def key(self) -> str:
        """The key under which hosts keep the value."""
        return self.pack()[0]


class Holding:
    """The kept values that a host has, as the process of the callers knows it."""

    def __init__(self) -> None:
        self._kept: dict[str, weakref.ref[Kept[Any]]] = {}

    def __contains__(self, kept: Kept[Any]) -> bool:
        return kept.key in self._kept

    def add(self, kept: Kept[Any]) -> None:
        """Note that the host has a value now."""
        self._kept[kept.key] = weakref.ref(kept)

    def take_gone(self) -> list[str]:
        """The keys of the values that this process dropped since the last call of this method."""
        gone = [key for key, kept in self._kept.copy().items() if kept() is None]
        for key in gone:
            self._kept.pop(key, None)  # None: another thread has removed it
        return gone


# Kept values, on the host.

_values: dict[str, Any] = {}


class _Failed(NamedTuple):
    """Kept in place of a value that could not be loaded."""

    error: BaseException


def keep(key: str, load: Callable[[], Any], replica_on: torch.device | None) -> None:
    """Load and keep a value; on a host. The calls that use the value raise an error of `load`.

    `replica_on` is the device of a module that is a replica; None: the value is no replica.
    """
    try:
        value = load()
        if replica_on is not None and isinstance(value, torch.nn.Module):
            value = value.to(replica_on).requires_grad_(False)
    except BaseException as error:  # noqa: BLE001  # raised by `kept_value`
        value = _Failed(error)
    _values[key] = value


def kept_value(key: str) -> Any:
    """A value that this host keeps."""
    value = _values[key]
    if isinstance(value, _Failed):
        raise value.error
    return value


def forget(keys: Iterable[str]) -> None:
    """Drop values; on a host."""
    for key in keys:
        _values.pop(key, None)
