"""The live page's events: what they say, and the history that the process keeps."""

import base64
import hashlib
import json
import re
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from anyio import to_thread
from starlette.applications import Starlette
from starlette.types import Message

import aiopar
from aiopar.asgi import Resource, _history, install, lifespan
from aiopar.testing import Gate
from tests.serve.steppers import Counting, Item

from .served import Served
from .wire import Wire, get


class _Page(Wire):
    """An open page."""

    def __init__(self) -> None:
        super().__init__("/aiopar/events", method="GET")
        self.deliver(b"")

    @property
    def samples(self) -> list[dict[str, Any]]:
        text = b"".join(message.get("body", b"") for message in self.sent).decode()
        events = [json.loads(line) for line in re.findall(r"^data: (.*)$", text, re.MULTILINE)]
        return [sample for event in events for sample in event]

    async def send(self, message: Message) -> None:
        await super().send(message)
        self._tell()

    async def sampled(self, count: int) -> list[dict[str, Any]]:
        """Wait for so many samples."""
        await self._until(lambda: len(self.samples) >= count)
        return self.samples

    async def sample(self) -> dict[str, Any]:
        """Wait for a sample that is taken from now on."""
        now = time.monotonic()
        await self._until(lambda: bool(self.samples) and self.samples[-1]["at"] > now)
        return self.samples[-1]


class _Counted:
    """A resource that counts how often it is asked whether it is ready: once per sample."""

    alive = True

    def __init__(self) -> None:
        self.asked = 0
        self.news = anyio.Event()

    @property
    def ready(self) -> bool:
        self.asked += 1
        self.news.set()
        return True

    async def sampled(self, count: int) -> None:
        """Wait until so many more samples are taken."""
        count += self.asked
        while self.asked < count:
            self.news = anyio.Event()
            await self.news.wait()

    async def __aenter__(self) -> None:
        self.asked = 0  # `lifespan` has asked too, before CPython 3.12: it has checked the type
        await anyio.lowlevel.checkpoint()

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await anyio.lowlevel.checkpoint()


async def _app(*resources: Resource, path: str = "/aiopar") -> Starlette:
    app = Starlette(lifespan=lifespan(*resources))
    # It reads the page from a file.
    await to_thread.run_sync(partial(install, app, metrics=None, dashboard=path))
    return app


@asynccontextmanager
async def _open(app: Starlette) -> AsyncIterator[_Page]:
    page = _Page()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(page.serve, app)
        yield page
        page.hang_up()


@pytest.mark.asyncio
async def test_page_allows_its_own_script_and_style_and_nothing_else() -> None:
    answer = await get(await _app(), "/aiopar")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none';")
    assert "unsafe" not in policy
    for tag in ("script", "style"):
        (text,) = re.findall(f"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    # Nothing comes from elsewhere: the page works without the internet.
    assert not re.search(r"(?:src|href)=\"(?!data:)", answer.text)


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "events"), [("/aiopar/", "/aiopar/events"), ("/", "/events")])
async def test_path_may_end_with_a_slash(path: str, events: str) -> None:
    app = await _app(path=path)
    assert (await get(app, path)).status == 200
    assert (await get(app, events)).headers["content-type"].startswith("text/event-stream")


