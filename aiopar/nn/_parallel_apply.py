"""`parallel_apply` and `fork_apply`: N calls at the same time, each in a thread of its own."""

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import torch

from .._base.arguments import as_kwargs, as_list, check_callable
from .._base.devices import Device, parse_device
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, in_words
from ..executor._current import get_executor
from ..executor._fork import device_of
from ..executor._gang import Gang, GangCall
from ..futures._future import Future
from ..futures._waiting import collect_all, settle

T = TypeVar("T")


class ParallelCall:
    """Calls that are validated and have their caller's state, ready to be queued together."""

    def __init__(
        self,
        modules: Iterable[Callable[..., Any]],
        inputs: Sequence[Any],
        kwargs_tup: Sequence[Mapping[str, Any] | None] | None,
        devices: Sequence[Device | None] | None,
    ) -> None:
        self._modules = as_list("modules", modules, "modules or functions")
        count = len(self._modules)
        for module in self._modules:
            check_callable(module)
        _check_length("inputs", inputs, count)
        self._args = [_as_args(inputs[index]) for index in range(count)]
        self._kwargs = _as_kwargs(kwargs_tup, count)
        self._dispatcher = get_executor()._dispatcher
        self._groups = self._dispatcher.groups_on(self._devices(devices))
        self._state = CallerState()

    def _devices(self, given: Sequence[Device | None] | None) -> list[torch.device]:
        count = len(self._modules)
        if given is None:
            given = [None] * count
        _check_length("devices", given, count)
        return [
            device_of(*args, *kwargs.values(), module) if device is None else parse_device(device)
            for module, args, kwargs, device in zip(
                self._modules, self._args, self._kwargs, given, strict=True
            )
        ]

    def start(self) -> tuple[Gang, list[Future[Any]]]:
        """Queue them all, or none."""
        gang = Gang()
        members: list[GangCall[Any]] = []
        for module, args, kwargs in zip(self._modules, self._args, self._kwargs, strict=True):
            member = gang.add(module, args, self._state)
            if kwargs:
                member.kwargs = kwargs
            members.append(member)
            del module, args, kwargs, member
        # The workers' now: a worker that has run one lets go of it, and so is the last to do so.
        self._modules, self._args, self._kwargs = [], [], []
        if members:
            self._dispatcher.submit_gang(members, self._groups)
        return gang, [member.future for member in members]

    async def run(self) -> list[Any]:
        """Queue them, wait for all, and return their results or raise the error of one."""
        gang, futures = self.start()
        del self  # modules and inputs are the workers' now, which let go of them when done
        try:
            await collect_all(futures)
            return _results(futures, gang.trigger)
        except BaseException:
            # Cancelled: what has not started is dropped, who waits in a meeting is released.
            gang.abort(None)
            await settle(futures)
            raise
        finally:
            del futures  # as in `_results`


# What a warning that it was never awaited says.
ParallelCall.run.__qualname__ = "parallel_apply"


def _check_length(name: str, given: Sequence[object], expected: int) -> None:
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise TypeError(
            f"{name} must be a sequence with an entry for each of the {expected} modules, "
            f"not {type(given).__name__}"
        )
    if len(given) != expected:
        raise ValueError(f"{name} has {len(given)} entries, but there are {expected} modules")


def _as_args(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, (list, tuple)) else (given,)


def _as_kwargs(
    given: Sequence[Mapping[str, Any] | None] | None, count: int
) -> list[Mapping[str, Any]]:
    if given is None:
        return [{}] * count
    _check_length("kwargs_tup", given, count)
    return [as_kwargs(f"kwargs_tup[{index}]", given[index]) for index in range(count)]


def _results(futures: Sequence[Future[Any]], trigger: int | None) -> list[Any]:
    try:
        errors = _errors(futures)
        dropped = any(future.cancelled() for future in futures)
        if errors and not (dropped and trigger is None and not _own(errors, trigger)):
            raise _own_error(errors, trigger)
        if dropped:
            raise CancelledError("a call was cancelled before it started")
        return [future.value() for future in futures]
    finally:
        # The error's traceback holds this frame, which must not hold the error.
        del errors, futures


