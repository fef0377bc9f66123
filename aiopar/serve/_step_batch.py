"""`StepBatch`: the states that one stepper steps together, on the host of their worker."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeAlias

import torch

from .._base.inputs import outline
from .._base.tracebacks import add_note_once, drop_frames, logger, own_traceback
from ..errors import InvalidInput, OutputMismatch, Overloaded
from ..remote._host import portable_error
from ._queue import RequestGroup
from ._stepper import AnyStepper, Done, check_stepper

FREE_SHARE = 0.1
"""The share of `max_batch_cost` that newcomers leave free, because the states that run grow."""

Joining: TypeAlias = tuple[int, Any, Sequence[Any] | None]
"""The key of a request, its item, and the parts that were made before its worker was lost."""


@dataclass(slots=True)
class Ticked:
    """The result of one tick.

    Attributes:
        size: How many states took a step.
        parts: The parts, with the keys of their requests.
        ended: The result or the error of each request that has ended.
        refused: Newcomers that did not fit. The first has what it would hold, the others 0.
        held: What all states hold.
        parked: How many states wait because the batch holds too much.
        preempted: How many states began to wait in this tick.
        limit: The most states that take a step together; smaller after an out-of-memory error.
        failure: The error of `step`, if no state could take its step.
        forgotten: Whether the states are lost, because the host of the worker is new.
        keeps_parts: Whether the stepper can go on from the parts of a request.
    """

    size: int = 0
    parts: list[tuple[int, Any]] = field(default_factory=list)
    ended: list[tuple[int, Done[Any] | BaseException]] = field(default_factory=list)
    refused: list[tuple[int, float]] = field(default_factory=list)
    held: float = 0.0
    parked: int = 0
    preempted: int = 0
    limit: int = 0
    failure: BaseException | None = None
    forgotten: bool = False
    keeps_parts: bool = False

    @property
    def with_parts(self) -> list[int]:
        """The keys of the requests with a part, also a last part."""
        last = [key for key, end in self.ended if type(end) is Done and end.part is not None]
        return [key for key, _ in self.parts] + last

    def add(self, keys: Sequence[int], results: Sequence[Any]) -> None:
        """Add the results of a step."""
        self.size += len(keys)
        for key, result in zip(keys, results, strict=True):
            if type(result) is Done or isinstance(result, BaseException):
                self.ended.append((key, result))
            elif result is not None:
                self.parts.append((key, result))

    def clear(self) -> None:
        """Forget the results: the frames of an error's traceback hold this object."""
        self.parts.clear()
        self.ended.clear()
        self.failure = None


