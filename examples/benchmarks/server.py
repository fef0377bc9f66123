"""A server in a process of its own, which stands still while its rival is measured."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from examples.benchmarks.load import requests_per_second, send

ROOT = Path(__file__).parents[2]
Command = Sequence[str]
"""A program and its arguments, without the port, which comes last."""
STARTS_WITHIN = 180.0
ENDS_WITHIN = 10.0


class Server:
    """A program that serves on loopback, and the processes that it starts.

    Args:
        command: How it is started; the port is put behind it.
        probe: A request that it answers when it is ready.
    """

    def __init__(self, command: Command, probe: bytes) -> None:
        self.port = free_port()
        self._command = (*command, str(self.port))
        self._probe = probe
        self._output = tempfile.TemporaryFile()

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            cwd=ROOT,
            # One thread of torch for each thread that computes, in all of them alike.
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
            stdout=self._output,
            stderr=self._output,
            start_new_session=True,  # its processes make a group
        )
        try:
            async with asyncio.timeout(STARTS_WITHIN):
                await self._wait_until_ready()
            os.killpg(self._process.pid, signal.SIGSTOP)
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._stop()

    async def requests_per_second(self, requests: Sequence[bytes], clients: int) -> float:
        """Of closed-loop clients, while no other server runs."""
        with self._awake():
            return await requests_per_second(self.port, requests, clients)

    async def send(self, requests: Sequence[bytes]) -> list[bytes]:
        """The bodies of the answers."""
        with self._awake():
            return await send(self.port, requests)

    @contextlib.contextmanager
    def _awake(self) -> Iterator[None]:
        """It stands still otherwise: some poll while they are idle."""
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            yield
        finally:
            os.killpg(self._process.pid, signal.SIGSTOP)

    async def _wait_until_ready(self) -> None:
        while True:
            if self._process.returncode is not None:
                raise RuntimeError(f"{' '.join(self._command)} ended:\n{self._printed()}")
            try:
                await send(self.port, [self._probe])
            except (OSError, ConnectionError, RuntimeError):
                await asyncio.sleep(0.1)
            else:
                return

    def _printed(self) -> str:
        self._output.seek(0)
        return self._output.read().decode(errors="replace")

    async def _stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), ENDS_WITHIN)
            os.killpg(self._process.pid, signal.SIGKILL)  # and what it has left
        await self._process.wait()
        self._output.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def program(module: str, *arguments: str) -> Command:
    """The command of a module of `examples.benchmarks.servers`."""
    return (sys.executable, "-m", f"examples.benchmarks.servers.{module}", *arguments)
