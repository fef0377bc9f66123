"""`ForkServer`: a process that has imported torch, whose forks become worker processes at once.

It replaces `multiprocessing.forkserver`. That server ends by SIGTERM, by a failed fork, and by an
import that raises anything but ImportError. It does not set `sys.path` before its imports. To start
a process, a program waits for the imports of that server, and cannot give up.
"""

import ctypes
import errno
import fcntl
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker
from multiprocessing.spawn import get_executable

import torch

from .._base.forking import ReentrantLock, Registry, own_socketpair
from ._channel import message_with_files

_PROGRAM = """\
import signal
# Ctrl-C in a terminal reaches all its processes, and systemd sends SIGTERM to all processes of a
# service. Not SIG_IGN: programs that an import starts would inherit it.
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: None)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
import sys
sys.path[:] = {path!r}
from aiopar.remote import _fork_server, _process
_process.work(*_fork_server.serve({modules!r}))
"""

HANDLED = (signal.SIGINT, signal.SIGTERM)
"""The signals that end neither the server nor its forks."""


class ForkServer:
    """Starts processes by forks of a process that has imported modules. Thread-safe.

    The first `fork` starts the server. The server ends with this object, and with this process.

    Args:
        modules: The names of the modules. The forks import again what the server could not import.
    """

    def __init__(self, modules: Iterable[str]) -> None:
        self._modules = [*modules]
        self._lock = ReentrantLock()
        self._connection: socket.socket | None = None  # for requests
        self._lifeline: socket.socket | None = None  # the server ends when this is closed
        self._pid = 0
        _servers.add(self)

    def __del__(self) -> None:
        self._end()

    def fork(self, files: Sequence[int]) -> None:
        """Start a process that runs `_process.work`; returns at once.

        Args:
            files: Its arguments, open files. The last one gets the exit code (`read_exit_code`).

        Raises:
            OSError: No process can be started.
        """
        # A process registers shared memory with the tracker, which must outlive the process.
        tracker = resource_tracker.getfd()
        assert tracker is not None  # noqa: S101  # `getfd` starts the tracker
        files = [*files, tracker]
        with self._lock:
            if self._connection is not None:
                try:
                    socket.send_fds(self._connection, [b"!"], files)
                    return
                except OSError:  # the server has ended
                    self._end()
            connection, requests = own_socketpair()
            self._start(requests)
            self._connection = connection  # if the start fails, the next call starts a server
            socket.send_fds(self._connection, [b"!"], files)

    def _start(self, requests: socket.socket) -> None:
        self._lifeline, lifeline = own_socketpair()
        executable = os.fsdecode(get_executable())
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # as `spawn`
        # `sys.path` may have paths of `pathlib`.
        program = _PROGRAM.format(path=[*map(str, sys.path)], modules=self._modules)
        inherited = [
            (os.POSIX_SPAWN_DUP2, lifeline.fileno(), _LIFELINE),
            (os.POSIX_SPAWN_DUP2, requests.fileno(), _REQUESTS),
        ]
        with requests, lifeline:
            self._pid = os.posix_spawn(
                executable,
                [executable, *flags, "-c", program],
                os.environ,
                file_actions=inherited,
                setsigmask=HANDLED,  # until it has handlers
            )

    def _end(self) -> None:
        for one in (self._lifeline, self._connection):
            if one is not None:
                shut_down(one)
                one.close()
        self._lifeline = self._connection = None
        if self._pid:
            with suppress(ChildProcessError):  # other code has waited for it
                os.waitpid(self._pid, 0)
            self._pid = 0

    def forget_after_fork(self) -> None:
        """Forget the server in a forked child: it belongs to the parent."""
        self._lifeline = self._connection = None
        self._pid = 0


_servers: Registry[ForkServer] = Registry(ForkServer.forget_after_fork)


def shut_down(connection: socket.socket) -> None:
    """Let both ends see the end of a connection, in all threads; `close` would not do that."""
    with suppress(OSError):  # it was closed
        connection.shutdown(socket.SHUT_RDWR)


