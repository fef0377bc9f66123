"""Who calls: the state captured when a call is made, for work that is done after it."""

import contextvars
import copy
import threading
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _python_dispatch
from torch.utils._device import DeviceContext

from .devices import (
    CallerStream,
    accelerators_in_use,
    capture_streams,
    default_streams,
    on_stream,
    supported_accelerator,
    to_enter,
)

_dispatch_stack_length = torch._C._len_torch_dispatch_stack
_hooks_disabled_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_is_multithreading_enabled = torch._C._is_multithreading_enabled


class Modes:
    """Those that a thread was in: `put` makes the calling thread be in them, which is in none."""

    __slots__ = ("_dispatch", "_message", "_multithreading")

    def __init__(self) -> None:
        """Take all of them off the calling thread."""
        self._dispatch: Any = _python_dispatch._disable_current_modes()
        self._dispatch.__enter__()
        self._message = _hooks_disabled_message()
        if self._message is not None:
            torch._C._autograd._saved_tensors_hooks_enable()
        self._multithreading = _is_multithreading_enabled()
        torch._C._set_multithreading_enabled(True)

    def put(self) -> None:
        """Have the calling thread be in them; once."""
        torch._C._set_multithreading_enabled(self._multithreading)
        if self._message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(self._message)
        self._dispatch.__exit__(None, None, None)


def in_modes() -> bool:
    """Whether the calling thread is in any."""
    return bool(
        _dispatch_stack_length()
        or _hooks_disabled_message() is not None
        or not _is_multithreading_enabled()
    )


def take_modes() -> Modes | None:
    """Have the calling thread be in none; those that it was in, None if there were none."""
    return Modes() if in_modes() else None


_async_library: contextvars.ContextVar[str | None] | None = None
with suppress(ImportError):  # anyio does without it
    from sniffio import current_async_library_cvar as _async_library

_CHECKPOINT = "torch.utils.checkpoint"
_MUTATION = ("torch.autograd.graph", "_swap_with_cloned")
_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

# Bound once: each is called for every call in both directions.
_is_grad_enabled = torch._C.is_grad_enabled
_is_inference_mode = torch._C.is_inference_mode_enabled
_function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
_function_modes_length = torch._C._len_torch_function_stack
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_is_autocast_cache_enabled = torch.is_autocast_cache_enabled
_get_autocast_dtype = torch.get_autocast_dtype
_interpreter_stack = torch._C._functorch.peek_interpreter_stack

# Where `torch.set_default_device` remembers, per thread, the mode that it has pushed.
_default_device: Any = torch._GLOBAL_DEVICE_CONTEXT

_HAS_MPS = torch.backends.mps.is_built()
_AUTOCAST_TYPES: tuple[str, ...] = tuple(torch._C._autocast_supported_devices())


def _read_autocast_dtypes() -> tuple[torch.dtype, ...]:
    return tuple(_get_autocast_dtype(kind) for kind in _AUTOCAST_TYPES)


def _in_fresh_thread() -> tuple[torch.dtype, ...]:
    # Who imports aiopar may have set other dtypes before, for the importing thread.
    read: list[tuple[torch.dtype, ...]] = []
    thread = threading.Thread(target=lambda: read.append(_read_autocast_dtypes()))
    thread.start()
    thread.join()
    return read[0]


_DEFAULT_DTYPES = _in_fresh_thread()
_CPU_DTYPE = _DEFAULT_DTYPES[_AUTOCAST_TYPES.index("cpu")]
# That of the one kind of accelerator that this build of torch computes on, if any.
_ACCELERATOR = supported_accelerator() or ""
_ACCELERATOR_DTYPE = dict(zip(_AUTOCAST_TYPES, _DEFAULT_DTYPES, strict=True)).get(_ACCELERATOR)


@dataclass(frozen=True, slots=True)
class PortableState:
    """The part of a caller's torch state that can be pickled, for a host in another process."""

    grad: bool
    forward_grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """(device type, enabled, dtype) of every type that differs from a fresh thread's."""
    autocast_cache: bool
    default_device: torch.device | None
    """That of the innermost `torch.device(...)` or `torch.set_default_device`."""

    def torch_state(self) -> "TorchState":
        """The whole state, for `applied` on the host."""
        mode = None if self.default_device is None else DeviceContext(self.default_device)
        return TorchState(
            self.grad,
            self.forward_grad,
            self.inference,
            self.autocast,
            self.autocast_cache,
            function_modes=() if mode is None else (mode,),
            default_device=None,
            hooks=(),
        )


