"""The statistics of an application's resources, sampled for the last 15 minutes."""

import json
import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import takewhile
from time import monotonic, time
from typing import Any

import anyio

from .._base.tracebacks import in_one_line
from ..executor._loop_tasks import Repeating
from ..executor._worker import Worker
from ..serve import ModelStore, ReplicaPool
from ..serve._base_batcher import BaseBatcher
from ..serve._prometheus import worker_pools
from ._service import Service

PERIOD = 1.0  # seconds from one sample to the next
TICK = 0.05  # seconds from one look at the loop to the next; a shorter delay may go unseen
_RECENT = 120  # samples, one per period
_STRIDE = 5  # periods from one earlier sample to the next
_EARLIER = 180  # samples, one per stride: 15 minutes
_LOOK = "the live page's look at the statistics"


class History:
    """The samples of one application, as JSON: each second for two minutes, else each fifth.

    A sample has the counts since the start, and the page makes rates of the differences. A string
    is small, and the garbage collector does not look into it.
    """

    def __init__(self, service: Service) -> None:
        self.count = 0  # how many samples were taken
        self._service = service
        self._recent: deque[tuple[float, str]] = deque(maxlen=_RECENT)
        self._earlier: deque[tuple[float, str]] = deque(maxlen=_EARLIER)

    async def record(self) -> None:
        """Take samples until the task is cancelled: a lifespan spawns it."""
        self._recent.clear()
        self._earlier.clear()
        delays: deque[float] = deque(maxlen=_STRIDE)  # of the loop, the longest of each period

        def look() -> None:
            delays[-1] = max(delays[-1], ticks.late)

        ticks = Repeating(TICK, look)
        try:
            while True:
                try:
                    self._take(statistics(self._service), delays)
                    self._service.tried(_LOOK)
                except Exception as error:  # noqa: BLE001  # a subclass may have its own `stats()`
                    self._service.tried(_LOOK, error)
                    why = f"no statistics: {in_one_line(error)}"
                    self._take({**_of_process(self._service), "unready": why}, delays)
                delays.append(0.0)
                await anyio.sleep(PERIOD)
        finally:
            ticks.cancel()

    def _take(self, sample: dict[str, Any], delays: deque[float]) -> None:
        if delays:
            sample["loop_delay"] = delays[-1]
        self._recent.append((sample["at"], json.dumps(sample)))
        if self.count % _STRIDE == 0:
            sample["loop_delay"] = max(delays, default=None)
            self._earlier.append((sample["at"], json.dumps(sample)))
        self.count += 1

    def since(self, count: int) -> Iterator[str]:
        """The samples after the first `count`; for 0 also the earlier ones."""
        if not count and self._recent:
            first = self._recent[0][0]
            yield from (text for _, text in takewhile(lambda one: one[0] < first, self._earlier))
        new = min(self.count - count, len(self._recent))
        yield from (self._recent[index][1] for index in range(-new, 0))


def statistics(service: Service) -> dict[str, Any]:
    """The statistics of this moment; they can be written as JSON."""
    resources = service.resources
    batchers = [one for one in resources if isinstance(one, BaseBatcher)]
    pools = [one for one in resources if isinstance(one, ReplicaPool)]
    pools += [one.pool for one in batchers if one.pool is not None]
    return {
        **_of_process(service),
        "batchers": [_batcher(one) for one in dict.fromkeys(batchers)],
        "pools": [{"name": one.name, **asdict(one.stats())} for one in dict.fromkeys(pools)],
        "stores": [
            {"name": one.name, **asdict(one.stats())}
            for one in resources
            if isinstance(one, ModelStore)
        ],
        "executors": [
            {"name": one.thread_name_prefix, "workers": [_worker(each) for each in one.workers]}
            for one in worker_pools(resources)
        ],
    }


def _of_process(service: Service) -> dict[str, Any]:
    """A sample without the statistics of resources."""
    parent = multiprocessing.parent_process()
    return {
        "at": monotonic(),
        "time": time(),
        "pid": os.getpid(),
        "parent": None if parent is None else parent.pid,
        "unready": service.unready_reason(),
        "dead": service.dead_reason(),
        "loop_delay": None,
        **dict.fromkeys(("batchers", "pools", "stores", "executors"), ()),
    }


def _batcher(batcher: BaseBatcher[Any, Any]) -> dict[str, Any]:
    settings, runners = batcher._settings, batcher._scheduler.runners
    return {
        "name": batcher.name,
        "max_batch_size": settings.max_batch_size,
        "max_pending": settings.max_pending,
        "concurrency": sum(runner.in_service for runner in runners),
        **asdict(batcher.stats()),
    }


def _worker(worker: Worker) -> dict[str, Any]:
    return {**asdict(worker.stats()), "device": str(worker.device), "label": worker.label}
