"""Messages between processes: pickles, with the memory of tensors and arrays beside them.

A small message travels whole through a socket. Larger tensors are copied once, into an `Arena` of
the sender, and the receiver uses them there.
"""

import io
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base.tracebacks import add_note_once
from ._arena import Arena
from ._kept import Kept, kept_value

_INLINE = 16 << 10
"""Up to so many bytes of tensors travel inside the message."""
_HEADER = struct.Struct("<QIQ")  # lengths of: the pickle, the table of buffers, the inline buffers
_ENTRY = struct.Struct("<qQ")  # of the table: the offset in the arena, or -1 (inline); the size
_ALIGNMENT = 16  # of inline buffers

# By name: pickle would look for a dtype in every module of the process.
_DTYPES = {name: kind for name, kind in vars(torch).items() if isinstance(kind, torch.dtype)}
_NAMES = {kind: name for name, kind in _DTYPES.items()}

Buffer: TypeAlias = Tensor | memoryview
"""Memory beside a pickle: of a tensor that is dense, on the CPU; of a NumPy array, ..."""
Pickled: TypeAlias = tuple[memoryview, list[Buffer]]


class Encoder(pickle.Pickler):
    """Pickles one object, apart from the memory of its tensors and arrays.

    A tensor arrives as a tensor of its own on the CPU, with its strides if it was dense. Only
    `requires_grad` of leaves is kept; of a tensor with a graph the graph would be lost.

    Raises:
        ValueError: A tensor requires grad and is no leaf.
    """

    def __init__(self) -> None:
        self._file = io.BytesIO()
        self._buffers: list[Any] = []
        # Not a method of this object: the cycle would keep the tensors.
        super().__init__(self._file, protocol=5, buffer_callback=self._buffers.append)
        self.kept: list[Kept[Any]] = []
        """The kept values that the object refers to: the host must have them first."""
        self._tensors: dict[int, Tensor] = {}

    def encode(self, obj: Any) -> Pickled:
        """The pickle of `obj`, and the memory beside it."""
        try:
            self.dump(obj)
        finally:
            del obj  # an error's traceback holds this frame
        buffers: list[Buffer] = [
            self._tensors[index] if index in self._tensors else buffer.raw()
            for index, buffer in enumerate(self._buffers)
        ]
        return self._file.getbuffer(), buffers

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Tensor):
            return self._reduce_tensor(obj)
        if type(obj) is Kept:
            self.kept.append(obj)
            return kept_value, (obj.key,)
        return NotImplemented

    def _reduce_tensor(self, tensor: Tensor) -> Any:
        if tensor.requires_grad and not tensor.is_leaf:
            raise ValueError(
                "a tensor that requires grad has a graph, which cannot leave its process: pass "
                "tensor.detach(), or call under torch.no_grad() or torch.inference_mode()"
            )
        kind = type(tensor)
        plain = kind is Tensor or kind is torch.nn.Parameter
        if not plain or tensor.layout is not torch.strided or _is_special(tensor):
            return NotImplemented  # torch's own way
        dense = _dense(tensor)
        # Pickle puts this empty buffer into the list next: it stands for the tensor.
        self._tensors[len(self._buffers)] = dense
        rebuilt = (
            pickle.PickleBuffer(bytearray()),
            _NAMES[dense.dtype],
            (*dense.shape,),
            dense.stride(),
        )
        if kind is Tensor and not tensor.requires_grad:
            return rebuild_tensor, rebuilt
        return rebuild_leaf, (*rebuilt, tensor.requires_grad, kind is not Tensor)


def _is_special(tensor: Tensor) -> bool:
    return tensor.is_quantized or tensor.is_nested or tensor.is_meta


def _dense(tensor: Tensor) -> Tensor:
    """`tensor` on the CPU, without a graph, with no gaps and no overlaps in its memory."""
    dense = tensor.detach()
    if dense.device.type != "cpu":
        dense = dense.cpu()
    if dense.is_conj() or dense.is_neg():
        dense = dense.resolve_conj().resolve_neg()
    if dense.is_contiguous() or torch.empty_like(dense, device="meta").stride() == dense.stride():
        return dense  # perhaps with other strides, as `channels_last`, but dense
    return dense.contiguous()


