"""Futures that are queued or failed, and waiting until they are awaited."""

from typing import Any

import anyio.lowlevel

from aiopar import Future


class Call:
    """Stands for a queued call; says whether it was dropped."""

    dropped = False

    def drop(self) -> None:
        self.dropped = True


def queued_future() -> tuple[Future[Any], Call]:
    future: Future[Any] = Future()
    future.call = call = Call()
    return future, call


def failed_future(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


async def until_awaited(future: Future[Any], count: int = 1) -> None:
    while len(future._awaiters) != count:
        await anyio.lowlevel.checkpoint()
