"""`Pipeline.state_dict`: a resumed pipeline gives the rest of the unbroken run."""

import io
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from tests.data.stateful import (
    AsyncKeeping,
    AsyncLines,
    AsyncPositionedLines,
    BeginsWhenAsked,
    CountedByItsLoader,
    Keeping,
    KeepingLate,
    Lines,
    Live,
    Positioned,
    PositionedLines,
    Rolling,
)
from tests.data.streams import double, double_async
from tests.freeing import survivors, without_gc

Make = Callable[[torch.Generator], "Pipeline[Any]"]


def _pairs(n: int) -> list[int]:
    return [n] * (n % 3)


PIPELINES: dict[str, Make] = {
    "source": lambda g: Pipeline(range(23)),
    "source with another kind of state": lambda g: Pipeline(CountedByItsLoader()),
    "maps": lambda g: Pipeline(range(23)).map(double, concurrency=3).map(double_async),
    "batches": lambda g: Pipeline(range(23)).map(double).batch(4).prefetch(3),
    "filter": lambda g: Pipeline(range(40)).filter(lambda n: n % 3).map(double, concurrency=2),
    "flat_map": lambda g: Pipeline(range(25)).flat_map(_pairs).batch(2).to("cpu"),
    "shuffle": lambda g: Pipeline(range(25)).shuffle(6, generator=g).map(double, concurrency=2),
    "shuffles": lambda g: (
        Pipeline(range(40)).shuffle(9, generator=g).batch(3).shuffle(3, generator=g)
    ),
    "skipped failures": lambda g: Pipeline(range(20), max_failures=9).map(
        lambda n: n // (n % 5 > 0), concurrency=2
    ),
    "no generator": lambda g: _seeded(g.initial_seed()),
    "shuffles of a source that shuffles": lambda g: Pipeline(
        Pipeline(range(40)).shuffle(9, generator=g)
    ).shuffle(3, generator=g),
}


def _use(item: Any) -> Any:
    torch.rand(1)  # as dropout does, from the same generator
    return item


async def _epochs(pipeline: Pipeline[Any], count: int) -> list[list[Any]]:
    return [[_use(item) async for item in pipeline] for _ in range(count)]


async def _cut(pipeline: Pipeline[Any], cut: int, epochs: int) -> tuple[list[list[Any]], Any]:
    """The items up to the `cut`-th, by epoch, and the state after it."""
    read: list[list[Any]] = []
    state = pipeline.state_dict()
    for _ in range(epochs):
        read.append([])
        async with pipeline as stream:
            while cut:
                try:
                    read[-1].append(_use(await anext(stream)))
                except StopAsyncIteration:
                    break
                cut -= 1
                state = pipeline.state_dict()
            else:
                return read, state
            state = pipeline.state_dict()
    return read, state


@pytest.mark.asyncio
@pytest.mark.parametrize("name", PIPELINES)
@settings(max_examples=15)
@given(cut=st.integers(0, 50))
async def test_a_pipeline_resumes_at_any_item(name: str, cut: int) -> None:
    make = PIPELINES[name]
    unbroken = await _epochs(make(torch.Generator().manual_seed(4)), 3)
    read, state = await _cut(make(torch.Generator().manual_seed(4)), cut, 3)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again = make(torch.Generator().manual_seed(99))
    again.load_state_dict(torch.load(buffer, weights_only=True))
    rest = await _epochs(again, 3)
    joined, expected = [*chain(*read, *rest)], [*chain(*unbroken)]
    assert joined[: len(expected)] == expected


def _seeded(seed: int) -> Pipeline[Any]:
    torch.manual_seed(seed)
    return Pipeline(range(25)).shuffle(6).batch(2).shuffle(3)


@pytest.mark.asyncio
async def test_functions_do_not_run_again_for_delivered_items() -> None:
    called: list[int] = []

    def note(n: int) -> int:
        called.append(n)
        return n

    def make() -> Pipeline[Any]:
        return Pipeline(range(30)).map(note, concurrency=1).batch(5).map(list)

    _, state = await _cut(make(), 4, 1)
    called.clear()
    resumed = make()
    resumed.load_state_dict(state)
    assert [batch async for batch in resumed] == [[20, 21, 22, 23, 24], [25, 26, 27, 28, 29]]
    assert called == list(range(20, 30))


@pytest.mark.asyncio
async def test_positions_in_errors_are_those_of_the_unbroken_run() -> None:
    def fail(n: int) -> int:
        return n // (n - 21)

    for concurrency in (None, 2):
        pipeline = Pipeline(range(30)).map(double).map(fail, concurrency=concurrency)
        pipeline.load_state_dict({**pipeline.state_dict(), "delivered": 20, "ended": False})
        assert [n async for n in pipeline.map(abs)], "another pipeline begins at its start"
        pipeline = Pipeline(range(30)).map(fail, concurrency=concurrency)
        pipeline.load_state_dict({**pipeline.state_dict(), "delivered": 20, "ended": False})
        with pytest.raises(ZeroDivisionError) as caught:
            [n async for n in pipeline]
        assert caught.value.__notes__ == ["in stage 'map(fail)' of the stream, item 21: int"]


