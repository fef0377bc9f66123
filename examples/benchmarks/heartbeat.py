"""A heartbeat on the event loop, due every millisecond. A late beat means a blocked loop."""

import asyncio
import math
import time
from collections.abc import Iterable

PERIOD = 1e-3


async def beat(beats: int) -> list[float]:
    """The lateness of each beat, in milliseconds."""
    late = []
    for _ in range(beats):
        due = time.perf_counter() + PERIOD
        await asyncio.sleep(PERIOD)
        late.append((time.perf_counter() - due) * 1e3)
    return late


def p99(late: Iterable[float]) -> float:
    ordered = sorted(late)
    return ordered[math.ceil(len(ordered) * 0.99) - 1]
