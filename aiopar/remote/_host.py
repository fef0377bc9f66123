"""Hosts: the processes and actors in which the calls of workers run."""

import contextvars
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, TypeVar

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
from .._base.tracebacks import add_note_once, drop_frames, in_words, without_frames
from ..errors import WorkerLost
from ..executor._worker import HostInfo
from ._channel import Pickled, copy_buffer
from ._unpicklable import can, notes_on, title
from ._wire import Encoder, Kept, decode

T = TypeVar("T")


class Task(NamedTuple):
    """A call, as it goes to a host."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    state: PortableState | None = None  # of the caller; None: that of a new thread
    threads: int = 0  # how many an operator may use; 0: as many as in the last task


class Host(Protocol):
    """The caller's side of one process or actor, which runs one call at a time."""

    @property
    def info(self) -> HostInfo | None:
        """Where it runs; None while it starts."""

    def open(self) -> None:
        """Wait until the host takes calls, or raise why it could not be started; called once."""

    def call(self, task: Task) -> tuple[bool, Any]:
        """Run a task; blocks. Returns whether it has succeeded, and its result or error.

        Raises:
            WorkerLost: The host has ended, or does not answer any more.
            Exception: The task or the result cannot be pickled.
        """

    def close(self) -> None:
        """End the host, which runs no call; blocks until it has ended. May be called once."""

    def kill_call(self) -> None:
        """End the host if it runs the latest call; drop that call if it has not begun."""

    def kill(self) -> None:
        """End the host at once: its call raises `WorkerLost`. From any thread; never blocks."""


def encode(
    obj: T, make: Callable[[], Encoder], parts: "Callable[[T], Iterable[tuple[str, Any]]]"
) -> tuple[Pickled, list[Kept[Any]]]:
    """An object as it goes to another process, and the kept values that the host must have first.

    If it cannot be pickled, notes on the error say which of its named `parts` cannot.
    """
    encoder = make()
    try:
        return encoder.encode(obj), encoder.kept
    except BaseException as error:
        with suppress(Exception):  # of a user's class: it must not hide the error
            for note in notes_on(error, parts(obj), make):
                add_note_once(error, note)
        raise
    finally:
        del obj, encoder  # an error's traceback holds this frame


def parts_of_call(task: Sequence[Any]) -> Iterable[tuple[str, Any]]:
    """What a caller has given: the function, its arguments and keywords."""
    fn, args, kwargs, *_ = task
    # Around the function of a batch or a replica, aiopar calls its own function.
    is_own = type(fn) is not Kept and str(getattr(fn, "__module__", "")).startswith("aiopar.")
    yield title(fn), fn
    for number, arg in enumerate(args, start=1):
        yield "the input" if is_own else f"argument {number}", arg
    for name, arg in kwargs.items():
        yield f"keyword {name}", arg


def parts_of_kept(value: Any) -> Iterable[tuple[str, Any]]:
    """The parts of a kept value."""
    yield title(value), value


def _parts_of_answer(answer: tuple[bool, Any]) -> Iterable[tuple[str, Any]]:
    yield "the result", answer[1]


def outcome(load: Callable[[], Any], name: str) -> tuple[bool, Any]:
    """What `Host.call` returns; `load` decodes the `answer` of the host `name`."""
    try:
        succeeded, result = load()
    except Exception as error:
        add_note_once(error, f"the result came from {name}, and cannot be unpickled")
        raise
    if not succeeded:
        for raised, cause in pairwise(result):
            _set(raised, "__cause__", cause)
        result = result[0]
    return succeeded, result


def lost(name: str, info: HostInfo | None, how: str, *, may_have_run: bool) -> WorkerLost:
    """The error of a call whose host `name` is lost; `how` says how it was lost."""
    where = "" if info is None else f" (pid {info.pid} on {info.node})"
    run = "its call may have run" if may_have_run else "its call has not run"
    return WorkerLost(f"worker {name}{where} {how}; {run}", may_have_run=may_have_run)


