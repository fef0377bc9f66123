"""`ProcessExecutor`: workers whose calls run in processes of this machine."""

import atexit
import importlib
import mmap
import multiprocessing.process
import multiprocessing.spawn
import os
import platform
import signal
import socket
import sys
import threading
import traceback
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch

from .._base.arguments import as_list, check_bound
from .._base.destructors import destructor
from .._base.devices import Device, default_devices, is_accelerator, parse_devices
from .._base.forking import own_socketpair, own_sockets
from .._base.tracebacks import add_note_once, in_words
from ..executor._gang import become_host
from ..executor._worker import HostInfo
from ._channel import Arena, Channel, Disconnected, arena_size, copy_buffer, shared_file
from ._executor import HostExecutor, HostSlot
from ._fork_server import HANDLED, ForkServer, end_with, name_process, read_exit_code, shut_down
from ._host import (
    Task,
    answer,
    encode,
    failure,
    lost,
    outcome,
    parts_of_call,
    parts_of_kept,
)
from ._wire import Encoder, Holding, Kept, decode, forget, keep, main_can_be_imported

_GRACE = 2.0  # seconds that a process has to end when it runs no call

_servers: dict[tuple[str, ...], ForkServer] = {}  # by the modules that they import


class ProcessExecutor(HostExecutor):
    """One worker process for each entry of `devices`: a `DeviceExecutor` without a shared GIL.

    Pass it wherever a `DeviceExecutor` is accepted. Functions, modules and arguments go to the
    process by pickle; tensors and arrays go through shared memory, with one copy. Results arrive on
    the CPU. What a `ReplicaPool`, a `Batcher`, `aiopar.map` or a `Pipeline` uses for all its calls
    (weights, functions) goes to each process once; the processes share the memory of weights until
    they write to it.

    Use it if Python code is the bottleneck: tokenizers, models of many small operators. A model
    that spends its time in torch's operators is faster in threads.

    The caller's grad mode, inference mode, autocast and default device apply in the process;
    context variables do not. Each process draws random numbers of its own. A process that ends (a
    crash, out of memory) is replaced: its call raises `WorkerLost`, or is tried elsewhere by a
    `ReplicaPool` and its `Batcher`. When this process ends, in whatever way, its worker processes
    end too. They ignore Ctrl-C and SIGTERM, so that this process can drain. A second Ctrl-C kills
    the worker processes that run a call.

    A script that uses it needs `if __name__ == "__main__":`, as for `multiprocessing`. Lambdas,
    functions in functions and functions of a notebook go by value, by `cloudpickle`. The executor
    needs `os.fork`, so it does not run on Windows. On free-threaded Python, threads do as well.

    Args:
        devices: As for `DeviceExecutor`.
        preload: Names of modules that the processes need. They are imported once, in the process
            from which all worker processes are forked, so the imports must start no threads. Later
            executors with the same names use that process, and do not see that a module was edited.
        max_pending, num_threads: As for `DeviceExecutor`.
        thread_name_prefix: As for `DeviceExecutor`, for the threads that wait for the processes.
        kill_after: A running call whose caller has left (cancelled, timed out) may go on for so
            many seconds. Then its process is killed and replaced. What would cancel a pending call
            lets the caller of a running call leave. A batch is left when all its callers have left.
            None: such a call may go on for ever.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A device does not exist, `devices` is empty, or a bound is below 1.

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
        kill_after: float | None = None,
    ) -> None:
        modules = as_list("preload", preload, "names of modules")
        if isinstance(preload, str) or not all(isinstance(name, str) for name in modules):
            raise TypeError(f"preload must be an iterable of names of modules, not {preload!r}")
        max_pending = check_bound("max_pending", max_pending)
        num_threads = check_bound("num_threads", num_threads)
        server = _servers.setdefault((*modules,), ForkServer(modules))
        super().__init__(
            default_devices() if devices is None else parse_devices(devices),
            max_pending=max_pending,
            num_threads=num_threads,
            thread_name_prefix=thread_name_prefix,
            kill_after=kill_after,
            slot=partial(
                HostSlot, start=partial(ProcessHost, server=server, preload=modules), pack=_pack
            ),
        )


class _File:
    """The memory of a kept value's tensors, which each process maps."""

    def __init__(self, size: int) -> None:
        self.descriptor = shared_file(size)

    @destructor
    def __del__(self) -> None:
        os.close(self.descriptor)


