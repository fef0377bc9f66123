"""`Batcher(batch_sizes=...)`: batches are padded to fixed sizes; no caller sees the padding."""

from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar import use_executor
from aiopar.serve import Batcher, BatchInfo, BatchObserver, ReplicaPool
from aiopar.testing import Gate
from tests.home import AtHome
from tests.workers import Workers

from .batches import LONG, Bad, busy, coroutine, open_batcher, outcomes_of, until
from .replicas import CPUS, Scale, X
from .streams import Counting, counted, reading

pytestmark = pytest.mark.asyncio

SIZES = (1, 2, 4, 8)


class Doubled(nn.Module):
    """Doubles a batch, and notes its shape."""

    def __init__(self, seen: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.note = AtHome(seen.append)

    def forward(self, batch: Tensor) -> Tensor:
        self.note(tuple(batch.shape))
        return batch * 2


class Watcher(BatchObserver):
    """Notes the batches that have ended."""

    def __init__(self) -> None:
        self.batches: list[BatchInfo] = []

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        self.batches.append(batch)


def service(kind: str, seen: list[tuple[int, ...]], workers: Workers) -> Any:
    module = Doubled(seen)
    if kind == "pool":
        return ReplicaPool(module, ["cpu"], executor=workers)
    return {"function": module.forward, "module": module, "async": coroutine(module)}[kind]


@pytest.mark.parametrize("unbatch_fn", [None, list], ids=["default", "list"])
@pytest.mark.parametrize("kind", ["function", "module", "async", "pool"])
@pytest.mark.parametrize(("count", "size"), [(1, 1), (3, 4), (5, 8)])
async def test_a_batch_is_padded_to_the_next_size(
    workers: Workers, kind: str, count: int, size: int, unbatch_fn: Any
) -> None:
    seen: list[tuple[int, ...]] = []
    items = torch.arange(1.0, 3 * count + 1).reshape(count, 3)
    options: dict[str, Any] = {"max_queue_delay": LONG, "max_pending": count}
    fn, watcher = service(kind, seen, workers), Watcher()
    with use_executor(workers):
        async with Batcher(fn, batch_sizes=SIZES, unbatch_fn=unbatch_fn, **options) as batcher:
            batcher.add_observer(watcher)
            outputs = await outcomes_of(batcher, list(items))
            assert batcher.stats().batch_sizes == {count: 1}
    assert torch.equal(torch.stack(outputs), items * 2)
    assert seen == [(size, 3)]
    [batch] = watcher.batches
    assert (len(batch.items), batch.outputs, batch.errors) == (count, count, 0)


async def test_streams_are_padded(kind: str) -> None:
    counting = Counting(3)
    options: dict[str, Any] = {"collate_fn": list, "max_queue_delay": LONG, "max_pending": 3}
    async with reading(Batcher(counting.of(kind), batch_sizes=SIZES, **options)) as readers:
        readers.read("a", "b", "c")
    assert readers.parts == {item: counted(item, 3) for item in "abc"}
    assert counting.batches == [["a", "b", "c", "c"]]


async def test_parts_of_a_failed_batch_are_padded() -> None:
    def fn(item: str) -> str:
        if item == "bad":
            raise Bad
        return item

    async with busy(fn, batch_sizes=[8, 2, 4, 1]) as callers:
        await callers.queue("a", "b", "c", "d", "bad")
    assert callers.runs == [
        ["a", "b", "c", "d", "bad", "bad", "bad", "bad"],
        ["a", "b", "c", "c"],
        ["d", "bad"],
        ["d"],
        ["bad"],
    ]
    error = callers.outcomes.pop("bad")
    assert type(error) is Bad
    assert callers.outcomes == {item: item for item in ("first", *"abcd")}
    assert callers.batcher.stats().batch_sizes == {1: 1, 5: 1}


async def test_a_size_that_does_not_fit_into_memory_is_not_tried_again() -> None:
    sizes: list[int] = []

    def fn(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 4:
            raise torch.OutOfMemoryError
        return items

    options: dict[str, Any] = {"max_queue_delay": LONG, "max_pending": 6}
    async with open_batcher(None, fn, batch_sizes=SIZES, **options) as batcher:
        for _ in range(2):
            assert await outcomes_of(batcher, range(6)) == [*range(6)]
    assert sizes == [8, 4, 4, 4, 4]


@pytest.mark.parametrize("opened", [False, True], ids=["new", "open"])
async def test_replicas_run_the_warmup_in_every_size(workers: Workers, opened: bool) -> None:
    seen: list[tuple[int, ...]] = []
    every = [(1, 2), (2, 2), (4, 2)]
    pool = ReplicaPool(Doubled(seen), executor=workers, warmup=torch.ones(3, 2))
    if opened:
        await pool(X)
        assert seen == [(3, 2)] * 3
        seen.clear()
    async with Batcher(pool, batch_sizes=(1, 2, 4)), pool:
        assert seen == every * 2
        seen.clear()
        async with Batcher(pool, batch_sizes=(4, 2)):
            assert not seen, "these sizes are warm"
        await pool.swap(Doubled(seen))
        assert seen == every * 2


async def test_a_replica_that_goes_with_its_batch_does_not_hold_up_other_batches() -> None:
    gate = Gate()
    module = Scale(2.0, lambda x: x.any() and gate())
    async with aiopar.ProcessExecutor(CPUS) as executor:
        pool = ReplicaPool(module, executor=executor, warmup=torch.zeros(1))
        async with Batcher(pool, batch_sizes=[1, 2]) as batcher, anyio.create_task_group() as tasks:
            with gate, Gate() as first:
                executor.on(worker=0).submit(AtHome(first))
                await first.entered()
                tasks.start_soon(batcher, torch.tensor(1.0))
                await gate.entered()  # on the second replica
                first.open()
                tasks.start_soon(executor.resize, 1)
                await until(lambda: len(pool.stats().replicas) == 1)
                assert (await batcher(torch.tensor(0.0)))[0] == 0
                gate.open()
