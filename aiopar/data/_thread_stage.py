"""A stage whose function runs on workers: plain functions, and all sync sources."""

from collections import deque
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

from .._call import TokenCall
from .._caller import CallerState
from .._errors import ExecutorShutdown
from .._executor import DeviceExecutor
from ._checks import UNAWAITED, unawaited
from ._item import END, Failure, failure
from ._stage import Stage

# After so many seconds a pump goes to the end of its executor's queue: others use it too.
_SLICE = 0.005


class ThreadStage(Stage):
    """Pumps that are calls on the CPU workers of an executor.

    Args:
        name: As for `Stage`.
        fn: What is done to each item; None: nothing, the stage only fetches ahead.
        items: Where they come from: an iterator that may block, and may yield `PENDING`.
        caller: Whose state `fn` and `items` run under.
        executor: Where.
        concurrency: As for `Stage`.
        bound: As for `Stage`.
        in_order: As for `Stage`.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], Any] | None,
        items: Iterator[Any],
        caller: CallerState,
        executor: DeviceExecutor,
        *,
        concurrency: int,
        bound: int,
        in_order: bool,
    ) -> None:
        super().__init__(name, concurrency=concurrency, bound=bound, in_order=in_order)
        self._fn = fn
        self._items = items
        self.caller = caller
        self._calls: deque[_PumpCall] = deque()  # those that do not run
        self._dispatcher = executor._dispatcher

    def _next(self) -> Any:
        return next(self._items, END)

    def _start(self) -> None:
        try:
            call = self._calls.pop()
        except IndexError:
            call = _PumpCall(self)
        call.token.append(None)
        try:
            self._dispatcher.put(call)
        except RuntimeError as error:  # shut down, or there can be no more threads
            self.fail(error)
            self.pump_ended()

    def pump(self) -> bool:
        """Whether it is to be started again."""
        fn, claim, leave = self._fn, self.claim, self.leave
        until = perf_counter() + _SLICE
        while (claimed := claim()) is not None:
            cell, item, position = claimed
            if fn is not None and type(item) is not Failure:
                try:
                    item = fn(item)
                    if type(item) in UNAWAITED:
                        raise unawaited(item)
                except BaseException as error:  # noqa: BLE001  # who reads the stream gets it
                    item = failure(error, self.name, position)
            leave(cell, item)
            # Nothing is held while upstream is asked, which may block.
            del claimed, cell, item
            if perf_counter() > until:
                return True
        return False

    def _all_gone(self) -> None:
        self._calls.clear()  # a cycle
        super()._all_gone()

    def close_items(self) -> None:
        """Close the iterator that the items come from, after the step that runs."""
        with self._source_lock:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()

    def call_ended(self, call: "_PumpCall", again: bool, error: BaseException | None) -> None:
        """The call of a pump has ended, or was dropped by a shutdown with an error."""
        self._calls.append(call)
        if error is not None:
            self.fail(error)
        if again:
            self._start()
        else:
            self.pump_ended()


class _PumpCall(TokenCall[bool]):
    """A call that nobody awaits, used again and again: what it does goes to its stage's buffer."""

    helpable = False

    def __init__(self, stage: ThreadStage) -> None:
        super().__init__(stage.pump, (), stage.caller)
        self.token.clear()  # there is one whenever it is queued

    def end(self) -> None:
        if self.watch is not None:
            self.watch.completed(self.error)
            self.watch = None
        again, error = self.result, self.error
        self.result = self.error = None
        stage: ThreadStage = self.fn.__self__  # type: ignore[attr-defined]
        stage.call_ended(self, bool(again), error)

    def cancel(self) -> None:
        if self.claim():
            self.withdraw()
            self.error = ExecutorShutdown("the executor of the stream was shut down")
            self.end()
