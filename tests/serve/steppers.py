"""A stepper for tests that counts, obeys a script, and checks how it is called."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiopar import Done


@dataclass(frozen=True)
class Item:
    """What a test asks for: the parts `(name, 0)`, `(name, 1)`, ... and then "name done".

    Attributes:
        name: The name.
        count: After how many steps the request is done; the last step makes a part, too.
        prompt: How many steps make no part, before the others.
        grows: What its state holds more after each step.
        holds: What its state holds after its first step.
    """

    name: Any
    count: int = 3
    prompt: int = 0
    grows: float = 1.0
    holds: float = 1.0

    def parts(self, first: int | None = None) -> list[tuple[Any, int]]:
        """All its parts, or the first ones."""
        return [(self.name, number) for number in range(self.count if first is None else first)]

    @property
    def result(self) -> str:
        """What `await batcher(item)` returns."""
        return f"{self.name} done"


class State:
    """The state of a request."""

    def __init__(self, item: Item, made: int = 0) -> None:
        self.item = item
        self.steps = item.prompt + made if made else 0
        self.live = True
        """Whether it holds memory: started or stepped, and not stopped since."""

    @property
    def name(self) -> Any:
        return self.item.name


class Counting:
    """Counts for each item; fails a test that calls it in another way than a stepper is called.

    Args:
        on_step: Called with the names of the states before each step; may hold it, or raise.
        resumable: See `aiopar.Stepper`.
    """

    def __init__(
        self,
        on_step: Callable[[list[Any]], object] = lambda _: None,
        *,
        resumable: bool = False,
    ) -> None:
        self.on_step = on_step
        self.resumable = resumable
        self.steps: list[list[Any]] = []
        """The names of the states of each step that succeeded."""
        self.live: set[State] = set()
        """The states that hold memory."""
        self.started = Counter[Any]()
        self.stopped = Counter[Any]()
        """How often the state of each name was stopped."""
        self.in_place: dict[Any, Exception] = {}
        """Errors that `step` returns in the places of these names."""
        self.too_few = False
        """Whether the next step returns too few results."""
        self.misuse: list[str] = []
        """How it was called in a wrong way."""
        self.calls: set[str] = set()
        """The threads that have called it."""
        self._busy = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), resumable=self.resumable), (self.on_step,)

    def start(self, item: Item) -> State:
        """Start an item, if it is one."""
        if not isinstance(item, Item):
            raise TypeError(f"not an item: {item!r}")
        self.calls.add(threading.current_thread().name)
        self.started[item.name] += 1
        state = State(item)
        self.live.add(state)
        return state

    def step(self, states: list[State]) -> Sequence[Any]:
        names = [state.name for state in states]
        if not self._busy.acquire(blocking=False):
            self._misused("two steps at a time")
        try:
            self._check(states)
            self.live.update(states)  # also if the step raises halfway
            self.on_step(names)
            results = [self._advance(state) for state in states]
            if self.too_few:
                self.too_few = False
                return results[1:]
            self.steps.append(names)
            return results
        finally:
            self._busy.release()

    def stop(self, state: State) -> None:
        self.stopped[state.name] += 1
        if state not in self.live:
            self._misused(f"{state.name} was stopped twice")
        self.live.discard(state)

    def held(self, state: State) -> float:
        if state.item.holds < 0:
            raise ValueError("it holds less than nothing")
        return state.item.holds + state.item.grows * max(0, state.steps - 1)

    def _check(self, states: Sequence[State]) -> None:
        if len(set(states)) < len(states) or not states:
            self._misused(f"a step of {[state.name for state in states]}")
        if not self.resumable and not self.live.issuperset(states):
            self._misused("a step of a state that was stopped")

    def _misused(self, how: str) -> None:
        self.misuse.append(how)
        raise AssertionError(how)

    def _advance(self, state: State) -> Any:
        item = state.item
        error = self.in_place.pop(item.name, None)
        if error is not None:
            return error
        state.steps += 1
        number = state.steps - item.prompt - 1
        if number < 0:
            return None
        part = item.name, number
        return part if number + 1 < item.count else Done(item.result, part)


class Resuming(Counting):
    """Can go on from the parts of a request."""

    def resume(self, item: Item, parts: Sequence[Any]) -> State:
        if [*parts] != item.parts(len(parts)):
            self._misused(f"{item.name} was resumed with {parts}")
        self.started[item.name] += 1
        state = State(item, len(parts))
        self.live.add(state)
        return state
