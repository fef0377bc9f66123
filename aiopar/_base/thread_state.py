"""The state of a caller: torch's thread state, context variables, streams.

It is captured where a call is made, applied where the call runs, and undone there.
"""

import contextvars
import threading
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode

from .devices import (
    CallerStream,
    accelerators_in_use,
    capture_streams,
    default_streams,
    on_stream,
    supported_accelerator,
    to_enter,
)

T = TypeVar("T")
_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_C: Any = torch._C
_autograd: Any = torch._C._autograd

_async_library: contextvars.ContextVar[str | None] | None = None
with suppress(ImportError):  # anyio does without it
    from sniffio import current_async_library_cvar as _async_library

# Thread-local: here `torch.set_default_device` stores the mode that it has pushed.
_default_device: Any = torch._GLOBAL_DEVICE_CONTEXT

_AUTOCAST_TYPES: tuple[str, ...] = tuple(_C._autocast_supported_devices())


def _read_autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(map(torch.get_autocast_dtype, _AUTOCAST_TYPES))


with ThreadPoolExecutor(1) as _new_thread:  # the importing thread may have set other dtypes
    _DEFAULT_DTYPES = _new_thread.submit(_read_autocast_dtypes).result()
_CPU_DTYPE = _DEFAULT_DTYPES[_AUTOCAST_TYPES.index("cpu")]
# The one kind of accelerator that this build of torch computes on, if any.
_ACCELERATOR = supported_accelerator() or ""
_ACCELERATOR_DTYPE = dict(zip(_AUTOCAST_TYPES, _DEFAULT_DTYPES, strict=True)).get(_ACCELERATOR)


@dataclass(frozen=True, slots=True)
class PortableState:
    """The part of a caller's torch state that can be pickled, for a worker in another process."""

    grad: bool = True
    forward_grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, bool, torch.dtype], ...] = ()
    """(device type, enabled, dtype) of every type that differs from a new thread's."""
    default_device: torch.device | None = None
    """The device of the innermost `torch.device(...)` or `torch.set_default_device`."""

    def torch_state(self) -> "TorchState":
        """The whole state, for `applied` in the other process."""
        modes = () if self.default_device is None else (DeviceContext(self.default_device),)
        return TorchState(**_portable_fields(self), function_modes=modes)


@dataclass(frozen=True, slots=True)
class TorchState(PortableState):
    """All torch state of one thread, immutable. The defaults are the state of a new thread."""

    # Outermost first. `torch.device(...)` and `set_default_device` are such modes.
    function_modes: tuple[Any, ...] = ()
    default_device_mode: Any = None  # the function mode that `set_default_device` has pushed
    hooks: tuple[_Hooks, ...] = ()
    """Saved-tensor hooks, (pack, unpack), the outermost first; torch applies the innermost only."""

    # Calls do not take the fields below along: that state stays with the code that has set it.
    dispatch_modes: tuple[Any, ...] = ()
    hooks_disabled: str | None = None  # the message of `disable_saved_tensors_hooks`
    multithreading: bool = True  # whether backward may use several threads
    autocast_cache: bool = False
    """Whether autocast keeps its casts of weights. In calls it does not: all threads share one
    cache, which may hold casts from before an optimizer step."""
    autocast_nesting: int = 0
    """How many `autocast` blocks torch counts. After the last block torch drops the casts."""


FRESH_STATE = TorchState()


def _portable_fields(state: PortableState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in fields(PortableState)}


def in_transform() -> bool:
    """Whether the calling thread is in a transform of `torch.func`, or is being traced."""
    return (
        _C._functorch.peek_interpreter_stack() is not None
        or _C._is_tracing()
        # A tracer is a dispatch mode. `get_proxy_mode` is slow, so the length is looked at first.
        or (_C._len_torch_dispatch_stack() > 0 and get_proxy_mode() is not None)
    )


def check_no_transform() -> None:
    """Raise RuntimeError in a transform or trace: a call would run outside of it."""
    if in_transform():
        raise RuntimeError(
            "a call from within a torch.func transform (grad, vmap, jvp, ...) or a trace "
            "(torch.jit.trace, torch.export, make_fx) would run outside of it: both belong to a "
            "thread. Transform or trace what the call runs instead, as in "
            "fork(torch.func.grad(fn), x)"
        )


# Reading


_is_any_autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
if torch.backends.mps.is_built():  # torch's function forgets MPS

    def _is_any_autocast_enabled() -> bool:
        return _C._is_any_autocast_enabled() or torch.is_autocast_enabled("mps")