@pytest.mark.anyio
async def test_events_are_the_statistics() -> None:
    executor = aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="two")
    pool = aiopar.ReplicaPool(torch.nn.Linear(3, 1), executor=executor, name="linear")
    batcher = aiopar.Batcher(pool, max_batch_size=4, max_pending=9)
    steps = aiopar.ContinuousBatcher(
        pool, stepper=lambda _: Counting(), max_batch_size=4, max_pending=9, name="steps"
    )
    app = await _app(executor, batcher, steps)  # the batchers open the pool
    async with app.router.lifespan_context(app):
        for _ in range(3):
            await batcher(torch.ones(3))
        await steps(Item("one"))
        async with _open(app) as page:
            sample = await page.sample()
        assert sample["batchers"] == [
            {
                "name": name,
                "max_batch_size": 4,
                "max_pending": 9,
                "concurrency": 2,
                **json.loads(json.dumps(asdict(stats))),
            }
            for name, stats in (("linear", batcher.stats()), ("steps", steps.stats()))
        ]
        assert sample["pools"] == [
            {"name": "linear", **json.loads(json.dumps(asdict(pool.stats())))}
        ]
        (shown,) = sample["executors"]
        assert shown["name"] == "two"
        assert [one["label"] for one in shown["workers"]] == ["cpu", "cpu"]
        assert sum(one["completed"] for one in shown["workers"]) == sum(
            one.completed for one in executor.stats().workers
        )
        assert sample["unready"] is sample["dead"] is sample["parent"] is None
        assert 0 <= sample["loop_delay"] < 60
        assert time.time() - 60 < sample["time"] <= time.time()


@pytest.mark.anyio
async def test_models_of_a_store_are_shown_while_they_are_loaded() -> None:
    def load(name: str) -> aiopar.Batcher[Any, Any]:
        return gate(aiopar.Batcher(aiopar.ReplicaPool(torch.nn.Linear(3, 1), ["cpu"])))

    store = aiopar.ModelStore(load, max_models=1, name="zoo")
    app = await _app(store)

    async def health() -> list[Any]:
        return [(await get(app, path)).json for path in ("/healthz", "/readyz")]

    async def use(name: str) -> None:
        async with store.use(name):
            pass

    with Gate() as gate:
        async with app.router.lifespan_context(app), anyio.create_task_group() as tasks:
            tasks.start_soon(use, "ant")
            await gate.entered()
            fine = [{"status": "alive"}, {"status": "ready"}]
            assert await health() == fine  # although a model is being loaded
            gate.open()
            await use("ant")
            await use("bee")
            async with _open(app) as page:
                sample = await page.sample()
            assert sample["stores"] == [
                {"name": "zoo", **json.loads(json.dumps(asdict(store.stats())))}
            ]
            assert [one["name"] for one in sample["stores"][0]["models"]] == ["bee"]
            assert [one["name"] for one in sample["batchers"] + sample["pools"]] == ["bee", "bee"]
            assert await health() == fine
            async with store.use("bee") as batcher:
                assert batcher.pool is not None
                await batcher.pool.aclose()
                assert (await health())[1] == {"detail": "not ready: model 'bee' of resource 0"}
    assert batcher.closed
    assert store.stats().models == ()


def _fail(items: list[int]) -> list[int]:
    raise ArithmeticError(f"cannot add {len(items)}")


@pytest.mark.anyio
async def test_history_is_kept_while_no_page_is_open() -> None:
    watched, broken = _Counted(), aiopar.Batcher(_fail, collate_fn=list)
    app = await _app(watched, broken)
    async with app.router.lifespan_context(app):
        await watched.sampled(1)
        with pytest.raises(ArithmeticError):
            await broken(1)
        await watched.sampled(1)
        async with _open(app) as first, _open(app) as second:
            history = await first.sampled(2)
            (before,), (after,) = history[0]["batchers"], history[-1]["batchers"]
            assert [before["failed"], after["failed"]] == [0, 1]
            assert before["errors"] == []
            (error,) = after["errors"]
            assert (error["text"], error["count"]) == ("ArithmeticError: cannot add 1", 1)
            # The pages get the same samples.
            await watched.sampled(1)
            count = watched.asked
            shared = (await second.sampled(count))[:count]
            assert (await first.sampled(count))[:count] == shared
            assert watched.asked < 2 * len(shared), "each page takes its own samples"
    asked = watched.asked
    await anyio.wait_all_tasks_blocked()
    assert watched.asked == asked


