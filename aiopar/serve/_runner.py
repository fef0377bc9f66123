"""Where batches run, one at a time: a worker that takes the next batch by itself."""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Protocol

import torch

from .._call import TokenCall
from .._caller import CallerState
from .._completion import own_traceback
from .._devices import is_device_error, order_after
from .._errors import ExecutorShutdown
from .._executor import DeviceExecutor
from ._compute import Compute
from ._part import Part, deliver_soon
from ._replica import Replica, ReplicaFailed
from ._request import Request, streams_of
from ._splitting import Splitting


class Schedule(Protocol):
    """What a runner knows of who gives it batches; each method may be called from any thread."""

    def take(self, runner: "Runner") -> list[Request]:
        """The next batch; empty if there is none."""

    def out_of_memory(self, requests: Sequence[Request]) -> None:
        """A batch of these did not fit."""

    def ended(self, runner: "Runner", batch: Sequence[Request], parts: Sequence[Part]) -> bool:
        """The runner has run a batch; whether there is another for it now."""

    def lost(self, runner: "Runner", batch: Sequence[Request], error: BaseException) -> None:
        """The runner's replica has failed under a batch, which is given back."""

    def refused(self, runner: "Runner", error: BaseException) -> None:
        """The executor takes no more calls."""


class Runner:
    """One place where batches run: a function on any worker, or one replica on its own.

    The worker itself takes a batch when it comes to it, as late as can be: what is urgent by then
    is in it, and who has gone is not. When it has run, the next is asked for at once; the event
    loop has no part in it.

    Args:
        schedule: Gives it batches.
        executor: On whose workers, or worker, it runs.
        compute: Runs the items of a batch.
        caller: The state it runs them under.
        replica: The one it is for, if any.
        replica_failed: Takes that one out of service.
    """

    def __init__(
        self,
        schedule: Schedule,
        executor: DeviceExecutor,
        compute: Compute,
        caller: CallerState,
        replica: Replica | None = None,
        replica_failed: Callable[[Replica, BaseException], object] | None = None,
    ) -> None:
        self.replica = replica
        self._replica_failed = replica_failed
        self.began = 0.0
        """When its last batch began, by `time.monotonic`."""
        self._schedule = schedule
        self._executor = executor
        self._compute = compute
        self._caller = caller
        self.batch: Sequence[Request] = ()
        """What it has taken and not ended."""

    @property
    def has_streams(self) -> bool:
        """Whether it runs on an accelerator."""
        return self._executor._pool.has_streams

    @property
    def in_service(self) -> bool:
        """Whether it can run a batch."""
        return self.replica is None or self.replica.in_service

    def fail(self, error: BaseException) -> None:
        """Its replica has failed: take it out of service."""
        if self._replica_failed is not None and self.replica is not None:
            self._replica_failed(self.replica, error)

    def start(self) -> None:
        """Run the next batch, on a worker that is free."""
        call = _Run(self, self._caller)
        try:
            self._executor._put(call)
        except ExecutorShutdown as error:
            self._schedule.refused(self, error)

    def refused(self) -> None:
        """The executor was shut down before the run began."""
        self._schedule.refused(self, ExecutorShutdown("the executor was shut down"))

    def run(self, call: "_Run") -> list[Part]:
        """On the worker: take a batch, and compute it."""
        self.batch = batch = self._schedule.take(self)
        self.began = monotonic()
        if not batch:
            return []
        call.take_streams(batch)
        splitting = Splitting(batch)
        for part in splitting:
            self._run_part(part, splitting)
        return splitting.parts

    def _run_part(self, part: list[Request], splitting: Splitting) -> None:
        items = [request.item for request in part]
        try:
            outputs, unbatched = self._compute(items, again=splitting.again)
        except Exception as error:  # noqa: BLE001  # it is whose item it was
            if isinstance(error, torch.OutOfMemoryError):
                self._schedule.out_of_memory(part)
            splitting.failed(part, own_traceback(error))
        else:
            splitting.succeeded(part, outputs, unbatched=unbatched)

    def ended(self, parts: list[Part] | None, error: BaseException | None) -> None:
        """What was computed is complete on the device; from any thread."""
        batch, self.batch = self.batch, ()
        if error is not None:
            if isinstance(error, ReplicaFailed) or (self.replica and is_device_error(error)):
                self._schedule.lost(self, batch, error)
                return
            # A kernel's, which came late, or one that only ends threads: everybody's.
            parts = [Part(batch, error=error)]
        # First of all, so that the worker goes on: to wake the loop takes longer.
        more = self._schedule.ended(self, batch, parts or [])
        if more:
            self.start()
        if parts:
            deliver_soon(parts)


class _Run(TokenCall[list[Part]]):
    """One run of a runner."""

    helpable = False

    def __init__(self, runner: Runner, caller: CallerState) -> None:
        super().__init__(runner.run, (self,), caller)
        self._runner = runner

    def take_streams(self, batch: list[Request]) -> None:
        """Order what follows after what the callers had launched, and before what they launch."""
        self.streams = tuple(streams_of(batch))
        if self.streams:
            order_after(self.streams, torch.accelerator.current_stream())

    def finish(self) -> None:
        parts, self.result = self.result, None
        error, self.error = self.error, None
        self._runner.ended(parts, error)

    def cancel(self) -> None:
        if self.claim():
            self.drop()
            self._runner.refused()
