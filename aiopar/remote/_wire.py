"""Objects on their way to other processes: pickles, with the memory of tensors beside them."""

import ctypes
import io
import os
import pickle
import sys
import threading
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from ._channel import Buffer, Pickled

T = TypeVar("T")

_INLINE = 16 << 10
"""Up to so many bytes of tensors and arrays are part of the pickle."""
_OPEN = (Connection, io.TextIOWrapper)
"""Open files that pickle or cloudpickle would copy: as a bare number, as their text."""

# By name: pickle would look for a dtype in every module of the process.
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}

_ONE_NUMBER = bytearray(16)
"""The memory of tensors that are empty: torch makes none on no memory."""


class Encoder(pickle.Pickler):
    """Pickles one object, apart from the memory of its tensors and arrays.

    A tensor arrives as a tensor of its own on the CPU, with its strides if it was dense. A leaf
    keeps `requires_grad`. A tensor with a graph is refused, because the graph would be lost.

    A function or class goes by its name. If the other process cannot import that name, it goes by
    value, and `cloudpickle` pickles the object. A kept value goes as its key.

    Raises:
        TypeError: The object has an open file, or something else that cannot be pickled.
        ValueError: A tensor requires grad and is no leaf.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._buffers = _Buffers()
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.add)
        self.kept: list[Kept[Any]] = []
        """The kept values that the object refers to: the host must have them first."""

    def encode(self, obj: Any) -> Pickled:
        """The pickle of `obj`, and the memory beside it."""
        try:
            try:
                self.dump(obj)
                return self._file.getbuffer(), self._buffers.beside
            except (pickle.PicklingError, AttributeError, TypeError):
                if type(self) is not Encoder:
                    raise
            # A second time, because `cloudpickle` is slow, and names are the rule.
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
                f"cannot pickle {type(obj).__name__!r} object: it is an open file of this process; "
                "pass a queue of multiprocessing.Manager(), or the name of the file"
            )
        return NotImplemented

    def _reduce_named(self, obj: Any) -> Any:
        """How a function or class is pickled."""
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
        if not (is_parameter or type(tensor) is Tensor) or _is_special(tensor):
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
        self.beside: list[Buffer] = []
        """The buffers that are not part of the pickle."""
        self._inline = 0
        self._held: Any = None

    def _fits(self, size: int) -> bool:
        """Whether a buffer of this size becomes part of the pickle; if so, it is counted."""
        if self._inline + size > _INLINE:
            return False
        self._inline += size
        return True

    def hold(self, dense: Tensor) -> bytearray | pickle.PickleBuffer:
        """What the pickler pickles next, for the memory of a tensor."""
        size = dense.nbytes
        if self._fits(size):
            return bytearray(ctypes.string_at(dense.data_ptr(), size))
        return self.hold_object(dense)

    def hold_object(self, obj: object) -> pickle.PickleBuffer:
        """What the pickler pickles next, for an object that goes beside the pickle as it is."""
        self._held = obj
        return pickle.PickleBuffer(bytearray())  # stands for it

    def add(self, buffer: pickle.PickleBuffer) -> bool:
        """Called by the pickler for each buffer; True: it becomes part of the pickle."""
        memory, self._held = self._held, None
        if memory is None:
            memory = buffer.raw()
            if self._fits(memory.nbytes):
                return True
        self.beside.append(memory)
        return False


def _is_special(tensor: Tensor) -> bool:
    plain_memory = tensor.layout is torch.strided and not tensor.is_meta
    return not plain_memory or tensor.is_quantized or tensor.is_nested


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


# Kept values: what many calls use, and each host gets once: weights, functions.


class Kept(Generic[T]):
    """Stands for a value in the arguments of calls; a host replaces it by its copy of the value.

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
        self._lock = threading.RLock()  # the value's own code may use it

    def pack(self) -> tuple[str, Any]:
        """The key, and the form in which the value goes to hosts."""
        with self._lock:
            if self._pack is not None:
                self._packed = self._pack(self._value)  # type: ignore[arg-type]  # not packed yet
                self._pack = self._value = None
            return self._packed

    def again(self) -> "Kept[T]":
        """Stands for another copy of the packed value: hosts load it anew."""
        _, form = self.pack()
        again: Kept[T] = Kept(None, self.replica, lambda _: (unique_key(), form))  # type: ignore[arg-type]  # packed already
        return again

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Make this callable for checks, as the value is; only copies on hosts are called."""
        raise TypeError("a kept value can be called on its hosts only")

    @property
    def key(self) -> str:
        """The key under which hosts keep the value."""
        return self.pack()[0]


def unique_key() -> str:
    """A key that no other value has, on any machine."""
    return uuid.uuid4().hex


class Holding:
    """Which kept values a host has, as the process of the callers knows it."""

    def __init__(self) -> None:
        self._kept: dict[str, weakref.ref[Kept[Any]]] = {}
        self._gone: deque[str] = deque()

    def __contains__(self, kept: Kept[Any]) -> bool:
        return kept.key in self._kept

    def add(self, kept: Kept[Any]) -> None:
        """Note that the host has a value now."""
        key, gone = kept.key, self._gone
        self._kept[key] = weakref.ref(kept, lambda _: gone.append(key))

    def take_gone(self) -> list[str]:
        """The keys of values that are gone here since the last call: the host must forget them."""
        keys = []
        while self._gone:
            with suppress(IndexError):  # another thread has taken the last key
                keys.append(self._gone.popleft())
                del self._kept[keys[-1]]
        return keys


# Kept values, on the host.

_values: dict[str, Any] = {}


class _Failed:
    """In place of a value that could not be loaded."""

    def __init__(self, error: BaseException) -> None:
        self.error = error


def keep(key: str, load: Callable[[], Any], replica_on: torch.device | None) -> None:
    """Load and keep a value; on a host. An error is raised by the calls that use the value.

    Args:
        key: The key of the value.
        load: Makes the value.
        replica_on: The device of a module that is a replica; None: the value is no replica.
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
