"""A resource of the tests that reports its events."""

from typing import Any, Protocol, Self

import anyio
import anyio.lowlevel

import aiopar


class Say(Protocol):
    def __call__(self, event: str, /, **details: Any) -> None: ...


class Hall:
    """Callers of `wait` wait until `let_out`."""

    def __init__(self, name: str, say: Say, *, opens: bool = True) -> None:
        self.ready = False
        self.alive = True
        self._name = name
        self._say = say
        self._opens = opens
        self._waiting = 0
        self._round = 0
        self._closing = False
        self._dropped = False
        self._changed: anyio.Event

    async def __aenter__(self) -> Self:
        await anyio.lowlevel.checkpoint()
        if not self._opens:
            raise OSError(f"{self._name} does not open")
        self._changed = anyio.Event()
        self._closing = self._dropped = False
        self.ready = True
        self._say("opened", name=self._name)
        return self

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        if not self._closing or (not drain and not self._dropped):
            most = {} if drain else {"timeout": timeout}
            self._say("closing", name=self._name, drain=drain, waiting=self._waiting, **most)
        self.ready = False
        self._closing = True
        self._dropped |= not drain
        self._tell()
        while self._waiting:
            await self._changed.wait()

    async def wait(self) -> None:
        entered = self._round
        self._waiting += 1
        try:
            while self._round == entered:
                if self._dropped:
                    raise aiopar.ServiceClosed(f"{self._name} is closed")
                await self._changed.wait()
        finally:
            self._waiting -= 1
            self._tell()

    def let_out(self) -> None:
        self._round += 1
        self._tell()

    def _tell(self) -> None:
        changed, self._changed = self._changed, anyio.Event()
        changed.set()
