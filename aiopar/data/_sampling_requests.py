"""One epoch's batches as requests: numbered, those delivered before a resume left out."""

from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any

import anyio

from .._executor import DeviceExecutor
from ._item import END
from ._leaving import Leaving
from ._loader_position import EpochPosition, Request
from ._own_state import own_state
from ._sampling import Sampling


class Numbered:
    """What all kinds of requests have in common."""

    position: EpochPosition
    """Of the consumer; there before the first request is."""

    def __init__(self, sampling: Sampling, leaving: Leaving) -> None:
        self._sampling = sampling
        self._leaving = leaving
        self._number = 0
        self._held: Request | None = None

    def delivered(self, request: Request) -> None:
        """It was handed to the consumer, or left out as failed."""
        self.position.deliver(request)

    def finished(self) -> None:
        """The consumer was told that there is no more."""
        self.position.finished = True
        self._sampling.warn_if_longer(self.position.batches)

    def begin(self, position: EpochPosition) -> None:
        """Count on from there."""
        self.position = position
        self._number = position.batches

    def requests(self, contents: Iterator[Any], content: Any) -> Generator[Request, None, None]:
        """Requests for `content` and for what `contents` has next, drawn as they are asked for.

        By `next` alone: what is its own iterator may start over where `iter` is called again.
        """
        while True:
            request = self.request(content)
            if request is not None:
                yield request
            if content is END:
                return
            content = next(contents, END)

    def request(self, content: Any) -> Request | None:
        """The next request, now that `content` (or `END`) has come; None if there is none yet."""
        stateful = self._sampling.stateful
        request = None
        if stateful is not None:
            # One behind, to say of each whether it is the last: a sampler that has ended may have
            # the state of one that begins.
            request, self._held = self._held, None
            if content is not END:
                self._held = Request(self._number, content, own_state(stateful))
            elif request is not None:
                request = request._replace(last=True)
        elif content is not END:
            request = Request(self._number, content)
        self._number += 1
        if content is END:
            self._sampling.exhausted = True
        if request is None or self.position.was_delivered(request):
            return None
        return request


class Requests(Numbered, Iterator[Request]):
    """The batches of an epoch, begun by the first `next`; one thread at a time.

    Args:
        sampling: Of the epoch.
        leaving: Of the iteration.
        begin_worker: Called in the thread, each time before anything is read.
    """

    def __init__(
        self,
        sampling: Sampling,
        leaving: Leaving,
        begin_worker: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(sampling, leaving)
        self._begin_worker = begin_worker
        self._contents: Any = None
        self._requests: Generator[Request, None, None] | None = None

    def __next__(self) -> Request:
        if self._begin_worker is not None:
            self._begin_worker()
        if self._requests is None:
            position, self._contents, first = self._sampling.begin(self._leaving)
            self.begin(position)
            self._requests = self.requests(self._contents, first)
        return next(self._requests)

    def close(self) -> None:
        """Close what is iterated, if that can be closed."""
        if self._requests is not None:
            self._requests.close()  # a cycle, and its frame has a batch in hand
        if hasattr(self._contents, "close"):
            self._contents.close()


class AsyncRequests(Numbered, AsyncIterator[Request]):
    """As `Requests`, of an async iterable; at most `bound` of them are not delivered."""

    def __init__(
        self, sampling: Sampling, leaving: Leaving, executor: DeviceExecutor, bound: int
    ) -> None:
        super().__init__(sampling, leaving)
        self._executor = executor
        self._room = anyio.Semaphore(bound)
        self._begun = False
        self._samples: Any = None
        self._first = END
        self._ended = False

    def delivered(self, request: Request) -> None:
        """It was handed to the consumer, or left out as failed: there is room for another."""
        super().delivered(request)
        self._room.release()

    async def __anext__(self) -> Request:
        if not self._begun:
            await self._begin()
            self._begun = True
        # Before its samples are fetched: they count.
        await self._room.acquire()
        while True:
            content, self._first = self._first, END
            if content is END:
                content = await self._content()
            request = self.request(content)
            if request is not None:
                return request
            if content is END:
                raise StopAsyncIteration

    async def _begin(self) -> None:
        begun = await self._executor.run_sync(self._sampling.begin, self._leaving)
        position, putting_back, _ = begun
        self.begin(position)
        if position.last and putting_back is not None and putting_back.done:
            self._ended = True  # as in `Sampling.begin`
            return
        self._samples = aiter(self._sampling.dataset)
        if putting_back is not None:
            await self._executor.run_sync(putting_back.behind, self._samples)
        if self._sampling.stateful is None:
            for _ in range(position.batches):
                await self._content()
        elif self._sampling.put_back_at_end:
            # As in `Sampling.first`.
            self._first = await self._content()
            if self._first is END:
                self._samples, self._ended = aiter(self._sampling.dataset), False
            self._sampling.put_back_at_end = False

    async def _content(self) -> Any:
        """The samples of the next batch, as torch batches them."""
        loader = self._sampling.loader
        size = loader.batch_size or 1
        samples: list[Any] = []
        while len(samples) < size and not self._ended:
            sample = await anext(self._samples, END)
            if sample is END:
                self._ended = True
            else:
                samples.append(sample)
        if not samples or (self._ended and loader.drop_last):
            return END
        return samples[0] if loader.batch_size is None else samples

    async def aclose(self) -> None:
        """Close what is iterated, if that can be closed."""
        if hasattr(self._samples, "aclose"):
            await self._samples.aclose()
