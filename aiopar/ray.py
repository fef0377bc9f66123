"""`RayExecutor`: workers whose calls run in Ray actors, on any machine (extra `ray`)."""

import atexit
import ctypes
import functools
import hashlib
import itertools
import logging
import os
import platform
import signal
import threading
import time
import uuid
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import torch

try:
    import ray
except ModuleNotFoundError as error:
    raise ImportError("aiopar.ray needs Ray: pip install 'aiopar[ray]'") from error
from ray.cloudpickle import CloudPickler
from ray.exceptions import ActorDiedError, RayActorError, RayError

from ._base.arguments import as_kwargs, check_bound, check_int, check_number
from ._base.forking import live_methods
from ._base.tracebacks import logger
from .errors import WorkerLost
from .executor._pool import _close_at_exit
from .executor._worker import HostInfo, current_call, current_worker
from .remote._executor import HostExecutor, HostWorker
from .remote._host import Host, Task, answer, become_host, encode_kept, encode_task, lost, outcome
from .remote._kept import Kept, forget, keep
from .remote._wire import Buffer, Encoder, Pickled, decode

__all__ = ["RayExecutor"]

_NAMESPACE = "aiopar"
_PERIOD = 0.8
"""Seconds between two pings of an actor."""
_MISSES = 3
"""An actor that has not answered a ping for so many periods is lost."""
_PATIENCE = 25
"""After so many periods a warning says that an actor has not started yet."""
_LEASE = 10.0
"""Seconds after which a shared actor forgets a driver that does not ping it."""
_GRACE = 2.0
"""How many seconds an actor that runs no call has to end."""
_OWN_OPTIONS = {
    *("num_cpus", "num_gpus", "name", "namespace", "lifetime", "get_if_exists", "max_restarts"),
    *("max_task_retries", "max_concurrency", "concurrency_groups"),
}
"""The options of actors that `RayExecutor` sets itself."""

# Ray shuts down when the interpreter exits. The calls that are queued then run before that.
atexit.unregister(_close_at_exit)
atexit.register(_close_at_exit)


class RayExecutor(HostExecutor):
    """`num_actors` Ray actors: a `DeviceExecutor` whose calls run on this or other machines.

    Give it wherever a `DeviceExecutor` is given. Functions, modules and arguments go to an actor by
    pickle, also lambdas and classes of a script; tensors and arrays go through Ray's object store.
    Results arrive on the CPU. What a `ReplicaPool`, a `Batcher`, `aiopar.map` or a `Pipeline` uses
    for all its calls (weights, functions) goes to each actor once. aiopar and the modules of the
    program must be installed on every node, in the same versions.

    An actor is lost if it ends, or if it answers no ping for about 3 seconds: its machine has
    stopped, or its code holds the GIL. It is replaced, where Ray finds room. Its calls raise
    `WorkerLost`, or are tried elsewhere by a `ReplicaPool` and its `Batcher`. Calls wait while Ray
    has no room for an actor.

    If Ray is not initialised, the executor does it, on a thread of its own, and shuts Ray down when
    the last such executor of this process is closed. The program's handlers of signals stay as they
    are.

    For HTTP on many nodes with autoscaling there is Ray Serve; for training, Ray Train.

    Args:
        num_actors: The number of actors. With `in_flight=2`, the executor has two workers for each.
        num_gpus: GPUs per actor. If it is above 0, the actor computes on its `cuda:0`, else on the
            CPU. This process needs no GPU.
        num_cpus: CPUs per actor; the operators of an actor use so many threads.
        in_flight: How many calls may be on their way to an actor at once. It runs one at a time;
            the next one travels meanwhile.
        address: The address of a cluster, as for `ray.init`. None: that of `RAY_ADDRESS`, or of the
            cluster that this machine is part of, or else as `"local"`: a Ray of its own.
        ray_actor_options: More options of the actors (`resources`, `scheduling_strategy`,
            `runtime_env`, ...), as for `ray.actor.ActorClass.options`.
        name: Share the actors with the executors of other processes that have this name: the
            workers of a web server, other machines of the cluster. The first executor makes them.
            They end when the last executor is closed, or 10 seconds after its process has died.
        max_pending: As for `DeviceExecutor`.
        num_threads: How many threads an operator may use in an actor. None: `num_cpus`.
        thread_name_prefix: As for `DeviceExecutor`, for the threads that wait for the actors.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is too low; or an option is unknown, or has an argument of its own.

    Example:
        >>> import asyncio, aiopar, aiopar.ray, torch
        >>> async def main():
        ...     async with aiopar.ray.RayExecutor(1) as executor:
        ...         return await executor.run_sync(lambda x: x + 1, torch.ones(2))
        >>> asyncio.run(main())
        tensor([2., 2.])
    """

    def __init__(
        self,
        num_actors: int,
        *,
        num_gpus: float = 0,
        num_cpus: float = 1,
        in_flight: int = 2,
        address: str | None = None,
        ray_actor_options: Mapping[str, Any] | None = None,
        name: str | None = None,
        max_pending: int | None = None,
        num_threads: int | None = None,
        thread_name_prefix: str = "aiopar",
    ) -> None:
        num_actors = check_int("num_actors", num_actors, at_least=1)
        in_flight = check_int("in_flight", in_flight, at_least=1)
        num_gpus = check_number("num_gpus", num_gpus, zero=True)
        options = _actor_options(num_gpus, num_cpus, ray_actor_options)
        max_pending = check_bound("max_pending", max_pending)
        num_threads = check_bound("num_threads", num_threads)
        actors = _Actors(_check_address(address), options, _check_name(name), num_threads)
        device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
        super().__init__(
            [device] * (num_actors * in_flight),
            max_pending=max_pending,
            num_threads=num_threads,
            thread_name_prefix=thread_name_prefix,
            kind="ray",
            per_host=in_flight,
            start=actors.start,
            pack=_pack,
            worker=partial(_RayWorker, actors=actors),
        )


