"""Who calls: the state captured when a call is made, for work that is done after it."""

import contextvars
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack
from typing import Any, TypeVar

from ._context import (
    FRESH_STATE,
    TorchState,
    applied,
    capture_torch_state,
    check_no_transform,
    copy_context,
    fresh,
)
from ._devices import (
    CallerStream,
    accelerators_in_use,
    capture_streams,
    default_streams,
    on_stream,
    to_enter,
)

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
