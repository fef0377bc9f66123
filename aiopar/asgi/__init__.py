"""Serving from Starlette, or from what is built on it: lifespan, errors, health, disconnects."""

from ._disconnect import DisconnectMiddleware as DisconnectMiddleware
from ._install import install as install
from ._lifespan import lifespan as lifespan
from ._service import Resource as Resource
