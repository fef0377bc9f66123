"""`lifespan`: opens resources before an application serves, and drains them after SIGTERM."""

import gc
import signal
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any, cast

import anyio
from starlette.applications import Starlette
from starlette.types import Lifespan

from .._base.arguments import check_int, check_number, described, generator_kind, is_async
from .._base.thread_state import CallerState
from .._base.tracebacks import logger
from ..executor._loop_tasks import Tasks
from ..futures._wakeup import Awaiter, awaiter_here
from ..serve import ReplicaPool
from ..serve._base_batcher import BaseBatcher
from ..serve._resource import Resource
from ._service import GRACE, OpenResources, Service, service_of

_freezing: deque[None] = deque()  # one element for each application that keeps objects frozen


@contextmanager
def _gc_frozen() -> Iterator[None]:
    """Keep all objects that exist now out of collections, until the last such block ends."""
    gc.collect()
    gc.freeze()
    _freezing.append(None)
    try:
        yield
    finally:
        _freezing.pop()
        if not _freezing:
            gc.unfreeze()


@contextmanager
def _gc_threshold(objects: int | None) -> Iterator[None]:
    """Collect after at least this many new objects, until the block ends; None: no change."""
    before, *others = gc.get_threshold()
    if objects is None or not 0 < before < objects:  # 0 means never
        yield
        return
    gc.set_threshold(objects, *others)
    try:
        yield
    finally:
        now, *others = gc.get_threshold()
        if now == objects:  # the program has not changed it
            gc.set_threshold(before, *others)


class _Termination:
    """The shutdown of a service after SIGTERM. `lifespan` documents its steps."""

    def __init__(
        self, service: Service, drain_delay: float, shutdown_timeout: float | None
    ) -> None:
        self._service = service
        self._drain_delay = drain_delay
        self._shutdown_timeout = shutdown_timeout
        # The handler may run between any two bytecodes of the loop's thread, so the handler must
        # not use the loop. It only wakes an awaiter, which is safe at any moment.
        self._first = cast(Awaiter, awaiter_here())
        self._second = cast(Awaiter, awaiter_here())
        self._passes_on = False  # whether SIGTERM goes directly to the server's handler
        self._server_handler: Callable[..., object] | signal.Handlers = signal.SIG_DFL

    @contextmanager
    def handling(self) -> Iterator[None]:
        """Handle SIGTERM before the server does, if this is the main thread."""
        handler = signal.getsignal(signal.SIGTERM)
        in_main_thread = threading.current_thread() is threading.main_thread()
        # None: the handler was set by C code, so Python can neither call nor restore it.
        if not in_main_thread or handler in (None, signal.SIG_IGN):
            yield
            return
        self._server_handler = handler  # type: ignore[assignment]  # an int is a signal.Handlers
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            # A handler that was set later may still call `_handle`.
            self._passes_on = True
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._server_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._passes_on:
            self._call_server_handler(signum, frame)
            return
        awaiter = self._second if self._service.draining else self._first
        self._service.draining = True
        awaiter.wake()
        if awaiter.waker.finished:  # the loop was closed, so `watch` has ended
            self._call_server_handler(signum, frame)

    def _call_server_handler(self, signum: int, frame: FrameType | None) -> None:
        if isinstance(self._server_handler, signal.Handlers):  # the default: the process ends
            signal.signal(signum, self._server_handler)
            signal.raise_signal(signum)
        else:
            self._server_handler(signum, frame)

    def time_left(self) -> float | None:
        """How many seconds a resource may drain."""
        if self._service.deadline is None:
            return self._shutdown_timeout
        return max(0.0, self._service.deadline - anyio.current_time())

    async def watch(self) -> None:
        """Wait for SIGTERM and take the steps. Cancelled when all resources are closed."""
        await self._first
        with anyio.move_on_after(self._drain_delay):
            await self._second
        if self._shutdown_timeout is not None:
            self._service.deadline = anyio.current_time() + self._shutdown_timeout
        self._passes_on = True
        try:
            self._call_server_handler(signal.SIGTERM, None)
        except Exception:  # noqa: BLE001 - a task must not fail
            logger.exception("the server's handler of SIGTERM failed")
        if self._shutdown_timeout is not None:
            await anyio.sleep(self._shutdown_timeout)
            await self._force()

    async def _force(self) -> None:
        logger.error("not shut down within %s s: waiting requests fail", self._shutdown_timeout)
        async with anyio.create_task_group() as tasks:
            for resource in self._service.resources:
                tasks.start_soon(_drop, resource)
            # The responses are sent meanwhile. The resources are not awaited: a kernel may hang.
            await anyio.sleep(GRACE)
            # uvicorn is shutting down already. SIGINT makes it exit at once.
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep(GRACE)
            # The server still waits for a connection or for a lifespan.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


