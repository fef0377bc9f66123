"""Functions that run in the process of the tests, also if a worker in another process calls them.

So a test with gates, lists and counters of its own can run on every kind of worker.
"""

import functools
import itertools
import os
import pickle
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Generic, TypeVar

from aiopar import DeviceExecutor

F = TypeVar("F", bound=Callable[..., Any])

_numbers = itertools.count()
_functions: dict[int, Callable[..., Any]] = {}
"""Those that other processes may call."""


class AtHome(Generic[F]):
    """Calls a function of this process, from here or from another process.

    Pickled, it becomes an object that sends its arguments here, and gets the result or the error.
    """

    def __init__(self, fn: F) -> None:
        self.fn = fn
        self.number = next(_numbers)

    def __call__(self, *args: Any) -> Any:
        return self.fn(*args)

    def __deepcopy__(self, _: object) -> "AtHome[F]":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        _functions[self.number] = self.fn
        return _FromAway, (_address(), self.number)


class _FromAway:
    def __init__(self, address: str, number: int) -> None:
        self._address = address
        self._number = number

    def __call__(self, *args: Any) -> Any:
        with Client(self._address) as connection:
            connection.send_bytes(pickle.dumps((self._number, args)))
            succeeded, result = pickle.loads(connection.recv_bytes())
        if succeeded:
            return result
        raise result


@functools.cache
def _address() -> str:
    listener = Listener(family="AF_UNIX", backlog=64)
    threading.Thread(target=_accept, args=(listener,), name="home", daemon=True).start()
    return str(listener.address)


def _accept(listener: Listener) -> None:
    while True:
        call = threading.Thread(target=_answer, args=(listener.accept(),), daemon=True)
        call.start()


def _answer(connection: Connection) -> None:
    with connection, suppress(EOFError, OSError):  # the other process was killed
        number, args = pickle.loads(connection.recv_bytes())
        try:
            reply = True, _functions[number](*args)
        except BaseException as error:  # noqa: BLE001  # the caller raises it
            reply = False, error
        connection.send_bytes(pickle.dumps(reply))


def place() -> tuple[int, str]:
    """What tells workers apart: the process, and the thread in it."""
    return os.getpid(), threading.current_thread().name


async def places(executor: DeviceExecutor) -> set[tuple[int, str]]:
    """The places of all workers of an executor."""
    views = [executor.on(worker=index) for index in range(len(executor.devices))]
    return {await view.submit(place) for view in views}


def elsewhere(executor: DeviceExecutor) -> bool:
    """Whether its calls run in other processes."""
    return type(executor) is not DeviceExecutor


def labels(executor: DeviceExecutor) -> list[str]:
    """The names of its workers, as in notes."""
    workers = executor.stats().workers
    return [str(stats.device) if stats.host is None else stats.host.name for stats in workers]
