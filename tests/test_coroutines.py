"""Coroutines and generators: functions that return them, and calls that nobody awaits."""

import asyncio
import inspect
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any, cast

import pytest
import torch
from fastapi import BackgroundTasks, FastAPI
from fastapi.testclient import TestClient
from torch import nn

import aiopar
import aiopar.asgi
import aiopar.data
import aiopar.fastapi
import aiopar.serve
import aiopar.testing
from aiopar._base.arguments import is_async
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.serve import Batcher, ReplicaPool
from tests.train.units import units

CPUS = ["cpu", "cpu"]
X = torch.ones(2)

# Functions that return a coroutine or a generator.


def generator(*_: object) -> Iterator[int]:
    yield 1


async def coroutine(*_: object) -> int:
    return 1


async def async_generator(*_: object) -> AsyncIterator[int]:
    yield 1


class Makes:
    """Calls a function that `inspect` cannot see."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def __call__(self, *args: Any) -> Any:
        return self.make(*args)


class Lazy(nn.Module):
    """Returns what a function makes."""

    def __init__(self, make: Callable[..., Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: object) -> Any:
        return self.make(x)


class Yielding(nn.Module):
    def forward(self, x: object) -> Iterator[object]:
        yield x


class LazyForward(aiopar.DataParallel[Any]):
    def forward(self, *_: Any) -> Any:
        return generator()


async def _unit(fn: Callable[..., Any]) -> None:
    async with aiopar.Parallel(1, units(fn)) as parallel:
        await parallel.put(0)
        await parallel.get()


async def _mapped(fn: Callable[..., Any]) -> list[Any]:
    # `map` blocks, as in `concurrent.futures`.
    return await asyncio.to_thread(lambda: list(aiopar.get_executor().map(fn, [1])))


async def _read(stream: Any) -> list[Any]:
    return [item async for item in stream]


VERBS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "fork": aiopar.fork,
    "fork of a module": lambda fn: aiopar.fork(Lazy(fn), 1),
    "run_sync": aiopar.run_sync,
    "submit": lambda fn: aiopar.get_executor().submit(fn),
    "submit_all": lambda fn: aiopar.get_executor().submit_all([fn])[0],
    "Executor.map": _mapped,
    "parallel_apply": lambda fn: aiopar.parallel_apply([fn] * 2, [1, 2], devices=CPUS),
    "fork_apply": lambda fn: aiopar.fork_apply([fn], [1])[0],
    "DataParallel": lambda fn: aiopar.DataParallel(Lazy(fn), CPUS)(X),
    "DataParallel, one device": lambda fn: aiopar.DataParallel(Lazy(fn), ["cpu"])(X),
    "data_parallel": lambda fn: aiopar.data_parallel(Lazy(fn), X, CPUS),
    "ReplicaPool": lambda fn: ReplicaPool(Lazy(fn), CPUS)(X),
    "aiopar.map": lambda fn: _read(aiopar.map(Lazy(fn), [X], devices=CPUS)),
    "Parallel": _unit,
}
WORDS = {
    generator: r"a generator \(generator\).*with `iterate`",
    coroutine: r"a coroutine \(coroutine\).*as in `await dp\(x\)`",
    async_generator: r"an async generator \(async_generator\).*with `async for`",
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("make", WORDS)
async def test_a_function_must_not_return_what_has_not_begun(
    verb: str, make: Callable[..., Any]
) -> None:
    with pytest.raises(TypeError, match="the function returned " + WORDS[make]):
        await VERBS[verb](Makes(make))


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "verb", ["fork", "run_sync", "submit", "submit_all", "Executor.map", "Parallel"]
)
async def test_a_generator_function_is_refused(verb: str) -> None:
    with pytest.raises(TypeError, match=r"generator.*`iterate`"):
        await VERBS[verb](partial(generator, 1))


@pytest.mark.asyncio
@pytest.mark.parametrize("device_ids", [CPUS, ["cpu"]])
async def test_a_module_whose_forward_is_a_generator_function(device_ids: list[str]) -> None:
    with pytest.raises(TypeError, match="Yielding is a generator function, and workers run plain"):
        await aiopar.DataParallel(Yielding(), device_ids)(X)
    with pytest.raises(TypeError, match=r"returned a generator \(generator\)"):
        await LazyForward(Yielding(), device_ids)(X)


@pytest.mark.asyncio
async def test_generator_objects_are_refused_after_they_have_begun() -> None:
    begun = generator()
    assert next(begun) == 1
    with pytest.raises(TypeError, match=r"returned a generator \(generator\)"):
        await aiopar.run_sync(lambda: begun)


@pytest.mark.asyncio
async def test_iterate_may_read_generators_of_generators() -> None:
    async with aiopar.get_executor().iterate(map, generator, range(3)) as inner:
        assert [list(items) async for items in inner] == [[1], [1], [1]]


# Plain functions that return coroutines.

PACKAGES = [aiopar, aiopar.asgi, aiopar.data, aiopar.fastapi, aiopar.serve, aiopar.testing]
# How Starlette recognises a coroutine function.
recognised: Callable[[object], bool] = (
    inspect.iscoroutinefunction if sys.version_info >= (3, 12) else asyncio.iscoroutinefunction
)


def _public_functions() -> Iterator[tuple[str, Callable[..., Any]]]:
    """All public functions, and all public methods of all public classes."""
    for package in PACKAGES:
        for name in package.__all__:
            value = getattr(package, name)
            if inspect.isfunction(value):
                yield name, value
            elif isinstance(value, type):
                for method, function in vars(value).items():
                    public = method == "__call__" or not method.startswith("_")
                    if public and inspect.isfunction(function):
                        yield f"{name}.{method}", function


def test_functions_that_return_coroutines_are_recognised() -> None:
    returning = {
        name: function
        for name, function in _public_functions()
        if "Coroutine" in str(inspect.signature(function).return_annotation)
    }
    assert {*returning} > {"run_sync", "ReplicaPool.swap", "Parallel.put", "Batcher.__call__"}
    steps = [getattr(aiopar.DataParallel, step) for step in ("scatter", "replicate", "gather")]
    for function in [*returning.values(), *steps]:
        assert recognised(function), function
        assert is_async(function), function


def test_a_background_task_of_fastapi_awaits_load_state_dict() -> None:
    module, other = nn.Linear(2, 1), nn.Linear(2, 1)
    pool, app = ReplicaPool(module, ["cpu"]), FastAPI()

    @app.post("/weights")
    async def load(tasks: BackgroundTasks) -> None:
        tasks.add_task(pool.load_state_dict, other.state_dict())

    @app.get("/")
    async def answer() -> float:
        return (await pool(X)).item()

    with TestClient(app) as client:
        assert client.get("/").json() == pytest.approx(module(X).item())
        client.post("/weights")
        assert client.get("/").json() == pytest.approx(other(X).item())


@pytest.mark.asyncio
async def test_functions_that_return_coroutines_are_refused_by_calls() -> None:
    dp, pool = aiopar.DataParallel(nn.Identity(), CPUS), ReplicaPool(nn.Identity(), CPUS)
    batcher = Batcher(nn.Identity())
    run, sum_of = cast(Any, aiopar.run_sync), cast(Any, torch.sum)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: aiopar.fork(dp, X), r"^DataParallel is .* `await dp\(x\)`$"),
        (lambda: run(batcher, X), r"^Batcher is .* `await batcher\(x\)`$"),
        (
            lambda: aiopar.run_sync(aiopar.backward, X),
            r"^backward is .* `await backward\(\.\.\.\)`$",
        ),
        (lambda: aiopar.fork(pool.swap, dp), r"^ReplicaPool\.swap is .* `await swap\(\.\.\.\)`$"),
        (lambda: run(aiopar.run_sync, str), r"^run_sync is a coroutine function"),
    ]
    for call, words in refused:
        with pytest.raises(TypeError, match=words):
            call()
    assert await _read(Pipeline([str, int]).map(run)) == ["", 0]
    losses = [X.clone().requires_grad_() for _ in range(3)]
    assert await _read(Pipeline(losses).map(sum_of).map(aiopar.backward)) == [None] * 3
    assert [loss.grad.tolist() for loss in losses if loss.grad is not None] == [[1, 1]] * 3


@pytest.mark.asyncio
async def test_a_result_is_refused_where_a_function_is_expected() -> None:
    module, run = nn.Linear(2, 1), cast(Any, aiopar.run_sync)
    with pytest.raises(TypeError, match=r"got Parameter: .* `run_sync\(fn, x\)`, not `run_sync"):
        run(nn.Parameter(X))
    with pytest.raises(
        TypeError, match=r"a coroutine \(DataParallel.__call__\), which must be awaited"
    ):
        run(aiopar.DataParallel(module, CPUS)(X))


# A forgotten `await` or `async`.

CALLS: dict[str, Callable[[], Any]] = {
    "DeviceExecutor.run_sync": lambda: aiopar.run_sync(abs, 1),
    "Batcher.__call__": lambda: Batcher(nn.Identity())(X),
    "DataParallel.__call__": lambda: aiopar.DataParallel(nn.Identity(), CPUS)(X),
    "ReplicaPool.__call__": lambda: ReplicaPool(nn.Identity(), CPUS)(X),
    "ReplicaPool.swap": lambda: ReplicaPool(nn.Identity(), CPUS).swap(nn.Identity()),
    "ReplicaPool.load_state_dict": lambda: ReplicaPool(nn.Identity(), CPUS).load_state_dict({}),
    "Parallel.put": lambda: aiopar.Parallel(1, units(abs)).put(1),
    "backward": lambda: aiopar.backward(X.clone().requires_grad_().sum()),
    "data_parallel": lambda: aiopar.data_parallel(nn.Identity(), X, CPUS),
    "gather": lambda: aiopar.gather([X, X], "cpu"),
    "parallel_apply": lambda: aiopar.parallel_apply([abs], [1]),
    "replicate": lambda: aiopar.replicate(nn.Identity(), CPUS),
    "scatter": lambda: aiopar.scatter(X, CPUS),
    "scatter_kwargs": lambda: aiopar.scatter_kwargs((X,), {}, CPUS),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_warning_for_a_call_that_nobody_awaits_names_it(name: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"coroutine '{name}' was never awaited"):
        CALLS[name]()


async def _every_async_iterable() -> list[Any]:
    streams = Batcher(generator).stream(X)
    loader = AsyncDataLoader(range(3))
    return [
        Pipeline(range(3)),
        aiter(Pipeline(range(3))),
        aiopar.map(abs, range(3)),
        loader,
        aiter(loader),
        aiopar.as_completed([]),
        aiopar.get_executor().iterate(range, 3),
        aiopar.Parallel(1, units(abs)),
        streams,
    ]


@pytest.mark.asyncio
async def test_a_plain_for_loop_over_an_async_iterable_is_refused() -> None:
    for stream in await _every_async_iterable():
        with pytest.raises(
            TypeError, match=f"{type(stream).__name__} must be read with `async for`"
        ):
            list(stream)
        assert isinstance(stream, AsyncIterable)


def test_as_completed_is_refused_where_futures_are_expected() -> None:
    with pytest.raises(TypeError, match="as_completed must be read with `async for`"):
        aiopar.wait_all(cast(Any, aiopar.as_completed([])))
