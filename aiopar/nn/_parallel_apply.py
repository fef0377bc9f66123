"""`parallel_apply` and `fork_apply`: N calls at the same time, each on its own worker."""

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any

import torch

from .._base.arguments import as_kwargs, as_list, check_callable, returns_coroutine
from .._base.devices import Device, parse_device
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once, in_words
from ..executor._current import get_executor
from ..executor._fork import device_of
from ..executor._gang import Gang, GangCall
from ..futures._future import Future
from ..futures._waiting import collect_all, settle
from ..futures._wakeup import ki_protected


def fork_apply(
    modules: Iterable[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> list[Future[Any]]:
    """Start the calls of `parallel_apply` now, and return their futures in order.

    `await asyncio.gather(*fork_apply(...))` gives the results of `await parallel_apply(...)`. Use
    the futures to handle each result as soon as it arrives. If one call fails, the calls that have
    not started are dropped, and their futures have the same error.

    Arguments, errors and the differences from torch are those of aiopar's `parallel_apply`.

    Raises:
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
    _, futures = _ParallelCall(modules, inputs, kwargs_tup, devices).start()
    return futures


@returns_coroutine
def parallel_apply(
    modules: Iterable[Callable[..., Any]],
    inputs: Sequence[Any],
    kwargs_tup: Sequence[Mapping[str, Any] | None] | None = None,
    devices: Sequence[Device | None] | None = None,
) -> Coroutine[Any, Any, list[Any]]:
    """Call each module on its input, all at the same time; return the results in order.

    Mirrors `torch.nn.parallel.parallel_apply`. Each call runs on a worker of its own, also if
    devices repeat, so that the calls may meet (`current_replica`). When this is called, arguments
    are checked and the caller's state (grad mode, autocast, the current executor, ...) is captured.
    When it is awaited, the calls are queued.

    If a call fails, calls that have not started are dropped, and calls that wait for each other
    are released. When the running calls have ended, the error of the lowest index is raised: the
    original error object, with a note that names replica and device and notes for the other
    errors. If the `await` is cancelled, the same happens, and then the cancellation goes on.

    Differences from torch: any device, the CPU included, and repeated devices; an error keeps its
    type (torch creates a new one); `devices=None` means the device of the first tensor of each
    input (torch: the current device for all); autocast and inference mode apply completely, not
    only grad mode; it is awaited.

    Args:
        modules: N modules or other callables.
        inputs: N inputs. An input that is not a list or tuple is a single argument.
        kwargs_tup: N dicts (or None) of keyword arguments.
        devices: N devices (or None) whose workers run the calls.

    Returns:
        The N results.

    Raises:
        TypeError: A module is not callable, or is a coroutine function or a generator function; or
            an argument has the wrong type. Later: a module returned a coroutine or a generator.
        ValueError: The lengths differ, a device does not exist, or the current executor has too
            few workers on a device.
        ExecutorShutdown: A `RuntimeError`, when awaited: the current executor is shut down.

    Example:
        >>> import asyncio, aiopar, torch
        >>> layers = [torch.nn.Linear(2, n) for n in (3, 4)]
        >>> ys = asyncio.run(aiopar.parallel_apply(layers, [torch.ones(1, 2)] * 2))
        >>> [tuple(y.shape) for y in ys]
        [(1, 3), (1, 4)]
    """
    return _ParallelCall(modules, inputs, kwargs_tup, devices).run()


class _ParallelCall:
    """The checked calls and the state of their caller, before they are queued."""

    def __init__(
        self,
        modules: Iterable[Callable[..., Any]],
        inputs: Sequence[Any],
        kwargs_tup: Sequence[Mapping[str, Any] | None] | None,
        devices: Sequence[Device | None] | None,
    ) -> None:
        callables = as_list("modules", modules, "modules or functions")
        count = len(callables)
        for module in callables:
            check_callable(module)
        _check_length("inputs", inputs, count)
        given = (inputs[index] for index in range(count))
        args = [tuple(one) if isinstance(one, (list, tuple)) else (one,) for one in given]
        if kwargs_tup is None:
            kwargs_tup = [None] * count
        _check_length("kwargs_tup", kwargs_tup, count)
        kwargs = [as_kwargs(f"kwargs_tup[{n}]", kwargs_tup[n]) for n in range(count)]
        self._calls = [*zip(callables, args, kwargs, strict=True)]
        self._dispatcher = get_executor()._dispatcher
        self._groups = self._dispatcher.groups_on(self._parse_devices(devices))
        self._state = CallerState()

    def _parse_devices(self, given: Sequence[Device | None] | None) -> list[torch.device]:
        if given is None:
            given = [None] * len(self._calls)
        _check_length("devices", given, len(self._calls))
        return [
            device_of(*args, *kwargs.values(), module) if device is None else parse_device(device)
            for (module, args, kwargs), device in zip(self._calls, given, strict=True)
        ]

    def start(self) -> tuple[Gang, list[Future[Any]]]:
        """Queue all calls, or none."""
        gang = Gang()
        members: list[GangCall[Any]] = []
        for module, args, kwargs in self._calls:
            member = GangCall(gang, module, args, self._state)
            if kwargs:
                member.kwargs = kwargs
            members.append(member)
        # Only the calls hold modules and arguments now; a call drops its own when it ends.
        self._calls = []
        if members:
            self._dispatcher.submit_gang(members, self._groups)
        return gang, [member.future for member in members]

    @ki_protected
    async def run(self) -> list[Any]:
        """Queue all calls and wait for them; return their results, or raise the error of one."""
        gang, futures = self.start()
        try:
            await collect_all(futures)
            return _results(futures, gang)
        except BaseException as error:
            # After a cancellation: drop the calls that have not started, and release meetings.
            gang.abort()
            list(map(Future.cancel, futures))  # no loop: this frame must not keep a future
            if not isinstance(error, GeneratorExit):  # a closed coroutine must not wait
                await settle(futures)
            raise
        finally:
            del futures  # the error's traceback refers to this frame: no reference cycle


# For the warning that a coroutine was never awaited.
_ParallelCall.run.__qualname__ = "parallel_apply"


def _check_length(name: str, given: Sequence[object], expected: int) -> None:
    if not (hasattr(given, "__len__") and hasattr(given, "__getitem__")):
        raise TypeError(
            f"{name} must be a sequence with an entry for each of the {expected} modules, "
            f"not {type(given).__name__}"
        )
    if len(given) != expected:
        raise ValueError(f"{name} has {len(given)} entries, but there are {expected} modules")


def _results(futures: Sequence[Future[Any]], gang: Gang) -> list[Any]:
    """Return the results, or raise an error."""
    trigger = gang.trigger
    try:
        ended = {
            index: future.exception()
            for index, future in enumerate(futures)
            if not (future.cancelled() or index in gang.dropped)
        }
        errors = {index: error for index, error in ended.items() if error is not None}
        # An aborted meeting is a consequence of another error, or of a cancellation.
        causes = [
            index
            for index, error in errors.items()
            if index == trigger or not isinstance(error, threading.BrokenBarrierError)
        ]
        dropped = any(future.cancelled() for future in futures)
        if errors and (causes or trigger is not None or not dropped):
            raise _first_error(errors, causes)
        if dropped:
            raise CancelledError("a call was cancelled before it started")
        return [future.value() for future in futures]
    finally:
        del ended, errors, futures  # as in `run`


def _first_error(errors: Mapping[int, BaseException], causes: Sequence[int]) -> BaseException:
    """Return the error with the lowest index of `causes`, with a note for each other cause."""
    error = errors[min(causes or errors)]
    for index in causes:
        if errors[index] is not error:
            add_note_once(error, f"replica {index} failed too: ", in_words(errors[index]))
    return error
