"""What observers of a `Batcher` see of a stream."""

from contextlib import suppress
from typing import Any

import pytest

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._observer import outcome_of

from .streams import Counting, held, idle
from .test_observer import Watcher

pytestmark = pytest.mark.anyio


async def test_observers_see_a_stream_as_an_item(kind: str) -> None:
    watcher = Watcher()
    options: dict[str, Any] = {"collate_fn": list, "max_pending": 1}
    async with Batcher(Counting(3).of(kind), **options) as batcher, held(batcher):
        batcher.add_observer(watcher)
        async with batcher.stream("a") as stream:
            with pytest.raises(aiopar.Overloaded):
                await anext(batcher.stream("refused"))
        assert [part async for part in stream] == []
    assert watcher.names == ["enqueue", "enqueue", "completed", "completed"]
    (left, _), (refused, _) = watcher.of("enqueue")
    (first, overloaded), (second, closed) = watcher.of("completed")
    assert (first, second) == (refused, left)
    assert refused.rejected == "queue_full"
    assert type(overloaded) is aiopar.Overloaded
    assert type(closed) is GeneratorExit
    assert outcome_of(left, closed) == "cancelled"


async def test_observers_see_how_streams_end(kind: str) -> None:
    watcher = Watcher()

    def on_step(batch: list[Any], number: int) -> None:
        if number and "bad" in batch:
            raise ZeroDivisionError

    async with Batcher(Counting(3, on_step).of(kind), collate_fn=list) as batcher:
        batcher.add_observer(watcher)
        for item in ("good", "bad"):
            with suppress(ZeroDivisionError):
                assert len([part async for part in batcher.stream(item)]) == 3
            await idle(batcher)
    assert [type(error) for _, error in watcher.of("completed")] == [type(None), ZeroDivisionError]
    assert [(batch.outputs, batch.errors) for batch in watcher.batches] == [(1, 0), (0, 1)]
    assert [size for _, size in watcher.of("compute")] == [1, 1], "of the first step"