class _Stateful:
    """A source that counts its epochs."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        self.epoch += 1
        return iter([(self.epoch, n) for n in range(5)])

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch = state["epoch"]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "source",
    [
        *(Positioned, Rolling, Lines, AsyncLines, PositionedLines, AsyncPositionedLines),
        *(Keeping, KeepingLate, AsyncKeeping, BeginsWhenAsked),
    ],
)
async def test_a_source_may_be_at_its_end_when_an_epoch_begins(source: Callable[[], Any]) -> None:
    unbroken = await _epochs(Pipeline(source()).batch(4), 3)
    for cut in (0, 1, 5, 6, 7, 12, 13, 18):  # 6 per epoch
        read, state = await _cut(Pipeline(source()).batch(4), cut, 3)
        resumed = Pipeline(source()).batch(4)
        resumed.load_state_dict(state)
        joined = [*chain(*read, *await _epochs(resumed, 3))]
        assert joined[:18] == [*chain(*unbroken)]


@pytest.mark.asyncio
@pytest.mark.parametrize("read", [1, 2])
async def test_a_resumed_source_is_closed(read: int) -> None:
    class Kept(_Stateful):
        def __iter__(self) -> Iterator[Any]:
            self.items = self._items()  # a reference: only `close` ends the generator
            return self.items

        def _items(self) -> Iterator[Any]:
            try:
                yield from super().__iter__()
            finally:
                closed.append(True)

    closed: list[bool] = []
    pipeline = Pipeline(Kept()).prefetch(1)
    pipeline.load_state_dict(pipeline.state_dict())
    async with pipeline as stream:
        for _ in range(read):
            await anext(stream)
    assert closed == [True]


def _nested() -> Pipeline[Any]:
    return Pipeline(Pipeline(range(9)).shuffle(4)).batch(2)


def _both_shuffle() -> Pipeline[Any]:
    return Pipeline(Pipeline(range(9)).shuffle(4)).shuffle(4)


def _loaded_and_shuffled() -> Pipeline[Any]:
    return Pipeline(AsyncDataLoader(range(9), None, shuffle=True)).shuffle(4)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "make", [lambda: Pipeline(_Stateful()), _nested, _both_shuffle, _loaded_and_shuffled]
)
@pytest.mark.parametrize("epochs", [0, 2])
async def test_between_epochs_the_state_has_the_sources_current_state(
    make: Callable[[], Pipeline[Any]], epochs: int
) -> None:
    pipeline = make()
    await _epochs(pipeline, epochs)
    state = pipeline.state_dict()
    following = await _epochs(pipeline, 2)
    for _ in range(2):  # also the state of a pipeline that was resumed
        resumed = make()
        resumed.load_state_dict(state)
        state = resumed.state_dict()
    assert await _epochs(resumed, 2) == following


@pytest.mark.asyncio
async def test_a_source_that_fails_to_load_its_state_fails_each_iteration() -> None:
    class Refusing(_Stateful):
        refuses = True

        def load_state_dict(self, state: dict[str, int]) -> None:
            if self.refuses:
                raise LookupError("no such position")
            super().load_state_dict(state)

    pipeline, source = Pipeline(_Stateful()), Refusing()
    state, expected = pipeline.state_dict(), await _epochs(pipeline, 1)
    resumed = Pipeline(source)
    resumed.load_state_dict(state)
    for _ in range(2):
        with pytest.raises(LookupError, match="no such position"):
            aiter(resumed)
    source.refuses = False
    assert await _epochs(resumed, 1) == expected


@pytest.mark.asyncio
async def test_a_pipeline_that_cannot_be_resumed_raises() -> None:
    pipeline = Pipeline(range(3)).map(double, concurrency=2, in_order=False)
    message = r"^a pipeline with map\(double\) cannot be resumed: it is not in order$"
    with pytest.raises(ValueError, match=message):
        pipeline.state_dict()
    state = Pipeline(range(3)).state_dict()
    with pytest.raises(ValueError, match=message):
        pipeline.load_state_dict(state)
    with pytest.raises(ValueError, match="0 seeds of 0 generators, this pipeline has 1 shuffles"):
        Pipeline(range(3)).shuffle(2).load_state_dict({**state, "steps": ["shuffle(2)"]})
    state = Pipeline(range(9)).batch(2).map(list).state_dict()
    with pytest.raises(ValueError, match=r"with the steps \['batch\(2\)'\], .* \['batch\(3\)'\]"):
        Pipeline(range(9)).batch(3).map(list).load_state_dict(state)
    with pytest.raises(ValueError, match="this is no state of a loader or pipeline: missing="):
        Pipeline(range(3)).load_state_dict({"delivered": 3})
    with pytest.raises(TypeError, match="expected a state dict, got int"):
        Pipeline(range(3)).load_state_dict(3)  # type: ignore[arg-type]


class _Refusing(_Stateful):
    def state_dict(self) -> dict[str, int]:
        raise NotImplementedError("not yet")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Pipeline(range(5)).map(double, concurrency=1, in_order=False),
            r"ValueError: a pipeline with map\(double\) cannot be resumed: it is not in order",
        ),
        (_Refusing, "NotImplementedError: not yet"),
    ],
)
async def test_a_source_that_gives_no_state_can_be_iterated(
    make: Callable[[], Any], message: str
) -> None:
    pipeline = Pipeline(make())
    assert len((await _epochs(pipeline, 2))[1]) == 5
    with pytest.raises(ValueError, match=f"^the source gives no state: {message}$"):
        pipeline.state_dict()  # between two iterations
    async with pipeline as stream:
        await anext(stream)
        for _ in range(2):
            with pytest.raises(ValueError, match=f"^the source gives no state: {message}$"):
                pipeline.state_dict()


@pytest.mark.asyncio
async def test_a_refused_state_does_not_hold_the_caller() -> None:
    pipeline = Pipeline(_Refusing())
    await _epochs(pipeline, 1)

    def ask() -> "weakref.ref[_Stateful]":
        local = _Stateful()
        with pytest.raises(ValueError, match="gives no state"):
            pipeline.state_dict()
        return weakref.ref(local)

    with without_gc():
        async with pipeline:
            assert await survivors([ask()]) == []


# The state.


@pytest.mark.asyncio
async def test_a_source_that_shares_its_state_dict_is_restored() -> None:
    pipeline: Pipeline[int] = Pipeline(Live(10))
    async with pipeline as stream:
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        state = pipeline.state_dict()
    for _ in range(2):  # a state may be loaded again
        resumed = Pipeline(Live(10))
        resumed.load_state_dict(state)
        async with resumed as stream:
            assert [await anext(stream) for _ in range(2)] == [3, 4]
            later = resumed.state_dict()
        again = Pipeline(Live(10))
        again.load_state_dict(later)
        assert [n async for n in again] == [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delivered", "3", "delivered must be an int, not str"),
        ("delivered", -1, "delivered must be at least 0, got -1"),
        ("seeds", None, "'NoneType' object is not iterable"),
        ("seeds", ["3"], "a seed must be an int, not str"),
        ("generators", {"0": None}, "the state of a generator must be a Tensor, not NoneType"),
        ("generators", {}, "1 seeds of 0 generators"),
        ("source", 3, "the state includes a source's state, which a range cannot load"),
    ],
)
def test_a_state_is_checked_when_it_is_loaded(name: str, value: object, words: str) -> None:
    pipeline = Pipeline(range(3)).shuffle(2)
    state = pipeline.state_dict()
    with pytest.raises(ValueError, match=words):
        pipeline.load_state_dict({**state, name: value})


@pytest.mark.asyncio
async def test_loading_sets_the_generators_and_iterating_puts_the_source_back() -> None:
    source, generator = Live(10), torch.Generator().manual_seed(3)
    pipeline = Pipeline(source).shuffle(4, generator=generator)
    async with pipeline as stream:
        begun = [await anext(stream) for _ in range(3)]
        state = pipeline.state_dict()
        rest = [n async for n in stream]
    after = generator.get_state()
    generator.manual_seed(4)
    source.state["next"] = 7
    pipeline.load_state_dict(state)
    assert torch.equal(generator.get_state(), after)
    assert source.state["next"] == 7
    torch.rand(1, generator=generator)  # as another pipeline with this generator does
    after = generator.get_state()
    assert [n async for n in pipeline] == rest
    assert torch.equal(generator.get_state(), after), "the seed is not drawn again"
    assert sorted(begun + rest) == list(range(10))


@pytest.mark.asyncio
@pytest.mark.parametrize("items", [0, 3])
async def test_a_pipeline_says_whether_it_is_finished(items: int) -> None:
    pipeline, again, new = (Pipeline(range(items)).map(str) for _ in range(3))
    new.load_state_dict(pipeline.state_dict())
    assert not pipeline.finished
    assert not new.finished, "it has not begun"
    stream = aiter(pipeline)
    for _ in range(items):
        await anext(stream)
        again.load_state_dict(pipeline.state_dict())
        assert not again.finished
    assert not pipeline.finished
    assert [n async for n in stream] == []
    assert pipeline.finished
    again.load_state_dict(pipeline.state_dict())
    new.load_state_dict(again.state_dict())
    assert again.finished
    assert new.finished
    assert len([n async for n in aiopar.map(str, new)]) == items
    stream = aiter(new)
    assert not new.finished, "an iteration has begun"
    await stream.aclose()
