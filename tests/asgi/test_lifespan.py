"""`lifespan`: order of opening and closing, failures, the garbage collector."""

import gc
import math
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any, Self

import anyio
import anyio.lowlevel
import prometheus_client
import pytest
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.testclient import TestClient

import aiopar
from aiopar.asgi import Resource, add_resources, install, lifespan, remove_resources
from aiopar.serve import PrometheusMetrics
from aiopar.testing import Gate

from ..freeing import survivors
from .hall import Hall
from .wire import get


class Events:
    """The events of the halls of one test."""

    def __init__(self) -> None:
        self.said: list[tuple[str, ...]] = []

    def __call__(self, event: str, /, **details: Any) -> None:
        drained = {True: ("drained",), False: ("dropped",), None: ()}[details.get("drain")]
        self.said.append((event, details["name"], *drained))


@pytest.fixture
def events() -> Events:
    return Events()


def _halls(events: Events, *names: str) -> list[Hall]:
    return [Hall(name, events) for name in names]


@pytest.mark.anyio
async def test_resources_open_in_order_and_drain_in_reverse(events: Events) -> None:
    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[dict[str, int]]:
        events("own startup", name="own")
        yield {"answer": 42}
        events("own shutdown", name="own")

    halls = _halls(events, "first", "second")
    async with lifespan(*halls, app_lifespan=own, gc_freeze=False)(Starlette()) as state:
        assert state == {"answer": 42}
    assert events.said == [
        ("opened", "first"),
        ("opened", "second"),
        ("own startup", "own"),
        ("own shutdown", "own"),
        ("closing", "second", "drained"),
        ("closing", "first", "drained"),
    ]


@pytest.mark.anyio
@pytest.mark.parametrize("first", ["executor", "batcher"])
@pytest.mark.parametrize("kind", ["function", "steps"])
async def test_batcher_is_drained_before_its_pool_and_executor(first: str, kind: str) -> None:
    class Doubling(torch.nn.Module):
        def forward(self, batch: torch.Tensor) -> torch.Tensor:
            return gate(batch * 2)

    class Steps:
        def __init__(self, module: torch.nn.Module) -> None:
            self.module = module

        def start(self, item: torch.Tensor) -> torch.Tensor:
            return item

        def step(self, states: list[torch.Tensor]) -> list[aiopar.Done[torch.Tensor]]:
            return [aiopar.Done(self.module(item)) for item in states]

    gate = Gate()
    executor = aiopar.DeviceExecutor(["cpu"])
    pool = aiopar.ReplicaPool(Doubling(), executor=executor)
    batcher: Any = aiopar.Batcher(pool, max_batch_size=1)
    if kind == "steps":
        batcher = aiopar.ContinuousBatcher(pool, stepper=Steps, max_batch_size=1)
    app = Starlette()
    given = executor, pool, batcher
    run = lifespan(*(given if first == "executor" else given[::-1]))
    results: list[float] = []

    async def call(item: float) -> None:
        results.append(float(await batcher(torch.tensor([item]))))

    with gate:
        async with anyio.create_task_group() as tasks, run(app):
            for item in range(3):
                tasks.start_soon(call, item)
            await gate.entered()
            while batcher.stats().queued < 2:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(_when, lambda: not batcher.ready, gate.open)
    assert sorted(results) == [0, 2, 4]
    assert [one.ready for one in given] == [False] * 3


async def _when(condition: Callable[[], bool], then: Callable[[], None]) -> None:
    while not condition():
        await anyio.lowlevel.checkpoint()
    then()


