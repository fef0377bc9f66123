"""What a `Batcher` runs on a worker: collate the items, call the function, check its outputs."""

import contextvars
from collections.abc import Callable, Iterable
from functools import partial
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, Protocol

from .._callables import not_begun, unwrapped
from .._caller import CallerState
from .._collate import check_batched, collate, pad_collate
from .._error_handling import logger
from .._errors import OutputMismatch
from .._steps import END, Steps
from ._replica import PoolReplica
from ._settings import BatcherSettings


class Compute(Protocol):
    """Runs the items of a batch; both steps raise what the user's functions raise."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """From items, those of a batch or of a part of one, to what the function is called with."""

    @property
    def builtin_collate(self) -> bool:
        """Whether that is aiopar's own work, and no function of the user's."""

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        """The outputs, and whether those are a sequence of one for each item already.

        Args:
            batch: Made by `collate`.
            count: Of how many items.
            again: Whether another part of the batch that was taken has failed before.
        """


class Batching:
    """A function's input, made of items, and its outputs, looked at."""

    def __init__(self, settings: BatcherSettings) -> None:
        self.collate = settings.collate_fn
        collate_fn = unwrapped(settings.collate_fn)
        self.builtin_collate = any(collate_fn is own for own in _OWN)
        self.unbatch = settings.unbatch_fn

    def checked(self, outputs: Any, count: int) -> tuple[Any, bool]:
        """What a function returned for `count` items, as `Compute` returns it."""
        if isinstance(outputs, _NOT_BEGUN):
            raise not_begun(outputs)
        if self.unbatch is None:
            # Here it is only looked at: it is taken apart on the loop's thread.
            check_batched(outputs, count)
            return outputs, False
        unbatched = list(self.unbatch(outputs))
        if len(unbatched) != count:
            raise OutputMismatch(
                f"unbatch_fn returned {len(unbatched)} outputs for a batch of {count} items"
            )
        return unbatched, True


_OWN = (collate, pad_collate, list)
_NOT_BEGUN = (CoroutineType, GeneratorType, AsyncGeneratorType)


class ComputeFunction(Batching):
    """Batches through a plain function."""

    def __init__(self, fn: Callable[[Any], Any], settings: BatcherSettings) -> None:
        super().__init__(settings)
        self._fn = fn

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        return self.checked(self._call(batch, again=again), count)

    def _call(self, batch: Any, *, again: bool) -> Any:
        return self._fn(batch)


class ComputeReplica(ComputeFunction):
    """Batches through one replica of a `ReplicaPool`."""

    def __init__(self, replica: PoolReplica, settings: BatcherSettings) -> None:
        super().__init__(replica.forward, settings)
        self._replica = replica

    def _call(self, batch: Any, *, again: bool) -> Any:
        # When a batch fails the replica itself is tried; once is enough for all of its parts.
        return self._replica.run((batch,), {}, probe=not again)


class ComputeGenerator(Batching):
    """Batches through a generator function: the first step of each, and then the others.

    Args:
        fn: The function.
        settings: How its batches are made.
        caller: Whose torch state its generators begin with.
    """

    def __init__(
        self, fn: Callable[[Any], Iterable[Any]], settings: BatcherSettings, caller: CallerState
    ) -> None:
        super().__init__(settings)
        self._fn = fn
        self._caller = caller
        self.begun: Steps[Any] | None = None
        """The generator of the latest call, if that is suspended after its first step."""

    def __call__(self, batch: Any, count: int, *, again: bool) -> tuple[Any, bool]:
        self.begun = None
        # This run's context, which is the caller's and what observers have set in it: a copy, for
        # they undo it after the first step, and the others are to be made in it as well.
        context = contextvars.copy_context()
        steps = Steps(partial(self._fn, batch), context, self._caller.torch_state)
        try:
            outputs = self.step(steps, count)
        except BaseException:
            close(steps)
            raise
        if steps.suspended:
            self.begun = steps
        return outputs

    def step(self, steps: Steps[Any], count: int) -> tuple[Any, bool]:
        """The next outputs for `count` items; after the last, `END` for each."""
        outputs = steps.step()
        return ([END] * count, True) if outputs is END else self.checked(outputs, count)


def close(steps: Steps[Any]) -> None:
    """Close a generator of which nobody reads."""
    if not steps.suspended:
        return
    try:
        steps.close()
    except BaseException as error:  # noqa: BLE001  # nobody waits for it
        logger.error("a generator failed when it was closed", exc_info=error)
