"""`ModelStore`: shared loads, eviction, memory, closing."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Self

import anyio
import anyio.lowlevel
import pytest
import torch
from anyio import to_thread
from hypothesis import given, settings, strategies as st
from torch import nn

import aiopar
from aiopar import Batcher, DeadlineExceeded, ModelStore, ReplicaPool, ServiceClosed
from aiopar.serve import ContinuousBatcher, StoreStats
from aiopar.testing import Gate
from tests.freeing import survivors, without_gc
from tests.gil import GIL

from .batches import on_asyncio, until

pytestmark = pytest.mark.anyio

X = torch.ones(2)


def linear(name: str, outputs: int = 3) -> Batcher[Any, torch.Tensor]:
    """A model of `12 * outputs` bytes."""
    return Batcher(ReplicaPool(nn.Linear(2, outputs).eval(), ["cpu"]))


class Fake:
    """A model that knows whether it is open."""

    alive = True

    def __init__(self, name: str) -> None:
        self.name = name
        self.ready = False
        self.failure: Exception | None = None

    async def __aenter__(self) -> Self:
        await anyio.lowlevel.checkpoint()
        if self.failure is not None:
            raise self.failure
        self.ready = True
        return self

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        self.ready = False
        await anyio.lowlevel.checkpoint()


def states(store: ModelStore[Any]) -> dict[str, str]:
    return {model.name: model.state for model in store.stats().models}


class Users:
    """Tasks that each use a model until they are told to leave."""

    def __init__(self, store: ModelStore[Any], tasks: anyio.abc.TaskGroup) -> None:
        self.store = store
        self.got: dict[str, Any] = {}
        """The model, or the error, of each user that has one."""
        self._tasks = tasks
        self._leave: dict[str, anyio.Event] = {}
        self._scopes: dict[str, anyio.CancelScope] = {}

    def ask(self, user: str, name: str, **options: Any) -> None:
        self._leave[user], self._scopes[user] = anyio.Event(), anyio.CancelScope()
        self._tasks.start_soon(self._use, user, name, options)

    async def asked(self, user: str, name: str, **options: Any) -> None:
        """Ask, and wait until the store knows."""
        before = sum(model.users for model in self.store.stats().models)
        self.ask(user, name, **options)
        await until(lambda: sum(one.users for one in self.store.stats().models) > before)

    async def _use(self, user: str, name: str, options: dict[str, Any]) -> None:
        with self._scopes[user]:
            try:
                async with self.store.use(name, **options) as model:
                    self.got[user] = model
                    await self._leave[user].wait()
            except Exception as error:  # noqa: BLE001  # to be looked at
                self.got[user] = error

    def leave(self, user: str) -> None:
        self._leave[user].set()

    def cancel(self, user: str) -> None:
        self._scopes[user].cancel()


@asynccontextmanager
async def users_of(store: ModelStore[Any]) -> AsyncIterator[Users]:
    """Users of an open store; they have left when the block ends."""
    async with store, anyio.create_task_group() as tasks:
        users = Users(store, tasks)
        try:
            yield users
        finally:
            for user in users._leave:
                users.leave(user)


# Loading.


async def test_uses_that_wait_share_one_load() -> None:
    loads: list[str] = []

    def load(name: str) -> Batcher[Any, torch.Tensor]:
        loads.append(threading.current_thread().name)
        return gate(linear(name))

    with Gate() as gate:
        async with users_of(ModelStore(load)) as users:
            for user in "abc":
                await users.asked(user, "model")
            await gate.entered()
            assert states(users.store) == {"model": "loading"}
            users.cancel("a")  # the use that has started the load
            await until(lambda: users.store.stats().models[0].users == 2)
            gate.open()
            await until(lambda: len(users.got) == 2)
            assert users.got["b"] is users.got["c"]
            assert (await users.got["b"](X)).shape == (3,)
            assert users.got["b"].name == users.got["b"].pool.name == "model"
            (thread,) = loads
            assert thread.startswith("aiopar-load")
            stats = users.store.stats()
            assert (stats.loads, stats.failed_loads, stats.evictions) == (1, 0, 0)
            assert (stats.models[0].bytes, stats.models[0].users) == (36, 2)
    assert not users.got["b"].ready
    assert users.got["b"].pool.closed


async def test_failed_load_is_raised_to_all_that_wait_and_tried_again() -> None:
    def load(name: str) -> Fake:
        gate()
        if not users.store.stats().failed_loads:
            raise KeyError(name)
        return Fake(name)

    with Gate() as gate:
        async with users_of(ModelStore(load)) as users:
            await users.asked("a", "model")
            await users.asked("b", "model")
            gate.open()
            await until(lambda: len(users.got) == 2)
            assert users.got["a"] is users.got["b"]
            assert isinstance(users.got["a"], KeyError)
            async with users.store.use("model") as model:
                assert model.ready
            assert users.store.stats().failed_loads == 1


async def test_model_that_does_not_open_is_a_failed_load() -> None:
    made: list[Fake] = []

    async def load(name: str) -> Fake:
        await anyio.lowlevel.checkpoint()
        made.append(Fake(name))
        made[-1].failure = None if made[1:] else OSError("no device")
        return made[-1]

    async with ModelStore(load, max_models=1) as store:
        with pytest.raises(OSError, match="no device"):
            async with store.use("model"):
                pytest.fail("it is not open")
        assert store.stats() == StoreStats((), 0, 1, 0)
        async with store.use("model") as model:
            assert model is made[1]


async def test_load_runs_under_the_state_of_the_code_that_made_the_store() -> None:
    seen: list[bool] = []

    def load(name: str) -> Fake:
        seen.append(torch.is_grad_enabled())
        return Fake(name)

    async def load_later(name: str) -> Fake:
        await anyio.lowlevel.checkpoint()
        return load(name)

    with torch.no_grad():
        stores = [ModelStore(load), ModelStore(load_later)]
    for store in stores:
        async with store:
            await _used(store, "model")
    assert seen == [False, False]


async def test_load_that_nobody_waits_for_is_dropped() -> None:
    loads: list[str] = []

    def load(name: str) -> Fake:
        loads.append(name)
        return gate(Fake(name))

    with Gate() as gate:
        async with users_of(ModelStore(load)) as users:
            for name in ("first", "second", "third"):
                await users.asked(name, name)
            await gate.entered()
            assert states(users.store)["second"] == "waiting"
            users.cancel("second")
            gate.open()
            await until(lambda: "third" in users.got)
            assert loads == ["first", "third"]
            assert states(users.store) == {"first": "ready", "third": "ready"}


async def test_use_has_a_time_limit_and_the_load_goes_on() -> None:
    with Gate() as gate:
        async with ModelStore(lambda name: gate(Fake(name)), timeout=0.01) as store:
            with pytest.raises(DeadlineExceeded, match=r"not ready after 0.01 s: it is loading"):
                async with store.use("model"):
                    pytest.fail("it is not loaded")
            gate.open()
            async with store.use("model", timeout=30):
                assert store.stats().loads == 1


# Eviction.


async def test_least_recently_used_model_makes_room() -> None:
    async with ModelStore(Fake, max_models=2) as store:
        used = []
        for name in ("a", "b", "a", "c"):
            async with store.use(name) as model:
                used.append(model)
        assert used[0] is used[2]
        assert [model.ready for model in used] == [True, False, True, True]
        assert store.stats().evictions == 1


async def test_model_in_use_is_not_evicted_and_a_new_one_waits_for_room() -> None:
    async with users_of(ModelStore(Fake, max_models=1)) as users:
        await users.asked("a", "first")
        await until(lambda: "a" in users.got)
        await users.asked("b", "second")
        with pytest.raises(DeadlineExceeded, match="it is waiting"):
            async with users.store.use("third", timeout=0.01):
                pytest.fail("there is no room")
        assert users.got["a"].ready
        users.leave("a")
        await until(lambda: "b" in users.got)
        assert (users.got["a"].ready, users.got["b"].ready) == (False, True)
        await until(lambda: states(users.store) == {"second": "ready"})


async def test_evicted_model_is_drained_first() -> None:
    with Gate() as gate:

        def load(name: str) -> Batcher[Any, Any]:
            return Batcher(gate, collate_fn=list, name=name)

        async with ModelStore(load, max_models=1) as store, anyio.create_task_group() as tasks:
            async with store.use("first") as batcher:
                tasks.start_soon(batcher, 1)  # it goes on after the use
                await gate.entered()
            tasks.start_soon(_used, store, "second")
            await until(lambda: states(store) == {"first": "closing", "second": "waiting"})
            gate.open()
            await until(lambda: states(store) == {"second": "ready"})
            assert batcher.stats().answered == 1


async def _used(store: ModelStore[Any], name: str) -> None:
    async with store.use(name):
        pass


# Bytes and memory.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(4, 4, bias=False)
        self.two = nn.Linear(4, 4, bias=False)
        self.two.weight = self.one.weight
        self.register_buffer("part", self.one.weight.detach()[0])

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(batch))  # type: ignore[no-any-return]


class Pipeline:
    """As one of transformers: a callable that has a module."""

    def __init__(self) -> None:
        self.model = Tied()

    def __call__(self, items: list[Any]) -> list[Any]:
        return items


class Counting:
    """A stepper with a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def start(self, item: int) -> int:
        return item

    def step(self, states: list[int]) -> list[Any]:
        return [aiopar.Done(state) for state in states]


