"""What stands for an event loop and a task, where a test looks at what is posted to them."""

from collections.abc import Generator, Iterable
from typing import Any

from aiopar.futures._wakeup import Delivery, Waker


class Loop(Waker):
    """An event loop: what is posted to it waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.posted: list[Delivery] = []
        self.closed = False

    @property
    def finished(self) -> bool:
        return self.closed

    def post(self, delivery: Delivery) -> None:
        self.posted.append(delivery)


class Waiting:
    """A task that waits on such a loop, and is never resumed."""

    def __init__(self, waker: Waker) -> None:
        self.waker = waker

    @property
    def resumed(self) -> Iterable[Any]:
        raise NotImplementedError

    def __await__(self) -> Generator[Any, Any, object]:
        raise NotImplementedError

    def wake(self) -> None:
        raise NotImplementedError

    def deliver(self) -> None:
        pass
