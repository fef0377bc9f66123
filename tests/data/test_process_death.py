"""A worker process that dies: who is told, and what."""

import os
import signal

import anyio
import pytest
import torch

from aiopar.data import AsyncDataLoader

pytestmark = pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs os.waitid")


class Pids:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.asyncio
async def test_who_reads_is_told_how_and_nobody_else() -> None:
    stream = aiter(AsyncDataLoader(Pids(), None, worker_type="process"))
    pid = await anext(stream)
    os.kill(pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # As its handler of SIGCHLD, which a loader of torch's own leaves in the main thread: it would
    # raise in whatever runs there, the event loop perhaps.
    torch._C._error_if_any_worker_fails()
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        async for _ in stream:
            pass
    assert raised.value.__notes__[0] == f"worker process {pid} was ended by signal 9 (Killed)"
