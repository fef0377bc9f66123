"""Stages that run on the event loop: async functions, and async sources."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable
from typing import Any

from .._future import Future, running_future
from .._tasks import Tasks
from ._item import END, Failure, failure
from ._stage import Idle, Stage


class TaskStage(Stage):
    """Pumps that are tasks.

    Args:
        name: As for `Stage`.
        fn: What is awaited for each item.
        pull: Where they come from; it never blocks.
        tasks: On which loop.
        concurrency: As for `Stage`.
        bound: As for `Stage`.
        in_order: As for `Stage`.
    """

    def __init__(
        self,
        name: str,
        fn: Callable[[Any], Awaitable[Any]],
        pull: Callable[[], Any],
        tasks: Tasks,
        *,
        concurrency: int,
        bound: int,
        in_order: bool,
    ) -> None:
        super().__init__(name, concurrency=concurrency, bound=bound, in_order=in_order)
        self._fn = fn
        self._pull_upstream = pull
        self._tasks = tasks

    def _next(self) -> Any:
        return self._pull_upstream()

    def _start(self) -> None:
        self._tasks.spawn(self._pump, self.pump_ended)

    async def _pump(self) -> None:
        while (claimed := self.claim()) is not None:
            cell, item, position = claimed
            if type(item) is not Failure:
                try:
                    item = await self._fn(item)
                except Exception as error:  # noqa: BLE001  # who reads the stream gets it
                    item = failure(error, self.name, position)
                except BaseException as error:
                    self.leave(cell, self.cancellation(error, position))
                    if self._tasks.is_the_loops(error):
                        raise
                    return
            self.leave(cell, item)
            # Nothing is held while upstream is asked.
            del claimed, cell, item


class AsyncSource(Stage):
    """The items of an async iterable, fetched ahead by one task.

    By one, from the first item to the end: what an async generator holds open between its items (a
    task group, a timeout) belongs to the task that has entered it. It also closes the generator.
    """

    def __init__(self, name: str, source: AsyncIterable[Any], tasks: Tasks, *, bound: int) -> None:
        super().__init__(name, concurrency=1, bound=bound, in_order=True)
        self._source: AsyncIterable[Any] | None = source
        self._tasks = tasks
        self._resumed: Future[None] | None = None

    def _start(self) -> None:
        resumed, self._resumed = self._resumed, None
        if resumed is None:
            self._tasks.spawn(self._pump, self.pump_ended)
        else:
            self.pump_ended()  # the task goes on, and counts already
            resumed.set_result(None)

    async def _pump(self) -> None:
        source, self._source = self._source, None
        iterator: Any = None
        try:
            iterator = aiter(source)  # type: ignore[arg-type]
            await self._fetch(iterator)
        except Exception as error:  # noqa: BLE001  # whatever it is, who reads the stream gets it
            self.fail(error)
        except BaseException as error:
            cell, position = self.new_cell()
            self.leave(cell, self.cancellation(error, position))
            if self._tasks.is_the_loops(error):
                raise
        finally:
            await self._tasks.close(iterator, "an async source")
            self._end()

    async def _fetch(self, iterator: AsyncIterator[Any]) -> None:
        while await self._has_room():
            item = await anext(iterator, END)
            if item is END:
                break
            cell, _ = self.new_cell()
            self.leave(cell, item)
            del cell, item

    async def _has_room(self) -> bool:
        """Wait until there is; False: the stage is closed."""
        while len(self._cells) >= self.bound and not self.closed:
            self._resumed = resumed = running_future()
            if self._retire(Idle.FULL):
                await resumed
            else:
                self._resumed = None
        return not self.closed