@pytest.mark.anyio
async def test_resource_that_fails_to_open_closes_the_resources_before_it(events: Events) -> None:
    app = Starlette()
    last = Hall("last", events)
    halls = [*_halls(events, "first", "second"), Hall("third", events, opens=False), last]
    with pytest.raises(OSError, match="third does not open"):
        async with lifespan(*halls, gc_freeze=False)(app):
            pytest.fail("it has not started")
    assert [said[:2] for said in events.said] == [
        ("opened", "first"),
        ("opened", "second"),
        ("closing", "second"),
        ("closing", "first"),
    ]
    assert not last.ready
    async with lifespan(last, gc_freeze=False)(app):  # the application can start again
        assert last.ready


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("where", "kind", "how"),
    [
        ("startup", LookupError, "dropped"),
        ("startup", SystemExit, "dropped"),
        ("startup", KeyboardInterrupt, "dropped"),
        ("server", LookupError, "drained"),
        ("shutdown", LookupError, "drained"),
    ],
)
async def test_failure_closes_all_resources_and_is_raised_unchanged(
    events: Events, where: str, kind: type[BaseException], how: str
) -> None:
    def reach(here: str) -> None:
        reached.append(here)
        if here == where:
            raise kind("no weights here")

    @asynccontextmanager
    async def own(app: Starlette) -> AsyncIterator[None]:
        reach("startup")
        try:
            yield
        finally:
            reach("shutdown")

    reached, halls = list[str](), _halls(events, "first", "second")
    with pytest.raises(kind, match="no weights here"):
        async with lifespan(*halls, app_lifespan=own, gc_freeze=False)(Starlette()):
            reach("server")
    assert where in reached
    assert events.said[-2:] == [("closing", "second", how), ("closing", "first", how)]


class _Unclosable(Hall):
    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await super().aclose(drain=drain, timeout=timeout)
        raise OSError("it does not close")


@pytest.mark.anyio
async def test_resource_that_fails_to_close_does_not_stop_the_drain_of_others(
    events: Events,
) -> None:
    halls = [*_halls(events, "first"), _Unclosable("second", events), *_halls(events, "third")]
    with pytest.raises(OSError, match="it does not close"):
        async with lifespan(*halls, gc_freeze=False)(Starlette()):
            pass
    closed = [said[1:] for said in events.said if said[0] == "closing"]
    assert closed == [("third", "drained"), ("second", "drained"), ("first", "drained")]


@pytest.mark.anyio
async def test_cancelled_server_does_not_drain(events: Events) -> None:
    [hall] = _halls(events, "hall")

    async def serve() -> None:
        async with lifespan(hall, gc_freeze=False)(Starlette()):
            tasks.cancel_scope.cancel()
            await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(serve)
    assert events.said == [("opened", "hall"), ("closing", "hall", "dropped")]


@pytest.mark.asyncio
async def test_objects_of_the_startup_are_frozen() -> None:
    async with lifespan()(Starlette()):
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0
    async with lifespan(gc_freeze=False)(Starlette()):
        assert gc.get_freeze_count() == 0


@pytest.fixture
def thresholds() -> Iterator[tuple[int, int, int]]:
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


@pytest.mark.asyncio
@pytest.mark.parametrize("own", [0, 50_000])
async def test_threshold_that_the_program_sets_stays(
    own: int, thresholds: tuple[int, int, int]
) -> None:
    gc.set_threshold(own)
    async with lifespan(gc_freeze=False, gc_threshold=10_000)(Starlette()):
        assert gc.get_threshold()[0] == own
    gc.set_threshold(*thresholds)
    async with lifespan(gc_freeze=False, gc_threshold=10_000)(Starlette()):
        gc.set_threshold(own)
    assert gc.get_threshold()[0] == own


def test_last_application_restores_the_collector(thresholds: tuple[int, int, int]) -> None:
    """Each application runs in its own thread."""
    with ExitStack() as first, ExitStack() as last:
        last.enter_context(TestClient(Starlette(lifespan=lifespan(gc_threshold=20_000))))
        first.enter_context(TestClient(Starlette(lifespan=lifespan(gc_threshold=30_000))))
        assert gc.get_threshold() == (30_000, *thresholds[1:])
        first.close()
        assert gc.get_freeze_count() > 0
        assert gc.get_threshold() == (20_000, *thresholds[1:])
        with TestClient(Starlette(lifespan=lifespan())):  # sets no threshold
            assert gc.get_threshold() == (20_000, *thresholds[1:])
        last.close()
    assert gc.get_freeze_count() == 0
    assert gc.get_threshold() == thresholds


