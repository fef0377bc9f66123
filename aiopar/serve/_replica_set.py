"""Which replicas of a pool serve, and with what; any thread may call any of it."""

import threading
from collections.abc import Callable, Mapping
from weakref import WeakMethod

import torch
from torch import nn

from .._devices import is_device_error
from .._error_handling import in_words, logger
from .._errors import ReplicaFailed, ReplicaUnavailable, ServiceClosed
from ._replica import PoolReplica


class ReplicaSet:
    """The replicas of one pool. Who serves changes under a lock, and is read without.

    Attributes:
        module: What replicas are made of.
        replicas: All of them; none before `begin`.
        closing: Whether new calls are refused.
        listeners: Methods, called in the thread where it happens, after a replica has come into
            service or left it. What they are of is not kept.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module: nn.Module | None = module
        self.replicas: tuple[PoolReplica, ...] = ()
        self.closing = False
        self.listeners: set[WeakMethod[Callable[[], None]]] = set()
        self._lock = threading.Lock()

    @property
    def ready(self) -> bool:
        """Whether calls are taken, and there is a replica for them."""
        return not self.closing and any(map(_is_in_service, self.replicas))

    @property
    def alive(self) -> bool:
        """Whether there is a device that is not lost."""
        return not self.replicas or any(map(_is_not_retired, self.replicas))

    def check_open(self) -> None:
        """Raise if new calls are refused."""
        if self.closing:
            raise ServiceClosed("the pool is closed")

    def current(self) -> nn.Module:
        """What replicas are made of; raises if the pool was closed."""
        module = self.module
        if module is None:
            raise ServiceClosed("the pool is closed")
        return module

    def usable(self) -> PoolReplica:
        """One whose device is not lost: the worker that is free first, of one in service if any is.

        Raises:
            ReplicaUnavailable: There is none.
        """
        for is_usable in (_is_in_service, _is_not_retired):
            if found := [*filter(is_usable, self.replicas)]:
                return min(found, key=_load)
        raise ReplicaUnavailable("no replica is in service, nor ever will be: all are retired")

    def begin(self, copies: Mapping[PoolReplica, nn.Module]) -> None:
        """Serve with these replicas and their modules."""
        with self._lock:
            self.check_open()
            for replica, copy in copies.items():
                replica.install(copy)
            self.replicas = tuple(copies)
        self._tell()

    def pick(
        self, cause: BaseException | None = None, failed: PoolReplica | None = None
    ) -> PoolReplica:
        """The replica in service that has the fewest calls before it.

        Args:
            cause: What the call has failed with before.
            failed: Where. It may be back by now, and fail again: another is better.

        Raises:
            ReplicaUnavailable: There is none, by reason of `cause`.
            ServiceClosed: The pool was closed meanwhile.
        """
        if serving := [*filter(_is_in_service, self.replicas)]:
            return min(serving, key=lambda one: (one is failed, _load(one)))
        states = [replica.state for replica in self.replicas]
        if "closed" in states:
            raise ServiceClosed("the pool was closed before the call began")
        rebuilding, retired = states.count("rebuilding"), states.count("retired")
        raise ReplicaUnavailable(
            f"no replica is in service: {rebuilding} rebuilding, {retired} retired"
        ) from cause

    def replace(
        self, module: nn.Module, copies: Mapping[PoolReplica, nn.Module]
    ) -> list[PoolReplica]:
        """Serve with `copies` of another module, from the next call on, on all replicas.

        Called on a worker: it may be what frees the weights of before.

        Returns:
            Those that need a copy too, without which nothing is done: who serves, or, where nobody
            does, who may serve again. Empty: it is done.
        """
        with self._lock:
            self.check_open()
            lacking = [one for one in self.replicas if one.in_service and one not in copies]
            if not lacking and not copies:
                lacking = [one for one in self.replicas if one.state == "rebuilding"]
            if lacking:
                return lacking
            # Who is being rebuilt meanwhile, of the former module, finds this and begins again.
            self.module = module
            for replica, copy in copies.items():
                if _is_not_retired(replica):
                    replica.install(copy)
        self._tell()
        return []

    def reinstate(self, replica: PoolReplica, copy: nn.Module, module: nn.Module) -> bool:
        """Let a replica serve again, with a copy of `module`; False if that is out of date."""
        with self._lock:
            if replica.state != "rebuilding":
                return True  # retired, closed, or another module was put in place
            if self.module is not module:
                return False
            replica.install(copy)
            replica.rebuilds += 1
        self._tell()
        return True

    def take_out(self, replica: PoolReplica, error: BaseException) -> bool:
        """`error` came from `replica`; whether it is out of service now and to be rebuilt.

        A device error retires every replica on the device.
        """
        device_lost = is_device_error(error)
        with self._lock:
            if device_lost:
                lost = [one for one in self.replicas if _is_lost_with(one, replica.device)]
            elif replica.in_service and replica.module is getattr(error, "module", None):
                lost = [replica]
            else:
                lost = []  # of several calls that failed one was the first; it may even be back
            for one in lost:
                one.leave("retired" if device_lost else "rebuilding")
        if lost:
            _log(replica, lost, error)
            self._tell()
        return bool(lost) and not device_lost

    def let_go(self) -> None:
        """Nobody serves any more, and nothing keeps a module alive."""
        with self._lock:
            self.closing = True
            self.module = None
            for replica in self.replicas:
                if _is_not_retired(replica):
                    replica.leave("closed")
        self._tell()

    def _tell(self) -> None:
        for reference in tuple(self.listeners):
            listener = reference()
            if listener is not None:
                listener()
            else:
                self.listeners.discard(reference)


def _is_in_service(replica: PoolReplica) -> bool:
    return replica.in_service


def _is_not_retired(replica: PoolReplica) -> bool:
    return replica.state != "retired"


def _load(replica: PoolReplica) -> float:
    return replica.worker.load


def _is_lost_with(replica: PoolReplica, device: torch.device) -> bool:
    return replica.device == device and replica.state in ("ready", "rebuilding")


def _log(replica: PoolReplica, lost: list[PoolReplica], error: BaseException) -> None:
    # In words: a record that kept the error would keep the weights in its traceback.
    cause = error.__cause__ if isinstance(error, ReplicaFailed) else None
    what = in_words(error if cause is None else cause)
    if is_device_error(error):
        indices = ", ".join(str(one.index) for one in lost)
        logger.error("device %s is lost, with replicas %s: %s", replica.device, indices, what)
    else:
        logger.error("replica %d on device %s is rebuilt: %s", replica.index, replica.device, what)