class StepBatch:
    """The states of the requests that run on one stepper.

    `ContinuousBatcher` calls `tick` on one worker. If the worker has a host (a process or an
    actor), this object is copied to the host once. A state is in one of these conditions::

        running --a reader has no room--> paused: not in the keys of a tick; holds its memory
        running, paused --the batch holds too much--> parked: stopped, holds nothing
        parked --there is room--> running

    Args:
        make: Makes the stepper, from the module of a replica if there is one.
        max_batch_size: The most states that take a step together.
        max_batch_cost: The most that all states may hold. None: no bound.
        portable: Whether errors are pickled on their way to the callers.
    """

    def __init__(
        self,
        make: Callable[..., AnyStepper],
        max_batch_size: int,
        max_batch_cost: float | None,
        portable: bool,
    ) -> None:
        self._options = make, max_batch_size, max_batch_cost, portable
        self._make, self._portable = make, portable
        self._max_cost = inf if max_batch_cost is None else max_batch_cost
        self._group = RequestGroup(max_batch_size)
        """The learned limit of states that fit into memory together."""
        self._stepper: AnyStepper | None = None
        self._states: dict[int, Any] = {}
        """The states by the keys of their requests, the oldest first."""
        self._held: dict[int, float] = {}
        """What each state holds, if `max_batch_cost` bounds it. A parked state would hold this."""
        self._parked: set[int] = set()
        self._preempted = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return StepBatch, self._options

    # A tick.

    def tick(
        self,
        module: Any,
        known: int,
        left: Iterable[int],
        joining: Sequence[Joining],
        keys: list[int],
    ) -> Ticked:
        """Stop the states that have left, start newcomers, and step those with these `keys`.

        Args:
            module: The module of the replica, for the first tick; None without a pool.
            known: How many states this object must have before the tick; 0: a new batch begins.
            left: The keys of requests that have left.
            joining: The newcomers.
            keys: The keys of the requests whose readers have room, newcomers too; the oldest first.
        """
        ticked = Ticked()
        stepper = self._stepper
        if stepper is None:
            stepper = self._stepper = self._begin(module)
        ticked.keeps_parts = hasattr(stepper, "resume")
        if not known:
            left = [*self._states]
        elif known != len(self._states):
            ticked.forgotten = True
            return ticked
        for key in left:
            self._remove(stepper, key)
        self._start(stepper, joining, ticked)
        del joining  # an error's traceback holds this frame
        fitting = self._fitting(stepper, [key for key in keys if key in self._states])
        if fitting:
            self._step(stepper, fitting, ticked, None)
            if not ticked.size:
                ticked.failure = _error_in(ticked)  # an error's traceback may hold this frame
        for key in [key for key, _ in ticked.ended]:
            self._remove(stepper, key)
        self._bound(stepper, keys, ticked)
        ticked.held, ticked.parked = self._total, len(self._parked)
        ticked.preempted, self._preempted = self._preempted, 0
        ticked.limit = self._group.limit
        if self._portable:
            ticked.ended = [(key, _sendable(end)) for key, end in ticked.ended]
            ticked.failure = None if ticked.failure is None else portable_error(ticked.failure)
        return ticked

    def _begin(self, module: Any) -> AnyStepper:
        stepper = self._make() if module is None else self._make(module)
        check_stepper(stepper, bounded=self._max_cost < inf)
        return stepper

    @property
    def _total(self) -> float:
        """What the states hold together."""
        return sum(held for key, held in self._held.items() if key not in self._parked)

    def _has_room(self, need: float) -> bool:
        """Whether the batch has room for a state that holds `need`."""
        total = self._total
        return not total or total + need <= self._max_cost * (1 - FREE_SHARE)

    # Coming and going.

    def _start(self, stepper: AnyStepper, joining: Sequence[Joining], ticked: Ticked) -> None:
        for index, (key, item, parts) in enumerate(joining):
            try:
                state = stepper.start(item) if parts is None else stepper.resume(item, parts)  # type: ignore[attr-defined]  # optional
                need = self._checked_need(stepper, state)
            except (Exception, SystemExit) as error:  # noqa: BLE001  # the caller gets every error
                add_note_once(error, "the request did not start; item: ", outline(item))
                ticked.ended.append((key, own_traceback(error)))
                continue
            if not self._has_room(need):
                _stop(stepper, state)
                ticked.refused = [(key, need), *((key, 0.0) for key, _, _ in joining[index + 1 :])]
                return
            self._states[key] = state
            self._held[key] = need

    def _checked_need(self, stepper: AnyStepper, state: Any) -> float:
        """Return what a started state holds. If the state can never fit, stop it and raise."""
        try:
            need = self._measure(stepper, state)
            if need > self._max_cost:
                most = f"{self._max_cost:g}"
                raise InvalidInput(f"the item needs {need:g}, and a batch may hold at most {most}")
        except BaseException:
            _stop(stepper, state)
            raise
        return need

    def _measure(self, stepper: AnyStepper, state: Any) -> float:
        return 0.0 if self._max_cost == inf else float(stepper.held(state))  # type: ignore[attr-defined]  # `_begin` has checked

    def _remove(self, stepper: AnyStepper, key: int) -> None:
        """Forget a state; stop it unless it is parked, and so stopped already."""
        if key in self._states:
            state = self._states.pop(key)
            del self._held[key]
            if key in self._parked:
                self._parked.remove(key)
            else:
                _stop(stepper, state)

    def _park(self, stepper: AnyStepper, key: int) -> None:
        """Stop a state, which will be stepped again."""
        self._parked.add(key)
        self._preempted += 1
        _stop(stepper, self._states[key])

    # Steps.

    def _fitting(self, stepper: AnyStepper, keys: list[int]) -> list[int]:
        """Which states take the step: parked ones only if there is room for them."""
        if not self._parked:
            return keys
        fitting = [key for key in keys if key not in self._parked]
        wanted = set(keys)
        for key in keys:
            if key not in self._parked:
                continue
            if len(fitting) >= self._group.limit:
                break
            need = self._held[key]
            # States whose readers do not read are parked before a state waits that could step.
            for idle in reversed([one for one in self._states if one not in wanted]):
                if idle not in self._parked and not self._has_room(need):
                    self._park(stepper, idle)
            if not self._has_room(need):
                break
            self._parked.remove(key)
            fitting.append(key)
        return sorted(fitting)

    def _step(
        self,
        stepper: AnyStepper,
        keys: list[int],
        ticked: Ticked,
        first: BaseException | None,
    ) -> None:
        """Step these states. After an error, step the halves.

        Args:
            stepper: The stepper.
            keys: The keys of the states.
            ticked: Gets the results.
            first: The error of the batch that these states are a half of.
        """
        try:
            results = self._results(stepper, keys)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # the callers get every error
            self._failed(stepper, keys, ticked, own_traceback(error), first)
        else:
            self._group.succeeded(len(keys))
            ticked.add(keys, results)

    def _failed(
        self,
        stepper: AnyStepper,
        keys: list[int],
        ticked: Ticked,
        error: BaseException,
        first: BaseException | None,
    ) -> None:
        """The step of these states has raised `error`: step the halves, or give up."""
        half = len(keys) // 2
        full = isinstance(error, torch.OutOfMemoryError)
        if full and half:
            self._group.out_of_memory(len(keys))
        # If the number of results was wrong, the states have taken the step: do not repeat it.
        repeats = getattr(stepper, "resumable", False) and not isinstance(error, OutputMismatch)
        if not half or not repeats:
            if first is not None and error is not first and error.__cause__ is None:
                error.__cause__ = first
            ticked.ended += [(key, error) for key in keys]
            return
        drop_frames(error)  # frames keep tensors alive
        older, newer = keys[:half], keys[half:]
        if full:
            for key in newer:
                self._park(stepper, key)
            self._step(stepper, older, ticked, error)
        else:
            self._step(stepper, older, ticked, first or error)
            self._step(stepper, newer, ticked, first or error)

    def _results(self, stepper: AnyStepper, keys: list[int]) -> Sequence[Any]:
        results = stepper.step([self._states[key] for key in keys])
        count = len(results) if hasattr(results, "__len__") else type(results).__name__
        if count != len(keys):
            raise OutputMismatch(f"step returned {count} results for {len(keys)} states")
        return results

    def _bound(self, stepper: AnyStepper, keys: list[int], ticked: Ticked) -> None:
        """While the states hold too much, park the newest; first those whose readers stall."""
        if self._max_cost == inf:
            return
        running = [key for key in self._states if key not in self._parked]
        for key in running:
            self._held[key] = self._measure(stepper, self._states[key])
        wanted, total = set(keys), self._total
        running.sort(key=lambda key: (key in wanted, -key))
        while total > self._max_cost and running:
            key = running.pop(0)
            held = self._held[key]
            if held > self._max_cost or not getattr(stepper, "resumable", False):
                error = f"the batch holds {total:g}, and max_batch_cost={self._max_cost:g}"
                ticked.ended.append((key, Overloaded(error, estimated_wait=0.0)))
                self._remove(stepper, key)
            else:
                self._park(stepper, key)
            total -= held