def _errors(futures: Sequence[Future[Any]]) -> dict[int, BaseException]:
    errors = {}
    for index, future in enumerate(futures):
        error = None if future.cancelled() else future.exception()
        if error is not None:
            errors[index] = error
    return errors


def _own(errors: Mapping[int, BaseException], trigger: int | None) -> list[int]:
    """Those that are not just a broken meeting."""
    return [
        index
        for index, error in errors.items()
        if index == trigger or not isinstance(error, threading.BrokenBarrierError)
    ]


def _own_error(errors: dict[int, BaseException], trigger: int | None) -> BaseException:
    """The lowest index's error that is not just a broken meeting; the others noted under it."""
    own = _own(errors, trigger)
    chosen = min(own or errors)
    error = errors.pop(chosen)
    for index, other in errors.items():
        if index in own and other is not error:
            add_note_once(error, f"replica {index} failed too: {in_words(other)}")
    return error


def fork_apply(
    modules: Iterable[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Future[Any]]:
    """Start what `parallel_apply` awaits, and return the futures, in order.

    `asyncio.gather(*fork_apply(...))` gives the results of `parallel_apply(...)`; the futures also
    serve to look at each result as it comes. If one call fails, those that have not started are
    cancelled.

    Mirrors `torch.nn.parallel.parallel_apply`, but for what is returned; differences from it are
    those of aiopar's `parallel_apply`.

    Args:
        modules: N modules or other callables.
        inputs: N inputs; one that is not a list or tuple is one argument.
        kwargs_tup: N dicts (or None) of keyword arguments.
        devices: N devices (or None) whose workers run the calls.

    Returns:
        N futures; each has its own call's result or error.

    Raises:
        TypeError: A module is not callable, or an argument is of a wrong type.
        ValueError: The lengths differ, there is no such device, or the current executor has too
            few workers on a device.
        ExecutorShutdown: A `RuntimeError`: the current executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> layers = [torch.nn.Linear(2, n) for n in (3, 4)]
        >>> async def main():
        ...     futures = aiopar.fork_apply(layers, [torch.ones(1, 2)] * 2)
        ...     return [y.shape[1] for y in await asyncio.gather(*futures)]
        >>> asyncio.run(main())
        [3, 4]
    """
    _, futures = ParallelCall(modules, inputs, kwargs_tup, devices).start()
    return futures


def parallel_apply(
    modules: Iterable[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> Coroutine[Any, Any, list[Any]]:
    """Call each module on its input, all at the same time, and return the results in order.

    Mirrors `torch.nn.parallel.parallel_apply`. Each call has a thread (a worker) of its own, also
    when devices repeat, so that calls may meet (`current_replica`). Arguments are checked, and the
    state of the caller (grad mode, autocast, the current executor, ...) is captured, when this is
    called; the calls are queued when it is awaited.

    If calls fail, those not started are dropped, meetings are released, and when the running ones
    have ended, the error of the lowest index is raised: the same object, with a note that names
    replica and device, and the others noted under it. If the `await` is cancelled: the same, then
    the cancellation goes on.

    Differences from torch: any device, CPU included, and repeats of it; an error keeps its type
    (torch makes a new one out of it); `devices=None` is the device of the first tensor of each
    input (torch: the current device for all); all of autocast and inference mode go along, not
    grad mode alone; it is awaited.

    Args:
        modules: N modules or other callables.
        inputs: N inputs; one that is not a list or tuple is one argument.
        kwargs_tup: N dicts (or None) of keyword arguments.
        devices: N devices (or None) whose workers run the calls.

    Raises:
        TypeError: A module is not callable, or an argument is of a wrong type.
        ValueError: The lengths differ, there is no such device, or the current executor has too
            few workers on a device.
        ExecutorShutdown: A `RuntimeError`, when awaited: the current executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> layers = [torch.nn.Linear(2, n) for n in (3, 4)]
        >>> ys = asyncio.run(aiopar.parallel_apply(layers, [torch.ones(1, 2)] * 2))
        >>> [tuple(y.shape) for y in ys]
        [(1, 3), (1, 4)]
    """
    return ParallelCall(modules, inputs, kwargs_tup, devices).run()