def _pack(value: Any) -> tuple[str, Any]:
    (data, buffers), _ = encode(value, Encoder, parts_of_kept)
    table: list[tuple[int, int]] = []
    end = 0
    for buffer in buffers:
        table.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // 64) * 64
    file = None
    if end:
        file = _File(end)
        with mmap.mmap(file.descriptor, end) as mapped, memoryview(mapped) as memory:
            for buffer, (offset, size) in zip(buffers, table, strict=True):
                with memory[offset : offset + size] as part:
                    copy_buffer(buffer, part)
    return uuid.uuid4().hex, (bytes(data), table, end, file)


# In the process of the callers.


class ProcessHost:
    """A worker process, as its worker sees it. See `Host`."""

    def __init__(self, slot: HostSlot, *, server: ForkServer, preload: Sequence[str]) -> None:
        self.info: HostInfo | None = None
        self._slot = slot
        self._server = server
        self._preload = preload
        self._holding = Holding()
        self._killed = False
        pairs = [own_socketpair() for _ in range(3)]
        (self._connection, self._lifeline, self._ended), self._theirs = zip(*pairs, strict=True)

    def open(self) -> None:
        if _importing_main():
            raise RuntimeError(
                "a worker process imports the main module, which calls a ProcessExecutor: what a "
                'script does must be under `if __name__ == "__main__":`'
            )
        size = arena_size()
        arenas = [shared_file(size), shared_file(size)]
        try:
            writes, reads = map(Arena, arenas)
            self._channel = Channel(self._connection, writes, reads)
            connection, lifeline, ended = (each.fileno() for each in self._theirs)
            self._server.fork([connection, lifeline, *arenas, ended])
        finally:
            for file in arenas:
                os.close(file)
            for each in self._theirs:
                each.close()
        worker = self._slot.worker
        try:
            own = worker.device, self._slot.seed, _main(self._slot.number)
            pid = self._run(_prepare, *own, self._preload, {**os.environ})
        except Disconnected:
            how, is_lost = self._end()
            if is_lost:
                raise lost(worker.label, None, how, may_have_run=False) from None
            raise RuntimeError(f"worker {worker.label} {how} while it started") from None
        except Exception as error:
            add_note_once(error, f"worker {worker.label} cannot start")
            raise
        self.info = HostInfo(worker.label, platform.node(), pid)

    def call(self, task: Task) -> tuple[bool, Any]:
        sent = False
        try:
            pickled, kept = encode(tuple(task), Encoder, parts_of_call)
            for value in kept:
                if value not in self._holding:
                    self._send_kept(value)
            gone = self._holding.take_gone()
            if gone:
                self._run(forget, gone)
            self._channel.send(pickled)
            sent = True
            return self._reply()
        except Disconnected:
            pass  # `WorkerLost` must not have it as context: its frames hold the arguments
        finally:
            del task  # an error's traceback holds this frame
            pickled = kept = value = None  # type: ignore[assignment]
        raise lost(self._slot.worker.label, self.info, self._end()[0], may_have_run=sent)

    def _send_kept(self, kept: Kept[Any]) -> None:
        key, (data, table, size, file) = kept.pack()
        replica_on = self._slot.worker.device if kept.replica else None
        self._run(_keep, key, replica_on, data, table, size, file=file)
        self._holding.add(kept)

    def _run(self, fn: Callable[..., Any], *args: Any, file: "_File | None" = None) -> Any:
        """Call a function of aiopar in the process; `file` is for a function that receives one."""
        self._channel.send(Encoder().encode((fn, args, {})))
        if file is not None:
            self._channel.send_file(file.descriptor)
        succeeded, result = self._reply()
        if not succeeded:
            raise result
        return result

    def _reply(self) -> tuple[bool, Any]:
        return outcome(partial(decode, *self._channel.receive()), self._slot.worker.label)

    def _end(self) -> tuple[str, bool]:
        """How the process has ended; and whether its end came from outside, as by a signal."""
        code = self._exit_code()
        if code is None:
            return "has closed its connection", True
        if isinstance(code, OSError):
            return f"could not be forked ({code})", False
        if code >= 0:
            return f"ended with exit code {code}", False
        name = next((each.name for each in signal.Signals if each == -code), f"signal {-code}")
        return f"was killed by {name}", True

    def close(self) -> None:
        shut_down(self._connection)
        if self._exit_code() is None:
            shut_down(self._lifeline)
            self._exit_code()
        for each in (self._connection, self._lifeline, self._ended, *self._theirs):
            each.close()

    def _exit_code(self) -> int | OSError | None:
        # A process that is killed while it starts may not exist yet: the server may still import.
        may_not_exist = self._killed and self.info is None
        return read_exit_code(self._ended, 0.0 if may_not_exist else _GRACE)

    def kill(self) -> None:
        self._killed = True
        shut_down(self._lifeline)
        shut_down(self._connection)

    kill_call = kill


