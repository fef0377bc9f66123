"""`Pipeline`: its verbs, how they are built, and how a pipeline is iterated."""

import operator
import pickle
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, assert_type

import anyio
import anyio.lowlevel
import pytest
import torch

from aiopar.data import Pipeline
from tests.data.streams import (
    Executor,
    Source,
    double,
    double_async,
    is_odd,
    left_since,
    running,
    until,
)
from tests.generators import autocast_nesting

FUNCTIONS = pytest.mark.parametrize(
    ("fn", "concurrency"), [(double, None), (double, 3), (double_async, None), (double_async, 3)]
)


async def _is_odd_async(n: int) -> bool:
    await anyio.lowlevel.checkpoint()
    return n % 2 == 1


def _repeat(n: int) -> Iterator[int]:
    for _ in range(n % 3):
        yield n


async def _repeat_async(n: int) -> AsyncIterator[int]:
    for again in _repeat(n):
        await anyio.lowlevel.checkpoint()
        yield again


class _Repeat:
    async def __call__(self, n: int) -> AsyncIterator[int]:
        async for again in _repeat_async(n):
            yield again


async def _repeat_awaited(n: int) -> list[int]:
    return list(_repeat(n))


@pytest.mark.anyio
@pytest.mark.parametrize(("fn", "concurrency"), [(is_odd, None), (is_odd, 3), (_is_odd_async, 3)])
async def test_filter(
    executor: Executor, fn: Callable[[int], Any], concurrency: int | None
) -> None:
    pipeline = Pipeline(Source(50), executor=executor).filter(fn, concurrency=concurrency)
    assert [n async for n in pipeline] == list(range(1, 50, 2))


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fn", "concurrency"),
    [
        *((_repeat, None), (_repeat, 3)),
        *((_repeat_async, 3), (_repeat_awaited, None), (_Repeat(), None)),
    ],
)
async def test_flat_map(
    executor: Executor, fn: Callable[[int], Any], concurrency: int | None
) -> None:
    pipeline = Pipeline(Source(50), executor=executor).flat_map(fn, concurrency=concurrency)
    assert [n async for n in pipeline] == [m for n in range(50) for m in _repeat(n)]


@pytest.mark.anyio
async def test_the_item_type_of_a_flat_map_is_that_of_the_returned_iterables() -> None:
    def texts(n: int) -> list[str]:
        return [str(n)]

    async def texts_later(n: int) -> AsyncIterator[str]:
        yield str(n)

    async def texts_awaited(n: int) -> list[str]:
        return [str(n)]

    numbers = Pipeline([1])
    for pipeline in (
        numbers.flat_map(texts),
        numbers.flat_map(texts_later),
        numbers.flat_map(texts_awaited),
        numbers.flat_map(lambda n: [str(n)]),
    ):
        assert [assert_type(item, str) async for item in pipeline] == ["1"]
    [number] = [n async for n in numbers.batch(1).flat_map(list)]
    assert assert_type(number, int) == 1
    with pytest.raises(TypeError, match="must return an iterable, not int"):
        await anext(aiter(numbers.flat_map(double)))  # type: ignore[arg-type]  # as it says


@pytest.mark.asyncio
@pytest.mark.parametrize("fn", [_repeat, _repeat_async])
async def test_a_flat_map_with_workers_leaves_the_readers_state_alone(
    fn: Callable[[int], Any],
) -> None:
    async with Pipeline(range(50)).flat_map(fn, concurrency=2) as stream:
        with torch.no_grad(), torch.autocast("cpu"), torch.autocast("cpu"):
            async for _ in stream:
                assert not torch.is_grad_enabled()
                assert torch.is_autocast_enabled("cpu")
                assert autocast_nesting() == 2


@pytest.mark.anyio
async def test_a_flat_map_without_workers_may_give_any_number_of_items() -> None:
    closed = Source()
    async with Pipeline([0]).flat_map(lambda _: iter(closed)) as stream:
        assert [await anext(stream) for _ in range(100)] == list(range(100))
        await until(lambda: closed.taken > 100)
    assert closed.closed.is_set()


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [range, Source])
async def test_batch(kind: Callable[[int], Any]) -> None:
    pipeline = Pipeline(kind(10)).batch(4)
    assert [batch async for batch in pipeline] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    pipeline = Pipeline(kind(10)).batch(4, drop_last=True)
    assert [batch async for batch in pipeline] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    pipeline = Pipeline(kind(0)).batch(4)
    assert [batch async for batch in pipeline] == []


