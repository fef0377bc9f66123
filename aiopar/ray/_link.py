"""A connection to one actor: starts it, asks it, knows when it is lost."""

import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError

from .._base.forking import ReentrantLock
from ..errors import WorkerLost
from ..executor._worker import HostInfo
from ..remote._host import lost
from ..remote._wire import Holding, Kept
from ._actor import Message

_GIVES_UP_AFTER = 20.0  # seconds that a closed executor waits for Ray, and for an actor to start
LEASE = 10.0  # seconds after which a shared actor forgets an executor that does not ping
_GRACE = 2.0  # seconds that an actor has to end when it runs no call


class ActorLink:
    """The connection of one executor to an actor, which several workers use.

    Args:
        name: The label of its workers.
        options: The options of the actor, as the program has given them.
        make: Makes the actor, or finds the one that another process has made.
        suspect: Called with the node of the actor if the actor is lost.
        shared: Whether other processes may share the actor.
    """

    # State     _started  info  _loss
    # new       None      None  None
    # starting  set       None  None   `open` asks for the actor, again if it ends meanwhile
    # ready     set       set   None   it takes calls
    # lost      any       any   set    its calls raise `WorkerLost`
    # closed    None      any   set    after `close`

    def __init__(
        self,
        name: str,
        options: Mapping[str, Any],
        make: Callable[[], Any],
        suspect: Callable[[str], None],
        *,
        shared: bool,
    ) -> None:
        self.name = name
        self.options = options
        self.info: HostInfo | None = None
        self.node: str | None = None  # its id; None until the actor has started
        self.workers: list[Callable[[], object]] = []
        """A function of each worker that uses the actor; called when the actor is lost."""
        self._id = uuid.uuid4().hex
        self._make = make
        self._suspect = suspect
        self._shared = shared
        self._started: tuple[Any, Future[Any]] | None = None
        """The actor, and its answer to `join`."""
        self._holding = Holding()
        # Held, perhaps long, while the actor is asked for, gets a value to keep, or is ended.
        self._turn = threading.Lock()
        self._lock = ReentrantLock()  # for `_loss` and `_waits`
        self._loss: tuple[str, bool] | None = None
        """How the actor was lost; and whether it must end, although other processes share it."""
        self._waits: set[SimpleQueue[Future[Any] | None]] = set()
        """For each thread that waits for the actor the queue of its answer; None: it is lost."""

    @property
    def is_lost(self) -> bool:
        """Whether the actor has ended, does not answer, or was stopped."""
        return self._loss is not None

    @property
    def is_loading(self) -> bool:
        """Whether the actor loads a value that it keeps: an import may hold the actor's GIL."""
        return self._turn.locked()

    def lose(self, how: str, *, dead: bool = True) -> None:
        """Have all calls raise `WorkerLost`; from any thread, never blocks.

        `how` says how the actor was lost. A `dead` actor must end, although other processes share
        it.
        """
        with self._lock:
            if self._loss is not None:
                return
            self._loss = how, dead
            waits = [*self._waits]
        if dead and self.node is not None:
            self._suspect(self.node)
            for host_lost in [*self.workers]:
                host_lost()  # before calls raise `WorkerLost`: no new call must come meanwhile
        for wait in waits:
            wait.put(None)

    def _error(self, *, may_have_run: bool) -> WorkerLost:
        assert self._loss is not None  # noqa: S101  # it is lost
        return lost(self.name, self.info, self._loss[0], may_have_run=may_have_run)

    def _wait(
        self,
        start: Callable[[], Future[Any]],
        *,
        may_have_run: bool = False,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """The result of the future that `start` returns; `WorkerLost` if the actor is lost.

        After `_GIVES_UP_AFTER` seconds `give_up` is called again and again; True ends the wait.
        """
        done: SimpleQueue[Future[Any] | None] = SimpleQueue()
        with self._lock:
            if self._loss is not None:
                raise self._error(may_have_run=False)
            self._waits.add(done)
        try:
            start().add_done_callback(done.put)
            timeout = None if give_up is None else _GIVES_UP_AFTER
            while True:
                try:
                    future = done.get(timeout=timeout)
                    break
                except Empty:
                    timeout = 0.5
                    if give_up is not None and give_up():
                        self.lose("did not start before its executor was closed", dead=False)
            if future is None:
                raise self._error(may_have_run=may_have_run)
            return future.result()
        finally:
            with self._lock:
                self._waits.discard(done)
            del start  # an error's traceback holds this frame

    def _ask(self, method: str, *args: Any, may_have_run: bool = False) -> Any:
        """The result of a method of the actor; `WorkerLost` if the actor is lost."""
        start = partial(self._start, method, *args)
        try:
            return self._wait(start, may_have_run=may_have_run)
        except RayActorError as error:
            self.lose(reason(error))
            raise self._error(may_have_run=may_have_run) from error
        finally:
            del args, start  # an error's traceback holds this frame

    def _start(self, method: str, *args: Any) -> Future[Any]:
        started = self._started
        if started is None or not ray.is_initialized():  # Ray would initialise itself again
            raise RayActorError(error_msg="the program has shut Ray down")
        future: Future[Any] = getattr(started[0], method).remote(*args).future()
        return future

    # The start.

    def _begin(self) -> Future[Any]:
        """Ask Ray for the actor, once; returns the future of its answer to `join`."""
        with self._turn:
            if self._started is None:
                actor = self._make()
                self._started = actor, actor.join.remote(self._id, self.name).future()
            return self._started[1]

    def open(self, ready: Future[None], give_up: Callable[[], bool]) -> None:
        """Wait until Ray is `ready` and the actor takes calls; `give_up` is as for `_wait`.

        Raises RuntimeError if the actor cannot start, WorkerLost if it has ended or was stopped.
        """
        self._wait(lambda: ready, give_up=give_up)
        if not ray.is_initialized():
            raise RuntimeError("the program has shut Ray down before its RayExecutor")
        patience = time.monotonic() + LEASE
        while self.info is None:
            joined = None
            try:
                joined = self._wait(self._begin, give_up=give_up)
            except RayError as error:
                if not isinstance(error, RayActorError) or error.actor_init_failed:
                    self.lose("cannot start")  # the next call tries again
                    raise RuntimeError(f"worker {self.name} cannot start: {error}") from error
            if joined is not None:
                self.node, self.info = joined
            elif time.monotonic() > patience:
                self.lose("has ended")
                raise self._error(may_have_run=False)
            else:
                # The shared actor is ending, because its last driver has left. In a moment its name
                # is free for a new actor.
                time.sleep(0.05)
                with self._turn:
                    self._started = None

    # Calls and kept values.

    def call(self, number: int, message: Message) -> Message:
        """The actor's answer to a task; `WorkerLost` if it is lost, or has dropped the call."""
        try:
            user = self._id, number
            reply: Message | None = self._ask("call", user, message, may_have_run=True)
        finally:
            del message  # an error's traceback holds this frame
        if reply is None:
            raise lost(self.name, self.info, "has dropped a call", may_have_run=False)
        return reply

    def end_call(self, number: int) -> None:
        """End a call, and with it the actor if the call runs; never blocks."""
        with suppress(RayError):
            self._start("end_call", (self._id, number))

    def keep(self, kept: Kept[Any]) -> None:
        """Have the actor keep a value; blocks."""
        with self._turn:
            if kept not in self._holding:
                key, message = kept.pack()
                gone = self._holding.take_gone()
                self._ask("keep", self._id, gone, key, kept.replica, message)
                self._holding.add(kept)

    def ping(self) -> Future[bool]:
        """Ask the actor whether it knows this driver."""
        return self._start("ping", self._id, self._holding.take_gone())

    # The end.

    def close(self) -> None:
        """End the actor, or leave it to other processes; blocks. A second call does nothing."""
        self.lose("is closed", dead=False)
        with self._turn:
            started = self._started
            if started is None:
                return
            ends = not self._shared or (self._loss is not None and self._loss[1])
            with suppress(RayError, TimeoutError):  # it has ended, or it will forget this driver
                if not ends:
                    ends = self._start("leave", self._id).result(_GRACE)
                if ends and ray.is_initialized():
                    ray.kill(started[0])
            self._started = None


def reason(error: BaseException) -> str:
    """How an actor was lost."""
    return "has ended" if isinstance(error, ActorDiedError) else "cannot be reached"
