"""`ProcessExecutor`: workers whose calls run in processes of this machine."""

import fcntl
import importlib
import mmap
import multiprocessing
import os
import platform
import select
import signal
import socket
import sys
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from .._base.arguments import as_list, check_int
from .._base.devices import Device, default_devices, is_accelerator, parse_devices
from .._base.forking import Registry
from .._base.tracebacks import add_note_once
from ..errors import WorkerLost
from ..executor._gang import refuse_meetings
from ..executor._worker import HostInfo
from ._arena import Arena, shared_file
from ._executor import HostExecutor
from ._host import Task, own_error, portable_error, run_task
from ._kept import Kept, forget, keep, unique_key
from ._wire import Channel, Encoder, Pickled, copy_buffer, decode, encode, name_unpicklable, size_of

_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_ARENA_SIZE = 1 << _MEMORY.bit_length()  # pages that are never written take no memory
_GRACE = 2.0
"""How many seconds a process that runs no call has to end."""
_PRELOAD = ("torch", "aiopar", "aiopar.remote._process")

_context = multiprocessing.get_context("forkserver")
_starting = threading.Lock()


class ProcessExecutor(HostExecutor):
    """One worker process for each entry of `devices`: a `DeviceExecutor` without a shared GIL.

    Give it wherever a `DeviceExecutor` is given. Functions, modules and arguments go to the process
    by pickle; tensors and arrays go through shared memory, with one copy. Results arrive on the
    CPU. What a `ReplicaPool`, a `Batcher`, `aiopar.map` or a `Pipeline` uses for all its calls
    (weights, functions) goes to each process once; the processes share the memory of weights until
    they write to it.

    Use it if Python code is the bottleneck: tokenizers, models of many small operators. A model
    that spends its time in torch's operators is faster in threads.

    The caller's grad mode, inference mode, autocast and default device apply in the process;
    context variables do not. A process that ends (a crash, out of memory) is replaced: its call
    raises `WorkerLost`, or is tried elsewhere by a `ReplicaPool` and its `Batcher`. When this
    process ends, in whatever way, its worker processes end too. They ignore Ctrl-C and SIGTERM,
    so that this process can drain.

    A script that uses it needs `if __name__ == "__main__":`, as for `multiprocessing`. Functions of
    a notebook must be in a module.

    Args:
        devices: As for `DeviceExecutor`.
        preload: Names of modules that the processes import before their first call. The first
            `ProcessExecutor` of a process imports them only once, for all its processes; importing
            them must start no threads.
        max_pending: As for `DeviceExecutor`.
        num_threads: As for `DeviceExecutor`.
        thread_name_prefix: As for `DeviceExecutor`, for the threads that wait for the processes.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: This machine does not have a device, there is no device, or a bound is below 1.

    Example:
        >>> import asyncio, math, aiopar
        >>> async def main():
        ...     async with aiopar.ProcessExecutor(["cpu", "cpu"]) as executor:
        ...         return await executor.run_sync(math.factorial, 5)
        >>> asyncio.run(main())
        120
    """

    def __init__(
        self,
        devices: Iterable[Device] | None = None,
        *,
        preload: Iterable[str] = (),
        max_pending: int | None = None,
        num_threads: int | None = None,
        thread_name_prefix: str = "aiopar",
    ) -> None:
        modules = as_list("preload", preload, "names of modules")
        if isinstance(preload, str) or not all(isinstance(name, str) for name in modules):
            raise TypeError(f"preload must be an iterable of names of modules, not {preload!r}")
        if max_pending is not None:
            max_pending = check_int("max_pending", max_pending, at_least=1)
        if num_threads is not None:
            num_threads = check_int("num_threads", num_threads, at_least=1)
        _context.set_forkserver_preload([*_PRELOAD, *modules])  # nothing if it runs already
        super().__init__(
            default_devices() if devices is None else parse_devices(devices),
            max_pending=max_pending,
            num_threads=num_threads,
            thread_name_prefix=thread_name_prefix,
            kind="process",
            start=partial(ProcessHost, preload=modules),
            pack=_pack,
        )


# Kept values: their tensors are in a file in memory, which each process maps for itself.


class _File:
    """The tensors of a kept value. Closed when the last reference is gone."""

    def __init__(self, size: int) -> None:
        self.descriptor = shared_file(size)

    def __del__(self) -> None:
        os.close(self.descriptor)


