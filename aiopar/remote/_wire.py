"""Messages between processes: pickles, with the memory of tensors and arrays beside them.

A small message travels whole through a socket. Larger tensors are copied once, into an `Arena` of
the sender, and the receiver uses them there.
"""

import ctypes
import errno
import io
import os
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing.connection import Connection
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.tracebacks import add_note_once
from ._arena import Arena
from ._kept import Kept, kept_value

_INLINE = 16 << 10
"""Up to so many bytes of tensors and arrays are part of the pickle."""
_HEADER = struct.Struct("<QI")  # the lengths of the pickle and of the table of buffers
_ENTRY = struct.Struct("<QQ")  # of the table: the offset of a block in the arena, and its size
_SMALL = 64 << 10
"""Messages up to so many bytes are received at once."""
_NOTE = " cannot be pickled"
_OPEN = (Connection, io.TextIOWrapper)
"""Open files that pickle or cloudpickle would copy: as a bare number, as their text."""
_CHUNK = 1 << 20
"""So many bytes are copied with the GIL held."""

# By name: pickle would look for a dtype in every module of the process.
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}

_ONE_NUMBER = bytearray(16)
"""The memory of tensors that are empty: torch makes none on no memory."""

Buffer: TypeAlias = Tensor | memoryview
"""Memory beside a pickle: of a tensor that is dense, on the CPU; of a NumPy array, ..."""
Pickled: TypeAlias = tuple[memoryview, list[Buffer]]


