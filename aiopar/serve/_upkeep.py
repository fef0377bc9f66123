"""A pool's background work: replicas are made ready, and made anew when they have failed."""

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import anyio
from torch import nn

from .._caller import CallerState
from .._devices import is_device_error
from .._error_handling import logger, own_traceback
from .._future import Future, running_future
from .._tasks import Tasks, is_cancellation
from ._copies import copies_of
from ._replica import PoolReplica
from ._replica_set import ReplicaSet
from ._sync import InFlight

LONGEST_DELAY = 60.0


def retry_delays() -> Iterator[float]:
    """Seconds between the tries to rebuild a replica: 1, 2, 4, ... 60, 60, ..."""
    delay = 1.0
    while True:
        yield delay
        delay = min(2 * delay, LONGEST_DELAY)


class Upkeep:
    """The tasks of one pool, on the event loop that opens it; calls under the state of who does.

    They are no part of any call: who gives up waiting for the pool to open leaves it to the others.
    """

    def __init__(self, replicas: ReplicaSet) -> None:
        self._set = replicas
        self._lock = threading.Lock()
        self._opened_by: tuple[Tasks, CallerState] | None = None
        self._opening: Future[None] | None = None
        self._running = InFlight()

    def open(
        self, caller: CallerState, bind: Callable[[CallerState], Sequence[PoolReplica]]
    ) -> Future[None]:
        """Begin to make the replicas ready, unless that is under way; called on a loop's thread.

        Returns:
            Done when they serve, when that was given up, or with the error that it failed with.
        """
        self._forget_lost()
        with self._lock:
            if self._opening is not None:
                return self._opening
            replicas = bind(caller)
            tasks = Tasks(caller)
            self._opened_by = tasks, caller
            opening = self._opening = running_future()
        begin = partial(self._begin, opening, caller, replicas)
        tasks.spawn(begin, partial(self._opened, opening))
        return opening

    async def _begin(
        self, opening: Future[None], caller: CallerState, replicas: Sequence[PoolReplica]
    ) -> None:
        with self._running:
            try:
                copies = await self.prepare(caller, self._set.current(), replicas)
                self._set.begin(copies)
            except BaseException as error:  # whatever it is, they get it who wait
                if is_cancellation(error):
                    raise
                self._opened(opening, own_traceback(error))
            finally:
                del opening  # it holds the error, whose traceback leads here

    def _opened(self, opening: Future[None], error: BaseException | None = None) -> None:
        with self._lock:
            if self._opening is not opening:
                return
            self._opening = None  # who comes after a failure tries again
        if error is None:
            opening.set_result(None)
        else:
            opening.set_exception(error)

    def _forget_lost(self) -> None:
        """If the loop was closed that has opened it: what ran there never ends."""
        with self._lock:
            if self._opened_by is None or not self._opened_by[0].finished:
                return
            opening, self._opening, self._running = self._opening, None, InFlight()
        if opening is not None:
            opening.set_result(None)  # who waits for it on another loop looks again

    async def prepare(
        self, caller: CallerState, module: nn.Module, replicas: Sequence[PoolReplica]
    ) -> dict[PoolReplica, nn.Module]:
        """Copies of `module`, warmed up where they are to serve.

        One replica after the other: those that serve, go on but for one.
        """
        devices = [replica.device for replica in replicas]
        copies = await replicas[0].call(caller, copies_of, module, devices)
        for replica, copy in zip(replicas, copies, strict=True):
            try:
                await replica.call(caller, replica.prepare, copy)
            except Exception as error:
                if is_device_error(error):
                    self.failed(replica, error)
                raise
        return dict(zip(replicas, copies, strict=True))

    def failed(self, replica: PoolReplica, error: BaseException) -> None:
        """Take `replica` out of service and rebuild it; from any thread."""
        if self._set.take_out(replica, error) and self._opened_by is not None:
            tasks, caller = self._opened_by
            tasks.spawn(partial(self._rebuild, caller, replica), _nothing)

    async def _rebuild(self, caller: CallerState, replica: PoolReplica) -> None:
        with self._running:
            for delay in retry_delays():
                try:
                    while not await self._renew(caller, replica):
                        pass  # the pool has got another module meanwhile
                    return
                except GeneratorExit:  # its loop was closed
                    raise
                except BaseException as error:  # whatever it is, it may get better
                    if is_cancellation(error):
                        raise
                    if replica.state != "rebuilding":
                        return
                    logger.error("%r: next try in %g s", replica, delay, exc_info=error)
                await anyio.sleep(delay)

    async def _renew(self, caller: CallerState, replica: PoolReplica) -> bool:
        if self._set.closing:
            return True
        module = self._set.current()
        copies = await self.prepare(caller, module, [replica])
        return self._set.reinstate(replica, copies[replica], module)

    async def stop(self) -> None:
        """Give up what is under way."""
        self._forget_lost()
        if self._opened_by is not None:
            tasks, _ = self._opened_by
            tasks.cancel()
        await self._running.ended()


def _nothing() -> None:
    """What follows when a rebuild has ended."""
