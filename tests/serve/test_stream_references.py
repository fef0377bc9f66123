"""Nothing of a stream is kept after it has ended or was left."""

import weakref
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from aiopar.serve import Batcher
from tests.freeing import survivors, without_gc

from .batches import LONG, Bad, until
from .streams import Counting, full, idle, of_kind, read_all

pytestmark = pytest.mark.anyio


async def test_nothing_of_a_stream_is_kept(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def step(batch: Tensor) -> Tensor:
        output = batch * 2
        refs.extend(map(weakref.ref, (batch, output)))
        return output

    def generate(batch: Tensor) -> Generator[Tensor]:
        for number in range(3):
            if batch == -number:
                raise Bad
            yield step(batch)

    with without_gc():
        async with Batcher(of_kind(kind, generate)) as batcher:
            stream = batcher.stream(torch.ones(1), timeout=LONG)
            async with stream:
                assert len([part async for part in stream]) == 3
            del stream
            await idle(batcher)
            assert await survivors(refs) == []
            for number in (0, 2):  # before the first part, and later
                try:
                    await read_all(batcher.stream(-number * torch.ones(1)))
                except Bad as error:
                    refs.append(weakref.ref(error))
                await idle(batcher)
                assert await survivors(refs) == []
    assert len(refs) == 6 + 1 + 5


async def test_an_error_that_nobody_reads_is_not_kept(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def on_step(_: list[Any], number: int) -> None:
        if number:
            error = Bad()
            refs.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

    with without_gc():
        batcher = Batcher(Counting(2, on_step).of(kind), **full(2))
        async with batcher, batcher.stream("a") as stream, batcher.stream("b"):
            with suppress(Bad):
                await read_all(stream)
            await idle(batcher)
        assert await survivors(refs) == []
    assert len(refs) == 1


async def test_parts_that_were_read_are_not_kept_while_it_goes_on(kind: str) -> None:
    refs: list[weakref.ref[Any]] = []

    def generate(batch: Tensor) -> Generator[Tensor]:
        output = batch
        del batch
        while True:
            refs.append(weakref.ref(output))
            output = output * 2
            yield output

    with without_gc():
        batcher = Batcher(of_kind(kind, generate), max_batch_size=2, max_queue_delay=LONG)
        item = torch.ones(1)
        item_ref = weakref.ref(item)
        async with batcher, batcher.stream(item, buffer=2) as stream:
            async with batcher.stream(torch.ones(1), buffer=2) as other:
                del item
                await anext(other)
            for _ in range(10):
                await anext(stream)
            # Two unread parts are left, and none of those that the other stream had not read.
            await until(lambda: len(refs) == 12)
            assert await survivors([item_ref, *refs[:11]]) == []
