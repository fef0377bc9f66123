"""How an executor, or a view of one, gives calls to its workers."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any, NoReturn

import torch

from ._call import Call
from ._gang import GangCall
from ._pool import WorkerPool
from ._worker import Worker, current_worker


class Dispatcher:
    """Some workers of a pool, or all of them, and what their executor wants of each call.

    Args:
        pool: Shared by an executor and its views.
        workers: Those that it has; None: all, also those that the pool grows by.
        synchronize: Whether a call has ended only when its result is complete on its accelerator.
    """

    __slots__ = ("default_workers", "pool", "synchronize", "workers")

    def __init__(
        self, pool: WorkerPool, workers: Sequence[Worker] | None = None, *, synchronize: bool
    ) -> None:
        self.pool = pool
        self.workers: Sequence[Worker] = pool.workers if workers is None else workers
        self.default_workers = (
            pool.default_workers if self.workers is pool.workers else self.workers
        )
        """Those that a call may run on which asks for no device."""
        self.synchronize = synchronize

    def __reduce__(self) -> NoReturn:
        raise TypeError("the threads of an executor can be neither pickled nor copied")

    @property
    def observed(self) -> bool:
        """Whether somebody is told of its calls."""
        return self.pool.observed

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each worker."""
        return tuple(worker.device for worker in self.workers)

    # Views.

    def on_device(self, device: torch.device) -> "Dispatcher":
        """One for the workers on `device`.

        Raises:
            ValueError: There are none.
        """
        self.pool.ensure([device])
        workers = self.workers_on(device)
        self._check_enough(1, workers, device)
        return Dispatcher(self.pool, workers, synchronize=self.synchronize)

    def on_worker(self, worker: Worker) -> "Dispatcher":
        """One for `worker` alone, which is one of these."""
        return Dispatcher(self.pool, (worker,), synchronize=self.synchronize)

    def with_synchronize(self, synchronize: bool) -> "Dispatcher":
        """One for the same workers."""
        return Dispatcher(self.pool, self.workers, synchronize=synchronize)

    def workers_on(self, device: torch.device) -> Sequence[Worker]:
        """Those on `device`, there may be none."""
        if self.workers is self.pool.workers:
            return self.pool.workers_of(device)
        mine = [worker for worker in self.workers if worker.device == device]
        # A view on a device grows with its pool.
        return self.workers if len(mine) == len(self.workers) else mine

    def groups_for(self, count: int) -> list[Sequence[Worker]]:
        """The workers that each of `count` calls at once may run on.

        Raises:
            ValueError: There are too few.
        """
        self.ensure(count)
        self._check_enough(count, self.default_workers)
        return [self.default_workers] * count

    def groups_on(self, devices: Sequence[torch.device]) -> list[Sequence[Worker]]:
        """The workers that each of some calls at once may run on, the i-th on the i-th device.

        Raises:
            ValueError: There are too few on a device.
        """
        self.pool.ensure(devices)
        groups = {device: self.workers_on(device) for device in dict.fromkeys(devices)}
        for device, group in groups.items():
            self._check_enough(devices.count(device), group, device)
        return [groups[device] for device in devices]

    def ensure(self, count: int) -> None:
        """Have so many workers, on the devices that there are, if the pool may grow."""
        devices = dict.fromkeys(worker.device for worker in self.default_workers)
        self.pool.ensure([*islice(cycle(devices), count)])

    def _check_enough(
        self, wanted: int, workers: Sequence[Worker], device: torch.device | None = None
    ) -> None:
        if wanted <= len(workers):
            return
        where = "" if device is None else f" on {device}"
        found = f"its workers are on {', '.join(map(str, self.devices))}"
        if not workers:
            raise ValueError(f"the executor has no worker{where}: {found}")
        raise ValueError(
            f"{wanted} calls at once{where} need {wanted} workers there, but the executor has "
            f"{len(workers)}: {found}"
        )

    # Calls.

    def prepare(self, call: Call[Any]) -> None:
        """Give a call what the executor wants of it, and order it after its caller's kernels."""
        if not self.synchronize:
            call.synchronize = False
        capture = self.pool.capture
        if capture is not None and not call.streams:  # a state captured before has them
            call.streams = capture()

    def put(self, call: Call[Any], worker: Worker | None = None) -> None:
        """Queue a call that has its caller's state, past `max_pending`; for `worker` alone."""
        if not self.synchronize:
            call.synchronize = False
        self.pool.put(call, self.default_workers if worker is None else [worker])

    def submit_gang(
        self, members: Sequence[GangCall[Any]], groups: Sequence[Sequence[Worker]]
    ) -> None:
        """Queue the members of a gang, the i-th on a worker of the i-th group."""
        for member in members:
            self.prepare(member)
        try:
            self.pool.admit_gang(members, groups)
        except BaseException:
            # Not queued, they would hold their arguments in the cycle that a queued call is.
            for member in members:
                member.cancel()
            raise

    def follow(self, call: Call[Any]) -> bool:
        """Run such a call next on this thread's worker, whose call is ending; whether it will be.

        It will not where others wait there, nor on an accelerator, where calls end on a thread of
        their own: then it is to be queued.
        """
        worker = current_worker()
        if worker is None or worker not in self.workers or self.pool.closed:
            return False
        return worker.follow(call)
