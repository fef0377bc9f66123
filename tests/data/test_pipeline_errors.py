"""`Pipeline`: errors of its functions, and refused arguments."""

from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import FrozenInstanceError
from enum import Enum
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import aiopar
from aiopar.data import FailedItem, Pipeline
from tests.data.streams import Executor, collect, double
from tests.home import elsewhere


def _fail(n: int) -> Any:
    if n == 4:
        raise LookupError("mine")
    return [n]


async def _fail_async(n: int) -> Any:
    return _fail(n)


def _fail_midway(n: int) -> Iterator[int]:
    yield n
    _fail(n)


@pytest.mark.anyio
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("verb", ["map", "filter", "flat_map"])
@pytest.mark.parametrize("fn", [_fail, _fail_async], ids=["sync", "async"])
async def test_errors_name_the_step_and_the_position(
    executor: Executor, verb: str, fn: Callable[[int], Any], concurrency: int | None
) -> None:
    pipeline = getattr(Pipeline(range(9), executor=executor).map(abs), verb)(
        fn, concurrency=concurrency
    )
    got: list[Any] = []
    with pytest.raises(LookupError, match="mine") as caught:
        await collect(pipeline, got)
    assert len(got) == 4
    note = f"in stage '{verb}({fn.__name__})' of the stream, item 4: int"
    assert caught.value.__notes__ == [note]


@pytest.mark.anyio
@pytest.mark.parametrize("concurrency", [None, 3])
@pytest.mark.parametrize("fn", [_fail, _fail_async], ids=["sync", "async"])
async def test_failures_are_skipped_and_recorded(
    executor: Executor, fn: Callable[[int], Any], concurrency: int | None
) -> None:
    def made(max_failures: int) -> Pipeline[Any]:
        pipeline = Pipeline(range(9), executor=executor, max_failures=max_failures)
        failing = pipeline.map(fn, concurrency=concurrency).flat_map(iter)
        return failing.map(double).shuffle(1).batch(3)

    async with made(1) as stream:
        assert [batch async for batch in stream] == [[0, 2, 4], [6, 10, 12], [14, 16]]
    assert isinstance(stream.failures, tuple), "callers cannot change it"
    [failed] = stream.failures
    assert type(failed) is FailedItem
    assert (failed.stage, failed.position) == (f"map({fn.__name__})", 4)
    with pytest.raises(FrozenInstanceError):
        failed.position = 3  # type: ignore[misc]
    assert stream.stats().failures == 1
    # The traceback is kept as text, because frames would keep the item.
    assert failed.error.__traceback__ is None
    assert "in _fail" in failed.error.__notes__[-1]
    with pytest.raises(LookupError, match="mine"):
        _ = [batch async for batch in made(0)]


@pytest.mark.anyio
async def test_parts_before_a_failure_of_a_flat_map_are_delivered(executor: Executor) -> None:
    pipeline = Pipeline(range(9), executor=executor, max_failures=1).flat_map(_fail_midway)
    async with pipeline as stream:
        assert [n async for n in stream] == list(range(9))
    [failed] = stream.failures
    assert (failed.position, str(failed.error)) == (4, "mine")


async def _true_of(n: int) -> bool:
    return True


def _coroutine(n: int) -> Any:
    return _true_of(n)


def _future(n: int) -> Any:
    return aiopar.fork(bool, n)


async def _agen(n: int) -> AsyncIterator[int]:
    yield n


def _agen_of(n: int) -> Any:
    return _agen(n)


@pytest.mark.anyio
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize("verb", ["map", "filter", "flat_map"])
@pytest.mark.parametrize(
    ("fn", "words"), [(_coroutine, "returned a coroutine"), (_future, "returned a Future")]
)
async def test_a_plain_function_must_not_return_an_awaitable(
    executor: Executor, fn: Callable[[int], Any], words: str, verb: str, concurrency: int | None
) -> None:
    on_host = executor is not None and elsewhere(executor) and concurrency
    if fn is _future and on_host and verb == "map":  # the result of other verbs is used there
        words = "a future can be neither copied nor pickled"
    pipeline = getattr(Pipeline(range(5), executor=executor), verb)(fn, concurrency=concurrency)
    with pytest.raises(TypeError, match=words):
        _ = [n async for n in pipeline]