@dataclass(frozen=True, slots=True)
class TorchState:
    """torch's thread-local state, as one immutable value."""

    grad: bool
    forward_grad: bool
    inference: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]
    """(device type, enabled, dtype) of every type that differs from a fresh thread's."""
    autocast_cache: bool
    function_modes: tuple[Any, ...]
    """Bottom first; `torch.device(...)` and `set_default_device` are among them."""
    default_device: Any
    """Which of them `set_default_device` has pushed, to take it off again; None: none."""
    hooks: tuple[_Hooks, ...]
    """(pack, unpack) pairs, outermost first; torch applies only the innermost."""

    @property
    def portable(self) -> PortableState:
        """The part that can be pickled."""
        devices = [mode.device for mode in self.function_modes if isinstance(mode, DeviceContext)]
        return PortableState(
            self.grad,
            self.forward_grad,
            self.inference,
            self.autocast,
            self.autocast_cache,
            devices[-1] if devices else None,
        )


def in_transform() -> bool:
    """Whether the calling thread is within a transform of `torch.func`, as no other thread is."""
    return _interpreter_stack() is not None


def check_no_transform() -> None:
    """Raise if what is called here would leave a transform of `torch.func`."""
    if _interpreter_stack() is not None:  # as `in_transform`, without a call more
        raise RuntimeError(
            "a call from within a torch.func transform (grad, vmap, jvp, ...) would run outside of "
            "it: transforms belong to a thread. Transform what the call runs instead, as in "
            "fork(torch.func.grad(fn), x)"
        )


def is_fresh() -> bool:
    """Whether the calling thread's torch state is a fresh thread's; asked twice for every call."""
    return (
        _is_grad_enabled()
        and not _function_modes_length()
        and not _is_inference_mode()
        and not _is_any_autocast_enabled()
        and not (_HAS_MPS and torch.is_autocast_enabled("mps"))  # the one before forgets it
        and _top_hooks(True) is None
        and _is_autocast_cache_enabled()
        # A dtype may be set while autocast is off, and `torch.autocast("cpu")` then starts from it.
        # Those of kinds that nothing here can run on are read only when anything else differs: each
        # takes as long as three of the above.
        and _get_autocast_dtype("cpu") is _CPU_DTYPE
        and (_ACCELERATOR_DTYPE is None or _get_autocast_dtype(_ACCELERATOR) is _ACCELERATOR_DTYPE)
    )


def capture_torch_state(*, own: bool = False) -> TorchState | None:
    """The calling thread's torch state; None if it is a fresh thread's.

    Args:
        own: Whether it is for the code that it was set for, not for calls on other threads.
    """
    if is_fresh():
        return None
    state = _read_torch_state()
    return state if own else _for_calls(state)


def _read_torch_state() -> TorchState:
    autocast = tuple(
        (kind, torch.is_autocast_enabled(kind), dtype)
        for kind, dtype, default in zip(
            _AUTOCAST_TYPES, _read_autocast_dtypes(), _DEFAULT_DTYPES, strict=True
        )
        if torch.is_autocast_enabled(kind) or dtype is not default
    )
    return TorchState(
        grad=_is_grad_enabled(),
        # Read when anything else differs: torch itself switches it off together with grad mode.
        forward_grad=torch._C._is_fwd_grad_enabled(),
        inference=_is_inference_mode(),
        autocast=autocast,
        autocast_cache=_is_autocast_cache_enabled(),
        function_modes=tuple(_function_modes()),
        default_device=_default_device.__dict__.get("device_context"),
        hooks=_read_hooks(),
    )


def _read_hooks() -> tuple[_Hooks, ...]:
    # torch shows only the innermost: the others are taken off and put back.
    hooks = _pop_hooks()
    _push_hooks(hooks)
    return hooks


def _pop_hooks() -> tuple[_Hooks, ...]:
    popped = []
    while (innermost := _top_hooks(True)) is not None:
        popped.append(innermost)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return tuple(reversed(popped))


def _push_hooks(hooks: tuple[_Hooks, ...]) -> None:
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def _clear_torch_state() -> None:
    """Everything but inference mode back to a fresh thread's."""
    torch._C._set_grad_enabled(True)
    torch._C._set_fwd_grad_enabled(True)
    for kind, default in zip(_AUTOCAST_TYPES, _DEFAULT_DTYPES, strict=True):
        torch.set_autocast_enabled(kind, False)
        torch.set_autocast_dtype(kind, default)
    torch.set_autocast_cache_enabled(True)
    for _ in range(_function_modes_length()):
        torch._C._pop_torch_function_stack()
    _pop_hooks()
    # Else the next `set_default_device` would leave a mode that is on the stack no more.
    _default_device.__dict__.pop("device_context", None)  # None there breaks torch 2.9


