"""Servers in separate processes. Each is stopped (SIGSTOP) while its rival is measured."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from pathlib import Path

import psutil

from examples.benchmarks import load

ROOT = Path(__file__).parents[2]
STARTS_WITHIN = 180.0
ENDS_WITHIN = 10.0
Command = Sequence[str]
"""A program and its arguments; the port is appended as the last one."""


def program(module: str, *arguments: str) -> Command:
    """The command of a module of `examples.benchmarks.servers`."""
    return (sys.executable, "-m", f"examples.benchmarks.servers.{module}", *arguments)


class Server:
    """A program that serves on loopback, and its child processes."""

    def __init__(self, process: Process, port: int) -> None:
        self._process = process
        self.port = port

    async def requests_per_second(self, requests: Sequence[bytes], clients: int) -> float:
        """The rate at which closed-loop clients get answers, while no other server runs."""
        with self.awake():
            return await load.requests_per_second(self.port, requests, clients)

    async def send(self, requests: Sequence[bytes]) -> list[bytes]:
        """Send requests, and return the bodies of the answers."""
        with self.awake():
            return await load.send(self.port, requests)

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let the server run. Otherwise it is stopped, because some servers poll while idle."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    async def wait_until_ready(self, probe: bytes) -> None:
        """Wait until the server answers `probe`.

        Raises:
            RuntimeError: The server has ended.
        """
        while self._process.returncode is None:
            with contextlib.suppress(OSError, load.UnexpectedAnswer):
                await load.send(self.port, [probe])
                self._signal(signal.SIGSTOP)
                return
            await asyncio.sleep(0.1)
        raise RuntimeError(f"the server ended with {self._process.returncode}")

    async def stop(self) -> None:
        """End the server and its child processes."""
        processes = self._processes()
        send_signal(signal.SIGTERM, processes)
        send_signal(signal.SIGCONT, processes)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), ENDS_WITHIN)
        send_signal(signal.SIGKILL, processes)  # those that are left
        await self._process.wait()

    def _signal(self, number: signal.Signals) -> None:
        send_signal(number, self._processes())

    def _processes(self) -> list[psutil.Process]:
        # The process group is not enough: BentoML's workers have groups of their own.
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def send_signal(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(number)


@contextlib.asynccontextmanager
async def start(command: Command, probe: bytes) -> AsyncIterator[Server]:
    """Start a server on a free port, and wait until it answers `probe`."""
    port = free_port()
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(port),
            cwd=ROOT,
            # One torch thread for each computing thread, for all servers.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends the server
        )
        server = Server(process, port)
        try:
            async with asyncio.timeout(STARTS_WITHIN):
                await server.wait_until_ready(probe)
            yield server
        except BaseException as error:
            output.seek(0)
            said = output.read().decode(errors="replace")
            error.add_note(f"{' '.join(command)} printed:\n{said}")
            raise
        finally:
            await server.stop()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
