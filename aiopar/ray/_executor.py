"""`RayExecutor`: workers whose calls run in Ray actors."""

import atexit
import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import ray
import torch

from .._base.arguments import as_kwargs, check_bound, check_int, check_number
from .._base.forking import live_methods
from ..errors import WorkerLost
from ..executor._call import CallQueue
from ..executor._gang import on_host
from ..executor._pool import _close_at_exit
from ..executor._worker import HostInfo, current_call
from ..remote._executor import HostExecutor, HostSlot, HostWorker
from ..remote._host import Host, Task, encode, outcome, parts_of_call, parts_of_kept
from ._actor import RayEncoder, actor_class, from_message, to_message
from ._link import LEASE, ActorLink
from ._session import (
    NAMESPACE,
    Session,
    check_joined,
    cluster_address,
    enter_session,
    leave_session,
)

_OWN_OPTIONS = {
    *("num_cpus", "num_gpus", "name", "namespace", "lifetime", "get_if_exists", "max_restarts"),
    *("max_task_retries", "max_concurrency", "concurrency_groups"),
}
"""The options of actors that `RayExecutor` sets itself."""

# Ray shuts down when the interpreter exits. Queued calls must run before.
atexit.unregister(_close_at_exit)
atexit.register(_close_at_exit)


class RayExecutor(HostExecutor):
    """`num_actors` Ray actors: a `DeviceExecutor` whose calls run on this or other machines.

    Pass it wherever a `DeviceExecutor` is accepted. Functions, modules and arguments go to an actor
    by pickle, also lambdas and classes of a script; tensors and arrays go through Ray's object
    store. Results arrive on the CPU. Weights and functions that a `ReplicaPool`, a `Batcher`,
    `aiopar.map` or a `Pipeline` uses for all its calls go to each actor once. aiopar and the
    modules of the program must be installed on every node, in the same versions.

    An actor is lost if it ends, or if it answers no ping for about 3 seconds: its machine has
    stopped, or its code holds the GIL. A lost actor is replaced where Ray finds room. Its calls
    raise `WorkerLost`, or are tried elsewhere by a `ReplicaPool` and its `Batcher`. Calls wait
    while Ray has no room for an actor. An executor that is closed waits 20 seconds for Ray, and for
    actors; then the calls that need them raise `WorkerLost`.

    If Ray is not initialised, the executor initialises it on a thread of its own, and shuts it down
    when the last such executor of this process is closed. The program's handlers of signals stay. A
    program that calls `ray.shutdown` itself must close its executors first: Ray ends a process in
    which another thread uses Ray during the shutdown.

    For HTTP on many nodes with autoscaling there is Ray Serve; for training, Ray Train.

    Args:
        num_actors: The number of actors. With `in_flight=2`, the executor has two workers for each.
        num_gpus: GPUs per actor. If above 0, the actor computes on its `cuda:0`, else on the CPU.
            This process needs no GPU.
        num_cpus: CPUs per actor; the operators of an actor use so many threads.
        in_flight: How many calls may be on their way to an actor at once. The actor runs one call
            at a time; the next one travels meanwhile.
        address: The address of a cluster, as for `ray.init`. None: that of `RAY_ADDRESS`, or of the
            latest `ray start` on this machine, or else `"local"`, which starts a Ray of its own. If
            this process has joined a cluster before, that cluster is used. The log names the
            cluster, and warns if it does not answer within 5 seconds.
        ray_actor_options: More options of the actors (`resources`, `scheduling_strategy`,
            `runtime_env`, ...), as for `ray.actor.ActorClass.options`.
        name: Share the actors with the executors of other processes that have this name: the
            workers of a web server, other machines of the cluster. The first executor makes the
            actors. They end when the last executor is closed, or 10 seconds after its process has
            died.
        num_threads: How many threads an operator may use in an actor. None: `num_cpus`.
        max_pending, thread_name_prefix: As for `DeviceExecutor`; the threads wait for the actors.
        kill_after: As for `ProcessExecutor`; the actor is killed and replaced. A call that has not
            begun in the actor is dropped.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is too low, or `ray_actor_options` has an unknown option, or one that
            `RayExecutor` sets.
        RuntimeError: This process has joined another cluster than that at `address`. While it is
            still joining, the calls raise this error.

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
        kill_after: float | None = None,
    ) -> None:
        num_actors = check_int("num_actors", num_actors, at_least=1)
        in_flight = check_int("in_flight", in_flight, at_least=1)
        num_gpus = check_number("num_gpus", num_gpus, zero=True)
        options = _actor_options(num_gpus, num_cpus, ray_actor_options)
        max_pending = check_bound("max_pending", max_pending)
        num_threads = check_bound("num_threads", num_threads)
        _check_words(address, name)
        actors = _Actors(address, options, name, num_threads or 0)
        device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
        super().__init__(
            [device] * (num_actors * in_flight),
            max_pending=max_pending,
            num_threads=num_threads,
            thread_name_prefix=thread_name_prefix,
            kill_after=kill_after,
            per_host=in_flight,
            slot=partial(_RaySlot, actors=actors),
            worker=_RayWorker,
        )
        if not on_host():  # see `HostWorker`
            actors.join()  # now, so that the first executor of a program decides the cluster


def _actor_options(
    num_gpus: float, num_cpus: float, given: Mapping[str, Any] | None
) -> dict[str, Any]:
    options = dict(as_kwargs("ray_actor_options", given))
    refused = sorted(_OWN_OPTIONS & options.keys())
    if refused:
        raise ValueError(f"ray_actor_options cannot have {', '.join(refused)}: RayExecutor sets it")
    options |= {"num_gpus": num_gpus, "num_cpus": check_number("num_cpus", num_cpus, zero=True)}
    actor_class().options(**options)  # raises if it cannot take them
    return options


def _check_words(address: str | None, name: str | None) -> None:
    for what, word in (("address", address), ("name", name)):
        if not isinstance(word, str | None):
            raise TypeError(f"{what} must be a str or None, not {type(word).__name__}")
    joined = ray.is_initialized()
    used = address if joined else cluster_address(address)
    if used is not None and used.startswith("ray://"):
        raise ValueError(
            "address, or RAY_ADDRESS, must name a cluster that this machine has joined, "
            f"got {used!r}: join it by `ray start --address=...`; "
            "a Ray client would copy all tensors"
        )
    if name == "":
        raise ValueError("name must not be empty")
    if joined:
        check_joined(address)


class _RayWorker(HostWorker):
    """A worker that shares an actor with the other workers of its number."""

    slot: "_RaySlot"

    # An idle actor gets a call before a busy actor gets a second call.

    @property
    def load(self) -> float:
        return super().load + (0 if self.slot.is_first else 0.5)

    def wait_in(self, queue: CallQueue) -> None:
        if self.slot.is_first:
            super().wait_in(queue)
        else:
            queue.idle.appendleft(self)  # it is woken last

    @property
    def idle(self) -> bool:
        return self._only_warms_up or super().idle

    @property
    def _only_warms_up(self) -> bool:
        """Whether it only waits for an actor that no call needs: closing must not wait for it."""
        stats = self.stats()
        return self.slot.warming == "running" and (stats.queued, stats.running) == (0, 1)

    def stop(self) -> None:
        super().stop()
        if self._only_warms_up:
            self.kill()


class _RaySlot(HostSlot):
    """The connection of one worker to an actor.

    Until the actor takes calls, the worker is busy with its warm-up, so that the workers with an
    actor take the calls. A warm-up may last: Ray may have no room for the actor.
    """

    kind = "ray"

    def __init__(self, worker: HostWorker, *, actors: "_Actors", **options: Any) -> None:
        super().__init__(worker, start=actors.start, pack=_pack, **options)
        self.actors = actors
        self.warming: Literal["queued", "running"] | None = None
        actors.enter()

    @property
    def is_first(self) -> bool:
        """Whether its worker is the first one of the actor."""
        return self.worker.index % self.per_host == 0

    def warm_up(self) -> None:
        self.warming = "queued"
        super().warm_up()

    def start(self) -> None:
        self.warming = "running"
        try:
            super().start()
        finally:
            if self.warming == "running":  # else it was lost meanwhile
                self.warming = None

    def _running_host(self) -> Host:
        if isinstance(self.host, _RayHost) and self.host.link.is_lost:  # while it ran no call
            self._end(self.host)
        call = current_call()
        if self.host is None and self.warming == "queued" and call is not None and call.internal:
            # A pool or batcher need not wait for the new actor: it has other workers.
            raise WorkerLost(f"worker {self.worker.label} is started again", may_have_run=False)
        return super()._running_host()

    def host_lost(self) -> None:
        """Have no more calls sent here until there is a new actor; from any thread."""
        error = WorkerLost(f"worker {self.worker.label} was lost", may_have_run=False)
        # First: a pool must not wait here for a new actor before the warm-up does.
        self.warming = "queued"
        for on_host_lost in live_methods(self.worker.on_host_lost):
            on_host_lost(self.worker, error)
        self.warm_up()

    def give_up(self) -> bool:
        """Stop waiting for the actor if the executor is being closed; returns whether it is."""
        if self.closing:
            self._killed = True
            self.worker.leave()  # other workers may have actors
        return self.closing

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.actors.leave()


_numbers = itertools.count()  # of calls


@dataclass(eq=False)
class _RayHost:
    """A worker's connection to an actor. See `Host`."""

    link: ActorLink
    slot: _RaySlot
    ready: Future[None]
    number: int = -1  # of the latest call

    @property
    def info(self) -> HostInfo | None:
        return self.link.info

    def open(self) -> None:
        self.link.open(self.ready, self.slot.give_up)

    def call(self, task: Task) -> tuple[bool, Any]:
        link = self.link
        try:
            task = task._replace(threads=self.slot.actors.threads)
            pickled, kept = encode(tuple(task), RayEncoder, parts_of_call)
            for value in kept:
                link.keep(value)
            message = to_message(pickled)
        finally:
            del task  # an error's traceback holds this frame
            pickled = kept = value = None  # type: ignore[assignment]
        self.number = next(_numbers)
        reply = link.call(self.number, message)
        return outcome(partial(from_message, reply), link.name)

    def kill_call(self) -> None:
        # The actor decides whether it ends: it may run another call, also one of another program.
        self.link.end_call(self.number)

    def close(self) -> None:
        self.slot.actors.release(self.link, self.slot)

    def kill(self) -> None:
        # If only the worker is stopped, other processes go on with the actor. Else the actor has
        # lost its device, or a second Ctrl-C ends its call.
        stopped = self.slot.closing
        self.link.lose("was stopped" if stopped else "was killed", dead=not stopped)


