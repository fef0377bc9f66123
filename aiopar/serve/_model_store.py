"""`ModelStore`: models that are loaded when they are first used, and evicted to make room."""

import gc
import math
import sys
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Generic, Self, TypeVar, cast, overload
from weakref import ref

import anyio.lowlevel
from torch import nn

from .._base.arguments import (
    check_bound,
    check_callable,
    check_instance,
    check_int,
    check_timeout,
    described,
    is_async,
    short_repr,
)
from .._base.forking import ReentrantLock
from .._base.thread_state import CallerState
from .._base.tracebacks import logger, own_traceback
from ..errors import DeadlineExceeded, ServiceClosed
from ..executor._executor import DeviceExecutor
from ..executor._loop_tasks import Tasks, is_cancellation
from ..futures._future import Future, running_future
from ..futures._semaphore import Semaphore
from ..futures._waiting import cancel_scope, heeding_ctrl_c
from ._base_batcher import BaseBatcher
from ._model_size import bytes_of, modules_in
from ._replica_pool import ReplicaPool
from ._resource import Resource
from ._settings import condition
from ._stats import ModelState, ModelStats, StoreStats

Model = TypeVar("Model", bound=Resource)


class StoredModel:
    """A model of a store, from the first use that asks for it until it is evicted."""

    def __init__(self, name: str, expected: int) -> None:
        self.name = name
        self.state: ModelState = "waiting"
        self.users = Semaphore(math.inf)  # a permit per use, also while the use waits
        self.ready: Future[Any] = running_future()
        self.parts: tuple[Any, ...] = ()  # the model and its pool, once they are loaded
        self.bytes = expected

    def drop(self) -> None:
        """Let the memory of the closed model be freed."""
        for part in self.parts:
            if isinstance(part, BaseBatcher):
                part._scheduler.use_runners([])  # the scheduler and its runners are a cycle
        self.parts, self.ready = (), running_future()


class _Shelf:
    """The models of a store from its opening to its closing, in the order of their latest use."""

    def __init__(self, caller: CallerState) -> None:
        self.tasks = Tasks(caller)
        self.turn = Semaphore(1)  # held to load a model
        # A replica on the worker that loads would wait, so the worker is no other executor's.
        self.loader = DeviceExecutor(["cpu"], thread_name_prefix="aiopar-load")
        self.lock = ReentrantLock()  # a coroutine that is collected ends its use at any line
        self.closing = False
        self.named: OrderedDict[str, StoredModel] = OrderedDict()  # what a use finds
        self.resident: dict[StoredModel, None] = {}  # what is in memory
        self.changed: Future[None] = running_future()  # done when a use ends

    def enter(self, name: str, expected: int) -> tuple[StoredModel, bool]:
        """Begin a use; return the model, and whether it must be loaded. Called under the lock."""
        if self.closing or self.tasks.finished:
            raise ServiceClosed("the store is closed")
        new = name not in self.named
        stored = self.named.setdefault(name, StoredModel(name, expected))
        self.named.move_to_end(name)
        stored.users.try_acquire()
        return stored, new

    def leave(self, stored: StoredModel) -> None:
        """End a use."""
        with self.lock:
            stored.users.release()
            if self.named.get(stored.name) is stored:
                self.named.move_to_end(stored.name)
            changed, self.changed = self.changed, running_future()
        changed.set_result(None)

    def forget(self, stored: StoredModel, *, if_unused: bool = False) -> bool:
        """Make the next use load the model again; return whether this was done."""
        with self.lock:
            if if_unused and stored.users.held:
                return False
            if self.named.get(stored.name) is stored:
                del self.named[stored.name]
            return True

    def take_idle(self) -> StoredModel | None:
        """Forget and return the least recently used model that nobody uses."""
        for stored in self.all:
            if stored.state == "ready" and self.forget(stored, if_unused=True):
                return stored
        return None

    @property
    def all(self) -> list[StoredModel]:
        """All models; those that are being closed come first."""
        with self.lock:
            closing = [one for one in self.resident.copy() if one.state == "closing"]
            return [*closing, *self.named.values()]