def _pack(value: Any) -> tuple[str, Any]:
    data, buffers = encode(value)
    table: list[tuple[int, int]] = []
    end = 0
    for buffer in buffers:
        table.append((end, size_of(buffer)))
        end += -(-size_of(buffer) // 64) * 64
    if not end:
        return unique_key(), (bytes(data), table, 0, None)
    file = _File(end)
    with mmap.mmap(file.descriptor, end) as mapped, memoryview(mapped) as memory:
        for buffer, (offset, size) in zip(buffers, table, strict=True):
            with memory[offset : offset + size] as part:
                copy_buffer(buffer, part)
    return unique_key(), (bytes(data), table, end, file)


# This process's side.


class ProcessHost:
    """A worker process, as its worker sees it.

    Args:
        index: The index of the worker.
        device: The device of the worker.
        preload: The modules to import first.

    Raises:
        RuntimeError: The process has ended before it was ready.
    """

    def __init__(self, index: int, device: torch.device, *, preload: Sequence[str]) -> None:
        self.info = HostInfo(f"process:{index}/{device}", platform.node(), 0)
        self._kept: dict[str, weakref.ref[Kept[Any]]] = {}
        """The values that the process has."""
        self._gone: deque[str] = deque()
        """The keys of values that are gone here, and that the process still has."""
        self._lifeline = -1
        ours, theirs = socket.socketpair()
        files = [shared_file(_ARENA_SIZE), shared_file(_ARENA_SIZE)]
        try:
            self._connection = ours
            writes, reads = (Arena(file, _ARENA_SIZE) for file in files)
            self._channel = Channel(ours, writes, reads)
            with theirs, _starting:  # multiprocessing's lists of processes have no lock
                self._process = _context.Process(
                    target=_serve, args=(theirs, device, preload), name=self.info.name
                )
                self._process.start()
            watched, self._lifeline = os.pipe()
            files.append(watched)
            socket.send_fds(ours, [b"!"], files)
            pid = self._reply()
        except BaseException:
            self.kill()
            self.close()
            raise
        finally:
            for file in files:
                os.close(file)
        self.info = replace(self.info, pid=pid)
        _hosts.add(self)

    def call(self, task: Task) -> Any:
        encoder = Encoder()
        try:
            pickled = encoder.encode(tuple(task))
        except Exception as error:
            name_unpicklable(error, Encoder, fn=task.fn, args=task.args, kwargs=task.kwargs)
            raise
        try:
            for kept in encoder.kept:
                self._send_kept(kept)
            self._send_gone()
            self._channel.send(pickled)
        except OSError:
            raise self._lost(may_have_run=False) from None
        finally:
            del task, pickled, encoder  # an error's traceback holds this frame
        return self._reply()

    def _send_kept(self, kept: Kept[Any]) -> None:
        key, (data, table, size, file) = kept.pack()
        if key in self._kept:
            return
        self._channel.send(encode(_Keep(key, kept.replica, data, table, size)))
        if file is not None:
            socket.send_fds(self._connection, [b"!"], [file.descriptor])
        self._kept[key] = weakref.ref(kept, partial(_append, self._gone, key))

    def _send_gone(self) -> None:
        keys = [self._gone.popleft() for _ in range(len(self._gone))]
        if keys:
            self._channel.send(encode(_Forget(keys)))
            for key in keys:
                del self._kept[key]

    def _reply(self) -> Any:
        """The result of the task that the process runs."""
        try:
            data, buffers = self._channel.receive()
        except (EOFError, OSError):
            raise self._lost(may_have_run=True) from None
        try:
            succeeded, result = decode(data, buffers)
        except Exception as error:
            add_note_once(error, f"the result came from {self.info.name}, and cannot be unpickled")
            raise
        if succeeded:
            return result
        raise own_error(result)

    def _lost(self, *, may_have_run: bool) -> WorkerLost:
        self._process.join(_GRACE)
        code = self._process.exitcode
        how = "ended"
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif code:
            how = f"ended with exit code {code}"
        run = "its call may have run" if may_have_run else "its call has not run"
        return WorkerLost(
            f"worker {self.info.name} (pid {self.info.pid} on {self.info.node}) {how}; {run}",
            may_have_run=may_have_run,
        )

    def close(self) -> None:
        if self._process.pid is not None:
            self._hang_up()
            self._process.join(_GRACE)
            self._process.kill()
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        self._connection.close()

    def kill(self) -> None:
        if self._process.pid is not None:
            self._process.kill()
        self._hang_up()

    def _hang_up(self) -> None:
        with suppress(OSError):  # a thread may wait in `receive`: closing alone would not wake it
            self._connection.shutdown(socket.SHUT_RDWR)

    def forget_after_fork(self) -> None:
        """In a forked child: the process belongs to the parent, and must see the parent's end."""
        os.close(self._lifeline)
        self._connection.close()


_hosts: Registry[ProcessHost] = Registry(ProcessHost.forget_after_fork)


def _append(gone: deque[str], key: str, _: object) -> None:
    gone.append(key)


# Messages: these, and a task as a plain tuple, which is quicker to pickle. The reply to a task is a
# pair: whether the task has succeeded, and its result or error.


class _Keep(NamedTuple):
    """Keep a value. If its size is not 0, the descriptor of its file follows."""

    key: str
    replica: bool
    data: bytes
    table: Sequence[tuple[int, int]]
    size: int


class _Forget(NamedTuple):
    """Drop kept values."""

    keys: Sequence[str]


# The worker process.


def _serve(connection: socket.socket, device: torch.device, preload: Sequence[str]) -> None:
    """Run the tasks that come through `connection`, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all its processes
        # A handler, because programs that a task starts would inherit SIG_IGN.
        signal.signal(number, _do_nothing)
    refuse_meetings("a worker process")
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    reads, writes, lifeline = files
    _end_with_parent(lifeline)
    channel = Channel(connection, Arena(writes, _ARENA_SIZE), Arena(reads, _ARENA_SIZE))
    for file in (reads, writes):
        os.close(file)
    try:
        for module in preload:
            importlib.import_module(module)
        if is_accelerator(device):
            torch.accelerator.set_device_index(device)
    except Exception as error:  # noqa: BLE001  # the parent raises it
        channel.send(encode((False, portable_error(error))))
        return
    channel.send(encode((True, os.getpid())))
    with suppress(EOFError, OSError):  # the parent has closed the connection
        while True:
            reply = _answer(connection, device, *channel.receive())
            if reply is not None:
                channel.send(reply)
            del reply  # an idle process must keep neither arguments nor result


def _answer(
    connection: socket.socket, device: torch.device, data: memoryview, buffers: list[memoryview]
) -> Pickled | None:
    try:
        message = decode(data, buffers)
        if isinstance(message, _Keep):
            _keep(connection, device, message)
            return None
        if isinstance(message, _Forget):
            forget(message.keys)
            return None
        result = run_task(Task(*message))
    except BaseException as error:  # noqa: BLE001  # the caller gets it
        return encode((False, portable_error(error)))
    try:
        return encode((True, result))
    except Exception as error:  # noqa: BLE001
        name_unpicklable(error, Encoder, result=result)
        return encode((False, portable_error(error)))


def _keep(connection: socket.socket, device: torch.device, message: _Keep) -> None:
    memory = memoryview(bytearray())
    if message.size:
        _, [file], _, _ = socket.recv_fds(connection, 1, 1)
        # Private: what this process writes to stays its own; all else is shared by all processes.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file, message.size, flags=mmap.MAP_PRIVATE, prot=protection)
        os.close(file)
        memory = memoryview(mapped)
    buffers = [memory[start : start + size] for start, size in message.table]
    load = partial(decode, memoryview(message.data), buffers)
    keep(message.key, load, device if message.replica else None)


def _do_nothing(_number: int, _frame: object) -> None:
    """Ignore a signal."""


def _end_with_parent(lifeline: int) -> None:
    """End this process when the other end of `lifeline` is closed, also if code holds the GIL."""
    set_signal = getattr(fcntl, "F_SETSIG", 10 if sys.platform == "linux" else None)
    if set_signal is None:
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()
        return
    # The kernel sends the signal when the parent's end of the pipe is closed, however the parent
    # ends. (PR_SET_PDEATHSIG would tell of the fork server, which outlives the parent.)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, set_signal, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)