@pytest.mark.anyio
async def test_several_lifespans_of_an_application_have_their_own_resources(
    events: Events,
) -> None:
    app, [first, second, third] = Starlette(), _halls(events, "first", "second", "third")
    install(app, metrics=None)
    async with lifespan(first, gc_freeze=False)(app):
        assert (await get(app, "/readyz")).status == 200
        async with lifespan(second, third, gc_freeze=False)(app):
            assert (await get(app, "/readyz")).status == 200
            third.ready = False
            assert (await get(app, "/readyz")).json == {"detail": "not ready: Hall (resource 2)"}
            third.ready, second.alive = True, False
            assert "Hall (resource 1)" in (await get(app, "/healthz")).json["detail"]
        assert (await get(app, "/readyz")).status == 200
    assert [(said[0], said[1]) for said in events.said] == [
        *(("opened", name) for name in ("first", "second", "third")),
        *(("closing", name) for name in ("third", "second", "first")),
    ]
    assert (await get(app, "/readyz")).status == 503


# Resources that are added while the application serves.


@pytest.mark.anyio
async def test_added_resources_are_watched_and_closed_first(events: Events) -> None:
    app, [first, second, third] = Starlette(), _halls(events, "first", "second", "third")
    install(app, metrics=None)
    run = lifespan(first, gc_freeze=False)
    async with run(app):
        await add_resources(app, second, third)
        assert (await get(app, "/readyz")).status == 200
        third.ready = False
        assert (await get(app, "/readyz")).json == {"detail": "not ready: Hall (resource 2)"}
    assert events.said == [
        *(("opened", name) for name in ("first", "second", "third")),
        *(("closing", name, "drained") for name in ("third", "second", "first")),
    ]
    events.said.clear()
    async with run(app):
        pass
    assert [said[1] for said in events.said] == ["first", "first"]


@pytest.mark.anyio
@pytest.mark.parametrize("how", ["remove_resources", "aclose"])
async def test_closed_resources_count_no_more_and_are_freed(how: str) -> None:
    registry = prometheus_client.CollectorRegistry()
    app, metrics = Starlette(), PrometheusMetrics(registry=registry)
    install(app, registry=registry)
    async with lifespan(gc_freeze=False)(app):
        for _ in range(2):  # the second pool has the name of the first
            model = torch.nn.Linear(2, 3)
            executor = aiopar.DeviceExecutor(["cpu"])
            pool = aiopar.ReplicaPool(model, executor=executor, name="new")
            batcher = aiopar.Batcher(pool)
            await add_resources(app, batcher, pool, executor)
            metrics.add(batcher, pool)
            await batcher(torch.ones(2))
            assert (await get(app, "/readyz")).status == 200
            shown = (await get(app, "/metrics")).text
            assert 'requests_total{batcher="new",outcome="answered"} 1.0' in shown
            assert (
                'aiopar_replica_state{device="cpu",pool="new",replica="0",state="ready"}' in shown
            )
            if how == "aclose":
                for resource in (batcher, pool, executor):
                    await resource.aclose()
            else:
                await remove_resources(app, executor, pool, batcher)
            assert [one.closed for one in (batcher, pool, executor)] == [True] * 3
            assert (await get(app, "/readyz")).status == 200
            metrics.remove(batcher, pool)
            assert '"new"' not in (await get(app, "/metrics")).text
            freed = weakref.ref(model)
            del model, executor, pool, batcher
            gc.collect()
            assert await survivors([freed]) == []


@pytest.mark.anyio
async def test_a_resource_of_the_lifespan_counts_until_it_is_removed(events: Events) -> None:
    app, halls = Starlette(), _halls(events, "first", "second")
    install(app, metrics=None)
    run = lifespan(*halls, gc_freeze=False)
    async with run(app):
        await halls[0].aclose()
        assert (await get(app, "/readyz")).json == {"detail": "not ready: Hall (resource 0)"}
        await remove_resources(app, halls[0])
        assert (await get(app, "/readyz")).status == 200
    said = [("opened", "first"), ("opened", "second"), ("closing", "first", "drained")]
    assert events.said == [*said, ("closing", "second", "drained")]
    events.said.clear()
    async with run(app):
        assert events.said == said[:2]


