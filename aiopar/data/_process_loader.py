"""torch's `DataLoader` with its processes, as a loader of ours needs it."""

import os
from signal import strsignal
from typing import Any

import torch
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


class Processes(_MultiProcessingDataLoaderIter):
    """torch's iterator, which ends its processes in the process that started them alone.

    One that is forked meanwhile, as every worker process of another loader is, has a copy, and
    frees it: at its exit, or as garbage. torch tells the processes to stop there too, by what they
    share with their own reader; that finds them dead, or waits for a lock that nobody lets go.
    """

    started_in: int | None = None
    """The process; None before there is one to end."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.started_in = os.getpid()
        super().__init__(loader)
        # Else torch's handler of SIGCHLD, which a loader of its own leaves in the main thread, says
        # it there if one dies: in whatever runs, the event loop perhaps, not in who reads.
        torch._C._remove_worker_pids(id(self))
        self._worker_pids_set = False

    def deaths(self) -> str:
        """Which of the processes have failed, and how."""
        codes = [(worker.pid, worker.exitcode) for worker in self._workers]
        return ", ".join(
            f"worker process {pid} was ended by signal {-code} ({strsignal(-code)})"
            if code < 0
            else f"worker process {pid} ended with exit code {code}"
            for pid, code in codes
            if code
        )

    def _shutdown_workers(self) -> None:
        if self.started_in == os.getpid():
            super()._shutdown_workers()


class ProcessLoader(DataLoader[Any]):
    """torch's, whose processes are known before the first of them starts."""

    processes: Processes | None = None

    def _get_iterator(self) -> Processes:
        # What fails while torch starts them (a sampler, the start of the last) leaves some, and
        # their only reference, which torch ends them by, in the error's traceback.
        self.processes = Processes.__new__(Processes)
        try:
            self.processes.__init__(self)  # type: ignore[misc]
        except BaseException:
            self.shut_down()
            raise
        return self.processes

    def shut_down(self) -> None:
        """End the processes, and wait until they have."""
        processes, self.processes, self._iterator = self.processes, None, None
        # As torch does when its iterator is freed, which an error that the user keeps would put
        # off: the iterator is in its traceback. Before the first process there is no list.
        if processes is not None and hasattr(processes, "_workers"):
            processes._shutdown_workers()