def _apply(module: nn.Module, batch: torch.Tensor) -> Any:
    return module(batch)


def _closure() -> Callable[[Any], Any]:
    pipeline = Pipeline()

    def call(items: list[Any]) -> Any:
        return pipeline(items)

    return call


@pytest.mark.parametrize(
    ("make", "size"),
    [
        pytest.param(lambda: Batcher(Tied()), 64, id="module"),
        # The replicas share the parameters.
        pytest.param(lambda: ReplicaPool(Tied(), ["cpu", "cpu"]), 64, id="pool"),
        pytest.param(lambda: Batcher(ReplicaPool(Tied(), ["cpu"])), 64, id="batcher of a pool"),
        pytest.param(lambda: Batcher(partial(_apply, Tied())), 64, id="partial"),
        pytest.param(lambda: Batcher(Tied().forward), 64, id="method"),
        pytest.param(lambda: Batcher(_closure()), 64, id="closure"),
        pytest.param(lambda: ContinuousBatcher(Counting(Tied())), 64, id="stepper"),
        pytest.param(
            lambda: ContinuousBatcher(ReplicaPool(Tied(), ["cpu"]), stepper=Counting),
            64,
            id="steppers of a pool",
        ),
        pytest.param(lambda: Batcher(len), 0, id="no module"),
    ],
)
@on_asyncio
async def test_bytes_are_those_of_parameters_and_buffers(
    make: Callable[[], Any], size: int
) -> None:
    async with ModelStore(lambda _: make()) as store, store.use("model"):
        assert store.stats().models[0].bytes == size


