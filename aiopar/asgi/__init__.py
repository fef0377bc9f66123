"""Serve from Starlette or FastAPI: lifespan, error responses, health routes, disconnects.

The extra `fastapi` installs Starlette. Starlette alone is enough.
"""

try:
    from ..serve._resource import Resource
    from ._app import install
    from ._disconnect import DisconnectMiddleware, cancel_on_disconnect
    from ._lifespan import add_resources, lifespan, remove_resources
except ModuleNotFoundError as error:
    raise ImportError("aiopar.asgi needs Starlette: pip install 'aiopar[fastapi]'") from error

__all__ = [
    "DisconnectMiddleware",
    "Resource",
    "add_resources",
    "cancel_on_disconnect",
    "install",
    "lifespan",
    "remove_resources",
]


def __dir__() -> list[str]:
    return __all__