@pytest.mark.anyio
async def test_shuffle_draws_from_the_items_that_are_next() -> None:
    pipeline = Pipeline(range(1000)).shuffle(10, generator=torch.Generator().manual_seed(0))
    first = [n async for n in pipeline]
    assert sorted(first) == list(range(1000)) != first
    assert all(n < place + 10 for place, n in enumerate(first))
    second = [n async for n in pipeline]
    assert second != first, "each iteration has its own order"
    again = Pipeline(range(1000)).shuffle(10, generator=torch.Generator().manual_seed(0))
    assert [n async for n in again] == first
    assert [n async for n in again] == second
    assert [n async for n in Pipeline(range(5)).shuffle(1)] == list(range(5))


@pytest.mark.anyio
async def test_shuffle_gives_every_order() -> None:
    pipeline = Pipeline(range(3)).shuffle(3, generator=torch.Generator().manual_seed(0))
    seen = Counter([tuple([n async for n in pipeline]) for _ in range(100)])
    assert len(seen) == 6


@pytest.mark.anyio
async def test_shuffle_takes_one_number_from_its_generator_however_far_it_ran_ahead() -> None:
    generator, other = (torch.Generator().manual_seed(3) for _ in range(2))
    async for _ in Pipeline(range(5000)).shuffle(10, generator=generator):
        break
    torch.empty((), dtype=torch.int64).random_(generator=other)
    assert torch.equal(generator.get_state(), other.get_state())


def _is_no_multiple_of_3(n: int) -> bool:
    return n % 3 != 0


@pytest.mark.anyio
async def test_all_verbs_in_one_pipeline(executor: Executor) -> None:
    before = running()
    pipeline = (
        Pipeline(Source(200), executor=executor)
        .map(double, concurrency=3)
        .map(double_async, concurrency=4)
        .filter(_is_no_multiple_of_3)
        .flat_map(_repeat)
        .shuffle(16)
        .batch(8)
        .map(torch.tensor)
        .prefetch(4)
        .to("cpu")
    )
    async with pipeline as stream:
        batches = [batch async for batch in stream]
    expected = [m for n in range(0, 800, 4) if n % 3 for m in _repeat(n)]
    assert sorted(torch.cat(batches).tolist()) == sorted(expected)
    assert [len(batch) for batch in batches[:-1]] == [8] * (len(batches) - 1)
    await until(lambda: not left_since(before))


@pytest.mark.anyio
async def test_each_call_returns_a_new_pipeline(executor: Executor) -> None:
    base = Pipeline(range(4), executor=executor)
    doubled, odd = base.map(double), base.filter(is_odd)
    assert [n async for n in base] == [0, 1, 2, 3]
    assert [n async for n in doubled] == [0, 2, 4, 6]
    assert [n async for n in odd] == [1, 3]
    assert [n async for n in doubled] == [0, 2, 4, 6], "each loop reads from the start"


@pytest.mark.anyio
async def test_functions_without_workers_run_in_the_worker_that_fetches() -> None:
    pipeline = Pipeline(Source(3)).map(double).map(double).filter(bool).batch(2)
    async with pipeline as stream:
        assert await anext(stream) == [4, 8]
        assert [stage.name for stage in stream.stats().stages] == ["fetch"]


@pytest.mark.anyio
async def test_prefetch_sets_the_bound() -> None:
    async with Pipeline(range(9)).map(double, concurrency=2).prefetch(7) as stream:
        await anext(stream)
        [stage] = stream.stats().stages
        assert (stage.name, stage.bound) == ("map(double)", 7)


@pytest.mark.anyio
async def test_each_task_that_iterates_a_pipeline_gets_all_items(executor: Executor) -> None:
    pipeline = Pipeline(range(100), executor=executor).map(double, concurrency=2)
    seen: list[list[int]] = []

    async def read() -> None:
        async with pipeline as stream, pipeline as other:
            assert await anext(other) == 0
            seen.append([n async for n in stream])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        tasks.start_soon(read)
    assert seen == [[2 * n for n in range(100)]] * 2


# Devices.


@pytest.mark.asyncio
async def test_a_pipeline_can_be_pickled() -> None:
    pipeline = Pipeline(range(6)).map(operator.neg, concurrency=2).filter(operator.truth)
    pipeline = pipeline.shuffle(1).batch(2).prefetch(1).to("cpu").flat_map(list)
    async with pickle.loads(pickle.dumps(pipeline)) as stream:
        assert [item async for item in stream] == [-1, -2, -3, -4, -5]