@on_asyncio
async def test_each_process_has_a_copy() -> None:
    executor = aiopar.ProcessExecutor(["cpu", "cpu"])

    def load(name: str) -> ReplicaPool[Any]:
        return ReplicaPool(nn.Linear(2, 3), executor=executor)

    async with ModelStore(load, max_bytes=50) as store:
        with pytest.raises(ValueError, match="has 72 bytes"):  # before a process starts
            await _used(store, "model")


async def test_bytes_are_bounded() -> None:
    loads: list[str] = []

    def load(name: str) -> Batcher[Any, torch.Tensor]:
        loads.append(name)
        return linear(name, len(name))

    async with ModelStore(load, max_bytes=12 * 5) as store:
        for name in ("ab", "abc", "ab"):
            await _used(store, name)
        assert [model.name for model in store.stats().models] == ["abc", "ab"]
        await _used(store, "abcd")  # no room for it beside any other
        assert [model.name for model in store.stats().models] == ["abcd"]
        for _ in range(2):
            with pytest.raises(ValueError, match=r"'abcdef' has 72 bytes, more than max_bytes"):
                await _used(store, "abcdef")
        assert loads == ["ab", "abc", "abcd", "abcdef"]  # the second time its size was known
        assert [model.name for model in store.stats().models] == ["abcd"]
    async with ModelStore(lambda _: Batcher(len), max_bytes=1) as store:
        with pytest.raises(TypeError, match=r"no module was found in the Batcher of load\('a'\)"):
            await _used(store, "a")
    async with ModelStore(lambda _: Batcher(len), max_bytes=9, size=lambda _: 5) as store:
        await _used(store, "a")
        await _used(store, "b")
        assert [(model.name, model.bytes) for model in store.stats().models] == [("b", 5)]


@pytest.mark.parametrize("cyclic", [False, True])
async def test_memory_of_an_evicted_model_is_free_before_the_next_is_loaded(cyclic: bool) -> None:
    modules: list[weakref.ref[nn.Module]] = []
    alive: list[int] = []
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    def load(name: str) -> Batcher[Any, torch.Tensor]:
        alive.append(sum(module() is not None for module in modules))
        module = nn.Linear(2, 3)
        if cyclic:
            module.owner = [module]  # type: ignore[assignment]  # as hooks of accelerate
        modules.append(weakref.ref(module))
        return Batcher(module)

    with without_gc():
        gc.callbacks.append(note)
        async with ModelStore(load, max_models=1) as store:
            for name in ("a", "b", "a"):
                async with store.use(name) as batcher:
                    await batcher(X)
                del batcher
        gc.callbacks.remove(note)
    assert alive == [0, 0, 0]
    # Begin and end of two collections, which hold the GIL; without a GIL the store always collects.
    assert len(collections) == 4 * cyclic or not GIL


