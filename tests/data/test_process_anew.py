"""Persistent worker processes that are started anew: after `aclose`, in a child, when one died."""

import asyncio
import multiprocessing
import os

import anyio
import pytest
import torch

from aiopar.data import AsyncDataLoader
from tests.data.loaders import N, read, values


def _loader() -> AsyncDataLoader:
    return AsyncDataLoader(
        range(N),
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        worker_type="process",
        persistent_workers=True,
    )


async def _resumes(loader: AsyncDataLoader) -> bool:
    """Whether what remains of an epoch comes of another loader that has the state."""
    async with loader as stream:
        await anext(stream)
        state = loader.state_dict()
        rest = [values(batch) async for batch in stream]
    other = _loader()
    other.load_state_dict(state)
    resumed = await read(other)
    await other.aclose()
    await loader.aclose()
    return resumed == rest


@pytest.mark.asyncio
async def test_a_state_of_later_resumes_after_a_close() -> None:
    loader = _loader()
    await read(loader)
    await loader.aclose()
    assert await _resumes(loader)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_state_of_later_resumes_in_a_child() -> None:
    loader = _loader()
    asyncio.run(read(loader))
    if (pid := os.fork()) == 0:
        same = False
        try:
            same = asyncio.run(_resumes(loader))
        finally:
            os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    asyncio.run(loader.aclose())


@pytest.mark.asyncio
async def test_all_are_where_one_has_died_between_two_epochs() -> None:
    loader, others = _loader(), set(multiprocessing.active_children())
    await read(loader)
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    await anyio.to_thread.run_sync(worker.join)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        await read(loader)
    assert raised.value.__notes__[0].startswith(f"worker process {worker.pid} ")
    assert await _resumes(loader)
