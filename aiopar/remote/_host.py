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
from .._base.tracebacks import add_note_once, drop_frames, in_words
from ..errors import WorkerLost
from ..executor._gang import refuse_meetings
from ..executor._worker import HostInfo
from ._kept import Kept
from ._wire import Encoder, Pickled, name_unpicklable, round_trip


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

    @property
    def info(self) -> HostInfo | None:
        """Where it runs; None while it starts."""

    def open(self) -> None:
        """Wait until it takes calls, if its calls do not wait for that themselves; called once.

        Raises:
            Exception: It could not be started.
        """

    def call(self, task: Task) -> tuple[bool, Any]:
        """Run a task; blocks.

        Returns:
            Whether it has succeeded, and its result or error.

        Raises:
            WorkerLost: The host has ended, or does not answer any more.
            Exception: The task or the result cannot be pickled.
        """

    def close(self) -> None:
        """End the host, which runs no call; blocks until it has ended. May be called once."""

    def kill_call(self) -> None:
        """End the latest call of `call`, and the host if it runs there; else as `kill`."""

    def kill(self) -> None:
        """End the host at once: its call raises `WorkerLost`. From any thread; never blocks."""


class StartHost(Protocol):
    """Starts hosts, or connects to them."""

    def __call__(self, index: int, device: torch.device) -> Host:
        """Return a new connection to the host `index`; blocks.

        If the host was lost, this starts it again.
        """


def encode_task(task: Task, make: Callable[[], Encoder]) -> tuple[Pickled, list[Kept[Any]]]:
    """A task as it goes to a host, and the values that the host must have before it."""
    encoder = make()
    try:
        return encoder.encode(tuple(task)), encoder.kept
    except Exception as error:
        name_unpicklable(error, make, fn=task.fn, args=task.args, kwargs=task.kwargs)
        raise
    finally:
        del task, encoder  # an error's traceback holds this frame


def encode_kept(value: Any, make: Callable[[], Encoder]) -> Pickled:
    """A kept value as it goes to hosts."""
    try:
        return make().encode(value)
    except Exception as error:
        name_unpicklable(error, make, **{type(value).__name__: value})
        raise


def outcome(load: Callable[[], Any], name: str) -> tuple[bool, Any]:
    """What `Host.call` returns, from what `answer` has sent.

    Args:
        load: Decodes it.
        name: The host.
    """
    try:
        succeeded, result = load()
    except Exception as error:
        add_note_once(error, f"the result came from {name}, and cannot be unpickled")
        raise
    return succeeded, result if succeeded else own_error(result)


def lost(name: str, info: HostInfo | None, how: str, *, may_have_run: bool) -> WorkerLost:
    """The error of a call whose host is lost.

    Args:
        name: The host.
        info: Where it ran, if it had started.
        how: What has happened to it.
        may_have_run: See `WorkerLost`.
    """
    where = "" if info is None else f" (pid {info.pid} on {info.node})"
    run = "its call may have run" if may_have_run else "its call has not run"
    return WorkerLost(f"worker {name}{where} {how}; {run}", may_have_run=may_have_run)


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
    if not isinstance(fn, torch.nn.Module):
        return
    grad = state.torch_state is None or (state.torch_state.grad and not state.torch_state.inference)
    if grad and any(parameter.requires_grad for parameter in fn.parameters()):
        raise NotImplementedError(
            f"the output of {type(fn).__name__} has a graph, which cannot leave its process: call "
            "it under torch.no_grad() or torch.inference_mode(); to train in processes or on "
            "machines, use torch's DistributedDataParallel"
        )


def _is_device(mode: object) -> bool:
    return isinstance(mode, torch.utils._device.DeviceContext)


# On the host.

_on_host = False


def become_host(what: str) -> None:
    """Prepare this process for tasks.

    Args:
        what: Its kind, for messages.
    """
    global _on_host  # noqa: PLW0603
    _on_host = True
    refuse_meetings(what)


def on_host() -> bool:
    """Whether this process is a host."""
    return _on_host


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


def answer(load: Callable[[], Task], make: Callable[[], Encoder]) -> Pickled:
    """Run a task; the answer says whether it has succeeded, and has its result or error.

    Args:
        load: Decodes the task.
        make: Makes the encoder of the answer.
    """
    try:
        result = run_task(load())
    except BaseException as error:  # noqa: BLE001  # the caller gets it
        return make().encode((False, portable_error(error, make)))
    try:
        return make().encode((True, result))
    except BaseException as error:  # noqa: BLE001
        name_unpicklable(error, make, result=result)
        return make().encode((False, portable_error(error, make)))


class RemoteTraceback(Exception):  # as that of `concurrent.futures`
    """The cause of an error that was raised on a host: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_LONGEST_CHAIN = 10


def portable_error(
    error: BaseException, make: Callable[[], Encoder] = Encoder
) -> list[BaseException]:
    """An error, its causes and its traceback, as errors that can be pickled; see `own_error`.

    Args:
        error: The error.
        make: Makes the encoder.
    """
    text = "".join(traceback.format_exception(error))
    drop_frames(error)  # an error that is raised again and again would collect frames, and text
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _LONGEST_CHAIN:  # it may be a cycle
        chain.append(cause)
        cause = cause.__cause__
    return [*(_picklable(error, make) for error in chain), RemoteTraceback(text)]


def own_error(chain: list[BaseException]) -> BaseException:
    """The error of `portable_error`, with its causes."""
    for error, cause in pairwise(chain):
        _set(error, "__cause__", cause)
    return chain[0]


def _picklable(error: BaseException, make: Callable[[], Encoder]) -> BaseException:
    """`error`, or an error that is as like it as can be pickled."""
    if _survives(error, error, make):
        return error
    attributes = {key: value for key, value in vars(error).items() if _can_pickle(value, make)}
    if isinstance(error, BaseExceptionGroup):
        members = [_picklable(member, make) for member in error.exceptions]
        args: tuple[Any, ...] = (error.message, members)
    else:
        args = tuple(value for value in error.args if _can_pickle(value, make))
    rebuilt = _Rebuilt(type(error), args, attributes)
    if _survives(rebuilt, error, make):
        return rebuilt
    plain = RuntimeError(in_words(error))
    plain.__dict__["__notes__"] = [str(note) for note in getattr(error, "__notes__", ())]
    return plain


class _Rebuilt(Exception):
    """Pickled as an error of another class, whose `__init__` is not called again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, self.args


def _rebuild(
    kind: type[BaseException], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> BaseException:
    error = kind.__new__(kind, *args)
    _set(error, "args", args)
    error.__dict__.update(attributes)
    return error


def _set(error: BaseException, name: str, value: object) -> None:
    """Set an attribute, also of an error whose class allows none, as a frozen dataclass."""
    BaseException.__setattr__(error, name, value)


def _survives(sent: BaseException, error: BaseException, make: Callable[[], Encoder]) -> bool:
    """Whether `sent` arrives as an error of the class of `error`, and with its text."""
    try:
        arrived = round_trip(sent, make)
        # An error that is made anew may have other arguments: `super().__init__(f"no {name}")`.
        return type(arrived) is type(error) and (
            sent is not error or in_words(arrived) == in_words(error)
        )
    except BaseException:  # noqa: BLE001  # any error of the error's own class
        return False


def _can_pickle(value: Any, make: Callable[[], Encoder]) -> bool:
    try:
        round_trip(value, make)
    except BaseException:  # noqa: BLE001  # any error of the value's own class
        return False
    return True
