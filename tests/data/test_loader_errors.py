"""Errors in an `AsyncDataLoader`: when they are raised, and which samples are left out."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.testing import Gate
from tests.data.datasets import Failing, FailingAsync, Held, same
from tests.data.loaders import no_threads, read, read_into

pytestmark = pytest.mark.usefixtures("_threads_of_one_test_are_gone_before_the_next")


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
@pytest.mark.parametrize("workers", [1, 3])
async def test_an_error_comes_after_the_batches_before_it(
    dataset: type[Failing], workers: int
) -> None:
    loader = AsyncDataLoader(dataset({7, 9}), 2, num_workers=workers)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="bad sample 7") as raised:
        await read_into(seen, loader)
    assert seen == [[0, 1], [2, 3], [4, 5]]
    notes = raised.value.__notes__
    assert notes[0].startswith("fetching sample 7 of batch 3")
    if dataset is Failing:
        assert ", in worker " in notes[0]
    assert loader.failures == ()
    await no_threads()
    # The state is still there: another loader can go on with the batch that failed.
    assert loader.state_dict()["delivered"] == 3


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
@pytest.mark.parametrize("in_order", [True, False])
async def test_max_failures_leaves_samples_out(dataset: type[Failing], in_order: bool) -> None:
    loader = AsyncDataLoader(
        dataset({1, 4, 5, 8}), 2, num_workers=2, max_failures=4, in_order=in_order
    )
    batches = await read(loader)
    assert sorted(batches) == [[0], [2, 3], [6, 7], [9], [10, 11]]
    failures = sorted(loader.failures, key=lambda failed: failed.index)
    assert [(failed.index, failed.batch) for failed in failures] == [(1, 0), (4, 2), (5, 2), (8, 4)]
    assert {type(failed.error) for failed in failures} == {ValueError}
    assert all(failed.error.__traceback__ is None for failed in failures)
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples, stats.failures) == (5, 8, 4)
    assert len(await read(loader)) == 5, "each epoch has its own failures"


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
async def test_one_failure_too_many_is_raised_in_order(dataset: type[Failing]) -> None:
    loader = AsyncDataLoader(dataset({1, 4, 5, 8}), 2, num_workers=3, max_failures=2)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="bad sample 5"):
        await read_into(seen, loader)
    assert seen == [[0], [2, 3]]
    assert [failed.index for failed in loader.failures] == [1, 4]


@pytest.mark.anyio
async def test_what_fails_together_is_left_out_together() -> None:
    class Batched(Failing):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in indices]

    loader = AsyncDataLoader(Batched({4}), 3, max_failures=1)
    assert await read(loader) == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    [failed] = loader.failures
    assert (failed.index, failed.batch) == ([3, 4, 5], 1)

    def refuse(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise KeyError(5)
        return samples

    loader = AsyncDataLoader(range(9), 3, collate_fn=refuse, max_failures=1)
    assert await read(loader) == [[0, 1, 2], [6, 7, 8]]
    [failed] = loader.failures
    assert (failed.index, failed.batch, type(failed.error)) == ([3, 4, 5], 1, KeyError)


@pytest.mark.asyncio
async def test_an_error_of_collate_fn_names_the_shapes() -> None:
    loader = AsyncDataLoader([torch.ones(n) for n in (2, 3, 2)], 3)
    with pytest.raises(RuntimeError, match="stack expects") as caught:
        await read(loader)
    first, _, last = caught.value.__notes__
    samples = "list of 3: 2 x Tensor float32 [2], Tensor float32 [3]"
    assert first == f"collate_fn was called with {samples}"
    assert last == "in stage 'load' of the stream, item 0"


@pytest.mark.anyio
async def test_an_error_of_a_source_or_a_sampler_is_always_raised() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    async def async_source() -> AsyncIterator[int]:
        for n in source():
            yield n

    class Broken(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return source()

    for loader in (
        AsyncDataLoader(source(), 2, max_failures=9),
        AsyncDataLoader(async_source(), 2, max_failures=9),
        AsyncDataLoader(range(9), 2, sampler=Broken(), max_failures=9),
    ):
        seen: list[Any] = []
        with pytest.raises(OSError, match="the disk is gone"):
            await read_into(seen, loader)
        assert seen == [[0, 1], [2, 3]]


@pytest.mark.anyio
async def test_a_sample_may_not_end_the_epoch() -> None:
    class Stops(Failing):
        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(RuntimeError, match="the call raised StopIteration"):
        await read(AsyncDataLoader(Stops(set())))


@pytest.mark.anyio
@pytest.mark.parametrize("batch_size", [4, None])
async def test_a_sample_that_cancels_itself_has_failed(batch_size: int | None) -> None:
    class Cancels(Failing):
        async def __getitem__(self, index: int) -> int:  # type: ignore[override]
            await anyio.lowlevel.checkpoint()
            if index == 2:
                raise asyncio.CancelledError
            return index

    with pytest.raises(RuntimeError, match="cancelled from outside") as raised:
        await read(AsyncDataLoader(Cancels(set(), 4), batch_size))
    assert type(raised.value.__cause__) is asyncio.CancelledError
    assert raised.value.__notes__[0].startswith("fetching sample 2 of batch ")
    skipping = AsyncDataLoader(Cancels(set(), 4), batch_size, collate_fn=same, max_failures=1)
    assert await read(skipping) == ([[0, 1, 3]] if batch_size else [0, 1, 3])


@pytest.mark.anyio
@pytest.mark.parametrize("batch_size", [4, None])
async def test_a_cancelled_fetch_is_no_failed_sample(batch_size: int | None) -> None:
    began, ended = anyio.Event(), list[type[BaseException]]()

    class Waits(Failing):
        async def __getitem__(self, index: int) -> int:  # type: ignore[override]
            began.set()
            try:
                await anyio.sleep_forever()
            except BaseException as error:
                ended.append(type(error))
                raise
            return index

    loader = AsyncDataLoader(Waits(set(), 4), batch_size, num_workers=2, max_failures=9)
    stream, seen = aiter(loader), list[Any]()

    async def read_all() -> None:
        seen.extend([batch async for batch in stream])

    async with anyio.create_task_group() as group:
        group.start_soon(read_all)
        await began.wait()
        await stream.aclose()
    assert ended
    assert set(ended) == {anyio.get_cancelled_exc_class()}
    assert (loader.failures, seen) == ((), [])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [
        lambda gate: AsyncDataLoader(Held(gate), 2, num_workers=2, timeout=0.3),
        lambda gate: AsyncDataLoader(Held(gate), timeout=0.3, persistent_workers=True),
        lambda gate: AsyncDataLoader(map(gate, range(9)), 2, timeout=0.3),
        lambda gate: Pipeline(range(9), timeout=0.3).map(gate, concurrency=2),
        lambda gate: Pipeline(map(gate, range(9)), timeout=0.3),
        lambda gate: aiopar.map(gate, Pipeline(range(9), timeout=0.3), concurrency=2),
    ],
)
async def test_a_timeout_leaves_async_with_while_a_thread_is_stuck(
    make: Callable[[Gate], Any],
) -> None:
    with Gate() as gate:
        with pytest.raises(TimeoutError, match="cannot be interrupted, and goes on"):
            async with make(gate) as stream:
                await anext(stream)
        assert gate.held
        assert stream.closed


@pytest.mark.anyio
async def test_a_recorded_failure_holds_no_tensors() -> None:
    """Nor do its context and the members of a group."""
    watched: list[weakref.ref[torch.Tensor]] = []

    class Fails(Failing):
        def __getitem__(self, index: int) -> int:
            tensor = torch.zeros(3)
            watched.append(weakref.ref(tensor))
            try:
                raise KeyError(index)
            except KeyError as error:
                raise ExceptionGroup("several", [error]) from None

    loader = AsyncDataLoader(Fails(set(), 3), 3, max_failures=3)
    assert await read(loader) == []
    assert len(loader.failures) == 3
    gc.collect()
    assert [one() for one in watched] == [None] * 3