def is_fresh() -> bool:
    """Whether calls take the same state along from this thread as from a new thread."""
    return (
        torch.is_grad_enabled()
        and not _C._len_torch_function_stack()
        and not _C.is_inference_mode_enabled()
        and not _is_any_autocast_enabled()
        and _autograd._top_saved_tensors_default_hooks(True) is None
        # A dtype may be set while autocast is off; `torch.autocast("cpu")` then begins with it.
        # Device types that this build does not compute on are left out: each look is slow.
        and torch.get_autocast_dtype("cpu") is _CPU_DTYPE
        and (
            _ACCELERATOR_DTYPE is None
            or torch.get_autocast_dtype(_ACCELERATOR) is _ACCELERATOR_DTYPE
        )
    )


def _is_under(state: TorchState) -> bool:
    """Whether calls take `state` along from this thread; much quicker than `_read`."""
    modes, hooks = state.function_modes, state.hooks
    return (
        torch.is_grad_enabled() is state.grad
        and _C.is_inference_mode_enabled() is state.inference
        and _read_autocast() == state.autocast
        and _C._len_torch_function_stack() == len(modes)
        and all(_C._get_function_stack_at(index) is mode for index, mode in enumerate(modes))
        and _autograd._top_saved_tensors_default_hooks(True) == (hooks[-1] if hooks else None)
    )


def capture_torch_state() -> TorchState | None:
    """Return the state that calls on other threads take along; None if it is a new thread's."""
    return None if is_fresh() else _read(for_calls=True)


def thread_torch_state() -> TorchState | None:
    """Return all torch state of this thread; None if it is a new thread's."""
    fresh = (
        is_fresh()
        and not _C._len_torch_dispatch_stack()
        and _autograd._saved_tensors_hooks_get_disabled_error_message() is None
        and _C._is_multithreading_enabled()
        and not _read_autocast_nesting()
    )
    return None if fresh else _read()


def _works_on_other_threads(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Whether a hook gives right gradients if several threads save tensors."""
    module, name = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "")
    # The hook of `allow_mutation_on_saved_tensors` needs a dispatch mode, which its thread keeps.
    if module == "torch.autograd.graph" and name.split(".")[0] == "_swap_with_cloned":
        return False
    return module != "torch.utils.checkpoint"  # its hook numbers tensors in the order of saves


def _read(*, for_calls: bool = False) -> TorchState:
    """Read the state; with `for_calls`, only what calls on other threads take along."""
    stack: list[Any] = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]  # torch's
    function_modes = tuple(stack)
    devices = [mode.device for mode in function_modes if isinstance(mode, DeviceContext)]
    disabled = _autograd._saved_tensors_hooks_get_disabled_error_message()
    if disabled is not None:
        _autograd._saved_tensors_hooks_enable()
    # torch shows only the innermost hooks: take all of them off and put them back.
    hooks = _pop_hooks()
    _push_hooks(hooks)
    if disabled is not None:
        _autograd._saved_tensors_hooks_disable(disabled)
    rest: dict[str, Any] = {}
    if for_calls:
        hooks = tuple(each for each in hooks if _works_on_other_threads(each[0]))
    else:
        rest = {
            "dispatch_modes": tuple(_get_current_dispatch_mode_stack()),
            "hooks_disabled": disabled,
            "multithreading": _C._is_multithreading_enabled(),
            "autocast_cache": torch.is_autocast_cache_enabled(),
            "autocast_nesting": _read_autocast_nesting(),
        }
    return TorchState(
        grad=torch.is_grad_enabled(),
        forward_grad=_C._is_fwd_grad_enabled(),
        inference=_C.is_inference_mode_enabled(),
        autocast=_read_autocast(),
        default_device=devices[-1] if devices else None,
        function_modes=function_modes,
        default_device_mode=_default_device.__dict__.get("device_context"),
        hooks=hooks,
        **rest,
    )


def _read_autocast() -> tuple[tuple[str, bool, torch.dtype], ...]:
    dtypes = _read_autocast_dtypes()
    if dtypes == _DEFAULT_DTYPES and not _is_any_autocast_enabled():  # a look at each type is slow
        return ()
    return tuple(
        (kind, torch.is_autocast_enabled(kind), dtype)
        for kind, dtype, default in zip(_AUTOCAST_TYPES, dtypes, _DEFAULT_DTYPES, strict=True)
        if torch.is_autocast_enabled(kind) or dtype is not default
    )


def _read_autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _pop_hooks() -> tuple[_Hooks, ...]:
    popped = []
    while (innermost := _autograd._top_saved_tensors_default_hooks(True)) is not None:
        popped.append(innermost)
        _autograd._pop_saved_tensors_default_hooks()
    return tuple(reversed(popped))


def _push_hooks(hooks: tuple[_Hooks, ...]) -> None:
    for pack, unpack in hooks:
        _autograd._push_saved_tensors_default_hooks(pack, unpack)


# Writing. Inference mode is separate: torch has only guards for it, see `_InferenceMode`.


def _clear() -> None:
    """Set a new thread's state, except inference mode."""
    for _ in range(_C._len_torch_dispatch_stack()):
        _pop_mode()
    if _autograd._saved_tensors_hooks_get_disabled_error_message() is not None:
        _autograd._saved_tensors_hooks_enable()
    _C._set_multithreading_enabled(True)
    _C._set_grad_enabled(True)
    _C._set_fwd_grad_enabled(True)
    for kind, dtype in zip(_AUTOCAST_TYPES, _DEFAULT_DTYPES, strict=True):
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(True)
    for _ in range(_read_autocast_nesting()):
        torch.autocast_decrement_nesting()
    for _ in range(_C._len_torch_function_stack()):
        _C._pop_torch_function_stack()
    _pop_hooks()
    # Else the next `set_default_device` would exit a mode that is not on the stack any more.
    _default_device.__dict__.pop("device_context", None)  # None there breaks torch 2.9


def _set(state: TorchState) -> None:
    """Set `state`, except inference mode, on a thread that has a new thread's state."""
    _C._set_grad_enabled(state.grad)
    _C._set_fwd_grad_enabled(state.forward_grad)
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)
    for _ in range(state.autocast_nesting):
        torch.autocast_increment_nesting()
    for mode in state.function_modes:
        # To enter a DeviceContext again would write a global of the process.
        _C._push_on_torch_function_stack(mode)
    if state.default_device_mode is not None:
        _default_device.device_context = state.default_device_mode
    _push_hooks(state.hooks)
    _C._set_multithreading_enabled(state.multithreading)
    if state.hooks_disabled is not None:
        _autograd._saved_tensors_hooks_disable(state.hooks_disabled)
    for mode in state.dispatch_modes:
        _push_mode(mode)