@dataclass(eq=False)
class _Actors:
    """The actors of one executor."""

    address: str | None
    options: Mapping[str, Any]
    name: str | None
    threads: int
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _workers: int = 0
    links: dict[int, ActorLink] = field(default_factory=dict)
    _session: Session | None = None

    def enter(self) -> None:
        """Note a new worker."""
        with self._lock:
            self._workers += 1

    def leave(self) -> None:
        """Note the end of a worker; after the last one Ray may be shut down."""
        with self._lock:
            self._workers -= 1
            session = None if self._workers else self._session
        if session is not None:
            leave_session(session)

    def join(self) -> Session:
        """Join the cluster, or try again if that has failed."""
        with self._lock:
            if self._session is None or self._session.failed:
                self._session = enter_session(self.address)
            return self._session

    def start(self, slot: _RaySlot) -> _RayHost:
        """Connect a slot to its actor, or to a new actor if the last one was lost."""
        session = self.join()
        with self._lock:
            link = self.links.get(slot.number)
            if link is None or link.is_lost:
                make, shared = partial(self._make, slot), self.name is not None
                link = ActorLink(
                    slot.worker.label, self.options, make, session.suspect, shared=shared
                )
                self.links[slot.number] = link
                session.watch(link)
            link.workers.append(slot.host_lost)
        return _RayHost(link, slot, session.ready_for(self.address))

    def _make(self, slot: _RaySlot) -> Any:
        options = dict(self.options)
        if self.name is not None:
            options |= {
                "name": f"{self.name}:{slot.number}",
                "namespace": NAMESPACE,
                "get_if_exists": True,
                "lifetime": "detached",
            }
        lease = None if self.name is None else LEASE
        return actor_class().options(**options).remote(slot.worker.device, slot.seed, lease)

    def release(self, link: ActorLink, slot: _RaySlot) -> None:
        """Close the connection of a slot; the last slot closes the link."""
        with self._lock:
            link.workers.remove(slot.host_lost)
            last = not link.workers
            if last and self.links.get(slot.number) is link:
                del self.links[slot.number]
        # A lost actor must not hold the resources that the new one needs.
        if last or link.is_lost:
            link.close()


_generations: Counter[str] = Counter()
_generations_lock = threading.Lock()


def _pack(value: Any) -> tuple[str, Any]:
    pickled, _ = encode(value, RayEncoder, parts_of_kept)
    data, views = to_message(pickled)
    digest = hashlib.blake2b(data, digest_size=16)
    for view in views:
        digest.update(view.data if isinstance(view, np.ndarray) else repr(view).encode())
    content = digest.hexdigest()
    # Other processes give an equal value the same key, so shared actors keep it once. If this
    # process keeps a value again, it gets another key: calls may have changed the first copy.
    with _generations_lock:
        generation = _generations[content]
        _generations[content] += 1
    return f"{content}-{generation}", ray.put((data, views))