def _main(number: int) -> dict[str, Any]:
    """What `multiprocessing.spawn.prepare` needs of this program: its main module, its path, ...

    `multiprocessing.spawn.get_preparation_data` would set the start method of this program, which
    could not set it later.
    """
    key = multiprocessing.process.current_process().authkey
    main: dict[str, Any] = {
        "name": f"aiopar-{number}",
        "authkey": bytes(key),  # of managers, and of connections that are sent
        "sys_path": sys.path,
        "sys_argv": sys.argv,
        "orig_dir": multiprocessing.process.ORIGINAL_DIR,  # type: ignore[attr-defined]
        "dir": os.getcwd(),
    }
    module = sys.modules["__main__"]
    spec = getattr(module, "__spec__", None)
    if spec is not None:  # started by `python -m`
        main["init_main_from_name"] = spec.name
    elif main_can_be_imported():  # else a notebook, or a script from stdin
        main["init_main_from_path"] = os.path.abspath(str(module.__file__))
    return main


# The worker process.

_channel: Channel


def work(connection: int, lifeline: int, reads: int, writes: int) -> NoReturn:
    """Run the tasks that come through the socket `connection`, until it is closed.

    When the other end of the socket `lifeline` is closed, the process ends at once. `reads` and
    `writes` are the files of the arenas that the parent and this process write.
    """
    # The server has set handlers that do nothing. The processes that a task forks get the default
    # handlers, because a `multiprocessing.Pool` ends its processes by SIGTERM.
    os.register_at_fork(
        before=_block_signals,
        after_in_parent=_unblock_signals,
        after_in_child=partial(_set_defaults, [*map(signal.getsignal, HANDLED)]),
    )
    end_with(lifeline)
    global _channel  # noqa: PLW0603
    _channel = Channel(socket.socket(fileno=connection), Arena(writes), Arena(reads))
    # Forked children must not keep this socket: it tells the parent that this process ended.
    own_sockets(_channel.connection)
    for file in (reads, writes):
        os.close(file)
    become_host("a worker process")
    code = 1
    try:
        with suppress(Disconnected):  # the parent has closed the connection
            while True:
                reply = answer(partial(decode, *_channel.receive()), Encoder)
                try:
                    _channel.send(reply)
                except MemoryError as error:
                    _channel.send(failure(error, Encoder))
                del reply  # an idle process must not keep the result
        code = 0
    except Exception:  # noqa: BLE001  # a bug of aiopar
        traceback.print_exc()
    finally:
        # No finalization of the interpreter: threads inside operators would abort the process.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _importing_main() -> bool:
    return getattr(multiprocessing.process.current_process(), "_inheriting", False)


def _prepare(
    device: torch.device,
    seed: int,
    main: dict[str, Any],
    preload: Sequence[str],
    environment: Mapping[str, str],
) -> int:
    """Prepare this process for the tasks of a program; returns its pid."""
    os.environ.clear()
    os.environ.update(environment)
    process = multiprocessing.process.current_process()
    name_process(f"{main['name']} {device}")  # `aiopar-0 cpu`
    process._inheriting = True  # type: ignore[attr-defined]  # as `multiprocessing.spawn` does it
    try:
        multiprocessing.spawn.prepare(main)
        del process._inheriting  # type: ignore[attr-defined]
        for module in preload:
            importlib.import_module(module)
    except SystemExit as error:
        raise RuntimeError(f"an import has raised {in_words(error)}") from None
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:  # all processes have inherited one state from the fork server
        sys.modules["numpy"].random.seed()
    return os.getpid()


def _keep(
    key: str,
    replica_on: torch.device | None,
    data: bytes,
    table: Sequence[tuple[int, int]],
    size: int,
) -> None:
    """Keep a value. If its size is not 0, the parent sends the file of its tensors."""
    memory = memoryview(bytearray())
    if size:
        file = _channel.receive_file()
        # Private: a page that this process writes becomes its own. The other pages are shared.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        memory = memoryview(mmap.mmap(file, size, flags=mmap.MAP_PRIVATE, prot=protection))
        os.close(file)
    buffers = [memory[start : start + size] for start, size in table]
    keep(key, partial(decode, data, buffers), replica_on)


# Around a fork, signals are blocked until the child has its own handlers.

_masks = threading.local()


def _block_signals() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)


def _unblock_signals() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _set_defaults(of_server: Sequence[Any]) -> None:
    defaults: Sequence[Any] = (signal.default_int_handler, signal.SIG_DFL)
    for number, handler, default in zip(HANDLED, of_server, defaults, strict=True):
        if signal.getsignal(number) is handler:  # else the task has set its own
            signal.signal(number, default)
    _unblock_signals()
