"""A connection to one actor: starts it, asks it, knows when it is lost."""

import itertools
import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
import torch
from ray.exceptions import ActorDiedError, RayActorError, RayError

from .._base.tracebacks import logger
from ..errors import WorkerLost
from ..executor._worker import HostInfo
from ..remote._host import lost
from ..remote._kept import Kept
from ._actor import Message, actor_class
from ._session import NAMESPACE, Session

_PATIENCE = 25
"""After so many periods a warning says that an actor has not started yet."""
_GIVES_UP_AFTER = 20.0
"""An executor that is closed waits for so many seconds for Ray, and for an actor to start."""
_LEASE = 10.0
"""Seconds after which a shared actor forgets an executor that does not ping it."""
_GRACE = 2.0
"""How many seconds an actor that runs no call has to end."""


class ActorLink:
    """An actor, as one executor knows it; several workers use it.

    Args:
        index: Its number in the executor.
        device: The device of its calls.
        session: Watches it.
        options: The options of the actor, as for Ray.
        shared: The executor's name, if other processes share the actor.
    """

    def __init__(
        self,
        index: int,
        device: torch.device,
        session: Session,
        options: Mapping[str, Any],
        shared: str | None,
    ) -> None:
        self.index = index
        self.name = f"ray:{index}/{device}"
        self.info: HostInfo | None = None
        self.node: str | None = None
        """The id of its node; None until it has started."""
        self.workers: list[Callable[[], object]] = []
        """One for each worker that uses it. They are called when it is lost."""
        self._id = uuid.uuid4().hex
        self._device = device
        self._session = session
        self._options = options
        self._shared = shared
        self._actor: Any = None
        self._joined: Future[Any] | None = None
        self._beginning = threading.Lock()
        self._keeping = threading.Lock()
        self._lock = threading.Lock()
        self._how: str | None = None
        """How it was lost."""
        self._dead = False
        self._waits: set[SimpleQueue[Future[Any] | None]] = set()
        """Of the threads that wait for it."""
        self._numbers: dict[weakref.ref[Kept[Any]], int] = {}
        """Of the values that the actor keeps for this driver."""
        self._gone: deque[weakref.ref[Kept[Any]]] = deque()
        """The values that are gone here, and that the actor still keeps."""
        self.next_number = itertools.count().__next__
        """A number that no other call or kept value has."""
        self._closed = False
        self._ping: Future[bool] | None = None
        """The latest ping."""
        self._misses = 0
        """For how many periods it has not started, or not answered."""

    @property
    def is_lost(self) -> bool:
        """Whether it has ended, does not answer, or was stopped."""
        return self._how is not None

    def lose(self, how: str, *, dead: bool = True) -> None:
        """Have all calls raise `WorkerLost`; from any thread, never blocks.

        Args:
            how: What has happened to the actor.
            dead: Whether the actor must end, although other processes may share it.
        """
        with self._lock:
            if self._how is not None:
                return
            self._how, self._dead = how, dead
            waits = [*self._waits]
        if dead and self.node is not None:
            self._session.suspect(self.node)
            for host_lost in [*self.workers]:
                host_lost()  # before a call raises: no other call must come here meanwhile
        for wait in waits:
            wait.put(None)

    def _error(self, *, may_have_run: bool) -> WorkerLost:
        assert self._how is not None  # noqa: S101  # it is lost
        return lost(self.name, self.info, self._how, may_have_run=may_have_run)

    def _wait(
        self,
        start: Callable[[], Future[Any]],
        *,
        may_have_run: bool = False,
        gives_up: Callable[[], bool] | None = None,
    ) -> Any:
        """The result of the future that `start` returns.

        Args:
            start: Starts what is waited for.
            may_have_run: See `WorkerLost`.
            gives_up: Whether not to wait any more; asked again and again after `_GIVES_UP_AFTER`.

        Raises:
            WorkerLost: The actor was lost before, or is lost meanwhile.
        """
        done: SimpleQueue[Future[Any] | None] = SimpleQueue()
        with self._lock:
            if self._how is not None:
                raise self._error(may_have_run=False)
            self._waits.add(done)
        try:
            start().add_done_callback(done.put)
            future = _first(done, gives_up)
            if future is None:
                self.lose("did not start before its executor was closed", dead=False)
                raise self._error(may_have_run=may_have_run)
            return future.result()
        finally:
            with self._lock:
                self._waits.discard(done)
            del start  # an error's traceback holds this frame

    def ask(self, method: str, *args: Any, may_have_run: bool = False) -> Any:
        """The result of a method of the actor.

        Raises:
            WorkerLost: The actor is lost.
        """
        start = partial(self._start, method, *args)
        try:
            return self._wait(start, may_have_run=may_have_run)
        except RayActorError as error:
            self.lose(_reason(error))
            raise self._error(may_have_run=may_have_run) from error
        finally:
            del args, start  # an error's traceback holds this frame

    def _start(self, method: str, *args: Any) -> Future[Any]:
        if not ray.is_initialized():  # Ray would initialise itself again
            raise RayActorError(error_msg="the program has shut Ray down")
        future: Future[Any] = getattr(self._actor, method).remote(*args).future()
        return future

    # The start.

    def begin(self) -> Future[Any]:
        """Ask for the actor; returns a future of where it runs."""
        with self._beginning:
            if self._joined is None:
                options = dict(self._options)
                if self._shared is not None:
                    options |= {
                        "name": f"{self._shared}:{self.index}",
                        "namespace": NAMESPACE,
                        "get_if_exists": True,
                        "lifetime": "detached",
                    }
                make = actor_class().options(**options)
                # Actors have different random numbers, the same in every run after
                # `torch.manual_seed`.
                seed = (torch.initial_seed() + self.index) % 2**63
                lease = None if self._shared is None else _LEASE
                self._actor = make.remote(self._device, seed, lease)
                self._joined = self._actor.join.remote(self._id).future()
                self._session.add(self)
            return self._joined

    def open(self, gives_up: Callable[[], bool]) -> None:
        """Wait until the actor takes calls.

        Args:
            gives_up: Whether the executor is closed, and does not wait any more.

        Raises:
            RuntimeError: It cannot start.
            WorkerLost: It has ended, or was stopped.
        """
        self._wait(lambda: self._session.ready, gives_up=gives_up)
        if not ray.is_initialized():
            raise RuntimeError("the program has shut Ray down before its RayExecutor")
        give_up = time.monotonic() + _LEASE
        while self.info is None:
            joined = None
            try:
                joined = self._wait(self.begin, gives_up=gives_up)
            except RayActorError as error:
                if error.actor_init_failed:
                    raise self._cannot_start(error) from error
            except RayError as error:
                raise self._cannot_start(error) from error
            if joined is not None:
                info, self.node = joined
                self._misses = 0
                self.info = HostInfo(self.name, info.node, info.pid)
            elif time.monotonic() > give_up:
                self.lose("has ended")
                raise self._error(may_have_run=False)
            else:
                # It has ended: its node has, or the last driver that shared it has left. In a
                # moment its name is free.
                time.sleep(0.05)
                with self._beginning:
                    self._joined = None

    def _cannot_start(self, error: RayError) -> RuntimeError:
        self.lose("cannot start")  # the next call tries again
        return RuntimeError(f"worker {self.name} cannot start: {error}")

    # Calls.

    def call(self, number: int, message: Message) -> Message:
        """The answer of the actor to a task.

        Raises:
            WorkerLost: The actor is lost, or has dropped the call.
        """
        try:
            reply: Message | None = self.ask("call", (self._id, number), message, may_have_run=True)
        finally:
            del message  # an error's traceback holds this frame
        if reply is None:
            raise lost(self.name, self.info, "has dropped a call", may_have_run=False)
        return reply

    def end_call(self, number: int) -> None:
        """End a call, and with it the actor if the call runs; never blocks."""
        with suppress(RayError):
            self._start("end_call", (self._id, number))

    # Kept values.

    def keep(self, kept: Kept[Any]) -> None:
        """Have the actor keep a value; blocks."""
        reference = weakref.ref(kept, self._gone.append)
        with self._keeping:
            if reference not in self._numbers:
                number = self.next_number()
                key, message = kept.pack()
                user = (self._id, number)
                self.ask("keep", user, self._forgotten(), key, kept.replica, message)
                self._numbers[reference] = number

    def _forgotten(self) -> list[int]:
        """The numbers of the values that are gone since this was called last."""
        numbers = []
        with suppress(IndexError):
            while True:
                numbers.append(self._numbers.pop(self._gone.popleft()))
        return numbers

    # Health.

    def check(self, misses: int) -> None:
        """Ping the actor, or count that it has not answered; after `misses` it is lost."""
        ping = self._ping
        if self.is_lost:
            return
        if self.info is None or (ping is not None and not ping.done()):
            self._misses += 1
            if self.info is not None and self._misses >= misses:
                self.lose("does not answer")
            elif self.info is None and self._misses == _PATIENCE:
                options = {name: value for name, value in self._options.items() if value}
                logger.warning("worker %s waits until Ray has room for %s", self.name, options)
            return
        try:
            if ping is not None and not ping.result():
                self.lose("has forgotten this process, which did not ping it")
                return
            self._misses = 0
            self._ping = self._start("ping", self._id, self._forgotten())
        except RayError as error:
            self.lose(_reason(error))

    # The end.

    def close(self) -> None:
        """End the actor, or leave it to other processes; blocks. May be called twice."""
        self._session.discard(self)
        with self._beginning:
            if self._actor is None or self._closed:
                return
            self._closed = True
        ends = self._dead or self._shared is None
        with suppress(RayError, TimeoutError):  # it has ended, or ends when its lease does
            if not ends:
                ends = self._start("leave", self._id).result(_GRACE)
            if ends and ray.is_initialized():
                ray.kill(self._actor)


def _first(
    done: SimpleQueue[Future[Any] | None], gives_up: Callable[[], bool] | None
) -> Future[Any] | None:
    """The first entry of a queue; None if the caller gives up."""
    timeout = None if gives_up is None else _GIVES_UP_AFTER
    while True:
        try:
            return done.get(timeout=timeout)
        except Empty:
            if gives_up is not None and gives_up():
                return None
            timeout = 0.5


def _reason(error: BaseException) -> str:
    return "has ended" if isinstance(error, ActorDiedError) else "cannot be reached"