def rebuild_tensor(
    memory: Any, dtype: str, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Tensor:
    """The tensor of a message, on the memory of the message."""
    kind = _DTYPES[dtype]
    flat = torch.frombuffer(memory, dtype=kind) if memory.nbytes else torch.empty(0, dtype=kind)
    return flat.as_strided(shape, stride)


def rebuild_leaf(
    memory: Any,
    dtype: str,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    is_parameter: bool,
) -> Tensor:
    """As `rebuild_tensor`, for a parameter or a leaf that requires grad."""
    tensor = rebuild_tensor(memory, dtype, shape, stride)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


def size_of(buffer: Buffer) -> int:
    """The size of a buffer in bytes."""
    return buffer.nbytes


def copy_buffer(buffer: Buffer, to: memoryview) -> None:
    """Write a buffer into memory of its size."""
    if not to.nbytes:
        return
    if isinstance(buffer, Tensor):
        flat = torch.frombuffer(to, dtype=buffer.dtype)
        flat.as_strided(buffer.shape, buffer.stride()).copy_(buffer)
    else:
        to[:] = buffer


def encode(obj: Any) -> Pickled:
    """Pickle `obj`; its tensors and arrays are apart."""
    return Encoder().encode(obj)


def name_unpicklable(error: Exception, make: Callable[[], Encoder], **parts: Any) -> None:
    """Add a note to an error of `encode`: which of `parts`, and what in it, cannot be pickled."""
    for name, part in parts.items():
        if not _can_pickle(part, make):
            add_note_once(error, f"{name}{_path(part, make)} cannot be pickled")


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
    parts = [(f".{name}", value) for name, value in getattr(obj, "__dict__", {}).items()]
    of_callables = ("__self__", "func", "args", "keywords")  # of methods and partials
    parts += [(f".{name}", getattr(obj, name)) for name in of_callables if hasattr(obj, name)]
    return parts


def _can_pickle(obj: Any, make: Callable[[], Encoder]) -> bool:
    try:
        make().dump(obj)
    except Exception:  # noqa: BLE001  # any error of the object's own class
        return False
    return True


class Channel:
    """One end of the connection of two processes. Not thread-safe.

    Args:
        connection: A connected stream socket.
        writes: The arena that this end writes.
        reads: The arena that the other end writes.
    """

    def __init__(self, connection: socket.socket, writes: Arena, reads: Arena) -> None:
        self.connection = connection
        self.writes = writes
        self._reads = reads

    def send(self, pickled: Pickled) -> None:
        """Send an encoded object.

        Raises:
            OSError: The other end is closed.
            MemoryError: The tensors do not fit into the arena.
        """
        data, buffers = pickled
        if not buffers:
            self.connection.sendall(b"".join((_HEADER.pack(len(data), 0, 0), data)))
            return
        sizes = [*map(size_of, buffers)]
        table: list[bytes] = []
        inline: list[bytes | bytearray] = []
        if sum(sizes) + len(data) <= _INLINE:
            for buffer, size in zip(buffers, sizes, strict=True):
                memory = bytearray(-(-size // _ALIGNMENT) * _ALIGNMENT)
                copy_buffer(buffer, memoryview(memory)[:size])
                table.append(_ENTRY.pack(-1, size))
                inline.append(memory)
        else:
            for buffer, size in zip(buffers, sizes, strict=True):
                offset = self.writes.allocate(size)
                copy_buffer(buffer, self.writes.write_to(offset, size))
                table.append(_ENTRY.pack(offset, size))
        lengths = _HEADER.pack(len(data), len(table), sum(map(len, inline)))
        # The inline buffers first: so they are aligned where they arrive.
        self.connection.sendall(b"".join((lengths, *inline, *table, data)))

    def receive(self) -> tuple[memoryview, list[memoryview]]:
        """Receive an encoded object, for `decode`.

        Raises:
            EOFError, OSError: The other end is closed.
        """
        length, entries, inline = _HEADER.unpack(self._read(_HEADER.size))
        body = self._read(inline + entries * _ENTRY.size + length)
        table = body[inline : inline + entries * _ENTRY.size]
        buffers: list[memoryview] = []
        position = 0
        for offset, size in _ENTRY.iter_unpack(table):
            if offset < 0:
                buffers.append(body[position : position + size])
                position += -(-size // _ALIGNMENT) * _ALIGNMENT
            else:
                buffers.append(self._reads.read(offset, size))
        return body[inline + entries * _ENTRY.size :], buffers

    def _read(self, size: int) -> memoryview:
        memory = memoryview(bytearray(size))
        done = 0
        while done < size:
            count = self.connection.recv_into(memory[done:] if done else memory)
            if not count:
                raise EOFError("the other process has closed the connection")
            done += count
        return memory


def decode(data: memoryview, buffers: Sequence[memoryview]) -> Any:
    """The object of a message, on the memory of `buffers`."""
    return pickle.loads(data, buffers=buffers)  # noqa: S301  # from a process that this one started


def round_trip(obj: Any, make: Callable[[], Encoder] = Encoder) -> Any:
    """`obj` as it would arrive."""
    data, buffers = make().encode(obj)
    arrived = [memoryview(bytearray(size_of(buffer))) for buffer in buffers]
    for buffer, memory in zip(buffers, arrived, strict=True):
        copy_buffer(buffer, memory)
    return decode(data, arrived)
