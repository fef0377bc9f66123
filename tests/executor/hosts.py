"""A worker whose host is another thread, which gets every task pickled.

It stands for a worker process or a remote actor: nothing of a task reaches the host but bytes.
"""

import pickle
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

import aiopar
from aiopar._base.devices import parse_devices
from aiopar._base.operator_threads import CoreShares
from aiopar._base.thread_state import CallerState, applied
from aiopar.executor._pool import Dispatcher, WorkerPool
from aiopar.executor._shared_queue import SharedQueue
from aiopar.executor._worker import WorkerCapabilities
from aiopar.executor._worker_thread import ThreadWorker


class HostWorker(ThreadWorker):
    """A worker that sends each task to its host and waits for the result."""

    capabilities = WorkerCapabilities(
        meetings=False, streams=False, iterate=False, shared_parameters=False
    )

    def __init__(
        self, device: torch.device, index: int, name: str, shares: CoreShares, shared: SharedQueue
    ) -> None:
        self._tasks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._host = threading.Thread(target=self._serve_tasks, name=f"{name}-host", daemon=True)
        self._host.start()
        super().__init__(device, index, name, shares, shared)
        self.ended.add_done_callback(lambda _: self._tasks.put(None))

    def run(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        state: CallerState,
    ) -> Any:
        self._tasks.put(pickle.dumps((state.portable, fn, args, kwargs)))
        result, error = pickle.loads(self._outcomes.get())  # of this very process
        if error is not None:
            raise error
        return result

    def _serve_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            self._outcomes.put(_run_pickled(task))


def _run_pickled(task: bytes) -> bytes:
    state, fn, args, kwargs = pickle.loads(task)  # of this very process
    try:
        with applied(state.torch_state()):
            return pickle.dumps((fn(*args, **kwargs), None))
    except BaseException as error:  # noqa: BLE001  # the caller gets it
        return pickle.dumps((None, error))


class HostExecutor(aiopar.DeviceExecutor):
    """An executor of these workers; the threads of their hosts are named `...-host`."""

    def __init__(self, devices: Iterable[str]) -> None:
        pool = WorkerPool(
            parse_devices(devices),
            max_pending=None,
            num_threads=None,
            thread_name_prefix="hosted",
            grows=False,
            make_worker=HostWorker,
        )
        self._dispatcher = Dispatcher(pool, synchronize=True)
