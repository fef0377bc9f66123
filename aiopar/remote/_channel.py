"""`Channel`: messages between two processes, through a socket and through memory that they share.

A small message travels whole through the socket. Larger tensors are copied once, into an `Arena` of
the sender, and the receiver uses them there.
"""

import ctypes
import errno
import mmap
import os
import resource
import socket
import struct
import tempfile
import weakref
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from .._base.forking import Registry
from .._base.tracebacks import add_note_once

Buffer: TypeAlias = Tensor | memoryview
"""Memory beside a pickle: that of a dense tensor on the CPU, or of a NumPy array."""
Pickled: TypeAlias = tuple[memoryview, list[Buffer]]

_HEADER = struct.Struct("<QI")  # the lengths of the pickle and of the table of buffers
_ENTRY = struct.Struct("<QQ")  # of the table: the offset of a block in the arena, and its size
_SMALL = 64 << 10  # messages up to so many bytes are received at once
_CHUNK = 1 << 20  # so many bytes are copied while the GIL is held

_ALIGNMENT = 64  # bytes of the vectors of the widest CPU; the header of a block is as long
_LIVE = 1
_FEW = 32  # with up to so many blocks, each `allocate` looks for a gap
_KEPT_WARM = 64 << 20  # so many free bytes keep their pages: fresh pages are slow
_STEP = 1 << 20  # so many bytes are given back together


def shared_file(size: int) -> int:
    """The descriptor of a file in memory. Its pages take no memory until they are written.

    The file has no name, so it never outlives its users. It does not use `/dev/shm`, which is small
    in containers.
    """
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("aiopar")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, size)
    except OSError as error:
        os.close(descriptor)
        add_note_once(error, f"{size} bytes to share with processes: see RLIMIT_FSIZE, `ulimit -f`")
        raise
    return descriptor


