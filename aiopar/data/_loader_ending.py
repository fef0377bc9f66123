"""The end of one iteration of an `AsyncDataLoader`."""

from typing import Any

from .._executor import DeviceExecutor
from ._leaving import Leaving
from ._stream import Stream


class Ending:
    """Stops an iteration, and waits until nothing of it runs.

    Apart from the `LoaderStream`: that is collected when a loop is broken off, while threads still
    read their samples, and the loader is to wait for these.

    Args:
        stream: Of the iteration.
        leaving: Of the iteration.
        owned: The executor that ends with it.
    """

    def __init__(self, stream: Stream[Any], leaving: Leaving, owned: DeviceExecutor | None) -> None:
        self._stream = stream
        self._leaving = leaving
        self._owned = owned
        self.awaited = False
        """Whether somebody has, and got the error if a generator had one."""

    def close(self) -> None:
        """Stop everything, soon."""
        self._stream.close()
        # After that: from now on no outcome is read, whatever a worker leaves.
        self._leaving.left = True
        if self._owned is not None:
            self._owned.shutdown(wait=False)

    async def aclose(self) -> None:
        """Stop everything, and wait; raises what a generator raises when it is closed."""
        self.close()
        try:
            await self._stream.aclose()
        finally:
            if self._owned is not None:
                await self._owned.aclose()
            self.awaited = True

    @property
    def over(self) -> bool:
        """Whether it can be forgotten: somebody has waited, or nothing is left."""
        flow = self._stream._flow
        if self.awaited or flow is None:
            return True
        closed = flow._iterators_closed
        return (
            all(stage.gone.done() for stage in flow.stages)
            and (closed is None or closed.done())
            and not (self._owned is not None and self._owned._pool.alive)
        )