async def _drop(resource: Resource) -> None:
    try:
        await resource.aclose(drain=False, timeout=0.0)
    except Exception:  # noqa: BLE001 - the other resources must be closed too
        logger.exception("%s failed to close", type(resource).__name__)


def lifespan(
    *resources: Resource,
    app_lifespan: Lifespan[Any] | None = None,
    gc_freeze: bool = True,
    gc_threshold: int | None = None,
    drain_delay: float = 0.0,
    shutdown_timeout: float | None = 30.0,
) -> Lifespan[Any]:
    """Make the lifespan of an application: open resources before it serves, drain them after.

    Pass the result to `FastAPI(lifespan=...)` or `Starlette(lifespan=...)`. Resources are opened in
    the order given, and closed in reverse; opening a `ReplicaPool` warms it up. A batcher is
    always closed before its pool, and a pool before its executor. If a resource fails to open, the
    resources before it are closed, and the startup fails with the error. If `app_lifespan` or a
    resource fails during the shutdown, the other resources are still drained.

    An application may start again, in any event loop: its resources are opened again. Several
    lifespans may run on one application, for example those of `FastAPI` and of an `APIRouter`, each
    with its own resources. The first to start handles SIGTERM for all, with its `drain_delay`.

    A server closes its socket as soon as SIGTERM arrives. This lifespan delays that:

    1. For `drain_delay` seconds `/readyz` fails and responses ask for their connection to be
       closed, so that the load balancer sends requests elsewhere. Requests are still answered. A
       second SIGTERM ends the delay.
    2. The server's own handler is called. The server stops listening and answers the requests that
       it has.
    3. If step 2 takes more than `shutdown_timeout` seconds, resources are closed without drain, and
       waiting requests get 503. One second later SIGINT is raised, which makes uvicorn exit. One
       second after that, SIGTERM ends the process.

    The server's handler is what `signal.getsignal` returns at startup, for example uvicorn's.
    Hypercorn and granian handle signals in the event loop or in another process, and are not
    delayed. Nothing changes if the process ignores SIGTERM, or if the application does not run in
    the main thread.

    Args:
        resources: Batchers, `ReplicaPool`, an executor, or other `Resource` objects. An
            application with an executor can start only once: the executor cannot be opened again.
        app_lifespan: The application's own lifespan. It runs while the resources are open, and may
            use them. The state that it yields is passed on.
        gc_freeze: Whether to collect garbage after the warm-up, and then to exclude all objects
            from later collections (`gc.freeze`). Else a full collection looks at the many objects
            of torch, and stalls the loop. When the last application of the process shuts down,
            `gc.unfreeze` is called.
        gc_threshold: Collect garbage only after this many new container objects, while the
            application serves (`gc.set_threshold`). A larger threshold stays, and so does 0 (never
            collect). Python's default is reached several times per batch, so 10,000 saves the event
            loop time. Large tensors in reference cycles then live longer. Applications that overlap
            in one process should set the same. None: unchanged.
        drain_delay: Seconds that your load balancer needs to see that `/readyz` fails and to react.
        shutdown_timeout: Seconds that the shutdown, or the drain of one resource, may take. None:
            no limit.

    Raises:
        TypeError: A resource lacks a method of `Resource` or is a class, `app_lifespan` is not a
            function that returns a context manager, or a number has a wrong type.
        ValueError: A duration is negative, or `gc_threshold` is below 1 or above C's `int`.

    Example:
        >>> import aiopar, torch
        >>> from aiopar.asgi import install, lifespan
        >>> from starlette.applications import Starlette
        >>> pool = aiopar.ReplicaPool(torch.nn.Linear(2, 3), ["cpu"], warmup=[torch.ones(1, 2)])
        >>> batcher = aiopar.Batcher(pool)
        >>> app = Starlette(lifespan=lifespan(pool, batcher, drain_delay=5.0))
        >>> install(app)
    """
    _check_resources(resources)
    _check_app_lifespan(app_lifespan)
    if gc_threshold is not None:
        check_int("gc_threshold", gc_threshold, at_least=1)
        if gc_threshold >= 2**31:  # `gc.set_threshold` takes a C int
            raise ValueError(f"gc_threshold must be at most {2**31 - 1}, got {gc_threshold}")
    check_number("drain_delay", drain_delay, zero=True)
    if shutdown_timeout is not None:
        check_number("shutdown_timeout", shutdown_timeout, zero=True)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[Mapping[str, Any] | None]:
        service = service_of(app)
        termination = _Termination(service, drain_delay, shutdown_timeout)
        opened = OpenResources(resources, termination.time_left)
        first = not service.lifespans
        service.lifespans.append(opened)
        watching = Tasks(CallerState())
        if first:
            service.draining, service.deadline = False, None
            # Until all resources are closed: `watch` enforces `shutdown_timeout`.
            for task in (termination.watch, *service.tasks):
                watching.spawn(task)
        try:
            async with opened.closing as stack:
                for resource in _in_order(resources):
                    await opened.open(resource)
                state = None
                if app_lifespan is not None:
                    state = await stack.enter_async_context(app_lifespan(app))
                stack.enter_context(_gc_frozen() if gc_freeze else nullcontext())
                stack.enter_context(_gc_threshold(gc_threshold))
                with termination.handling() if first else nullcontext():
                    opened.started()
                    try:
                        yield state
                    finally:
                        opened.serving = False
        finally:
            watching.cancel()
            service.lifespans.remove(opened)

    return cast(Lifespan[Any], run)  # its exact type depends on what `app_lifespan` yields


