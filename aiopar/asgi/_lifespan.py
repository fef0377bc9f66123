"""`lifespan`: resources are open while an application serves."""

import gc
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from types import FrameType
from typing import Any, Protocol, cast, runtime_checkable

import anyio
from starlette.applications import Starlette
from starlette.types import Lifespan

from .._base.arguments import check_int, check_number, described, generator_kind, is_async
from .._base.tracebacks import add_note_once, logger
from ..errors import ServiceClosed
from ..futures._wakeup import Awaiter, awaiter_here
from ..serve import Batcher
from ._disconnect import beside


class _Collector:
    """What all applications want of it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._freezing = 0
        """How many."""
        self._thresholds: list[int] = []
        self._threshold_before = self._threshold_set = 0

    def freeze(self) -> None:
        gc.collect()
        with self._lock:
            self._freezing += 1
            gc.freeze()

    def unfreeze(self) -> None:
        with self._lock:
            self._freezing -= 1
            if not self._freezing:
                gc.unfreeze()

    def add_threshold(self, objects: int) -> None:
        with self._lock:
            if not self._thresholds:
                self._threshold_before = self._threshold_set = gc.get_threshold()[0]
            self._thresholds.append(objects)
            self._set_threshold()

    def remove_threshold(self, objects: int) -> None:
        with self._lock:
            self._thresholds.remove(objects)
            self._set_threshold()

    def _set_threshold(self) -> None:
        now, *others = gc.get_threshold()
        # Somebody's own choice stays: never to collect (0), and what was set meanwhile.
        if now == self._threshold_set and now > 0:
            self._threshold_set = max([self._threshold_before, *self._thresholds])
            gc.set_threshold(self._threshold_set, *others)


_collector = _Collector()


@contextmanager
def frozen() -> Iterator[None]:
    """What there is now is left out of collections, until the last of these blocks ends."""
    _collector.freeze()
    try:
        yield
    finally:
        _collector.unfreeze()


@contextmanager
def threshold(objects: int) -> Iterator[None]:
    """A collection begins for `objects` new ones at least, inside of this block."""
    _collector.add_threshold(objects)
    try:
        yield
    finally:
        _collector.remove_threshold(objects)


@runtime_checkable
class Resource(Protocol):
    """What `lifespan` opens and drains: a `Batcher`, a `ReplicaPool`, or one of your own."""

    @property
    def ready(self) -> bool:
        """Warmed up, and not closing."""

    @property
    def alive(self) -> bool:
        """False when it can never serve again in this process."""

    async def __aenter__(self) -> Any:
        """Open it: when this returns it is ready."""

    async def aclose(self, *, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109 - of the drain
        """Take nothing new, finish what was taken (or, without `drain`, drop it), close.

        After `timeout` seconds those who still wait get `ServiceClosed`. May be called again, also
        while it still drains: without `drain`, or with a shorter `timeout`, that is cut short.
        """


class Service:
    """The state of one application, from its startup to its end."""

    def __init__(self) -> None:
        self.installed = False
        self.draining = False
        """The service ends: requests are still answered, but no more should be sent."""
        self.has_served = False
        """Its startup was completed: what its resources have accepted is worth a drain."""
        self._resources: tuple[Resource, ...] | None = None
        self._started = False

    @contextmanager
    def running(self, resources: tuple[Resource, ...]) -> Iterator[None]:
        """From the moment when the resources are being opened until they are closed."""
        if self._resources is not None:
            raise RuntimeError(
                "a lifespan of aiopar runs on this application already: "
                "hand all its resources to that one"
            )
        self._resources = resources
        self.draining = self.has_served = False
        try:
            yield
        finally:
            self._resources = None

    @contextmanager
    def serving(self) -> Iterator[None]:
        """While requests are served: everything is open and warmed up."""
        self._started = self.has_served = True
        try:
            yield
        finally:
            self._started = False

    def unready_reason(self) -> str | None:
        """Why no requests should be sent here; None: send them."""
        if self.draining:
            return "draining"
        if self._resources is None and not self.has_served:
            return "no lifespan of aiopar runs on this application"
        if not self._started:
            return "not started, or closing"
        unready = [name for name, resource in self._named() if not resource.ready]
        return f"not ready: {', '.join(unready)}" if unready else None

    def dead_reason(self) -> str | None:
        """Why this process can never serve again; None: it can."""
        dead = [name for name, resource in self._named() if not resource.alive]
        return f"never to serve again: {', '.join(dead)}" if dead else None

    def _named(self) -> Iterator[tuple[str, Resource]]:
        for index, resource in enumerate(self._resources or ()):
            yield f"{type(resource).__name__} (resource {index})", resource


def service_of(app: Starlette) -> Service:
    """The one of this application: `install` and `lifespan` come in any order."""
    if not isinstance(app, Starlette):
        raise TypeError(f"expected a Starlette or FastAPI application, got {type(app).__name__}")
    if not hasattr(app.state, "aiopar"):
        app.state.aiopar = Service()
    return cast(Service, app.state.aiopar)


GRACE = 1.0
"""Seconds for each step that is left when there is no time to drain."""

_Handler = Callable[[int, FrameType | None], object]


class Termination:
    """One end of a service: `lifespan` says what it consists of. Made in its event loop."""

    def __init__(
        self,
        service: Service,
        resources: tuple[Resource, ...],
        drain_delay: float,
        shutdown_timeout: float | None,
    ) -> None:
        self._service = service
        self._resources = resources
        self._drain_delay = drain_delay
        self._shutdown_timeout = shutdown_timeout
        self._deadline: float | None = None
        # Woken by the handler, which may run between any two steps of the loop's thread. That is
        # no place to touch the loop: a waker's `post` is made for any thread, and for any moment.
        self._first = cast(Awaiter, awaiter_here())
        self._second = cast(Awaiter, awaiter_here())
        self._handed_on = False
        self._server_handler: _Handler | signal.Handlers = signal.SIG_DFL

    @contextmanager
    def handling(self) -> Iterator[None]:
        """SIGTERM comes here first, if this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handler = signal.getsignal(signal.SIGTERM)
        # None: installed by other means than Python's, and could not be called or put back.
        if handler is None or handler == signal.SIG_IGN:
            yield
            return
        self._server_handler = handler  # type: ignore[assignment]  # an int is one of Handlers
        signal.signal(signal.SIGTERM, self._handle)
        try:
            yield
        finally:
            # Who has put a handler over this one calls it, or puts it back: then it hands on.
            self._handed_on = True
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._server_handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        # Called in the main thread between any two of its steps, also between two of these: what
        # may then happen twice is a mark that is set, or a waiter that is woken. A signal just
        # before the loop goes to sleep is seen when it wakes next; uvicorn's does in 0.1 s.
        if self._handed_on:
            self._call_server_handler(signum, frame)
            return
        watching = self._second if self._service.draining else self._first
        self._service.draining = True
        watching.wake()
        if watching.waker.finished:  # the loop was closed under this: nobody is told there
            self._call_server_handler(signum, frame)

    def _call_server_handler(self, signum: int, frame: FrameType | None) -> None:
        if isinstance(self._server_handler, signal.Handlers):  # the default: the process ends
            signal.signal(signum, self._server_handler)
            signal.raise_signal(signum)
        else:
            self._server_handler(signum, frame)

    def time_left(self) -> float | None:
        """Seconds that a resource may drain now."""
        if self._deadline is None:
            return self._shutdown_timeout
        return max(0.0, self._deadline - anyio.current_time())

    async def watch(self) -> None:
        """Keep to the times, from the first SIGTERM on; cancelled when all is closed."""
        await self._first
        with anyio.move_on_after(self._drain_delay):
            await self._second
        if self._shutdown_timeout is not None:
            self._deadline = anyio.current_time() + self._shutdown_timeout
        self._handed_on = True
        self._call_server_handler(signal.SIGTERM, None)
        if self._shutdown_timeout is not None:
            await anyio.sleep(self._shutdown_timeout)
            await self._force()

    async def _force(self) -> None:
        logger.error("not shut down within %s s: waiting requests fail", self._shutdown_timeout)
        async with anyio.create_task_group() as closing:
            for resource in self._resources:
                closing.start_soon(_drop, resource)
            # Their answers are on the way, and the server may leave by itself. Nobody waits for the
            # resources: one may be stuck in a kernel.
            await anyio.sleep(GRACE)
            # As Ctrl-C: to uvicorn, which is leaving already, it says to leave at once.
            signal.raise_signal(signal.SIGINT)
            await anyio.sleep(GRACE)
            # It still waits, for a connection to close or for a lifespan to end.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)


