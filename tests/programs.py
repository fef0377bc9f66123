"""Programs that tests run in processes of their own.

`import torch` takes over a second. So one process imports torch and aiopar, and each program is a
fork of it. It starts, runs and ends as `python -c` would.
"""

import atexit
import functools
import json
import os
import select
import signal
import socket
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Self

import pytest

_ROOT = Path(__file__).parents[1]
_NO_FORK_WARNING = "ignore:This process:DeprecationWarning"
_HEAD = """
import asyncio, os, signal, sys, threading, time
import torch, aiopar
from aiopar.testing import Gate

def multiply(seconds):
    # Operators that use OpenMP, for a while.
    x, end = torch.rand(400, 400), time.monotonic() + seconds
    while time.monotonic() < end:
        x = torch.tanh(x @ x)
    return "multiplied"
"""


class Program:
    """A program that runs, like `subprocess.Popen`."""

    def __init__(self, text: str, *, new_session: bool) -> None:
        (out, out_end), (err, err_end), (code, code_end) = os.pipe(), os.pipe(), os.pipe()
        with tempfile.TemporaryFile("w+") as request:
            json.dump([text, new_session, dict(os.environ)], request)
            request.seek(0)
            files = request.fileno(), out_end, err_end, code_end
            socket.send_fds(_server(), [b"!"], files)
        for file in files[1:]:
            os.close(file)
        self.stdout, self.stderr, self._code = open(out), open(err), open(code)  # noqa: SIM115
        self.pid = int(self._code.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.stdout, self.stderr, self._code):
            file.close()

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the program has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def runs(self) -> bool:
        """Whether the program has not ended."""
        return not select.select([self._code], [], [], 0)[0]

    def end(self) -> tuple[int, str, str]:
        """Wait for the exit code, and for what is still to be read of both streams."""
        streams = self._code, self.stdout, self.stderr
        with self, ThreadPoolExecutor(3) as threads:
            readers = [threads.submit(stream.read) for stream in streams]
            _, hangs = wait(readers, timeout=90)
            if hangs:
                self.send_signal(signal.SIGKILL)
            code, out, err = [reader.result() for reader in readers]
        if hangs:
            pytest.fail(f"the program hangs; it wrote {out!r} and {err!r}")
        return int(code), out, err


def start(program: str, *, head: str = _HEAD, new_session: bool = False) -> Program:
    return Program(head + textwrap.dedent(program), new_session=new_session)


def run(program: str) -> tuple[int, str, str]:
    return start(program).end()


@functools.cache
def _server() -> socket.socket:
    ours, theirs = socket.socketpair()
    # CPython warns of any fork of a process with threads, since 3.12.
    program = "from tests import programs; exec(programs.serve())"
    arguments = [sys.executable, "-W", _NO_FORK_WARNING, "-c", program]
    with theirs:
        dup = (os.POSIX_SPAWN_DUP2, theirs.fileno(), 0)
        os.posix_spawn(
            sys.executable, arguments, {**os.environ, "PYTHONPATH": str(_ROOT)}, file_actions=[dup]
        )
    atexit.register(ours.close)
    return ours


def serve() -> str:
    """Fork for each request; ends with the process that asks. In each fork: return its program."""
    import anyio  # noqa: F401
    import torch  # noqa: F401

    import aiopar.testing  # noqa: F401

    os.chdir(_ROOT)  # the tests may have changed the folder
    requests = socket.socket(fileno=0)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody awaits the forks below
    while True:
        message, files, _, _ = socket.recv_fds(requests, 1, 4)
        if not message:
            os._exit(0)
        if not os.fork():
            break
        for file in files:
            os.close(file)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    requests.close()
    request, out, err, code = files
    if pid := os.fork():
        os.write(code, b"%d\n" % pid)
        for file in (out, err):
            os.close(file)
        _, status = os.waitpid(pid, 0)
        os.write(code, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(code)
    program: str
    with open(request) as text:
        program, new_session, environment = json.load(text)
    with open(os.devnull) as nothing:
        for number, file in enumerate((nothing.fileno(), out, err)):
            os.dup2(file, number)
    for file in (out, err):
        os.close(file)
    if new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    return program
