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
        self._stream: Stream[Any] | None = stream
        self._leaving = leaving
        self._owned = owned

    def close(self) -> None:
        """Stop everything, soon."""
        if self._stream is not None:
            self._stream.close()
        # After that: from now on no outcome is read, whatever a worker leaves.
        self._leaving.left = True
        if self._owned is not None:
            self._owned.shutdown(wait=False)

    async def aclose(self) -> None:
        """Stop everything, and wait; raises, once, what a generator raises when it is closed."""
        self.close()
        stream = self._stream
        if stream is None:
            return
        try:
            await stream.aclose()
        finally:
            if self._owned is not None:
                await self._owned.aclose()
            if self.over:  # else this was given up, and may be called again
                self._stream = None  # it holds the state of who iterated

    @property
    def over(self) -> bool:
        """Whether it can be forgotten: somebody has waited, or nothing is left."""
        flow = None if self._stream is None else self._stream._flow
        owned = self._owned
        return flow is None or (
            flow.gone and not (owned is not None and owned._dispatcher.pool.alive)
        )