def _actor_options(
    num_gpus: float, num_cpus: float, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    options = dict(as_kwargs("ray_actor_options", given))
    refused = sorted(_OWN_OPTIONS & options.keys())
    if refused:
        raise ValueError(f"ray_actor_options cannot have {', '.join(refused)}: RayExecutor sets it")
    options |= {"num_gpus": num_gpus, "num_cpus": check_number("num_cpus", num_cpus, zero=True)}
    _actor_class().options(**options)  # raises if it cannot take them
    return options


def _check_address(address: str | None) -> str | None:
    if address is not None and not isinstance(address, str):
        raise TypeError(f"address must be a str or None, not {type(address).__name__}")
    if address is not None and address.startswith("ray://"):
        raise ValueError(
            f"address must be that of a cluster which this machine is part of, got {address!r}: "
            "join it by `ray start --address=...`; a Ray client would copy all tensors"
        )
    return address


def _check_name(name: str | None) -> str | None:
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a str or None, not {type(name).__name__}")
    if name is not None and not name:
        raise ValueError("name must not be empty")
    return name


class _RayWorker(HostWorker):
    """A worker that shares an actor with the other workers of its number.

    Until the actor takes calls, the worker is busy with its warm-up, so that other workers take the
    calls of their queue. That may last: Ray may have no room for the actor.
    """

    def __init__(self, *args: Any, actors: "_Actors", **kwargs: Any) -> None:
        self._actors = actors
        self._returns = False
        """Whether a warm-up is queued."""
        self._warming = False
        """Whether a warm-up runs."""
        super().__init__(*args, **kwargs)
        self.spare = self.index % kwargs["per_host"] > 0
        actors.enter()

    @property
    def load(self) -> float:
        # An idle actor gets a call before a busy one gets a second call.
        return super().load + self.spare / 2

    def warm_up(self) -> None:
        self._returns = True
        super().warm_up()

    def ensure_host(self) -> None:
        self._returns = False
        self._warming = True
        try:
            super().ensure_host()
        finally:
            self._warming = False

    def _running_host(self) -> Host:
        host = self._host
        if isinstance(host, _RayHost) and host.is_lost:  # while it ran no call
            self._host = None
            host.close()
            host = None
        call = current_call()
        if host is None and self._returns and call is not None and call.internal:
            # A pool or batcher need not wait here: it has other workers.
            raise WorkerLost(f"worker {self.label} is started again", may_have_run=False)
        return super()._running_host()

    def host_lost(self) -> None:
        """Have no more calls sent here until there is a new actor; from any thread."""
        for on_host_lost in live_methods(self.on_host_lost):
            on_host_lost(self)
        self.warm_up()

    @property
    def killed(self) -> bool:
        """Whether the executor has killed its hosts."""
        return self._killed

    @property
    def only_warms_up(self) -> bool:
        """Whether it was stopped and waits for an actor that no call needs."""
        return self._stopping and self._warming

    @property
    def idle(self) -> bool:
        # An executor that is drained must not wait for an actor that no call needs.
        with self._lock:
            unneeded = self._warming and len(self.outstanding) == 1 and not self._detached
        return unneeded or super().idle

    def stop(self) -> None:
        super().stop()
        host = self._host  # either this is seen here, or `open` sees that the worker was stopped
        if self.only_warms_up and host is not None:
            host.kill()

    def _set_ended(self) -> None:
        self._actors.leave()
        super()._set_ended()


# Messages: a pickle, and the memory of tensors and arrays beside it, which Ray moves without a copy
# of its own.


class _Encoder(Encoder, CloudPickler):
    """Pickles also what has no name in a module: lambdas, classes of a script."""

    def reducer_override(self, obj: Any) -> Any:
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return CloudPickler.reducer_override(self, obj)  # type: ignore[no-untyped-call]
        return reduced


_Message: TypeAlias = tuple[bytes, list["np.ndarray[Any, np.dtype[np.uint8]]"]]


def _message(pickled: Pickled) -> _Message:
    data, buffers = pickled
    return bytes(data), [*map(_view, buffers)]


def _view(buffer: Buffer) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    if isinstance(buffer, torch.Tensor):
        flat = buffer.as_strided((buffer.numel(),), (1,))
        return flat.view(torch.uint8).numpy()
    return np.frombuffer(buffer, np.uint8)


def _load(message: _Message) -> Any:
    """The object of a message, on memory of its own: that of the message is Ray's, read-only."""
    data, views = message
    return decode(memoryview(data), [view.copy().data for view in views])


_generations: Counter[str] = Counter()
_generations_lock = threading.Lock()


def _pack(value: Any) -> tuple[str, Any]:
    data, views = _message(encode_kept(value, _Encoder))
    digest = hashlib.blake2b(data, digest_size=16)
    for view in views:
        digest.update(view.data)
    content = digest.hexdigest()
    # The same value in other processes gets the same key: so shared actors keep it once. But if
    # this process keeps a value again, the actors get it again: calls may have changed their copy.
    with _generations_lock:
        generation = _generations[content]
        _generations[content] += 1
    return f"{content}-{generation}", ray.put((data, views))


# The actor's side.


class _Actor:
    """Runs the calls of its drivers, one at a time.

    A driver is a `_Link`, by its id. Methods of the group "health" run beside calls.

    Args:
        device: The device of the calls.
        seed: For its random numbers.
        lease: After so many seconds without a ping a driver is forgotten; without drivers the actor
            ends. None: it ends with its only driver.
    """

    def __init__(self, device: torch.device, seed: int, lease: float | None) -> None:
        become_host("a Ray actor")
        torch.manual_seed(seed)
        self._device = device
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._ends = False
        self._pings: dict[str, float] = {}
        """When each driver has last pinged."""
        self._users: dict[str, set[tuple[str, int]]] = {}
        """For each kept value the pairs (driver, number) that use it."""
        if lease is not None:
            threading.Thread(target=self._end_if_left, args=(lease,), daemon=True).start()

    def call(self, message: _Message) -> _Message:
        """Run a task."""
        return _message(answer(lambda: Task(*_load(message)), _Encoder))

    def keep(
        self,
        user: tuple[str, int],
        gone: Sequence[int],
        key: str,
        replica: bool,
        message: _Message,
    ) -> None:
        """Keep a value for a driver, under a number of the driver's; drop the numbers `gone`."""
        self._drop({(user[0], number) for number in gone})
        with self._lock:
            users = self._users.setdefault(key, set())
            first = not users
            users.add(user)
        if first:
            keep(key, partial(_load, message), self._device if replica else None)
            with self._lock:
                if key not in self._users:  # dropped meanwhile
                    forget([key])

    @ray.method(concurrency_group="health")
    def join(self, driver: str) -> tuple[HostInfo, str] | None:
        """Add a driver; returns where this runs, and the id of the node. None: it ends.

        Raises:
            Exception: It does not have its device.
        """
        # Not in `__init__`: a Ray actor that fails there may abort.
        torch.empty(0, device=self._device)
        with self._lock:
            if self._ends:
                return None
            self._pings[driver] = time.monotonic()
        node = ray.get_runtime_context().get_node_id()
        return HostInfo("", platform.node(), os.getpid()), node

    @ray.method(concurrency_group="health")
    def ping(self, driver: str, gone: Sequence[int]) -> bool:
        """Whether the driver is known. Its numbers `gone` are dropped."""
        with self._lock:
            if driver not in self._pings:
                return False
            self._pings[driver] = time.monotonic()
        self._drop({(driver, number) for number in gone})
        return True

    @ray.method(concurrency_group="health")
    def leave(self, driver: str) -> bool:
        """Forget a driver; returns whether it was the last, which must end this actor then."""
        return self._forget_driver(driver)

    def _forget_driver(self, driver: str) -> bool:
        with self._lock:
            self._pings.pop(driver, None)
            self._ends = not self._pings
            users = {user for users in self._users.values() for user in users if user[0] == driver}
        self._drop(users)
        return self._ends

    def _drop(self, gone: set[tuple[str, int]]) -> None:
        if not gone:
            return
        with self._lock:
            for users in self._users.values():
                users.difference_update(gone)
            unused = [key for key, users in self._users.items() if not users]
            for key in unused:
                del self._users[key]
            forget(unused)

    def _end_if_left(self, lease: float) -> None:
        while True:
            time.sleep(lease / 10)
            now = time.monotonic()
            with self._lock:
                silent = [driver for driver, last in self._pings.items() if now - last > lease]
            for driver in silent:
                self._forget_driver(driver)
            if self._ends or (now - self._began > lease and not self._pings):
                os._exit(0)


@functools.cache
def _actor_class() -> Any:
    return ray.remote(concurrency_groups={"health": 1})(_Actor)  # type: ignore[call-overload]


# This process's side.


class _Ray(threading.Thread):
    """Ray in this process, while executors use it: starts it, watches actors, shuts it down.

    It is one thread, because the kernel ends the processes of a local Ray when the thread that has
    started them ends.
    """

    def __init__(self, address: str | None) -> None:
        super().__init__(name="aiopar-ray", daemon=True)
        self.ready: Future[None] = Future()
        self.users = 0
        """How many executors use it; guarded by `_ray_lock`."""
        self._address = address
        self._stopping = threading.Event()
        self._links: set[_Link] = set()
        self._down: dict[str, int] = {}
        """The nodes that have lost an actor, and for how many more periods they are suspect."""
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            started = self._start_ray()
        except BaseException as error:  # noqa: BLE001  # the calls raise it
            self.ready.set_exception(error)
            return
        self.ready.set_result(None)
        while not self._stopping.wait(_PERIOD):
            self._watch()
        if started:
            ray.shutdown()

    def _start_ray(self) -> bool:
        if ray.is_initialized():
            return False
        with _sigterm_kept():
            ray.init(
                self._address,
                namespace=_NAMESPACE,
                include_dashboard=False,
                logging_level=logging.ERROR,
            )
        return True

    @property
    def failed(self) -> bool:
        """Whether Ray could not be started."""
        return self.ready.done() and self.ready.exception() is not None

    def stop(self) -> None:
        """End when Ray is shut down; blocks."""
        self._stopping.set()
        self.join()

    def add(self, link: "_Link") -> None:
        """Watch an actor."""
        with self._lock:
            self._links.add(link)

    def discard(self, link: "_Link") -> None:
        """Do not watch an actor any more."""
        with self._lock:
            self._links.discard(link)

    def suspect(self, node: str) -> None:
        """Note that an actor on a node was lost."""
        with self._lock:
            # Two: an actor may have answered just before, so that only its next ping tells.
            self._down[node] = 2

    def _watch(self) -> None:
        with self._lock:
            links = [*self._links]
            down = [*self._down]
            self._down = {node: count - 1 for node, count in self._down.items() if count > 1}
        if not ray.is_initialized():  # Ray would initialise itself again
            for link in links:
                link.lose("has ended: the program has shut Ray down")
            return
        # If a node ends, Ray notices its actors one after the other. So an actor has less time to
        # answer if another one of its node was lost.
        for link in links:
            link.check(1 if link.node in down else _MISSES)


_current_ray: _Ray | None = None
_ray_lock = threading.Lock()


def _use_ray(address: str | None) -> _Ray:
    """Ray, for one more executor."""
    global _current_ray  # noqa: PLW0603
    with _ray_lock:
        if _current_ray is None or _current_ray.failed:
            _current_ray = _Ray(address)
            _current_ray.start()
        _current_ray.users += 1
        return _current_ray


def _leave_ray(used: _Ray) -> None:
    global _current_ray  # noqa: PLW0603
    with _ray_lock:
        used.users -= 1
        if not used.users:
            used.stop()
            if _current_ray is used:
                _current_ray = None


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Have the program's handler of SIGTERM in place after `ray.init`.

    Ray's core puts its own in front of it, below Python, which aborts the process 3 seconds later.
    """
    handler, action = signal.getsignal(signal.SIGTERM), _signal_action(signal.SIGTERM)
    try:
        yield
    finally:
        placed = _signal_action(signal.SIGTERM)
        # Ray's core handles SIGTRAP alike, and nobody else does.
        if placed != action and placed[:8] == _signal_action(signal.SIGTRAP)[:8]:
            if signal.getsignal(signal.SIGTERM) is not handler:  # set meanwhile, through Python
                action = _signal_action(signal.SIGINT)
            _signal_action(signal.SIGTERM, action)


def _signal_action(number: int, action: bytes | None = None) -> bytes:
    """The C library's `struct sigaction` of a signal, before `action` is set; on any thread."""
    before = ctypes.create_string_buffer(256)  # larger than the structure
    ctypes.CDLL(None).sigaction(int(number), action, before)
    return before.raw


class _Actors:
    """The actors of one executor."""

    def __init__(
        self,
        address: str | None,
        options: Mapping[str, Any],
        name: str | None,
        num_threads: int | None,
    ) -> None:
        self.options = options
        self.name = name
        self.threads = num_threads or 0
        self._address = address
        self._lock = threading.Lock()
        self._workers = 0
        self._links: dict[int, _Link] = {}
        self._ray: _Ray | None = None

    def enter(self) -> None:
        """Note a new worker."""
        with self._lock:
            self._workers += 1

    def leave(self) -> None:
        """Note the end of a worker; after the last one Ray may be shut down."""
        with self._lock:
            self._workers -= 1
            used = None
            if not self._workers:
                used, self._ray = self._ray, None
        if used is not None:
            _leave_ray(used)

    def start(self, index: int, device: torch.device) -> "_RayHost":
        """Connect the calling worker to the actor `index`, or to a new one if it was lost.

        See `StartHost`. If the actor is lost later, the worker warms up again.
        """
        worker = current_worker()
        assert isinstance(worker, _RayWorker)  # noqa: S101  # it calls this on its thread
        with self._lock:
            if self._ray is None or self._ray.failed:
                if self._ray is not None:
                    _leave_ray(self._ray)
                self._ray = _use_ray(self._address)
            used = self._ray
        used.ready.result()
        if not ray.is_initialized():
            raise RuntimeError("the program has shut Ray down before its RayExecutor")
        with self._lock:
            link = self._links.get(index)
            if link is None or link.is_lost:
                link = self._links[index] = _Link(index, device, self, used)
            link.workers.append(worker)
        return _RayHost(link, worker, self)

    def release(self, link: "_Link", worker: _RayWorker) -> None:
        """Close a connection; the last one closes the link."""
        with self._lock:
            link.workers.remove(worker)
            last = not link.workers
            if last and self._links.get(link.index) is link:
                del self._links[link.index]
        # A lost actor must not hold the resources that the new one needs.
        if last or link.is_lost:
            link.close()


class _RayHost:
    """A worker's connection to an actor. See `Host`."""

    def __init__(self, link: "_Link", worker: _RayWorker, actors: _Actors) -> None:
        self._link = link
        self._worker = worker
        self._actors = actors

    @property
    def info(self) -> HostInfo | None:
        return self._link.info

    @property
    def is_lost(self) -> bool:
        """Whether the next call would raise `WorkerLost`."""
        return self._link.is_lost

    def open(self) -> None:
        if self._worker.only_warms_up:
            self.kill()
        self._link.open()

    def call(self, task: Task) -> tuple[bool, Any]:
        link = self._link
        try:
            pickled, kept = encode_task(task._replace(threads=self._actors.threads), _Encoder)
            for value in kept:
                link.keep(value)
            message = _message(pickled)
        finally:
            del task  # an error's traceback holds this frame
            pickled = kept = value = None  # type: ignore[assignment]
        reply = link.ask("call", message, may_have_run=True)
        return outcome(partial(_load, reply), link.name)

    def close(self) -> None:
        self._actors.release(self._link, self._worker)

    def kill(self) -> None:
        # Else it has lost its device. If it was stopped, other processes may go on with it.
        stopped = self._worker.killed or self._worker.only_warms_up
        self._link.lose("was stopped" if stopped else "has lost its device", dead=not stopped)


class _Link:
    """An actor, as one executor knows it; several workers use it.

    Args:
        index: Its number in the executor.
        device: The device of its calls.
        actors: Its executor's.
        used: Ray.
    """

    def __init__(self, index: int, device: torch.device, actors: _Actors, used: _Ray) -> None:
        self.index = index
        self.name = f"ray:{index}/{device}"
        self.info: HostInfo | None = None
        self.node: str | None = None
        """The id of its node; None until it has started."""
        self.workers: list[_RayWorker] = []
        """Those that use it; guarded by the lock of `_Actors`."""
        self._id = uuid.uuid4().hex
        self._device = device
        self._actors = actors
        self._ray = used
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
        self._next_number = itertools.count().__next__
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
            self._ray.suspect(self.node)
            for worker in [*self.workers]:
                worker.host_lost()  # before a call raises: no other call must come here meanwhile
        for wait in waits:
            wait.put(None)

    def _error(self, *, may_have_run: bool) -> WorkerLost:
        assert self._how is not None  # noqa: S101  # it is lost
        return lost(self.name, self.info, self._how, may_have_run=may_have_run)

    def _wait(self, start: Callable[[], Future[Any]], *, may_have_run: bool = False) -> Any:
        """The result of the future that `start` returns.

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
            future = done.get()
            if future is None:
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
                options = dict(self._actors.options)
                shared = self._actors.name is not None
                if shared:
                    options |= {
                        "name": f"{self._actors.name}:{self.index}",
                        "namespace": _NAMESPACE,
                        "get_if_exists": True,
                        "lifetime": "detached",
                    }
                make = _actor_class().options(**options)
                # Actors have different random numbers, the same in every run after
                # `torch.manual_seed`.
                seed = (torch.initial_seed() + self.index) % 2**63
                self._actor = make.remote(self._device, seed, _LEASE if shared else None)
                self._joined = self._actor.join.remote(self._id).future()
                self._ray.add(self)
            return self._joined

    def open(self) -> None:
        """Wait until the actor takes calls.

        Raises:
            RuntimeError: It cannot start.
            WorkerLost: It has ended, or was stopped.
        """
        give_up = time.monotonic() + _LEASE
        while self.info is None:
            joined = None
            try:
                joined = self._wait(self.begin)
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

    # Kept values.

    def keep(self, kept: Kept[Any]) -> None:
        """Have the actor keep a value; blocks."""
        reference = weakref.ref(kept, self._gone.append)
        with self._keeping:
            if reference not in self._numbers:
                number = self._next_number()
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
                options = {name: value for name, value in self._actors.options.items() if value}
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
        self._ray.discard(self)
        with self._beginning:
            if self._actor is None or self._closed:
                return
            self._closed = True
        ends = self._dead or self._actors.name is None
        with suppress(RayError, TimeoutError):  # it has ended, or ends when its lease does
            if not ends:
                ends = self._start("leave", self._id).result(_GRACE)
            if ends and ray.is_initialized():
                ray.kill(self._actor)


def _reason(error: BaseException) -> str:
    return "has ended" if isinstance(error, ActorDiedError) else "cannot be reached"