def read_exit_code(ended: socket.socket, timeout: float) -> int | OSError | None:
    """The exit code of a process, negative if a signal has ended it; or why the fork failed.

    None: The process has not ended within `timeout` seconds, or the server has ended. `ended` is
    the other end of the last file of `ForkServer.fork`.
    """
    ended.settimeout(timeout)
    try:
        kind, number = ended.recv(10).decode().split()
    except (OSError, ValueError):
        return None
    return int(number) if kind == "exit" else OSError(int(number), os.strerror(int(number)))


# In the server and in its forks.


def name_process(name: str) -> None:
    """Name this process in `ps` and `top`: by `setproctitle` if it is installed, else on Linux."""
    try:
        import setproctitle
    except ImportError:  # not installed, or broken
        if sys.platform == "linux":
            set_name = 15  # PR_SET_NAME; the kernel keeps 15 bytes
            ctypes.CDLL(None).prctl(set_name, name.encode())
    else:
        setproctitle.setproctitle(name)


_LIFELINE, _REQUESTS = 0, 3
"""Open files of the server, which reads nothing else from its standard input."""


def end_with(lifeline: int) -> None:
    """End this process when the other end of a socket is closed, also if code holds the GIL."""
    set_signal = getattr(fcntl, "F_SETSIG", 10 if sys.platform == "linux" else None)
    if set_signal is None:
        threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()
        return
    # The kernel sends the signal when the other end is closed, however its process ends.
    # (PR_SET_PDEATHSIG would report the end of the server, or of a thread.)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, set_signal, signal.SIGKILL)
    flags = fcntl.fcntl(lifeline, fcntl.F_GETFL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it was closed before
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_for_end(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGKILL)


def serve(modules: Sequence[str]) -> list[int]:
    """Import modules, then fork for each request; ends with the parent.

    In each fork it returns the files of `ForkServer.fork`, without the last one.
    """
    name_process("aiopar-fork")
    requests = socket.socket(fileno=_REQUESTS)
    lifeline = os.dup(_LIFELINE)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), _LIFELINE)
    end_with(lifeline)
    _import(modules)
    ended, woken = os.pipe()
    for file in (ended, woken):
        os.set_blocking(file, False)
    signal.set_wakeup_fd(woken)
    default = signal.signal(signal.SIGCHLD, lambda *_: None)
    codes: dict[int, int] = {}  # for each fork the file that gets its exit code
    while True:
        ready, _, _ = select.select([requests.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report(codes)
        if requests.fileno() not in ready:
            continue
        request, files = message_with_files(requests)
        if not request:
            os._exit(0)
        *files, code, tracker = files
        pid = _fork(code)
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, default)
            requests.close()
            for file in (lifeline, ended, woken, *codes.values(), code):
                os.close(file)
            # As `multiprocessing.forkserver` does it.
            resource_tracker._resource_tracker._fd = tracker  # type: ignore[attr-defined]
            return files
        for file in (*files, tracker, *([code] if pid is None else [])):
            os.close(file)
        if pid is not None:
            codes[pid] = code


def _fork(code: int) -> int | None:
    """As `os.fork`; None: it has failed, and the error is in the file `code`."""
    try:
        return os.fork()
    except OSError as error:  # there is too little memory, or there are too many processes
        with suppress(OSError):
            os.write(code, b"errno %d" % (error.errno or errno.EAGAIN))
        return None


def _import(modules: Sequence[str]) -> None:
    # An import that runs operators must start no threads: they would be missing in the forks, whose
    # operators would wait for them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for module in modules:
        with suppress(Exception, SystemExit):
            importlib.import_module(module)
    torch.set_num_threads(threads)
    gc.collect()
    gc.freeze()  # else the first collection of a fork would copy most pages
    sys.stdout.flush()  # else each fork would write it


def _report(codes: dict[int, int]) -> None:
    """Write the exit codes of the forks that have ended."""
    with suppress(ChildProcessError):  # no forks are left
        while ended := os.waitpid(-1, os.WNOHANG):
            pid, status = ended
            if not pid:
                return
            file = codes.pop(pid, None)  # None: an imported module has started it
            if file is not None:
                with suppress(OSError):
                    os.write(file, b"exit %d" % os.waitstatus_to_exitcode(status))
                os.close(file)