def _stop(stepper: AnyStepper, state: Any) -> None:
    """Tell the stepper that a state leaves; log the error of `stop`, if any."""
    stop = getattr(stepper, "stop", None)
    if stop is not None:
        try:
            stop(state)
        except (Exception, SystemExit) as error:  # noqa: BLE001  # no caller waits for it
            logger.error("a stepper failed when a state was stopped", exc_info=error)


def _error_in(ticked: Ticked) -> BaseException | None:
    """The last error among the results of a tick."""
    ends = [end for _, end in ticked.ended if isinstance(end, BaseException)]
    return ends[-1] if ends else None


def _sendable(end: Done[Any] | BaseException) -> Done[Any] | BaseException:
    return portable_error(end) if isinstance(end, BaseException) else end


def tick(batch: StepBatch, *args: Any) -> Ticked:
    """One tick of a batch without a pool; runs on the host of its worker."""
    try:
        return batch.tick(None, *args)
    finally:
        del args  # an error's traceback holds this frame


def tick_on_replica(call: Any, batch: StepBatch, *args: Any) -> Ticked:
    """One tick of the batch of a replica; runs on the host of its worker."""
    try:
        with torch.inference_mode() if call.inference_mode else nullcontext():
            return batch.tick(call.module, *args)
    finally:
        del args  # an error's traceback holds this frame
