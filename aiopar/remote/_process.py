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
from functools import partial
from multiprocessing.connection import wait as wait_for
from typing import Any, NamedTuple

import torch

from .._base.arguments import as_list, check_int
from .._base.devices import Device, default_devices, is_accelerator, parse_devices
from .._base.forking import Registry, after_fork_in_child, held_across_fork
from .._base.tracebacks import add_note_once
from ..executor._gang import refuse_meetings
from ..executor._worker import HostInfo
from ._arena import Arena, shared_file
from ._executor import HostExecutor
from ._host import Task, answer, encode_kept, encode_task, lost, outcome, portable_error
from ._kept import Kept, forget, keep, unique_key
from ._wire import (
    Channel,
    Disconnected,
    Encoder,
    copy_buffer,
    decode,
    encode,
    receive_files,
    send_files,
    size_of,
)

_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
_ARENA_SIZE = 1 << _MEMORY.bit_length()  # pages that are never written take no memory
_GRACE = 2.0
"""How many seconds a process that runs no call has to end."""
_PRELOAD = ("torch", "aiopar", "aiopar.remote._process")

_context = multiprocessing.get_context("forkserver")
_processes = threading.Lock()
"""Held while multiprocessing's lists of processes, or the state of a process, may change."""
_pipes = held_across_fork()
"""Held while a pipe is made that no forked child may keep open."""


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
    data, buffers = encode_kept(value, Encoder)
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
    """A worker process, as its worker sees it. See `Host`.

    Args:
        index: The index of the worker.
        device: The device of the worker.
        preload: The modules to import first.
    """

    def __init__(self, index: int, device: torch.device, *, preload: Sequence[str]) -> None:
        self.info: HostInfo | None = None
        self._name = f"process:{index}/{device}"
        self._kept: dict[str, weakref.ref[Kept[Any]]] = {}
        """The values that the process has."""
        self._gone: deque[str] = deque()
        """The keys of values that are gone here, and that the process still has."""
        self._killed = False
        self._lifeline = -1
        """The process ends when this is closed, also by the end of this process."""
        self._connection, self._theirs = socket.socketpair()
        # Each process has random numbers of its own; `torch.manual_seed` here makes them the same
        # in every run.
        seed = (torch.initial_seed() + index) % 2**63
        self._process = _context.Process(
            target=_serve, args=(self._theirs, device, preload, seed), name=self._name
        )

    def open(self) -> None:
        try:
            self._start()
            pid = self._result()
        except Disconnected:
            raise self._start_error() from None
        except Exception as error:
            add_note_once(error, f"worker {self._name} cannot start")
            raise
        self.info = HostInfo(self._name, platform.node(), pid)

    def _start(self) -> None:
        files = [shared_file(_ARENA_SIZE), shared_file(_ARENA_SIZE)]
        try:
            writes, reads = (Arena(file, _ARENA_SIZE) for file in files)
            self._channel = Channel(self._connection, writes, reads)
            with self._theirs, _processes:
                self._process.start()
            if self._killed:  # meanwhile: `kill` has found no process
                self._process.kill()
            with _pipes:
                watched, self._lifeline = os.pipe()
                _hosts.add(self)
            files.append(watched)
            send_files(self._connection, files)
        finally:
            for file in files:
                os.close(file)

    def call(self, task: Task) -> tuple[bool, Any]:
        sent = False
        try:
            pickled, kept = encode_task(task, Encoder)
            for value in kept:
                self._send_kept(value)
            self._send_gone()
            self._channel.send(pickled)
            sent = True
            return self._reply()
        except Disconnected:
            pass  # `WorkerLost` must not refer to this error, whose frames hold the arguments
        finally:
            del task  # an error's traceback holds this frame
            pickled = kept = value = None  # type: ignore[assignment]
        raise lost(self._name, self.info, self._end()[0], may_have_run=sent)

    def _send_kept(self, kept: Kept[Any]) -> None:
        key, (data, table, size, file) = kept.pack()
        if key in self._kept:
            return
        self._channel.send(encode(_Keep(key, kept.replica, data, table, size)))
        if file is not None:
            send_files(self._connection, [file.descriptor])
        self._result()
        self._kept[key] = weakref.ref(kept, partial(_append, self._gone, key))

    def _send_gone(self) -> None:
        keys = [self._gone.popleft() for _ in range(len(self._gone))]
        if keys:
            self._channel.send(encode(_Forget(keys)))
            self._result()
            for key in keys:
                del self._kept[key]

    def _reply(self) -> tuple[bool, Any]:
        """The outcome of the message that the process works on."""
        message = self._channel.receive()
        return outcome(partial(decode, *message), self._name)

    def _result(self) -> Any:
        """The result of the message that the process works on; raises its error."""
        succeeded, result = self._reply()
        if not succeeded:
            raise result
        return result

    def _start_error(self) -> Exception:
        how, killed = self._end()
        if killed:
            return lost(self._name, None, how, may_have_run=False)
        return RuntimeError(
            f"worker {self._name} {how} while it started; its own error is on stderr. Its "
            'process imports the main module: a script needs `if __name__ == "__main__":`'
        )

    def _end(self) -> tuple[str, bool]:
        """How the process has ended, and whether a signal has killed it."""
        wait_for([self._process.sentinel], _GRACE)
        with _processes:
            code = self._process.exitcode
        if code is None:
            return "has closed its connection", False
        if code >= 0:
            return f"ended with exit code {code}", False
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        return f"was killed by {name}", True

    def close(self) -> None:
        self._hang_up()
        if self._process.pid is not None:
            wait_for([self._process.sentinel], _GRACE)
            with _processes:
                if self._process.exitcode is None:
                    self._process.kill()
                self._process.join()
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            os.close(lifeline)
        self._connection.close()
        self._theirs.close()

    def kill(self) -> None:
        self._killed = True
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