async def test_failed_uses_leave_no_reference_cycles() -> None:
    class Failure(Exception):
        pass

    watched: list[weakref.ref[Any]] = []

    def watch(made: Any) -> Any:
        watched.append(weakref.ref(made))
        return made

    def load(name: str) -> Batcher[Any, torch.Tensor]:
        if name == "bad":
            raise watch(Failure())
        return Batcher(watch(nn.Linear(2, 30)))

    async with ModelStore(load, max_bytes=100) as store:
        with without_gc():
            for name in ("large", "large", "bad"):
                with pytest.raises((ValueError, Failure)):
                    await _used(store, name)
            assert await survivors(watched) == []


# Opening and closing.


async def test_store_that_is_not_open_refuses_uses() -> None:
    store = ModelStore(Fake)
    assert (store.ready, store.closed, store.alive) == (False, False, True)
    with pytest.raises(ServiceClosed, match="not open"):
        await _used(store, "a")
    await store.aclose()
    for _ in range(2):  # it opens again
        async with store:
            assert (store.ready, store.closed) == (True, False)
            await _used(store, "a")
        assert (store.ready, store.closed) == (False, True)
        with pytest.raises(ServiceClosed, match="closed"):
            await _used(store, "a")
    assert store.stats().loads == 2


async def test_closing_waits_for_uses_and_their_loads() -> None:
    with Gate() as gate:
        store = ModelStore(lambda name: gate(Fake(name)))
        async with users_of(store) as users:
            await users.asked("a", "model")
            await gate.entered()
            async with anyio.create_task_group() as closing:
                closing.start_soon(store.aclose)
                await until(lambda: store.closed)
                gate.open()
                await until(lambda: "a" in users.got)
                assert users.got["a"].ready
                users.leave("a")
            assert not users.got["a"].ready
            assert store.stats().models == ()


@pytest.mark.parametrize("how", [{"drain": False}, {"timeout": 0.01}])
async def test_closing_at_once_fails_uses_that_wait(how: dict[str, Any]) -> None:
    with Gate() as gate:
        store = ModelStore(lambda name: gate(Fake(name)) if name == "slow" else Fake(name))
        async with users_of(store) as users:
            await users.asked("a", "quick")
            await until(lambda: "a" in users.got)
            await users.asked("b", "slow")
            await gate.entered()
            await store.aclose(**how)
            await until(lambda: "b" in users.got)
            assert isinstance(users.got["b"], ServiceClosed)
            assert not users.got["a"].ready
            assert store.stats().models == ()


async def test_failure_in_closing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Unwilling(Fake):
        async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
            await super().aclose()
            raise OSError("stuck")

    async with ModelStore(Unwilling, max_models=1) as store:
        await _used(store, "a")
        await _used(store, "b")
        assert states(store) == {"b": "ready"}
    assert [record.message for record in caplog.records] == [
        f"model '{name}' failed when it was closed" for name in "ab"
    ]


@on_asyncio
async def test_uses_come_from_any_event_loop() -> None:
    async def elsewhere() -> int:
        async with store.use("model") as batcher:
            return len(await batcher(X))

    async with ModelStore(linear) as store:
        outputs = await to_thread.run_sync(anyio.run, elsewhere)
        async with store.use("model") as batcher:
            assert outputs == len(await batcher(X)) == 3
        assert store.stats().loads == 1


def test_store_opens_again_after_its_loop_was_closed() -> None:
    store, users = ModelStore(Fake), []

    async def lose() -> None:
        await store.__aenter__()
        use = store.use("model")
        await use.__aenter__()
        users.append(use)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(lose())
    loop.close()

    async def again() -> None:
        async with store:
            await _used(store, "model")

    anyio.run(again)
    assert store.stats().loads == 2


# Everything at once.


