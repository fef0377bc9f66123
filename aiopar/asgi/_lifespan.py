"""`lifespan`: resources are open while an application serves."""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, cast

from starlette.applications import Starlette
from starlette.types import Lifespan

from .._callables import generator_kind, is_async
from .._checks import check_int, check_number, described
from .._error_handling import add_note_once
from .._errors import ServiceClosed
from ..serve import Batcher
from ._beside import beside
from ._collector import frozen, threshold
from ._service import Resource, Service, service_of
from ._termination import GRACE, Termination

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