@pytest.mark.anyio
async def test_added_resource_that_fails_to_open_leaves_the_application_ready(
    events: Events,
) -> None:
    app = Starlette()
    install(app, metrics=None)
    async with lifespan(gc_freeze=False)(app):
        with pytest.raises(OSError, match="new does not open"):
            await add_resources(app, Hall("new", events, opens=False))
        with pytest.raises(TypeError, match="resource 0 must be a Resource, not int"):
            await add_resources(app, 5)  # type: ignore[arg-type]
        assert (await get(app, "/readyz")).status == 200
    with pytest.raises(RuntimeError, match="no lifespan of aiopar serves"):
        await add_resources(app)


@pytest.mark.anyio
async def test_resource_that_opens_while_the_application_closes_is_closed(events: Events) -> None:
    class Slow(Hall):
        async def __aenter__(self) -> Self:
            await go_on.wait()
            return await super().__aenter__()

    async def add() -> None:
        with pytest.raises(aiopar.ServiceClosed, match="before its new resources were open"):
            await add_resources(app, Slow("slow", events))

    app, go_on = Starlette(), anyio.Event()
    async with anyio.create_task_group() as tasks:
        async with lifespan(gc_freeze=False)(app):
            tasks.start_soon(add)
            await anyio.wait_all_tasks_blocked()
        go_on.set()
    assert events.said == [("opened", "slow"), ("closing", "slow", "dropped")]


# Starting again.


@pytest.mark.parametrize("given", ["pool", "batcher", "both"])
@pytest.mark.parametrize("backends", [("asyncio", "asyncio"), ("asyncio", "trio")])
def test_application_with_a_model_can_start_again(given: str, backends: tuple[str, str]) -> None:
    pool = aiopar.ReplicaPool(torch.nn.Linear(2, 3), ["cpu"], warmup=torch.ones(1, 2))
    batcher = aiopar.Batcher(pool)

    async def endpoint(request: Request) -> Response:
        return PlainTextResponse(str(len(await batcher(torch.ones(2)))))

    choices: dict[str, list[Resource]] = {
        "pool": [pool],
        "batcher": [batcher],
        "both": [batcher, pool],
    }
    app = Starlette(
        routes=[Route("/", endpoint)], lifespan=lifespan(*choices[given], gc_freeze=False)
    )
    install(app, metrics=None)
    for backend in backends:
        with TestClient(app, backend=backend) as client:  # type: ignore[arg-type]
            assert client.get("/").text == "3"
            assert client.get("/readyz").status_code == 200
    assert pool.ready == (given == "batcher")


async def _coroutine(app: Starlette) -> None:
    pytest.fail("it was run")


async def _undecorated(app: Starlette) -> AsyncIterator[None]:
    yield


_NOT_A_MANAGER = r"app_lifespan must be .*asynccontextmanager\), not"


@pytest.mark.parametrize(
    ("resources", "options", "error", "message"),
    [
        ([Hall("hall", Events()), "hall"], {}, TypeError, "resource 1 must be a Resource, not str"),
        ([aiopar.Batcher], {}, TypeError, "resource 0 must be a Resource, not the class Batcher"),
        ([], {"app_lifespan": 5}, TypeError, f"{_NOT_A_MANAGER} int"),
        ([], {"app_lifespan": _coroutine}, TypeError, f"{_NOT_A_MANAGER} a coroutine function"),
        ([], {"app_lifespan": _undecorated}, TypeError, f"{_NOT_A_MANAGER} an async generator"),
        ([], {"drain_delay": None}, TypeError, "drain_delay must be a number, not NoneType"),
        ([], {"gc_threshold": 1e4}, TypeError, "gc_threshold must be an int, not float"),
        ([], {"gc_threshold": 0}, ValueError, "gc_threshold must be at least 1, got 0"),
        ([], {"gc_threshold": 2**31}, ValueError, "gc_threshold must be at most 2147483647"),
        ([], {"shutdown_timeout": math.nan}, ValueError, "shutdown_timeout must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(
    resources: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        lifespan(*resources, **options)