def portable_state(state: CallerState) -> PortableState | None:
    """The state of a caller, for another process: without function modes and hooks."""
    torch_state = state.torch_state
    if torch_state is None:
        return None
    modes = [
        mode
        for mode in torch_state.function_modes
        if not isinstance(mode, torch.utils._device.DeviceContext)
    ]
    if modes or torch_state.hooks:
        what = f"{type(modes[0]).__name__}, a function mode" if modes else "saved-tensor hooks"
        raise NotImplementedError(
            f"a call from within {what} cannot run in another process: set it in the function that "
            "is called"
        )
    return state.portable


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


# On the host.


def _run(task: Task) -> Any:
    """Run a task on the thread that runs all tasks of this host."""
    try:
        if task.threads and task.threads != torch.get_num_threads():
            set_operator_threads(task.threads)
            torch.set_num_threads(task.threads)
        # A context of its own: the next task must not see the variables that this task sets.
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


def answer(load: Callable[[], Iterable[Any]], make: Callable[[], Encoder]) -> Pickled:
    """Run the task that `load` decodes; returns whether it succeeded, and its result or error."""
    try:
        try:
            task = Task(*load())
        except Exception as error:
            add_note_once(error, "the call cannot be unpickled in its process")
            raise
        result = _run(task)
        return encode((True, result), make, _parts_of_answer)[0]
    except BaseException as error:  # noqa: BLE001  # the caller gets it
        return failure(error, make)


class RemoteTraceback(Exception):  # as that of `concurrent.futures`
    """The cause of an error that was raised on a host: its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


_LONGEST_CHAIN = 10


def failure(error: BaseException, make: Callable[[], Encoder]) -> Pickled:
    """The answer with an error: its causes and its traceback follow the error in a list."""
    text = "".join(traceback.format_exception(error))
    drop_frames(error)  # else an error object that is raised again would collect frames
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < _LONGEST_CHAIN:  # the causes may be a cycle
        chain.append(cause)
        cause = cause.__cause__
    errors = [*(_picklable(error, make) for error in chain), RemoteTraceback(text)]
    return make().encode((False, errors))


def portable_error(error: BaseException) -> BaseException:
    """`error`, or the most similar one, for a result that is pickled; its traceback is a note."""
    return _picklable(without_frames(error), Encoder)


def _picklable(error: BaseException, make: Callable[[], Encoder]) -> BaseException:
    """`error`, or the most similar error that can be pickled."""
    if _survives(error, error, make):
        return error
    attributes = {key: value for key, value in vars(error).items() if can(_round_trip, value, make)}
    if isinstance(error, BaseExceptionGroup):
        members = [_picklable(member, make) for member in error.exceptions]
        args: tuple[Any, ...] = (error.message, members)
    else:
        args = tuple(value for value in error.args if can(_round_trip, value, make))
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
    """Set an attribute, also of a class that forbids it, as a frozen dataclass does."""
    BaseException.__setattr__(error, name, value)


def _survives(sent: BaseException, error: BaseException, make: Callable[[], Encoder]) -> bool:
    """Whether `sent` arrives as an error of the class of `error`, and with its text."""
    try:
        arrived = _round_trip(sent, make)
        # Unpickling calls the class with `args`; its `__init__` may make another text of them.
        return type(arrived) is type(error) and (
            sent is not error or in_words(arrived) == in_words(error)
        )
    except BaseException:  # noqa: BLE001  # raised by the class of the error
        return False


def _round_trip(obj: Any, make: Callable[[], Encoder]) -> Any:
    """`obj` as it would arrive."""
    data, buffers = make().encode(obj)
    arrived: list[Any] = [*buffers]
    for index, buffer in enumerate(buffers):
        if isinstance(buffer, torch.Tensor | memoryview):
            arrived[index] = memoryview(bytearray(buffer.nbytes))
            copy_buffer(buffer, arrived[index])
    return decode(data, arrived)