def _set_torch_state(state: TorchState) -> None:
    """Everything but inference mode as in `state`, from a fresh thread's."""
    torch._C._set_grad_enabled(state.grad)
    torch._C._set_fwd_grad_enabled(state.forward_grad)
    for kind, enabled, dtype in state.autocast:
        torch.set_autocast_enabled(kind, enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(state.autocast_cache)
    for mode in state.function_modes:
        # Entering a DeviceContext again would write a process-wide global: it is pushed as it is.
        torch._C._push_on_torch_function_stack(mode)
    if state.default_device is not None:
        _default_device.device_context = state.default_device
    _push_hooks(state.hooks)


def _for_calls(state: TorchState) -> TorchState:
    """`state` for calls on other threads, where some hooks must not go.

    Those of `torch.utils.checkpoint` number tensors in the order in which these are saved, to find
    them again when all is computed a second time: among several threads that order is another one
    each time. Those of `allow_mutation_on_saved_tensors` go with a dispatch mode, which clones what
    is about to be written to, and with no other thread. With either, gradients would be wrong. What
    a call saves stays with it, as without them.
    """
    if not state.hooks:
        return state
    return replace(state, hooks=tuple(hooks for hooks in state.hooks if _may_go(hooks[0])))


def _may_go(pack: Callable[[torch.Tensor], Any]) -> bool:
    module, name = getattr(pack, "__module__", ""), getattr(pack, "__qualname__", "")
    return module != _CHECKPOINT and (module, name.split(".")[0]) != _MUTATION


FRESH_STATE = TorchState(
    grad=True,
    forward_grad=True,
    inference=False,
    autocast=(),
    autocast_cache=True,
    function_modes=(),
    default_device=None,
    hooks=(),
)
"""The state of a fresh thread."""


# Classes, not generators: `contextlib` throws an error into a generator and then writes its
# `__traceback__`, which an error that is a frozen dataclass refuses.


class applied:  # noqa: N801  # a verb to its callers, as in `contextlib`
    """Run the body under `state`, on a thread whose state is a fresh one's, and leave it so."""

    __slots__ = ("_inference", "_state")

    def __init__(self, state: TorchState) -> None:
        self._state = state

    def __enter__(self) -> None:
        # The guard's exit restores absolute values, so it also undoes an inference mode that the
        # body entered and has not left.
        self._inference = torch.inference_mode(self._state.inference)
        self._inference.__enter__()
        _set_torch_state(self._state)
        # An `autocast` block inside the body must not be the outermost one, which drops the cache
        # of cast weights at its end.
        torch.autocast_increment_nesting()

    def __exit__(self, *error: object) -> None:
        torch.autocast_decrement_nesting()
        # But here it has to go: the caller's own block may have ended before this call did, and
        # then the next optimizer step would be computed with stale weights.
        torch.clear_autocast_cache()
        _clear_torch_state()
        self._inference.__exit__(None, None, None)


class fresh:  # noqa: N801  # as `applied`
    """Run the body as in a fresh thread, then put the thread's own state back.

    This is what lets a waiting worker run another call inside its own `inference_mode` block.
    """

    __slots__ = ("_inference", "_modes", "_state")

    def __enter__(self) -> None:
        self._modes = take_modes()
        self._state = capture_torch_state(own=True)
        if self._state is not None:
            self._inference = torch.inference_mode(False)
            self._inference.__enter__()
            _clear_torch_state()

    def __exit__(self, *error: object) -> None:
        if self._state is not None:
            _clear_torch_state()
            _set_torch_state(self._state)
            self._inference.__exit__(None, None, None)
        if self._modes is not None:
            self._modes.put()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.inference_modes: list[object] = []
        """Those entered for good: whatever ends the call sets an absolute value."""


_thread = _Thread()
_MANY = 64


def _set_inference_mode(mode: bool) -> None:
    guard: Any = torch._C._InferenceMode(mode)
    guard.__enter__()
    # Its destructor would undo it, for the thread that drops it: a thread of their own drops them,
    # which ends then. So would this one, when it ends.
    _thread.inference_modes.append(guard)
    del guard
    if len(_thread.inference_modes) >= _MANY:
        guards, _thread.inference_modes = _thread.inference_modes, []
        try:
            threading.Thread(target=guards.clear).start()
        except RuntimeError:  # there can be no more threads now
            _thread.inference_modes = guards


def undo_leaks() -> None:
    """Back to a fresh thread's state, whatever the last call left behind."""
    if _is_inference_mode():
        _set_inference_mode(False)
    _clear_torch_state()


def put_back(state: TorchState | None) -> None:
    """Back to `state`, which the calling thread has had, whatever was left behind since."""
    if not is_fresh():
        undo_leaks()
    if state is not None:
        if state.inference:
            _set_inference_mode(True)
        _set_torch_state(state)


def autocast_nesting() -> int:
    """How many `autocast` blocks torch counts this thread to be in.

    When it leaves the outermost, torch drops the casts of weights that it keeps.
    """
    # There is no reading it but by counting.
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def set_autocast_nesting(wanted: int) -> None:
    """Have torch count `wanted` of them."""
    nesting = autocast_nesting()
    for _ in range(wanted - nesting):
        torch.autocast_increment_nesting()
    for _ in range(nesting - wanted):
        torch.autocast_decrement_nesting()


def copy_context() -> contextvars.Context:
    """A copy of the caller's context variables, for one worker.

    The name of the caller's async library is reset in it, so that `anyio.run` works in a worker.
    """
    context = contextvars.copy_context()
    if _async_library is not None and _async_library.get() is not None:
        context.run(_async_library.set, None)
    return context


T = TypeVar("T")


class CallerState:
    """The state of who calls, captured where this is created; for any number of calls."""

    __slots__ = ("_context", "_streams", "torch_state")

    def __init__(self) -> None:
        check_no_transform()
        self._context = copy_context()
        self.torch_state: TorchState | None = capture_torch_state()
        self._streams = capture_streams()

    @property
    def streams(self) -> tuple[CallerStream, ...]:
        """The caller's current stream of every accelerator; empty where none is in use."""
        # In a child, forked since, none is, and those of its parent could not be waited for.
        devices = accelerators_in_use()
        # Not in use when it was captured: then nobody had set any other than the default ones.
        return (self._streams or default_streams(devices)) if devices else ()

    def with_variable(self, variable: contextvars.ContextVar[T], value: T) -> "CallerState":
        """The same state, with another value of one context variable."""
        changed = copy.copy(self)
        changed._context = self._context.copy()
        changed._context.run(variable.set, value)
        return changed

    @property
    def portable(self) -> PortableState:
        """The part of the state that can be pickled: torch's, without function modes and hooks."""
        return (self.torch_state or FRESH_STATE).portable

    def context(self) -> contextvars.Context:
        """A copy for one more call: a context cannot be entered twice at a time."""
        return self._context.copy()

    async def drive(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Run the coroutine `fn(*args)`, each of its steps under the state captured here.

        What it calls captures it in turn. Between its steps the event loop's thread has its own
        state back: grad mode and the like belong to threads, and tasks take turns on one.
        """
        try:
            result: T = await _Driven(self, fn(*args))
            return result
        finally:
            # The frames in which an error is raised lead to those that awaited them, since CPython
            # 3.12: to this one, which must not hold what may hold the error.
            del fn, args


class _Driven:
    __slots__ = ("_coroutine", "_state")

    def __init__(self, state: CallerState, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._state = state
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        coroutine, context = self._coroutine, self._state.context()
        step: Callable[[Any], Any] = coroutine.send
        sent: Any = None
        waited_for: Any = None
        try:
            while True:
                with self._entered():
                    try:
                        waited_for = context.run(step, sent)
                    except StopIteration as finished:
                        return finished.value
                try:
                    step, sent = coroutine.send, (yield waited_for)
                except GeneratorExit:
                    # Its loop was closed, and the garbage collector has come to one of the two.
                    with self._entered():
                        context.run(coroutine.close)
                    raise
                except BaseException as error:  # noqa: BLE001  # whatever it is, it is passed on
                    step, sent = coroutine.throw, error
        finally:
            # An error thrown in comes out again, and its traceback holds this frame; so does one
            # that the future holds that was waited for.
            del sent, waited_for

    def _entered(self) -> ExitStack:
        state = self._state
        entered = ExitStack()
        if state.torch_state != capture_torch_state():
            entered.enter_context(fresh())
            entered.enter_context(applied(state.torch_state or FRESH_STATE))
        for caller in state.streams:
            if not on_stream(caller.stream):
                # Entered, not set: that would also change the thread's current device for good.
                entered.enter_context(to_enter(caller.stream))
        return entered
