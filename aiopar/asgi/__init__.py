"""Serving from Starlette, or from what is built on it: lifespan, errors, health, disconnects.

It is in the extra `fastapi`; Starlette alone will do.
"""

try:
    from ._app import install
    from ._disconnect import DisconnectMiddleware
    from ._lifespan import Resource, lifespan
except ModuleNotFoundError as error:
    raise ImportError("aiopar.asgi needs Starlette: pip install 'aiopar[fastapi]'") from error

__all__ = ["DisconnectMiddleware", "Resource", "install", "lifespan"]