def _nothing(n: int) -> None:
    """Return None."""


def _generator(n: int) -> Iterator[int]:
    yield n


class _Yielding(nn.Module):
    def forward(self, n: int) -> Iterator[int]:
        yield n


@pytest.mark.parametrize("fn", [_agen, _generator, partial(_agen), _Yielding()])
@pytest.mark.parametrize(
    "step", [Pipeline([]).map, Pipeline([]).filter, lambda fn: aiopar.map(fn, [])]
)
def test_a_generator_function_is_refused_but_by_flat_map(
    step: Callable[[Callable[..., Any]], object], fn: Callable[..., Any]
) -> None:
    with pytest.raises(TypeError, match=r"is an? (async )?generator function.* Pipeline\.flat_map"):
        step(fn)
    Pipeline([]).flat_map(fn)


@pytest.mark.anyio
@pytest.mark.parametrize("concurrency", [None, 2])
@pytest.mark.parametrize(
    ("made", "words"),
    [
        (_nothing, "the function of a flat_map must return an iterable, not NoneType"),
        (double, "the function of a flat_map must return an iterable, not int"),
        (_agen_of, "the function returned an async generator"),
        (_true_of, "the function of a flat_map must return an iterable, not bool"),
    ],
)
async def test_a_flat_map_names_a_result_that_is_not_iterable(
    executor: Executor, made: Callable[[int], Any], words: str, concurrency: int | None
) -> None:
    with pytest.raises(TypeError, match=words) as caught:
        _ = [
            n
            async for n in Pipeline(range(5), executor=executor).flat_map(
                made, concurrency=concurrency
            )
        ]
    [note] = caught.value.__notes__
    assert note.startswith("in stage 'flat_map(")


class _Indexed:
    """Iterable by index."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise IndexError
        return index


class Squares:
    """A map-style dataset: only its length says where it ends."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * index


class _Colour(Enum):
    RED = 1


@pytest.mark.asyncio
async def test_any_iterable_is_a_source() -> None:
    sources: dict[Any, list[Any]] = {
        iter([1]): [1],
        _Indexed(): [0, 1, 2],
        _agen(4): [4],
        _Colour: [_Colour.RED],
    }
    for source, items in sources.items():
        assert [item async for item in Pipeline(source)] == items
    with pytest.raises(TypeError, match="expected an iterable or async iterable, got function"):
        Pipeline(_agen)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="or async iterable, got the class _Indexed"):
        Pipeline(_Indexed)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_map_style_dataset_ends_at_its_length() -> None:
    squares: Any = Squares()
    streams: list[Any] = [
        Pipeline(squares),
        aiopar.map(int, squares),
        Pipeline([squares]).flat_map(lambda parts: parts),
        Pipeline([squares]).flat_map(lambda parts: parts, concurrency=2),
        aiopar.data.AsyncDataLoader(range(5), None, sampler=squares),
    ]
    for stream in streams:
        assert [int(item) async for item in stream] == [0, 1, 4]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Pipeline(3), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([], executor="cpu"), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([], max_failures=-1), ValueError),
        (lambda: Pipeline([], max_failures=True), TypeError),
        (lambda: Pipeline([], timeout=0), ValueError),
        (lambda: Pipeline([], timeout="1"), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([]).map(3), TypeError),  # type: ignore[call-overload]
        (lambda: Pipeline([]).map(abs, concurrency=0), ValueError),
        (lambda: Pipeline([]).filter(abs, concurrency=1.5), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([]).flat_map(None), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([]).shuffle(0), ValueError),
        (lambda: Pipeline([]).shuffle(2, generator=0), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([]).shuffle(2, torch.Generator()), TypeError),  # type: ignore[call-arg]
        (lambda: Pipeline([]).batch(2, True), TypeError),  # type: ignore[call-arg]
        (lambda: Pipeline([]).batch(0), ValueError),
        (lambda: Pipeline([]).prefetch("2"), TypeError),  # type: ignore[arg-type]
        (lambda: Pipeline([]).progress(-1), ValueError),
        (lambda: Pipeline([]).to("nowhere"), ValueError),
    ],
)
def test_arguments_are_checked_when_the_pipeline_is_made(
    make: Callable[[], object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        make()