_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def arena_size() -> int:
    """How many bytes an arena has. Pages that are never written take addresses only."""
    size = 1 << min(_MEMORY.bit_length(), 38)
    # An arena gets a part of the addresses, because each of many workers has two arenas.
    for limit, part in ((resource.RLIMIT_AS, 64), (resource.RLIMIT_FSIZE, 1)):
        allowed, _ = resource.getrlimit(limit)
        if allowed != resource.RLIM_INFINITY:
            size = min(size, allowed // part)
    return size // mmap.PAGESIZE * mmap.PAGESIZE


class Arena:
    """Blocks of shared memory: one process allocates and writes them, the other reads them.

    The reader gets a block as a `memoryview`, and may write to it. When the last object that uses
    the view is gone, the reader clears one byte in the header of the block: the block is free. So a
    destructor needs neither a lock nor a message.

    Args:
        descriptor: A `shared_file`.
    """

    def __init__(self, descriptor: int) -> None:
        try:
            self._map = mmap.mmap(descriptor, 0)
        except OSError as error:
            add_note_once(error, "no addresses for shared memory: see RLIMIT_AS, `ulimit -v`")
            raise
        self._view = memoryview(self._map)
        self._blocks: list[tuple[int, int]] = []
        """(start, end) of each block that the writer has not found free, in order."""
        self._owners: dict[int, weakref.ref[Any]] = {}
        """The objects that keep the reader's blocks, by the offset of the block."""
        self._sweep_at = 0
        """At so many blocks the next sweep is worth its time."""
        self._written: set[int] = set()
        """The steps of the map that have pages."""
        _arenas.add(self)

    # The writer's side.

    def allocate(self, size: int) -> int:
        """Reserve a block and return the offset of its data; MemoryError if no gap is as large."""
        length = _ALIGNMENT + -(-size // _ALIGNMENT) * _ALIGNMENT
        start = self._blocks[-1][1] if self._blocks else 0
        # Usually few blocks live, and the first gap has warm pages. If a reader keeps all blocks,
        # the sweeps become rare, so that calls do not become slower and slower.
        if len(self._blocks) <= _FEW or len(self._blocks) >= self._sweep_at:
            self._sweep_at = 2 * self.sweep()
            start = 0
            for taken, end in self._blocks:
                if start + length <= taken:
                    break
                start = end
        if start + length > len(self._view):
            raise MemoryError(
                f"no room for {size} bytes between processes; {len(self._view)} bytes are shared "
                "(the memory of the machine, or less by `ulimit -v` or `ulimit -f`)"
            )
        block = (start, start + length)
        self._blocks.insert(bisect_left(self._blocks, block), block)
        self._written.update(_steps(block))
        self._view[start] = _LIVE
        return start + _ALIGNMENT

    def sweep(self) -> int:
        """Forget the blocks that the reader has freed; returns how many are in use."""
        self._blocks = [block for block in self._blocks if self._view[block[0]] == _LIVE]
        kept = _KEPT_WARM // _STEP
        used = sum(end - start for start, end in self._blocks) // _STEP
        if len(self._written) - used > kept and hasattr(mmap, "MADV_REMOVE"):
            free = self._written.difference(*map(_steps, self._blocks))
            for step in sorted(free)[kept:]:  # the first gaps are used first
                start = step * _STEP
                length = min(_STEP, len(self._view) - start)
                self._map.madvise(mmap.MADV_REMOVE, start, length)
                self._written.discard(step)
        return len(self._blocks)

    def take_back(self, offset: int) -> None:
        """Free a block that was never sent to the reader."""
        self._view[offset - _ALIGNMENT] = 0

    def write_to(self, offset: int, size: int) -> memoryview:
        """The memory of a block, for its writer."""
        return self._view[offset : offset + size]

    # The reader's side.

    def read(self, offset: int, size: int) -> memoryview:
        """The memory of a block; the block is free when no object uses the result any more."""
        # Every view of a ctypes array keeps the array. (A view of a `memoryview` does not keep the
        # `memoryview`.) ctypes caches a type for each length, so lengths are powers of two.
        length = min(1 << size.bit_length(), len(self._view) - offset)
        owner = (ctypes.c_char * length).from_buffer(self._map, offset)
        owners, memory, header = self._owners, self._view, offset - _ALIGNMENT

        def free(_: object) -> None:
            del owners[offset]
            memory[header] = 0  # last: from now on the writer may use the block again

        owners[offset] = weakref.ref(owner, free)
        return memoryview(owner).cast("B")[:size]

    def forget_owners(self) -> None:
        """Forget the views in a forked child: to drop them must not free blocks of the parent."""
        self._owners.clear()


def _steps(block: tuple[int, int]) -> range:
    return range(block[0] // _STEP, -(-block[1] // _STEP))


_arenas: Registry[Arena] = Registry(Arena.forget_owners)


def copy_buffer(buffer: Buffer, to: memoryview) -> None:
    """Write a buffer into memory of its size."""
    if isinstance(buffer, Tensor):
        # `memmove` copies without the GIL. `Tensor.copy_` would use cores of the other processes.
        address = ctypes.addressof(ctypes.c_char.from_buffer(to))
        ctypes.memmove(address, buffer.data_ptr(), buffer.nbytes)
        return
    for start in range(0, len(to), _CHUNK):  # other threads may get the GIL between two chunks
        to[start : start + _CHUNK] = buffer[start : start + _CHUNK]


class Disconnected(Exception):
    """The other process has closed the connection, or has ended."""


class Channel:
    """One end of the connection of two processes, which send in turns. Not thread-safe.

    This end writes the arena `writes`, and the other end writes `reads`.
    """

    def __init__(self, connection: socket.socket, writes: Arena, reads: Arena) -> None:
        self.connection = connection
        self._writes = writes
        self._reads = reads
        self._small = memoryview(bytearray(_SMALL))

    def send(self, pickled: Pickled) -> None:
        """Send an encoded object, or raise MemoryError: the tensors do not fit into the arena."""
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
        """Receive an encoded object, for `decode`. The first part is valid until the next call."""
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
        """Read until `memory`, which has `done` bytes, has `wanted` or more; return how many."""
        while done < wanted:
            try:
                count = self.connection.recv_into(memory[done:] if done else memory)
            except OSError:
                raise Disconnected from None
            if not count:
                raise Disconnected
            done += count
        return done

    # A file would be lost if `_read` received it together with a message. So the receiver says when
    # it waits for a file.

    def send_file(self, descriptor: int) -> None:
        """Send an open file to the other end, once that end waits in `receive_file`."""
        try:
            if not self.connection.recv(1):
                raise Disconnected
            socket.send_fds(self.connection, [b"!"], [descriptor])
        except OSError:
            raise Disconnected from None

    def receive_file(self) -> int:
        """Receive the descriptor of an open file."""
        try:
            self.connection.sendall(b"?")
            message, files = message_with_files(self.connection)
        except OSError:
            raise Disconnected from None
        if not message:
            raise Disconnected
        if not files:
            raise OSError(errno.EMFILE, "too many open files")
        return files[0]


def message_with_files(connection: socket.socket) -> tuple[bytes, list[int]]:
    """Receive one byte (none at the end) and the files that came with it."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1, 10)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)  # a program that a task starts must not keep it
    return message, descriptors
