"""Processes that are forked while worker processes load: whose these are, and who ends them."""

import asyncio
import gc
import os
from typing import Any

import pytest

from aiopar.data import AsyncDataLoader
from tests.data.loaders import N, read, values

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")


def _loader(persistent: bool) -> AsyncDataLoader:
    return AsyncDataLoader(
        range(N), 2, num_workers=2, worker_type="process", persistent_workers=persistent
    )


def _exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("persistent", [False, True])
def test_a_child_that_frees_its_copy_ends_nobodys_processes(persistent: bool) -> None:
    loaders = [_loader(persistent)]
    expected = [[n, n + 1][: N - n] for n in range(0, N, 2)]

    async def main() -> None:
        stream = aiter(loaders[0])
        streams = [stream]
        seen = [values(await anext(stream))]
        del stream
        if (pid := os.fork()) == 0:
            # As in a worker process of another loader, which collects what is garbage in there.
            streams.clear()
            loaders.clear()
            gc.collect()
            os._exit(0)
        assert _exit_code(pid) == 0
        seen.extend([values(batch) async for batch in streams.pop()])
        assert seen == expected
        assert await read(loaders[0]) == expected
        await loaders[0].aclose()

    asyncio.run(main())


@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_child_has_persistent_workers_of_its_own(worker_type: Any) -> None:
    loader = AsyncDataLoader(
        range(N), num_workers=2, worker_type=worker_type, persistent_workers=True
    )

    async def in_process() -> Any:
        batches = await read(loader)
        await loader.aclose()
        return batches

    expected = asyncio.run(read(loader))
    if (pid := os.fork()) == 0:
        same = False
        try:
            same = asyncio.run(in_process()) == expected
        finally:
            os._exit(0 if same else 1)
    assert _exit_code(pid) == 0
    assert asyncio.run(in_process()) == expected
