"""Batchers that run in the caller's process, each called as `await call(item)`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from async_batcher.batcher import AsyncBatcher
from batched import aio
from torch import Tensor

import aiopar
from examples.benchmarks.small_model import BATCH, SmallModel

Call = Callable[[Tensor], Awaitable[Tensor]]


@contextlib.asynccontextmanager
async def open_batcher(
    model: SmallModel, *, workers: int = 1, max_batch_size: int = BATCH, **options: Any
) -> AsyncIterator[aiopar.Batcher[Tensor, Tensor]]:
    """Open aiopar's `Batcher` on CPU workers with one torch thread each."""
    async with aiopar.DeviceExecutor(["cpu"] * workers, num_threads=1) as executor:
        with aiopar.use_executor(executor):
            async with aiopar.Batcher(
                model.predict, max_batch_size=max_batch_size, concurrency=workers, **options
            ) as batcher:
                yield batcher


class ListBatcher(AsyncBatcher[Tensor, Tensor]):
    """async-batcher runs `process_batch` in the loop's default executor."""

    def __init__(self, model: SmallModel, max_queue_time: float) -> None:
        super().__init__(max_batch_size=BATCH, max_queue_time=max_queue_time)
        self._model = model

    def process_batch(self, batch: list[Tensor]) -> list[Tensor]:
        return self._model.predict_list(batch)


@contextlib.asynccontextmanager
async def open_async_batcher(model: SmallModel, max_queue_time: float) -> AsyncIterator[Call]:
    batcher = ListBatcher(model, max_queue_time)
    try:
        yield batcher.process
    finally:
        await batcher.stop(force=True)


@contextlib.asynccontextmanager
async def open_batched(model: SmallModel) -> AsyncIterator[Call]:
    processor = aio.dynamically(model.predict_list, batch_size=BATCH)
    try:
        yield processor
    finally:
        processor._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await processor._task