class _InferenceMode(threading.local):
    """Sets inference mode of this thread without a block."""

    # The destructor of a guard restores the mode from before the guard. So the last guard is kept.
    # It is left just before the next one is entered, when all other state is clear.
    _guard: Any = None

    def set(self, mode: bool) -> None:
        if self._guard is not None:
            self._guard.__exit__(None, None, None)
        self._guard = _C._InferenceMode(mode)
        self._guard.__enter__()


_inference_mode = _InferenceMode()


def undo_leaks(state: TorchState | None = None) -> None:
    """Set `state` again, after code that may have changed this thread's; None: a new thread's."""
    _clear()
    inference = state is not None and state.inference
    if _C.is_inference_mode_enabled() is not inference:
        _inference_mode.set(inference)
    if state is not None:
        _set(state)


def make_fresh() -> None:
    """Undo what calls or callbacks may have left on a thread whose own state is a new thread's."""
    if not is_fresh():
        undo_leaks()


# Classes, not generators: `contextlib` writes the `__traceback__` of an error, which fails if the
# error is a frozen dataclass.


class applied:  # noqa: N801  # used like a function of `contextlib`
    """Run the body of `with` under `state`, on a thread that has a new thread's state."""

    __slots__ = ("_inference", "_state")

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def __enter__(self) -> None:
        # The guard's exit restores an absolute value: that also undoes an inference mode that the
        # body has entered and not left.
        self._inference = torch.inference_mode(self._state.inference)
        self._inference.__enter__()
        _set(self._state)

    def __exit__(self, *error: object) -> None:
        _clear()
        self._inference.__exit__(None, None, None)


class fresh:  # noqa: N801  # as `applied`
    """Run the body of `with` under a new thread's state; then restore the thread's own state."""

    __slots__ = ("_inference", "_state")

    def __enter__(self) -> None:
        self._state = thread_torch_state()
        if self._state is not None:
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
            _clear()

    def __exit__(self, *error: object) -> None:
        if self._state is not None:
            _clear()
            _set(self._state)
            self._inference.__exit__(None, None, None)


class SuspendedState:
    """The torch state of a suspended generator; `with` runs one more step under it."""

    def __init__(self, state: TorchState | None) -> None:
        self._state = state or FRESH_STATE

    @classmethod
    def take(cls, outside: TorchState | None) -> Self:
        """Move the state that a step has left on this thread into an object; set `outside`."""
        suspended = cls(_read())
        undo_leaks(outside)
        return suspended

    def __enter__(self) -> None:
        self._outside, self._inside = fresh(), applied(self._state)
        self._outside.__enter__()
        self._inside.__enter__()

    def __exit__(self, *error: object) -> None:
        self._state = _read()
        # Casts of an `autocast` block with a cache would be stale after an optimizer step.
        torch.clear_autocast_cache()
        self._inside.__exit__()
        self._outside.__exit__()


# A failed backward leaves its queue in a thread-local of autograd. The queue keeps the graph, and
# may abort the process when the thread ends. Another backward on the thread empties the queue. This
# second backward runs only if needed: the first backward of a process starts the threads of the
# accelerators, and forked children cannot use accelerators after that.

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
_MOST_CAUSES = 10  # that are searched: a user's errors may be a cycle


