"""`Stepper`: a model that works in steps, for `ContinuousBatcher`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from .._base.arguments import check_callable, described

In_contra = TypeVar("In_contra", contravariant=True)
State = TypeVar("State")
Part_co = TypeVar("Part_co", covariant=True)
Out_co = TypeVar("Out_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Done(Generic[Out_co]):
    """The end of a request, in place of its part: a stepper returns it from `step`.

    Attributes:
        result: What `await batcher(item)` returns.
        part: The last part for `batcher.stream(item)`. None: the step made no part.
    """

    result: Out_co
    part: Any = None


class Stepper(Protocol[In_contra, State, Part_co]):
    """A model that works in steps. `ContinuousBatcher` calls its methods on one worker.

    Two methods never run at the same time, so a stepper needs no lock. A state may be any object:
    the requests' tensors, or a handle if the stepper keeps the batch itself.

    A stepper may have three more methods and an attribute, which are looked up by name:

    - `stop(state)`: called once when a state leaves, before the next `step`: the request is done,
      cancelled, late, failed or preempted. Frees what the state holds.
    - `held(state) -> float`: what the state holds now, in the unit of `max_batch_cost` (tokens,
      bytes). Of a state that was only started: what it holds after its first full step.
    - `resume(item, parts) -> State`: as `start`, for a request whose worker was lost after it had
      delivered `parts`. The next step must make the part that follows them.
    - `resumable = True`: a stopped state may be given to `step` again, and then rebuilds what
      `stop` has freed. `step` may also be called again for the same states after it has raised.
      Only such a stepper can be preempted, and only its failed batches are split.
    """

    def start(self, item: In_contra) -> State:
        """Make the state of a new request, without a forward. An error fails only this item."""

    def step(self, states: list[State]) -> Sequence[Part_co | Done[Any] | Exception | None]:
        """Take one step for all `states`; the oldest request is first.

        Returns one entry per state: a part; None if there is no part yet (a prompt may take several
        steps); `Done` at the end; or an `Exception`, which fails only this request.
        """


AnyStepper: TypeAlias = Stepper[Any, Any, Any]


def check_stepper(given: object, *, bounded: bool) -> None:
    """Raise TypeError unless `given` is a stepper; ValueError if it lacks `held` and is bounded."""
    methods = {
        name: getattr(given, name, None) for name in ("start", "step", "stop", "held", "resume")
    }
    if isinstance(given, type) or methods["start"] is None or methods["step"] is None:
        raise TypeError(
            f"expected a stepper, which has the methods start and step, got {described(given)}"
        )
    for method in methods.values():
        if method is not None:
            check_callable(method)
    if bounded and methods["held"] is None:
        raise ValueError(
            f"max_batch_cost needs a stepper with the method held, and {described(given)} has none"
        )
