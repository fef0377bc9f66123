"""Helpers for tests of concurrent code and of services.

`Gate` and `Sequencer` order events without sleeping. Threads, and tasks of any event loop, can use
both. No test hangs: every wait has a time limit, and then raises a `TimeoutError` that says what
did not happen. `client` sends requests to an application without a server.
"""

from ._client import client
from ._order import Gate, Sequencer

__all__ = ["Gate", "Sequencer", "client"]


def __dir__() -> list[str]:
    return __all__
