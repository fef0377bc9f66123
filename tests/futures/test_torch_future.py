"""`aiopar.wrap_future`: torch's futures become awaitable."""

from typing import Any, assert_type

import anyio
import pytest
import torch

import aiopar
from tests import simdevice
from tests.no_threads import no_more_threads


@pytest.mark.anyio
async def test_torch_futures() -> None:
    theirs: torch.futures.Future[int] = torch.futures.Future()
    ours = aiopar.wrap_future(theirs)
    for _ in range(2):
        with anyio.move_on_after(0):
            await ours
    assert not ours.cancel()
    theirs.set_result(3)
    assert assert_type(await ours, int) == 3
    assert assert_type(aiopar.wrap_future(ours), aiopar.Future[int]) is ours
    failed: torch.futures.Future[Any] = torch.futures.Future()
    failed.set_exception(ZeroDivisionError("theirs"))
    with pytest.raises(ZeroDivisionError, match="theirs"):
        await aiopar.wrap_future(failed)


@pytest.mark.anyio
async def test_torch_jit() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    forked: object = torch.jit.fork(double, torch.ones(2))  # type: ignore[no-untyped-call]  # torch's
    assert (await aiopar.wrap_future(forked)).tolist() == [2, 2]


def test_distributed_work() -> None:
    dist = torch.distributed
    if not dist.is_available():
        pytest.skip("torch was built without torch.distributed")
    dist.init_process_group(
        "gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1
    )
    try:
        x = torch.ones(3)
        work = dist.all_reduce(x, async_op=True)
        aiopar.wrap_future(work).result(30)
        assert x.tolist() == [1, 1, 1]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("wrong", [3, None, torch.ones(1)])
def test_other_objects_are_refused(wrong: object) -> None:
    with pytest.raises(TypeError, match="expected a torch future or Work, got"):
        aiopar.wrap_future(wrong)


@pytest.mark.sim
@pytest.mark.anyio
async def test_a_wrapped_result_is_complete_on_its_accelerator() -> None:
    theirs: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    with simdevice.paused():
        theirs.set_result(torch.ones(3, device="sim:0") + 1)
        ours = aiopar.wrap_future(theirs)
        assert not ours.done()
    assert (await ours).tolist() == [2, 2, 2]


@pytest.mark.sim
def test_without_a_new_thread_the_completing_thread_waits() -> None:
    theirs: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    theirs.set_result(torch.ones(3, device="sim:0") + 1)
    with no_more_threads():
        assert aiopar.wrap_future(theirs).result(30).tolist() == [2, 2, 2]