class Encoder(pickle.Pickler):
    """Pickles one object, apart from the memory of its tensors and arrays.

    A tensor arrives as a tensor of its own on the CPU, with its strides if it was dense. Only
    `requires_grad` of leaves is kept; of a tensor with a graph the graph would be lost.

    A function or class goes by its name. If the other process cannot import that, it goes by value,
    and `cloudpickle` pickles the object.

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
            if self._can_dump(obj):
                return self._file.getbuffer(), self._buffers.beside
            # A second time, because `cloudpickle` is slow, and names are the rule.
            by_value = _by_value()()
            self.kept = by_value.kept
            return by_value.encode(obj)
        finally:
            del obj  # an error's traceback holds this frame

    def _can_dump(self, obj: Any) -> bool:
        try:
            self.dump(obj)
        except (pickle.PicklingError, AttributeError, TypeError):
            if type(self) is not Encoder:
                raise
            return False
        finally:
            del obj  # an error's traceback holds this frame
        return True

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
        rebuilt = (
            self._buffers.hold(dense),
            _NAMES[dense.dtype],
            (*dense.shape,),
            dense.stride(),
        )
        if is_parameter or tensor.requires_grad or tensor.__dict__:
            return rebuild_leaf, (*rebuilt, tensor.requires_grad, is_parameter, tensor.__dict__)
        return rebuild_tensor, rebuilt


@cache
def main_can_be_imported() -> bool:
    """Whether other processes can: the main module of a notebook has no file."""
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
    """The buffers of one pickle. In the `Encoder`, a cycle would keep the tensors."""

    def __init__(self) -> None:
        self.beside: list[Buffer] = []
        """Those that are not part of the pickle."""
        self._inline = 0
        self._held: Any = None

    def _fits(self, size: int) -> bool:
        """Whether a buffer of this size becomes part of the pickle."""
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
        if self._held is not None:
            self.beside.append(self._held)
            self._held = None
            return False
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
    memory: bytearray | memoryview, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """The tensor of a message, on the memory of the message."""
    flat = torch.frombuffer(memory or _ONE_NUMBER, dtype=_DTYPES[dtype])
    return flat.as_strided(shape, stride)


def rebuild_leaf(
    memory: bytearray | memoryview,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
    attributes: Mapping[str, Any],
) -> Tensor:
    """As `rebuild_tensor`, for a parameter, a leaf that requires grad, one with attributes."""
    tensor = rebuild_tensor(memory, dtype, shape, stride)
    if is_parameter:
        tensor = torch.nn.Parameter(tensor, requires_grad)
    elif requires_grad:
        tensor.requires_grad_()
    tensor.__dict__.update(attributes)
    return tensor


def copy_buffer(buffer: Buffer, to: memoryview) -> None:
    """Write a buffer into memory of its size."""
    if isinstance(buffer, Tensor):
        # Without the GIL. `Tensor.copy_` would use threads, which the processes need.
        address = ctypes.addressof(ctypes.c_char.from_buffer(to))
        ctypes.memmove(address, buffer.data_ptr(), buffer.nbytes)
        return
    for start in range(0, len(to), _CHUNK):  # between chunks other threads may have the GIL
        to[start : start + _CHUNK] = buffer[start : start + _CHUNK]


def encode(obj: Any) -> Pickled:
    """Pickle `obj`; its tensors and arrays are apart."""
    return Encoder().encode(obj)


def name_unpicklable(error: BaseException, make: Callable[[], Encoder], **parts: Any) -> None:
    """Add a note to an error of `encode`: which of `parts`, and what in it, cannot be pickled."""
    if any(note.endswith(_NOTE) for note in getattr(error, "__notes__", ())):
        return  # a part that is kept was named
    for name, part in parts.items():
        if not _can_pickle(part, make):
            add_note_once(error, f"{name}{_path(part, make)}{_NOTE}")


def _path(obj: Any, make: Callable[[], Encoder]) -> str:
    """The path to the innermost part of `obj` that cannot be pickled."""
    path, seen = "", {id(obj)}
    while True:
        for name, part in _parts(obj):
            if id(part) not in seen and not _can_pickle(part, make):
                seen.add(id(part))
                path, obj = path + name, part
                break
        else:
            return path


def _parts(obj: Any) -> Sequence[tuple[str, Any]]:
    if isinstance(obj, dict):
        return [(f"[{key!r}]", value) for key, value in obj.items()]
    if isinstance(obj, list | tuple | set | frozenset):
        return [(f"[{index}]", value) for index, value in enumerate(obj)]
    if isinstance(obj, type | FunctionType):
        return []  # pickled by name
    parts = [(f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items()]
    of_callables = ("__self__", "func", "args", "keywords")  # of methods and partials
    parts += [(f".{name}", getattr(obj, name)) for name in of_callables if hasattr(obj, name)]
    return parts


def _can_pickle(obj: Any, make: Callable[[], Encoder]) -> bool:
    try:
        make().encode(obj)
    except BaseException:  # noqa: BLE001  # any error of the object's own class
        return False
    return True


class Disconnected(Exception):
    """The other process has closed the connection, or has ended."""


class Channel:
    """One end of the connection of two processes, which send in turns. Not thread-safe.

    Args:
        connection: A connected stream socket.
        writes: The arena that this end writes.
        reads: The arena that the other end writes.
    """

    def __init__(self, connection: socket.socket, writes: Arena, reads: Arena) -> None:
        self.connection = connection
        self._writes = writes
        self._reads = reads
        self._small = memoryview(bytearray(_SMALL))

    def send(self, pickled: Pickled) -> None:
        """Send an encoded object.

        Raises:
            Disconnected: The other end is closed.
            MemoryError: The tensors do not fit into the arena. Nothing was sent.
        """
        data, buffers = pickled
        table = self._place(buffers) if buffers else []
        head = _HEADER.pack(len(data), len(table))
        try:
            self.connection.sendall(b"".join((head, *table, data)))
        except OSError:
            raise Disconnected from None

    def _place(self, buffers: Sequence[Buffer]) -> list[bytes]:
        """Copy buffers into the arena; returns their table."""
        placed: list[tuple[int, int]] = []
        try:
            for buffer in buffers:
                size = buffer.nbytes
                placed.append((self._writes.allocate(size), size))
                copy_buffer(buffer, self._writes.write_to(*placed[-1]))
        except BaseException:
            for offset, _ in placed:
                self._writes.take_back(offset)
            raise
        return [_ENTRY.pack(*entry) for entry in placed]

    def receive(self) -> tuple[memoryview, list[memoryview]]:
        """Receive an encoded object, for `decode`. The first part is valid until the next call.

        Raises:
            Disconnected: The other end is closed.
        """
        memory = self._small
        done = self._read(memory, 0, _HEADER.size)
        length, entries = _HEADER.unpack_from(memory)
        start = _HEADER.size + entries * _ENTRY.size
        end = start + length
        if end > len(memory):
            memory = memoryview(bytearray(end))
            memory[:done] = self._small[:done]
        self._read(memory, done, end)
        buffers: list[memoryview] = []
        if entries:
            table = _ENTRY.iter_unpack(memory[_HEADER.size : start])
            buffers = [self._reads.read(offset, size) for offset, size in table]
        return memory[start:end], buffers

    def _read(self, memory: memoryview, done: int, wanted: int) -> int:
        """Read until `memory` holds at least `wanted` bytes, `done` of them from before."""
        while done < wanted:
            try:
                count = self.connection.recv_into(memory[done:] if done else memory)
            except OSError:
                raise Disconnected from None
            if not count:
                raise Disconnected
            done += count
        return done


# Open files. What precedes a file in a stream must not be read together with it: the file would be
# lost. So the receiver says when it waits for files.


def send_files(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Send open files to the other process, when it is in `receive_files`."""
    try:
        if not connection.recv(1):
            raise Disconnected
        socket.send_fds(connection, [b"!"], descriptors)
    except OSError:
        raise Disconnected from None


def receive_files(connection: socket.socket, count: int) -> list[int]:
    """Receive the descriptors of open files."""
    try:
        connection.sendall(b"?")
        message, descriptors = message_with_files(connection)
    except OSError:
        raise Disconnected from None
    if not message:
        raise Disconnected
    if len(descriptors) != count:
        raise OSError(errno.EMFILE, "too many open files")
    return descriptors


def message_with_files(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one byte (none at the end) and the files that came with it."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 10)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # programs that a task starts must not keep it open
    return message, descriptors


def decode(data: memoryview | bytes, buffers: Sequence[memoryview]) -> Any:
    """The object of a message, on the memory of `buffers`."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301  # from a process that this one started


def round_trip(obj: Any, make: Callable[[], Encoder] = Encoder) -> Any:
    """`obj` as it would arrive."""
    data, buffers = make().encode(obj)
    arrived: list[Any] = []
    for buffer in buffers:
        if isinstance(buffer, Tensor | memoryview):
            arrived.append(memoryview(bytearray(buffer.nbytes)))
            copy_buffer(buffer, arrived[-1])
        else:
            arrived.append(buffer)
    return decode(data, arrived)