class ModelStore(Generic[Model]):
    """Models that are loaded when they are first used, and evicted to make room.

    `async with store.use("name") as batcher` gives what `load("name")` has returned. All uses that
    wait for a model share one load. A use that is cancelled does not stop the load. If a load
    fails, all uses that wait for it raise its error, and the next use tries again.

    If there is no room for another model, the least recently used model is evicted: it is drained
    and closed, and its memory is freed, before the new model is opened. A model in use is never
    evicted. If all are in use, the new use waits, because a use is usually short; it is refused
    (`DeadlineExceeded`) after `timeout`. So do not wait for a second model while you use a first
    one, unless both fit.

    One model is loaded at a time. A load that has not begun is dropped when no use waits for it any
    more.

    `async with` opens the store, in any event loop, also after it was closed. It belongs to this
    loop: models are loaded and opened there. Uses may come from any event loop.
    `aiopar.asgi.lifespan(store)` opens and drains it, and shows its models in the health routes and
    on the live page. A model that is being loaded does not make the application unready.

    Args:
        load: Called with a name; returns a `Batcher`, a `ContinuousBatcher`, a `ReplicaPool` or
            another `aiopar.asgi.Resource`, not open. The pool of a batcher is opened and closed
            with it, and both get the name. A plain function runs on a worker of its own, a
            coroutine function on the event loop, both under the state of the code that made the
            store.
        max_bytes: The most bytes of all loaded models. A model counts as its parameters and
            buffers, each memory once, times the number of different devices of its pool. The bytes
            are known when `load` has returned: until then, a model of unknown size may exceed them.
            None: no bound.
        max_models: The most loaded models. None: no bound.
        size: Returns the bytes of a model that `load` returned. None: as above. The modules are
            found in the attributes and closures of the function that a batcher calls.
        timeout: Seconds that a use waits for its model. The load goes on then. None: no limit.
        name: The name in metrics and on the live page.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A bound is below 1, or `timeout` below 0.

    Example:
        >>> import asyncio, aiopar, torch
        >>> def load(name):
        ...     return aiopar.Batcher(torch.nn.Linear(2, {"small": 3, "large": 5}[name]).eval())
        >>> async def main():
        ...     async with aiopar.ModelStore(load, max_models=1) as store:
        ...         for name in ("small", "large"):
        ...             async with store.use(name) as batcher:
        ...                 print(name, (await batcher(torch.ones(2))).shape)
        ...         return store.stats()
        >>> asyncio.run(main())
        small torch.Size([3])
        large torch.Size([5])
        StoreStats(models=(ModelStats(name='large', state='ready', bytes=60, users=0),), loads=2,
        failed_loads=0, evictions=1)
    """

    @overload
    def __init__(
        self,
        load: Callable[[str], Awaitable[Model]],
        *,
        max_bytes: int | None = None,
        max_models: int | None = None,
        size: Callable[[Model], int] | None = None,
        timeout: float | None = 60.0,
        name: str = "models",
    ) -> None: ...

    @overload
    def __init__(
        self,
        load: Callable[[str], Model],
        *,
        max_bytes: int | None = None,
        max_models: int | None = None,
        size: Callable[[Model], int] | None = None,
        timeout: float | None = 60.0,
        name: str = "models",
    ) -> None: ...

    def __init__(
        self,
        load: Callable[[str], Any],
        *,
        max_bytes: int | None = None,
        max_models: int | None = None,
        size: Callable[[Model], int] | None = None,
        timeout: float | None = 60.0,
        name: str = "models",
    ) -> None:
        if not is_async(load):
            check_callable(load)
        if size is not None:
            check_callable(size)
        check_instance("name", name, str)
        self.name = name
        self._load = load
        self._max_bytes: float = check_bound("max_bytes", max_bytes) or math.inf
        self._max_models: float = check_bound("max_models", max_models) or math.inf
        self._size: Callable[[Model], int | None] = size or bytes_of
        self._timeout = check_timeout(timeout)
        self._caller = CallerState()
        self._sizes: dict[str, int] = {}  # the bytes of all models that were ever loaded
        self._loads = self._failed_loads = self._evictions = 0
        self._shelf: _Shelf | None = None
        self._opening = ReentrantLock()
        self._listeners: list[Callable[[StoredModel], object]] = []
        """Called when a model is ready, and again when it is closed."""

    @short_repr
    def __repr__(self) -> str:
        opened = self._shelf is not None
        state = condition(self.closed, opened, self.ready)
        return f"{self.name!r}, {len(self._ready_models)} loaded, {state}"

    @property
    def ready(self) -> bool:
        """Whether the store is open, and not closing."""
        return self._shelf is not None and not self._shelf.closing

    @property
    def closed(self) -> bool:
        """Whether `aclose` was called since the store was opened."""
        return self._shelf is not None and self._shelf.closing

    @property
    def alive(self) -> bool:
        """Always True: the health routes ask each loaded model too."""
        return True

    def stats(self) -> StoreStats:
        """A snapshot of every model, the least recently used first."""
        shown = () if self._shelf is None else self._shelf.all
        models = [ModelStats(one.name, one.state, one.bytes, one.users.held) for one in shown]
        return StoreStats(tuple(models), self._loads, self._failed_loads, self._evictions)

    @property
    def _ready_models(self) -> list[StoredModel]:
        shown = () if self._shelf is None else self._shelf.all
        return [one for one in shown if one.state == "ready"]

    @asynccontextmanager
    async def use(
        self,
        name: str,
        *,
        timeout: float | None = None,  # noqa: ASYNC109  # of the wait, not of the use
    ) -> AsyncIterator[Model]:
        """Use a model; load it if it is not loaded. It is not evicted until the block is left.

        Args:
            name: What `load` is called with.
            timeout: Seconds to wait for the model. None: the store's.

        Yields:
            What `load(name)` has returned, open. Do not keep it after the block.

        Raises:
            DeadlineExceeded: The model was not ready in time.
            ServiceClosed: The store is not open.
            TypeError: `name` is not a str, or `load` returned something else than a `Resource`.
            ValueError: The model has more than `max_bytes`.
            Exception: What `load`, or the opening of the model, raised.
        """
        check_instance("name", name, str)
        timeout = self._timeout if timeout is None else check_timeout(timeout)
        shelf = self._shelf
        if shelf is None:
            raise ServiceClosed("the store is not open: `async with store`")
        stored = self._enter(shelf, name)
        try:
            with cancel_scope(timeout):
                await stored.ready
            if not stored.ready.done():
                raise DeadlineExceeded(
                    f"model {name!r} was not ready after {timeout:g} s: it is {stored.state}"
                )
            yield cast(Model, stored.ready.value())
        finally:
            shelf.leave(stored)
            del stored  # its future may hold the error, whose traceback holds this frame

    def _enter(self, shelf: _Shelf, name: str) -> StoredModel:
        with shelf.lock:  # after the store is closed, no load begins
            stored, new = shelf.enter(name, self._sizes.get(name, 0))
            if new:
                ended = partial(self._load_ended, shelf, stored)
                shelf.tasks.spawn(partial(self._take_turn, shelf, stored), ended)
        return stored

    # Loading, in a task of the loop that opened the store.

    async def _take_turn(self, shelf: _Shelf, stored: StoredModel) -> None:
        try:
            async with shelf.turn:
                if not await self._make_room(shelf, stored):
                    return
                model = await self._load_now(shelf, stored)
                stored.state = "ready"
                self._loads += 1
                self._tell(stored)
                stored.ready.set_result(model)
        except BaseException as error:  # the waiting uses raise it
            if is_cancellation(error):
                raise
            self._failed_loads += 1
            self._load_ended(shelf, stored, own_traceback(error))
        finally:
            del stored  # as in `use`

    async def _make_room(self, shelf: _Shelf, stored: StoredModel) -> bool:
        """Evict models until there is room; False if no use waits for one that is not loaded."""
        try:
            if stored.bytes > self._max_bytes:
                most = f"max_bytes ({self._max_bytes})"
                raise ValueError(
                    f"model {stored.name!r} has {stored.bytes} bytes, more than {most}"
                )
            while stored.parts or not shelf.forget(stored, if_unused=True):
                changed = shelf.changed  # read first: a use may end after the look
                needed = stored.bytes + sum(one.bytes for one in shelf.resident)
                if needed <= self._max_bytes and len(shelf.resident) < self._max_models:
                    stored.state = "loading"
                    return True
                stored.state = "waiting"
                idle = shelf.take_idle()
                await (changed if idle is None else self._evict(shelf, idle))
            return False
        finally:
            del stored

    async def _evict(self, shelf: _Shelf, stored: StoredModel) -> None:
        modules = [ref(module) for module in modules_in(stored.parts[0])]
        await self._close(shelf, stored, drain=True)
        self._evictions += 1
        stored.drop()
        await anyio.lowlevel.checkpoint()  # trio still holds tasks that have just ended
        await shelf.loader.run_sync(_collect, modules)

    async def _load_now(self, shelf: _Shelf, stored: StoredModel) -> Model:
        """Load a model, make room for it, and open it."""
        model: Any = None
        try:
            model = await self._loaded(shelf, stored.name)
            size = await shelf.loader.run_sync(self._size, model)
            if size is None and self._max_bytes < math.inf:
                raise TypeError(
                    f"no module was found in the {type(model).__name__} of load({stored.name!r}): "
                    "max_bytes then needs size, a function from the model to its bytes"
                )
            stored.bytes = self._sizes[stored.name] = check_int("size", size or 0, at_least=0)
            stored.parts = (model,)
            if isinstance(model, BaseBatcher) and model.pool is not None:
                stored.parts = (model, model.pool)
            for part in stored.parts:
                if isinstance(part, BaseBatcher | ReplicaPool):
                    part.name = stored.name
            await self._make_room(shelf, stored)
            shelf.resident[stored] = None
            try:
                await model.__aenter__()
            except Exception:
                await self._close(shelf, stored, drain=False)
                raise
            return cast(Model, model)
        finally:
            del stored, model

    async def _loaded(self, shelf: _Shelf, name: str) -> Any:
        """What `load` returns."""
        if is_async(self._load):
            model = await self._load(name)
        else:
            call = shelf.loader.run_sync(self._load, name, abandon_on_cancel=True)
            model = await call
        if isinstance(model, type) or not isinstance(model, Resource):
            raise TypeError(
                f"load({name!r}) must return a Batcher, a ContinuousBatcher, a ReplicaPool or "
                f"another Resource, not {described(model)}"
            )
        return model

    def _load_ended(
        self, shelf: _Shelf, stored: StoredModel, error: BaseException | None = None
    ) -> None:
        if not stored.ready.done():
            shelf.forget(stored)  # the next use tries again
            closed = f"the store was closed before model {stored.name!r} was loaded"
            stored.ready.set_exception(error or ServiceClosed(closed))

    # Opening and closing.

    async def __aenter__(self) -> Self:
        shelf = self._shelf
        if shelf is not None and shelf.tasks.finished:
            await self.aclose(drain=False)  # its loop was closed, so its uses may never end
        elif shelf is not None and shelf.closing:
            await self.aclose()
        with self._opening:
            if self._shelf is shelf and not self.ready:
                self._shelf = _Shelf(self._caller)
        return self

    async def __aexit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        await self.aclose(drain=exc_type is None)

    async def aclose(
        self,
        *,
        drain: bool = True,
        timeout: float | None = None,  # noqa: ASYNC109  # the store closes after the timeout
    ) -> None:
        """Refuse new uses, wait for the present ones, then close all models.

        `aclose` may be called again. `async with` opens the store again.

        Args:
            drain: Whether to wait for the uses. If False, uses that wait for a model and requests
                that wait for a batcher get `ServiceClosed`.
            timeout: The longest wait, in seconds; then as without `drain`.
        """
        timeout = check_timeout(timeout)
        shelf = self._shelf
        if shelf is None:
            return
        with shelf.lock:
            shelf.closing = True
        closed = False
        try:
            with cancel_scope(timeout), heeding_ctrl_c():
                while drain and (busy := [one for one in shelf.all if one.users.held]):
                    await busy[0].users.wait_idle()
                await self._close_all(shelf, drain=drain)
                closed = True
        finally:
            # A coroutine that is being closed must not wait.
            if not closed and not isinstance(sys.exception(), GeneratorExit):
                with cancel_scope(shield=True):
                    await self._close_all(shelf, drain=False, at_once=True)
            shelf.loader.shutdown(wait=False)

    async def _close_all(self, shelf: _Shelf, *, drain: bool, at_once: bool = False) -> None:
        shelf.tasks.cancel()  # the loads
        if not (at_once or shelf.tasks.finished):
            await shelf.turn.wait_idle()
        for stored in tuple(shelf.resident):
            await self._close(shelf, stored, drain=drain, timeout=0.0 if at_once else None)

    async def _close(self, shelf: _Shelf, stored: StoredModel, **how: Any) -> None:
        shelf.forget(stored)
        stored.state = "closing"
        for part in stored.parts:  # the batcher before its pool
            try:
                await part.aclose(**how)
            except Exception:  # noqa: BLE001  # the other models are closed too
                logger.exception("model %r failed when it was closed", stored.name)
        shelf.resident.pop(stored, None)
        self._tell(stored)

    def _tell(self, stored: StoredModel) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(stored)
            except ValueError:  # another batcher has the name
                logger.exception("model %r is not in the metrics", stored.name)


def _collect(modules: list[ref[nn.Module]]) -> None:
    """Free these modules, whose owners are dropped, also from reference cycles."""
    if any(module() is not None for module in modules):
        gc.collect()
