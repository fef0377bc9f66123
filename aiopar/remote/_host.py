"""Hosts: the processes and actors in which the calls of workers run."""

import contextvars
import traceback
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from .._base.arguments import NOT_BEGUN, not_begun
from .._base.operator_threads import set_operator_threads
from .._base.thread_state import (
    CallerState,
    PortableState,
    applied,
    free_failed_backwards,
    make_fresh,
)
from .._base.tracebacks import in_words
from ..executor._worker import HostInfo
from ._wire import round_trip


class Task(NamedTuple):
    """A call, as it goes to a host."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: PortableState | None = None
    """The state of the caller; None: that of a new thread."""
    threads: int = 0
    """How many threads an operator may use; 0: as before."""


class Host(Protocol):
    """The caller's side of one process or actor, which runs one call at a time."""

    info: HostInfo

    def call(self, task: Task) -> Any:
        """Run a task and return its result; blocks.

        Raises:
            WorkerLost: The host has ended, or does not answer any more.
            BaseException: The error of the task.
        """

    def close(self) -> None:
        """End the host, which runs no call; blocks until it has ended. May be called once."""

    def kill(self) -> None:
        """End the host at once: its call raises `WorkerLost`. From any thread; never blocks."""


class StartHost(Protocol):
    """Starts hosts, or connects to them."""

    def __call__(self, index: int, device: torch.device) -> Host:
        """Return a new connection to the host `index`, which takes calls; blocks.

        If the host was lost, this starts it again.
        """


def portable_state(state: CallerState) -> PortableState | None:
    """The state of a caller that can go to another process.

    Raises:
        NotImplementedError: The caller has set function modes or saved-tensor hooks.
    """
    torch_state = state.torch_state
    if torch_state is None:
        return None
    modes = [mode for mode in torch_state.function_modes if not _is_device(mode)]
    if modes or torch_state.hooks:
        what = f"{type(modes[0]).__name__}, a function mode" if modes else "saved-tensor hooks"
        raise NotImplementedError(
            f"a call from within {what} cannot run in another process: set it in the function that "
            "is called"
        )
    return torch_state.portable


def check_no_gradients(fn: Callable[..., Any], state: CallerState) -> None:
    """Raise `NotImplementedError` if `fn` is a module whose output would have a graph."""
    grad = state.torch_state is None or (state.torch_state.grad and not state.torch_state.inference)
    if grad and isinstance(fn, torch.nn.Module) and any(p.requires_grad for p in fn.parameters()):
        raise NotImplementedError(
            f"the output of {type(fn).__name__} has a graph, which cannot leave its process: call "
            "it under torch.no_grad() or torch.inference_mode(); to train in processes or on "
            "machines, use torch's DistributedDataParallel"
        )


def _is_device(mode: object) -> bool:
    return isinstance(mode, torch.utils._device.DeviceContext)


# On the host.


def run_task(task: Task) -> Any:
    """Run a task on the thread that runs all tasks of this host."""
    try:
        if task.threads and task.threads != torch.get_num_threads():
            set_operator_threads(task.threads)
            torch.set_num_threads(task.threads)
        # In a context of its own: the next task does not see the variables that this one sets.
        context, result = contextvars.Context(), None
        if task.state is None:
            torch.set_autocast_cache_enabled(False)  # see `TorchState.autocast_cache`
            result = context.run(task.fn, *task.args, **task.kwargs)
        else:
            with applied(task.state.torch_state()):
                result = context.run(task.fn, *task.args, **task.kwargs)
        if type(result) in NOT_BEGUN:
            raise not_begun(result, on_worker=True)
        return result
    except BaseException as error:
        free_failed_backwards(error)
        raise
    finally:
        make_fresh()
        del task, result  # an error's traceback holds this frame


class RemoteTraceback(Exception):  # as that of `concurrent.futures`
    """The cause of an error that was raised on a host: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_LONGEST_CHAIN = 10


def portable_error(error: BaseException) -> list[BaseException]:
    """An error, its causes and its traceback, as errors that can be pickled; see `own_error`."""
    text = "".join(traceback.format_exception(error))
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain and len(chain) < _LONGEST_CHAIN:
        chain.append(cause)
        cause = cause.__cause__
    return [*map(_picklable, chain), RemoteTraceback(text)]


def own_error(chain: list[BaseException]) -> BaseException:
    """The error of `portable_error`, with its causes."""
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def _picklable(error: BaseException) -> BaseException:
    """`error`, or an error that is as like it as can be pickled."""
    if _survives(error):
        return error
    attributes = {key: value for key, value in vars(error).items() if _can_pickle(value)}
    rebuilt = _Rebuilt(type(error), tuple(filter(_can_pickle, error.args)), attributes)
    if _survives(rebuilt):
        return rebuilt
    plain = RuntimeError(in_words(error))
    plain.__dict__["__notes__"] = [str(note) for note in getattr(error, "__notes__", ())]
    return plain


class _Rebuilt(BaseException):
    """Pickled as an error of another class, whose `__init__` is not called again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _survives(error: BaseException) -> bool:
    kind = error.args[0] if isinstance(error, _Rebuilt) else type(error)
    try:
        return type(round_trip(error)) is kind
    except Exception:  # noqa: BLE001  # any error of the error's own class
        return False


def _can_pickle(value: Any) -> bool:
    try:
        round_trip(value)
    except Exception:  # noqa: BLE001  # any error of the value's own class
        return False
    return True
