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

    The batcher never calls two methods at the same time, so a stepper needs no lock. A state may be
    any object: the tensors of a request, or a handle if the stepper keeps the tensors of the batch.

    A stepper may have three more methods and an attribute, which are looked up by name:

    - `stop(state)`: frees what the state holds. Called each time a state leaves the batch, before
      the next `step`: the request is done, cancelled, late, failed or preempted. A newcomer that
      does not fit is stopped too, and its item is started again later.
    - `held(state) -> float`: what the state holds now, in the unit of `max_batch_cost` (tokens,
      bytes). Before its first step: what it needs to begin, such as the tokens of its prompt.
    - `resume(item, parts) -> State`: replaces `start` for a request that has sent `parts` and then
      lost its worker. The next step must make the part that follows `parts`.
    - `resumable = True` promises two things. `step` may get a state again that was stopped: the
      stepper rebuilds what `stop` has freed. And `step` may be repeated for the same states after
      it has raised. Without this attribute no request is preempted, and a failed batch is not
      split to find the bad request.
    """

    def start(self, item: In_contra) -> State:
        """Make the state of a new request, without a forward. An error fails only this item.

        Called again for the same item if its first state did not fit and was stopped.
        """

    def step(self, states: list[State]) -> Sequence[Part_co | Done[Any] | Exception | None]:
        """Take one step for all `states`; the oldest request is first.

        Returns one entry per state: a part; None if this step made no part (a prompt may take
        several steps); `Done` at the end; or an `Exception`, which fails only this request.
        """


AnyStepper: TypeAlias = Stepper[Any, Any, Any]


def check_stepper(given: object, *, bounded: bool) -> None:
    """Raise unless `given` is a stepper, with `held` if its batch is `bounded`."""
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
