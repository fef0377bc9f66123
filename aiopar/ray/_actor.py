"""The actor: runs the calls of executors, keeps their values, answers their pings."""

import functools
import os
import platform
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar

import numpy as np
import ray
import torch
from ray.actor import ActorHandle
from ray.cloudpickle import CloudPickler

from ..executor._gang import become_host
from ..executor._worker import HostInfo
from ..remote._channel import Pickled
from ..remote._host import answer
from ..remote._wire import Encoder, decode, forget, keep

T = TypeVar("T")


class RayEncoder(Encoder, CloudPickler):
    """Pickles the main module's functions and classes by value: actors do not import it.

    Ray's references go beside the pickle: Ray would keep references in a pickle for ever.
    """

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, ray.ObjectRef | ActorHandle):
            return _itself, (self._buffers.hold_object(obj),)
        return super().reducer_override(obj)

    def _reduce_named(self, obj: Any) -> Any:
        return CloudPickler.reducer_override(self, obj)  # type: ignore[no-untyped-call]


def _itself(obj: T) -> T:
    return obj


Message: TypeAlias = tuple[bytes, list[Any]]
"""A pickle; and a list of Ray's references, and of arrays of bytes, which Ray does not copy."""


def to_message(pickled: Pickled) -> Message:
    data, buffers = pickled
    return bytes(data), [*map(_view, buffers)]


def _view(buffer: Any) -> Any:
    if isinstance(buffer, torch.Tensor):
        flat = buffer.as_strided((buffer.numel(),), (1,))
        return flat.view(torch.uint8).numpy()
    return np.frombuffer(buffer, np.uint8) if isinstance(buffer, memoryview) else buffer


def from_message(message: Message) -> Any:
    """The object of a message, on a copy of the memory: Ray's own memory is read-only."""
    data, beside = message
    own = [one.copy().data if isinstance(one, np.ndarray) else one for one in beside]
    return decode(memoryview(data), own)


class HostActor:
    """Runs the calls of its drivers, one at a time.

    A driver is the id of an `ActorLink`. Methods of the group "health" run beside calls. A driver
    that has not pinged for `lease` seconds is forgotten. Without drivers the actor ends. If `lease`
    is None, the only driver ends the actor.
    """

    def __init__(self, device: torch.device, seed: int, lease: float | None) -> None:
        become_host("a Ray actor")
        torch.manual_seed(seed)
        self._device = device
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ends = False
        self._pings: dict[str, float] = {}  # when each driver has last pinged
        self._running: tuple[str, int] | None = None
        self._unwanted: set[tuple[str, int]] = set()  # calls that must not begin
        self._users: dict[str, set[str]] = {}  # for each kept value the drivers that use it
        if lease is not None:
            threading.Thread(target=self._end_if_left, args=(lease,), daemon=True).start()

    def call(self, user: tuple[str, int], message: Message) -> Message | None:
        """Run a task of `user`, a driver and the call's number; None: the driver ended the call."""
        with self._lock:
            if user in self._unwanted:
                self._unwanted.remove(user)
                return None
            self._running = user
        try:
            return to_message(answer(partial(from_message, message), RayEncoder))
        finally:
            with self._lock:
                self._running = None

    @ray.method(concurrency_group="health")
    def end_call(self, user: tuple[str, int]) -> None:
        """Drop a call that has not begun. If the call runs, this actor ends."""
        with self._lock:
            if user == self._running:
                os._exit(1)
            self._unwanted.add(user)

    def keep(
        self, driver: str, gone: Sequence[str], key: str, replica: bool, message: Message
    ) -> None:
        """Keep a value for a driver, under `key`, and drop the values with the keys `gone`."""
        self._drop(driver, gone)
        with self._lock:
            users = self._users.setdefault(key, set())
            first = not users
            users.add(driver)
        if first:
            keep(key, partial(from_message, message), self._device if replica else None)
            with self._lock:
                if key not in self._users:  # the driver has gone meanwhile
                    forget([key])

    @ray.method(concurrency_group="health")
    def join(self, driver: str, name: str) -> tuple[str, HostInfo] | None:
        """Add a driver, which calls its worker `name`; returns the id of the node, and the host.

        None: This actor ends. An error says that the actor does not have its device.
        """
        # Not in `__init__`: an actor that fails there may abort its process.
        torch.empty(0, device=self._device)
        with self._lock:
            if self._ends:
                return None
            self._pings[driver] = time.monotonic()
        node = ray.get_runtime_context().get_node_id()
        return node, HostInfo(name, platform.node(), os.getpid())

    @ray.method(concurrency_group="health")
    def ping(self, driver: str, gone: Sequence[str]) -> bool:
        """Note that a driver is alive, and drop its values `gone`; False: it was forgotten."""
        with self._lock:
            if driver not in self._pings:
                return False
            self._pings[driver] = time.monotonic()
        self._drop(driver, gone)
        return True

    @ray.method(concurrency_group="health")
    def leave(self, driver: str) -> bool:
        """Forget a driver; returns whether it was the last one, which must end this actor."""
        return self._forget(driver)

    def _forget(self, driver: str) -> bool:
        with self._lock:
            self._pings.pop(driver, None)
            self._ends = not self._pings
            self._unwanted = {user for user in self._unwanted if user[0] != driver}
            keys = [*self._users]
        self._drop(driver, keys)
        return self._ends

    def _drop(self, driver: str, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                users = self._users.get(key, set())
                users.discard(driver)
                if not users and self._users.pop(key, None) is not None:
                    forget([key])

    def _end_if_left(self, lease: float) -> None:
        while True:
            time.sleep(lease / 10)
            now = time.monotonic()
            with self._lock:
                silent = [driver for driver, last in self._pings.items() if now - last > lease]
            for driver in silent:
                self._forget(driver)
            if self._ends or (now - self._began > lease and not self._pings):
                os._exit(0)


@functools.cache
def actor_class() -> Any:
    return ray.remote(concurrency_groups={"health": 1})(HostActor)  # type: ignore[call-overload]