def free_failed_backwards(error: BaseException | None = None) -> None:
    """Free what failed backwards have left on this thread.

    After a call with an `error`, this happens only if a backward has raised the error. At the end
    of the thread (None), it happens only if operations were recorded on the thread.
    """
    if _autograd._get_sequence_nr() if error is None else _failed_in_backward(error):
        with fresh(), suppress(RuntimeError):  # a forked child may be unable to run one
            torch.autograd.backward(torch.zeros((), device="cpu", requires_grad=True))


def _failed_in_backward(error: BaseException | None) -> bool:
    for _ in range(_MOST_CAUSES):
        if error is None:
            break
        frames = traceback.walk_tb(error.__traceback__)
        if any(frame.f_code is _RUN_BACKWARD for frame, _ in frames):
            return True
        error = error.__context__
    return False


# The whole state of a caller


def copy_context() -> contextvars.Context:
    """Copy the caller's context variables, except the name of its async library."""
    context = contextvars.copy_context()
    if _async_library is not None and _async_library.get() is not None:
        context.run(_async_library.set, None)  # else `anyio.run` would refuse to run in a worker
    return context


class CallerState:
    """The state of a caller, captured when this object is made. Any number of calls may use it."""

    __slots__ = ("_context", "_streams", "torch_state")

    def __init__(self) -> None:
        check_no_transform()
        self._context = copy_context()
        self.torch_state: TorchState | None = capture_torch_state()
        self._streams = capture_streams()

    @property
    def streams(self) -> tuple[CallerStream, ...]:
        """The caller's current stream of every accelerator; empty if none is in use."""
        devices = accelerators_in_use()  # none in a forked child, which cannot wait for streams
        # If no accelerator was in use at the capture, the caller had set no stream.
        return (self._streams or default_streams(devices)) if devices else ()

    @property
    def portable(self) -> PortableState:
        """The part of torch's state that can be pickled: without function modes and hooks."""
        return PortableState(**_portable_fields(self.torch_state or FRESH_STATE))

    def with_context(self, context: contextvars.Context) -> "CallerState":
        """Return the same state with the context variables of `context`."""
        changed = CallerState.__new__(CallerState)  # `copy.copy` takes ten times as long
        changed._context = context
        changed.torch_state, changed._streams = self.torch_state, self._streams
        return changed

    def context(self) -> contextvars.Context:
        """Copy the context variables for one call: two calls cannot enter one context at once."""
        return self._context.copy()

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Return `fn(*args)`, run on a thread that is under this state, in a context of its own.

        State that `fn` leaves behind is undone: the next call on the thread does not see it.
        """
        state, cache = self.torch_state, torch.is_autocast_cache_enabled()
        try:
            return self.context().run(fn, *args)
        except BaseException as error:
            free_failed_backwards(error)
            raise
        finally:
            if not (is_fresh() if state is None else _is_under(state)):
                undo_leaks(state)
                torch.set_autocast_cache_enabled(cache)
            del fn, args  # an error's traceback holds this frame

    async def drive(self, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
        """Await `fn(*args)`, each step under the captured state, in a context of its own.

        Between the steps the loop's thread has its own state back: other tasks take their turns.
        """
        try:
            result: T = await _steps(self, _awaited(fn, args))
            return result
        finally:
            # Since CPython 3.12 the traceback of an error refers to this frame.
            del fn, args  # they may hold the error


async def _awaited(fn: Callable[..., Awaitable[T]], args: tuple[Any, ...]) -> T:
    try:
        return await fn(*args)
    finally:
        del fn, args


@types.coroutine
def _steps(state: CallerState, coroutine: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
    context = state.context()
    step: Callable[[Any], Any] = coroutine.send
    sent: Any = None
    awaited: Any = None
    try:
        while True:
            with _entered(state):
                try:
                    awaited = context.run(step, sent)
                except StopIteration as finished:
                    return finished.value
            try:
                step, sent = coroutine.send, (yield awaited)
            except GeneratorExit:
                # The loop was closed, and the garbage collector has found the task.
                with _entered(state):
                    context.run(coroutine.close)
                raise
            except BaseException as error:  # noqa: BLE001  # every error is passed on
                step, sent = coroutine.throw, error
    finally:
        del sent, awaited  # an error thrown in, or held by the awaited future, has this frame


def _entered(state: CallerState) -> ExitStack:
    entered = ExitStack()
    if state.torch_state is None and is_fresh():
        entered.callback(make_fresh)
    else:
        entered.enter_context(fresh())
        entered.enter_context(applied(state.torch_state or FRESH_STATE))
    for caller in state.streams:
        if not on_stream(caller.stream):
            # To set the stream would also change the thread's current device for good.
            entered.enter_context(to_enter(caller.stream))
    return entered
