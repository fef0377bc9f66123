"""What a `Batcher` runs on a worker: collate the items, call the function, check its outputs."""

from collections.abc import Callable
from typing import Any, Protocol

from .._collate import check_batched
from .._errors import OutputMismatch
from ._replica import Replica
from ._settings import BatcherSettings


class Compute(Protocol):
    """Runs the items of a batch."""

    def __call__(self, items: list[Any], *, again: bool) -> tuple[Any, bool]:
        """Their outputs, and whether those are a sequence of one for each item already.

        Raises what the user's functions raise.

        Args:
            items: Those of a batch, or of a part of one.
            again: Whether another part of that batch has failed before.
        """


class ComputeFunction:
    """Batches through a plain function."""

    def __init__(self, fn: Callable[[Any], Any], settings: BatcherSettings) -> None:
        self._fn = fn
        self._collate = settings.collate_fn
        self._unbatch = settings.unbatch_fn

    def __call__(self, items: list[Any], *, again: bool) -> tuple[Any, bool]:
        outputs = self._call(self._collate(items), again=again)
        if self._unbatch is None:
            # Here it is only looked at: it is taken apart on the loop's thread.
            check_batched(outputs, len(items))
            return outputs, False
        unbatched = self._unbatch(outputs)
        if len(unbatched) != len(items):
            raise OutputMismatch(
                f"unbatch_fn returned {len(unbatched)} outputs for a batch of {len(items)} items"
            )
        return unbatched, True

    def _call(self, batch: Any, *, again: bool) -> Any:
        return self._fn(batch)


class ComputeReplica(ComputeFunction):
    """Batches through one replica of a `ReplicaPool`."""

    def __init__(self, replica: Replica, settings: BatcherSettings) -> None:
        super().__init__(replica.forward, settings)
        self._replica = replica

    def _call(self, batch: Any, *, again: bool) -> Any:
        # When a batch fails the replica itself is tried; once is enough for all of its parts.
        return self._replica.run((batch,), {}, probe=not again)