@pytest.mark.asyncio
async def test_history_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_history, "PERIOD", 0.0005)
    monkeypatch.setattr(_history, "TICK", 0.0005)
    watched = _Counted()
    app = await _app(watched)
    async with app.router.lifespan_context(app):
        await watched.sampled(1100)
        async with _open(app) as page:
            await page.sampled(1)
            event = page.sent[2]["body"]
    # Two minutes of each second, and 13 of each fifth.
    assert event.startswith(b"data: [{")
    assert len(json.loads(event[6:])) in (120 + 13 * 12, 120 + 13 * 12 + 1)


class _Unsound(_Counted):
    """A resource whose properties raise for a while."""

    error: Exception | None = None

    @property
    def ready(self) -> bool:
        return super().ready and self.alive

    @property
    def alive(self) -> bool:  # type: ignore[override]  # a property, not an attribute
        if self.error is not None:
            raise self.error
        return True


@pytest.mark.asyncio
async def test_a_resource_whose_property_raises_is_named(caplog: pytest.LogCaptureFixture) -> None:
    resource, batcher = _Unsound(), aiopar.Batcher(torch.neg, name="fine")
    app = await _app(resource, batcher)
    why = "_Unsound (resource 0): OSError: not now"
    async with app.router.lifespan_context(app):
        resource.error = OSError("not now")
        async with _open(app) as page:
            await page.sample()
            sample = await page.sample()
            assert sample["unready"] == f"not ready: {why}"
            assert sample["dead"] == f"never to serve again: {why}"
            assert [one["name"] for one in sample["batchers"]] == ["fine"]
            answers = [await get(app, path) for path in ("/readyz", "/healthz")]
            assert [(one.status, one.json["detail"]) for one in answers] == [
                (503, sample["unready"]),
                (503, sample["dead"]),
            ]
            resource.error = None
            sample = await page.sample()
            assert sample["unready"] is sample["dead"] is None
    raised = [f"`{quality}` of _Unsound (resource 0) raised" for quality in ("ready", "alive")]
    assert [record.getMessage() for record in caplog.records] == raised, "each once"


class _WithoutStats(aiopar.Batcher[Any, Any]):
    def stats(self) -> Any:
        raise OSError("none")


@pytest.mark.asyncio
async def test_the_page_says_why_it_has_no_statistics(caplog: pytest.LogCaptureFixture) -> None:
    app = await _app(_WithoutStats(torch.neg))
    async with app.router.lifespan_context(app), _open(app) as page:
        await page.sample()
        sample = await page.sample()
        assert sample["unready"] == "no statistics: OSError: none"
        assert sample["batchers"] == []
    assert [record.getMessage() for record in caplog.records] == [
        "the live page's look at the statistics raised"
    ]


@pytest.mark.asyncio
@pytest.mark.may_block("the page shows that the loop was blocked")
async def test_delay_of_the_loop_is_measured() -> None:
    app = await _app()
    async with app.router.lifespan_context(app), _open(app) as page:
        await page.sampled(1)
        await anyio.wait_all_tasks_blocked()
        time.sleep(0.3)  # noqa: ASYNC251
        sample = await page.sample()
        assert sample["loop_delay"] > 0.2


@pytest.mark.asyncio
async def test_without_a_lifespan_each_request_gets_one_sample() -> None:
    page = _Page()
    await page.serve(await _app())
    (sample,) = page.samples
    assert sample["unready"] == "no lifespan of aiopar runs on this application"
    assert sample["batchers"] == sample["pools"] == sample["executors"] == []


@pytest.mark.parametrize("end", [Served.terminate, Served.interrupt], ids=["SIGTERM", "SIGINT"])
def test_server_ends_with_an_open_page(end: Callable[[Served], None]) -> None:
    with (
        Served() as served,
        served.connection("GET /aiopar/events") as page,
        page.makefile("rb") as answer,
    ):
        while not answer.readline().startswith(b"data: "):
            pass
        end(served)
        assert answer.read().endswith(b"\r\n0\r\n\r\n")  # the response is complete
        served.ended()
    drained = served.events(event="closing")
    assert [event["drain"] for event in drained] == [True, True]