async def add_resources(app: Starlette, *resources: Resource) -> None:
    """Open more resources while an application serves; its lifespan drains them at the end.

    The resources are opened in the order that `lifespan` documents, and closed before all resources
    that were opened earlier. The health routes include them. Call this on the event loop of the
    application, for example in an endpoint. The next start of the application opens only the
    resources of `lifespan`.

    Args:
        app: A Starlette or FastAPI application.
        resources: As for `lifespan`. For their metrics call `PrometheusMetrics.add`.

    Raises:
        TypeError: `app` or a resource has a wrong type.
        RuntimeError: No lifespan of aiopar runs on this application.
        ServiceClosed: The application was closed before the resources were open.

    Example:
        >>> import aiopar, anyio
        >>> from aiopar.asgi import add_resources, lifespan
        >>> from starlette.applications import Starlette
        >>> app = Starlette(lifespan=lifespan())
        >>> batcher = aiopar.Batcher(sum, collate_fn=list)
        >>> async def main():
        ...     async with app.router.lifespan_context(app):
        ...         await add_resources(app, batcher)
        ...         return batcher.ready
        >>> anyio.run(main), batcher.ready
        (True, False)
    """
    _check_resources(resources)
    serving = [one for one in service_of(app).lifespans if one.serving]
    if not serving:
        raise RuntimeError("no lifespan of aiopar serves on this application")
    for resource in _in_order(resources):
        await serving[-1].open(resource)


async def remove_resources(app: Starlette, *resources: Resource) -> None:
    """Drain and close resources while an application serves; its health routes forget them.

    The order is that of `lifespan`, whose resources may be removed too: the next start of the
    application opens them again.

    You may also `aclose()` a resource yourself. If it came by `add_resources` and its attribute
    `closed` is true (that of a `Batcher`, `ReplicaPool` or executor), the health routes forget it.
    If it came by `lifespan`, the application is not ready until the resource is removed.

    Args:
        app: A Starlette or FastAPI application.
        resources: The resources. One that the application does not have is only closed. For their
            metrics call `PrometheusMetrics.remove`.

    Raises:
        TypeError: `app` or a resource has a wrong type.

    Example:
        >>> import aiopar, anyio
        >>> from aiopar.asgi import add_resources, lifespan, remove_resources
        >>> from starlette.applications import Starlette
        >>> app = Starlette(lifespan=lifespan())
        >>> batcher = aiopar.Batcher(sum, collate_fn=list)
        >>> async def main():
        ...     async with app.router.lifespan_context(app):
        ...         await add_resources(app, batcher)
        ...         await remove_resources(app, batcher)
        >>> anyio.run(main), batcher.ready
        (None, False)
    """
    _check_resources(resources)
    service = service_of(app)
    for resource in reversed(_in_order(resources)):
        for one in service.lifespans:
            one.forget(resource)
        await resource.aclose()


def _check_resources(resources: tuple[Resource, ...]) -> None:
    for index, resource in enumerate(resources):
        # A class, given instead of its object, has the methods of the protocol too.
        if isinstance(resource, type) or not isinstance(resource, Resource):
            raise TypeError(
                f"resource {index} must be a Resource, not {described(resource)}: it needs "
                "__aenter__, aclose(drain=..., timeout=...), ready and alive"
            )


def _check_app_lifespan(given: object) -> None:
    kind = "a coroutine function" if is_async(given) else generator_kind(given)
    if given is not None and (kind is not None or not callable(given)):
        raise TypeError(
            "app_lifespan must be a function that gives an async context manager "
            f"(contextlib.asynccontextmanager), not {kind or described(given)}"
        )


def _in_order(resources: tuple[Resource, ...]) -> list[Resource]:
    """The resources in the order given, but each after the pool or executor that it uses."""
    # By identity: other classes may define equality as they like.
    given = {id(resource): resource for resource in resources}
    found: dict[int, Resource] = {}
    for resource in resources:
        pool = resource.pool if isinstance(resource, BaseBatcher) else resource
        executor = pool._executor if isinstance(pool, ReplicaPool) else None
        for key in map(id, (executor, pool, resource)):
            if key in given:
                found[key] = given[key]
    return list(found.values())
