"""The state of a served application, for its health routes; the protocol of its resources."""

import math
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, Literal, cast

from starlette.applications import Starlette

from .._base.tracebacks import in_one_line, logger
from ..errors import ServiceClosed
from ..serve import ModelStore
from ..serve._resource import Resource

GRACE = 1.0  # seconds for each step of a shutdown that has no time left to drain


class OpenResources:
    """The resources of one lifespan, from its startup to the end of its shutdown."""

    def __init__(self, given: Iterable[Resource], time_left: Callable[[], float | None]) -> None:
        self.given = list(given)  # those of `lifespan`; some may not be open yet, or not any more
        self.opened: list[Resource] = []  # the open ones of them, in the order of their opening
        self.added: list[Resource] = []  # the open resources of `add_resources`
        self.closing = AsyncExitStack()  # closes `opened` and `added` at the end
        self.closing.push_async_exit(partial(self.close, self.opened))
        self.has_served = False  # whether the startup was completed
        self.serving = False  # like `has_served`, but False once the shutdown begins
        self._time_left = time_left

    def started(self) -> None:
        """Note that the startup is complete. Resources opened later are closed first."""
        self.closing.push_async_exit(partial(self.close, self.added))
        self.serving = self.has_served = True

    async def open(self, resource: Resource) -> None:
        """Open a resource of `lifespan`, or of `add_resources` once the startup is complete."""
        await resource.__aenter__()
        if self.has_served and not self.serving:
            await resource.aclose(drain=False, timeout=GRACE)
            raise ServiceClosed("the application was closed before its new resources were open")
        (self.added if self.has_served else self.opened).append(resource)

    @property
    def resources(self) -> list[Resource]:
        """All resources, without added ones that their owner has closed."""
        self.added[:] = [one for one in self.added if not getattr(one, "closed", False)]
        return [*self.given, *self.added]

    def forget(self, resource: Resource) -> None:
        """Do not close this resource at the end."""
        for resources in (self.given, self.opened, self.added):
            resources[:] = [one for one in resources if one is not resource]

    async def close(self, resources: list[Resource], *error: Any) -> None:
        """Close these, the last first; `error` is as for `__aexit__`."""
        stack = AsyncExitStack()
        for resource in resources:
            stack.push_async_exit(partial(self._close, resource))
        await stack.__aexit__(*error)

    async def _close(
        self, resource: Resource, kind: type[BaseException] | None, *_: object
    ) -> None:
        # An error in the shutdown is no reason to fail the callers' requests.
        if kind is None or (self.has_served and issubclass(kind, Exception)):
            await resource.aclose(drain=True, timeout=self._time_left())
        else:  # the startup failed, or the server must leave at once
            await resource.aclose(drain=False, timeout=GRACE)


class Service:
    """The state of one application."""

    def __init__(self) -> None:
        self.installed = False  # whether `install` was called
        self.stuck_after = math.inf
        self.lifespans: list[OpenResources] = []  # those that run, in the order of their startup
        self.draining = False  # whether SIGTERM has come; requests are still answered
        # When the shutdown must be over, by `anyio.current_time`; None: it has not begun, or has no
        # limit.
        self.deadline: float | None = None
        self._failing: set[str] = set()  # what has raised when it was last tried
        self.tasks: list[Callable[[], Coroutine[Any, Any, None]]] = []  # of the first lifespan

    def unready_reason(self) -> str | None:
        """Why the application should get no requests; None if it should get them."""
        if self.draining:
            return "draining"
        if not self.lifespans:
            return "no lifespan of aiopar runs on this application"
        if not all(one.serving for one in self.lifespans):
            return "not started, or closing"
        if unready := self._lacking("ready"):
            return f"not ready: {', '.join(unready)}"
        busy = [(name, getattr(one, "_seconds_busy", 0.0)) for name, one in self._named()]
        stuck = [name for name, seconds in busy if seconds > self.stuck_after]
        return f"in one call for {self.stuck_after:g} s: {', '.join(stuck)}" if stuck else None

    def dead_reason(self) -> str | None:
        """Why this process can never serve again; None if it can."""
        dead = self._lacking("alive")
        return f"never to serve again: {', '.join(dead)}" if dead else None

    def _lacking(self, quality: Literal["ready", "alive"]) -> list[str]:
        """The resources without this quality; with its error if the property raises."""
        lacking = list[str]()
        for name, resource in self._named():
            what = f"`{quality}` of {name}"
            try:
                if not getattr(resource, quality):
                    lacking.append(name)
            except Exception as error:  # noqa: BLE001  # the property of a user's class
                self.tried(what, error)
                lacking.append(f"{name}: {in_one_line(error)}")
            else:
                self.tried(what)
        return lacking

    def tried(self, what: str, error: Exception | None = None) -> None:
        """Log the error of what is tried again and again; the next one only after a success."""
        if error is None:
            self._failing.discard(what)
        elif what not in self._failing:
            self._failing.add(what)
            logger.error("%s raised", what, exc_info=error)

    @property
    def resources(self) -> list[Resource]:
        """The resources of all lifespans, and the models that are loaded in their stores."""
        return [resource for _, resource in self._named()]

    def _named(self) -> Iterator[tuple[str, Resource]]:
        resources = [resource for one in self.lifespans for resource in one.resources]
        for index, resource in enumerate(resources):
            yield f"{type(resource).__name__} (resource {index})", resource
            if isinstance(resource, ModelStore):
                for stored in resource._ready_models:
                    yield f"model {stored.name!r} of resource {index}", stored.parts[0]


def service_of(app: Starlette) -> Service:
    """The service of `app`, made on the first call by `install` or by `lifespan`."""
    if not isinstance(app, Starlette):
        raise TypeError(f"expected a Starlette or FastAPI application, got {type(app).__name__}")
    if not hasattr(app.state, "aiopar"):
        app.state.aiopar = Service()
    return cast(Service, app.state.aiopar)
