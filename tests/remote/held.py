"""Functions that hold a worker process until the test lets it on."""

import os
from pathlib import Path
from typing import Any, Self

import anyio


class ProcessGate:
    """As `aiopar.testing.Gate`, for calls that run in other processes. `async with` opens it.

    Args:
        folder: An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / "entered", folder / "let_on"]
        for path in self._paths:
            os.mkfifo(path)
        # Open both ways: neither end waits for the other to be opened, or sees it closed.
        self._entered, self._let_on = (os.open(path, os.O_RDWR) for path in self._paths)
        os.set_blocking(self._let_on, False)  # an event loop may write

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.open()

    def close(self) -> None:
        for file in (self._entered, self._let_on):
            os.close(file)

    @property
    def hold(self) -> "Held":
        """The function that goes to the process."""
        return Held(*map(str, self._paths))

    def wait_entered(self) -> int:
        """Block until a call has come; returns its process."""
        return int(os.read(self._entered, 10))

    async def entered(self) -> int:
        """Wait until a call has come; returns its process."""
        return await anyio.to_thread.run_sync(self.wait_entered)

    def open(self) -> None:
        """Let calls on."""
        os.write(self._let_on, b"!" * 1000)


class Held:
    """Says that it was called, and waits."""

    def __init__(self, entered: str, let_on: str) -> None:
        self._entered, self._let_on = entered, let_on

    def __call__(self, result: Any = None) -> Any:
        with open(self._entered, "w") as file:
            file.write(f"{os.getpid():10}")
        with open(self._let_on, "rb", buffering=0) as let_on:
            let_on.read(1)
        return result