# Messages: these, and a task as a plain tuple, which is quicker to pickle. The reply is a pair:
# whether it has succeeded, and its result or error.


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


def _serve(
    connection: socket.socket, device: torch.device, preload: Sequence[str], seed: int
) -> None:
    """Run the tasks that come through `connection`, until it is closed."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal sends them to all its processes
        # A handler, because programs that a task starts would inherit SIG_IGN.
        signal.signal(number, _do_nothing)
    refuse_meetings("a worker process")
    # Else the parent would not see the end of this process while a forked child of it lives.
    after_fork_in_child(connection.close)
    with suppress(Disconnected):  # the parent has closed the connection
        reads, writes, lifeline = receive_files(connection, 3)
        _end_with_parent(lifeline)
        channel = Channel(connection, Arena(writes, _ARENA_SIZE), Arena(reads, _ARENA_SIZE))
        for file in (reads, writes):
            os.close(file)
        try:
            _prepare(device, preload, seed)
        except Exception as error:  # noqa: BLE001  # the parent raises it
            channel.send(encode((False, portable_error(error))))
            return
        channel.send(encode((True, os.getpid())))
        while True:
            reply = answer(partial(_task, connection, device, *channel.receive()), Encoder)
            try:
                channel.send(reply)
            except MemoryError as error:
                channel.send(encode((False, portable_error(error))))
            del reply  # an idle process must keep neither arguments nor result


def _prepare(device: torch.device, preload: Sequence[str], seed: int) -> None:
    for module in preload:
        importlib.import_module(module)
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:  # else all processes would have the state of the fork server
        sys.modules["numpy"].random.seed()


def _task(
    connection: socket.socket, device: torch.device, data: memoryview, buffers: list[memoryview]
) -> Task:
    """The task of a message."""
    message = _decode(data, buffers)
    if isinstance(message, _Keep):
        return Task(_keep, (connection, device, message), {})
    if isinstance(message, _Forget):
        return Task(forget, message, {})
    return Task(*message)


def _decode(data: memoryview, buffers: list[memoryview]) -> Any:
    try:
        return decode(data, buffers)
    except Exception as error:
        add_note_once(
            error,
            "the call cannot be unpickled in its process; functions and classes of a notebook must "
            "be in a module",
        )
        raise


def _keep(connection: socket.socket, device: torch.device, message: _Keep) -> None:
    memory = memoryview(bytearray())
    if message.size:
        [file] = receive_files(connection, 1)
        # Private: what this process writes to stays its own; all else is shared by all processes.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        mapped = mmap.mmap(file, message.size, flags=mmap.MAP_PRIVATE, prot=protection)
        os.close(file)
        memory = memoryview(mapped)
    buffers = [memory[start : start + size] for start, size in message.table]
    load = partial(decode, message.data, buffers)
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