class Expected:
    """What a store for two models should do: the same rules, without tasks."""

    def __init__(self) -> None:
        self.models: dict[str, tuple[str, set[str]]] = {}  # state and users, by latest use
        self.queue: list[str] = []
        self.got: dict[str, str] = {}

    def ask(self, user: str, name: str) -> None:
        if name not in self.models:
            self.queue.append(name)
        state, users = self.models.pop(name, ("waiting", set()))
        self.models[name] = state, users | {user}

    def leave(self, user: str) -> None:
        for name, (state, users) in tuple(self.models.items()):
            if user in users:
                del self.models[name]
                self.models[name] = state, users - {user}

    def end_load(self, name: str, *, succeeds: bool) -> None:
        _, users = self.models[name]
        self.models[name] = "ready", users
        if not succeeds:
            del self.models[name]
            self.got |= dict.fromkeys(users, "failure")

    def settle(self) -> None:
        """Begin the next load if there is room for it, and give models to their users."""
        while self.queue and not self.having("loading"):
            _, users = self.models[self.queue[0]]
            ready = self.having("ready")
            idle = [name for name in ready if not self.models[name][1]]
            if not users:
                del self.models[self.queue.pop(0)]
            elif len(ready) < 2:
                self.models[self.queue.pop(0)] = "loading", users
            elif idle:
                del self.models[idle[0]]
            else:
                break
        for name in self.having("ready"):
            self.got |= dict.fromkeys(self.models[name][1], name)

    def having(self, wanted: str) -> list[str]:
        return [name for name, (state, _) in self.models.items() if state == wanted]


class Failure(Exception):
    name = "failure"


async def _compare(steps: list[tuple[str, int, str]]) -> None:
    """Take these steps with a store and with `Expected`, and compare them after each."""
    expected, made = Expected(), list[Fake]()
    ends: dict[str, anyio.Event] = {}
    failing: list[str] = []

    async def load(name: str) -> Fake:
        ends[name] = anyio.Event()
        await ends[name].wait()
        if name in failing:
            failing.remove(name)
            raise Failure
        made.append(Fake(name))
        return made[-1]

    def differences() -> list[Any]:
        seen = [(one.name, one.state, one.users) for one in users.store.stats().models]
        wanted = [(name, state, len(of)) for name, (state, of) in expected.models.items()]
        got = {user: model.name for user, model in users.got.items()}
        begun = {*expected.having("loading")} <= ends.keys()
        return [] if (seen, got, begun) == (wanted, expected.got, True) else [seen, wanted, got]

    async with users_of(ModelStore(load, max_models=2)) as users:
        present, asked = list[str](), 0
        ending = [("leave", 0, ""), ("succeed", 0, "")] * len(steps)
        for step, choice, name in steps + ending:
            user = present[choice % len(present)] if present else ""
            loading = expected.having("loading")
            if step == "ask":
                asked += 1
                present.append(str(asked))
                users.ask(present[-1], name)
                expected.ask(present[-1], name)
            elif step in ("leave", "cancel") and user:
                # A use that still waits can only be cancelled.
                getattr(users, step if user in expected.got else "cancel")(user)
                present.remove(user)
                expected.leave(user)
            elif step in ("succeed", "fail") and loading:
                failing += loading if step == "fail" else []
                ends.pop(loading[0]).set()
                expected.end_load(loading[0], succeeds=step == "succeed")
            expected.settle()
            with anyio.move_on_after(3):
                await until(lambda: not differences())
            assert differences() == []
            assert sum(model.ready for model in made) <= 2
    assert not any(model.ready for model in made)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["ask", "ask", "ask", "leave", "cancel", "succeed", "succeed", "fail"]),
            st.integers(0, 5),
            st.sampled_from("abcd"),
        ),
        max_size=30,
    )
)
@settings(max_examples=60)
def test_random_uses_against_a_simple_model(
    backend: str, steps: list[tuple[str, int, str]]
) -> None:
    anyio.run(_compare, steps, backend=backend)


# Arguments.


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"load": 3}, TypeError, "callable"),
        ({"max_models": 0}, ValueError, "max_models must be at least 1, got 0"),
        ({"max_bytes": 1.5}, TypeError, "max_bytes must be an int"),
        ({"size": 3}, TypeError, "callable"),
        ({"timeout": -1}, ValueError, "timeout must be at least 0"),
        ({"name": 3}, TypeError, "name must be a str"),
    ],
    ids=str,
)
@on_asyncio
async def test_wrong_arguments_are_refused(
    arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ModelStore(**{"load": Fake, **arguments})


@on_asyncio
async def test_wrong_models_are_refused() -> None:
    def load(name: str) -> Any:
        return nn.Linear(2, 3) if name == "module" else Fake

    async with ModelStore(load) as store:
        for name, shown in (("module", "not Linear"), ("class", "not the class Fake")):
            with pytest.raises(TypeError, match=rf"load\('{name}'\) must return .*, {shown}"):
                await _used(store, name)
        with pytest.raises(TypeError, match="name must be a str, not int"):
            await _used(store, 3)  # type: ignore[arg-type]  # it is refused