async def _drop(resource: Resource) -> None:
    try:
        # Nor is what runs waited for: its callers need the time for their answers.
        await resource.aclose(drain=False, timeout=0.0)
    except Exception:  # noqa: BLE001 - the other resources' waiters are to be let go too
        logger.exception("%s failed to close", type(resource).__name__)


# `gc.set_threshold` takes a C int.
_MOST_OBJECTS = 2**31 - 1


def lifespan(
    *resources: Resource,
    app_lifespan: Lifespan[Any] | None = None,
    gc_freeze: bool = True,
    gc_threshold: int | None = 10_000,
    drain_delay: float = 0.0,
    shutdown_timeout: float | None = 30.0,
) -> Lifespan[Any]:
    """The lifespan of an application: opens the resources before it serves, drains them after.

    For `FastAPI(lifespan=...)` and `Starlette(lifespan=...)`. Resources are opened in their order
    (a `ReplicaPool` is warmed up by that) and closed in reverse; but the pool of a `Batcher` always
    before it, so that the batcher is drained first, in whichever order the two are given. One that
    fails to open fails the startup with its own error, after those before it were closed. An error
    of the shutdown (of `app_lifespan`, or of a resource that closes) comes out when all others were
    drained as well.

    What SIGTERM does, which the server would answer by closing its socket at once:

    1. For `drain_delay` seconds `/readyz` fails, and responses ask for their connection to be
       closed, while requests are still taken and answered: who balances the load learns that it
       should send them elsewhere. A second SIGTERM ends this delay.
    2. The server's own handler is called. It stops listening and answers what is in flight.
    3. Where that takes more than `shutdown_timeout` seconds: resources are closed without drain,
       so that who waits for them gets 503; a second later the server is interrupted (SIGINT, by
       which uvicorn forces its exit), and a second after that the process ends by SIGTERM.

    The server's handler is what `signal.getsignal` finds at startup, as uvicorn's. A server that
    takes signals elsewhere (hypercorn and granian: in the event loop, or in another process) is not
    delayed. Where the process ignores SIGTERM, and outside of the main thread, nothing is changed.

    Args:
        resources: `Batcher`, `ReplicaPool`, or other `Resource` objects. Those two cannot be
            opened again: make new ones for each start of an application.
        app_lifespan: The application's own lifespan. It runs while the resources are open, and
            may use them; the state that it yields is passed on.
        gc_freeze: Once all is warmed up, collect garbage and take what is left out of later
            collections (`gc.freeze`), until shutdown (of the last such application in the process).
            After `import torch` some 170,000 objects would be looked through by each full
            collection, which stalls the loop for 36 to 155 ms, by machine.
        gc_threshold: While it serves, collect garbage when so many more container objects exist
            than at the last collection (`gc.set_threshold`; a larger threshold stays, and 0, which
            is never). Python's own, 700 or 2,000, is reached several times by the requests of one
            batch, none of which is garbage; that took a seventh of the event loop's time. Lower it
            where large tensors get into reference cycles. None: as it is.
        drain_delay: Seconds; as long as it takes your load balancer to see that `/readyz` fails
            and to act on it. 0: none.
        shutdown_timeout: Seconds; None: as long as the requests take. Also the longest that one
            resource may drain.

    Raises:
        TypeError: A resource has not the methods of `Resource`, or is a class; `app_lifespan` is no
            function that gives a context manager; a number is none.
        ValueError: A duration is negative, or `gc_threshold` below 1 or beyond C's `int`.
        ServiceClosed: A resource was closed before (when the application starts).

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
    if app_lifespan is not None:
        _check_app_lifespan(app_lifespan)
    _check_numbers(gc_threshold, drain_delay, shutdown_timeout)

    @asynccontextmanager
    async def run(app: Starlette) -> AsyncIterator[Mapping[str, Any] | None]:
        service = service_of(app)
        with service.running(resources):
            end = Termination(service, resources, drain_delay, shutdown_timeout)
            # Outermost: what keeps to the times goes on until everything is closed.
            async with beside(end.watch), AsyncExitStack() as stack:
                for resource in _in_order(resources):
                    await _open(resource, stack, service, end)
                state = None
                if app_lifespan is not None:
                    state = await stack.enter_async_context(app_lifespan(app))
                if gc_freeze:
                    stack.enter_context(frozen())
                if gc_threshold is not None:
                    stack.enter_context(threshold(gc_threshold))
                with end.handling(), service.serving():
                    yield state

    return cast(Lifespan[Any], run)  # which of the two it is depends on what `app_lifespan` yields


def _check_resources(resources: tuple[Resource, ...]) -> None:
    for index, resource in enumerate(resources):
        # The class of one has all those names as well.
        if isinstance(resource, type) or not isinstance(resource, Resource):
            raise TypeError(
                f"resource {index} must be a Resource, not {described(resource)}: it needs "
                "__aenter__, aclose(drain=..., timeout=...), ready and alive"
            )


def _check_app_lifespan(given: object) -> None:
    kind = "a coroutine function" if is_async(given) else generator_kind(given)
    if kind is not None or not callable(given):
        raise TypeError(
            "app_lifespan must be a function that gives an async context manager "
            f"(contextlib.asynccontextmanager), not {kind or described(given)}"
        )


def _check_numbers(
    gc_threshold: int | None, drain_delay: float, shutdown_timeout: float | None
) -> None:
    if gc_threshold is not None:
        check_int("gc_threshold", gc_threshold, at_least=1)
        if gc_threshold > _MOST_OBJECTS:
            raise ValueError(f"gc_threshold must be at most {_MOST_OBJECTS}, got {gc_threshold}")
    check_number("drain_delay", drain_delay, zero=True)
    if shutdown_timeout is not None:
        check_number("shutdown_timeout", shutdown_timeout, zero=True)


def _in_order(resources: tuple[Resource, ...]) -> list[Resource]:
    """As they are given, but each `Batcher` behind its pool, which it needs to its end."""
    # By identity: what equality means to resources of others is not known.
    found: dict[int, Resource] = {}
    for resource in resources:
        pool = resource.pool if isinstance(resource, Batcher) else None
        if pool is not None and any(pool is other for other in resources):
            found.setdefault(id(pool), pool)
        found.setdefault(id(resource), resource)
    return list(found.values())


async def _open(
    resource: Resource, stack: AsyncExitStack, service: Service, end: Termination
) -> None:
    try:
        await resource.__aenter__()
    except ServiceClosed as error:  # an application that it served has ended
        add_note_once(error, "make a new one for each start of the application")
        raise

    # Not by `__aexit__`, which has no limit of time.
    async def close(kind: type[BaseException] | None, *_: object) -> None:
        # An error of the shutdown, perhaps of another resource, is not the callers' fault.
        if kind is None or (service.has_served and issubclass(kind, Exception)):
            await resource.aclose(drain=True, timeout=end.time_left())
        else:  # it has not started, or was made to leave at once
            await resource.aclose(drain=False, timeout=GRACE)

    stack.push_async_exit(close)
