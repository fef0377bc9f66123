"""The function of a `Batcher`: its input, its state, and its outputs."""

import threading
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from tests import simdevice
from tests.caller_states import PLAIN, snapshot

from .batches import LONG, outcomes_of

pytestmark = pytest.mark.anyio

_VARIABLE: ContextVar[int] = ContextVar("variable", default=0)


async def test_tensors_are_stacked_and_outputs_unbound_by_default(
    devices: tuple[torch.device, ...],
) -> None:
    device = devices[0]
    if device.type == "sim":
        simdevice.set_kernel_latency(0.001)
    with torch.no_grad():
        network = nn.Linear(3, 2).to(device)
        items = list(torch.randn(40, 3, device=device).unbind())
        batcher = Batcher(network, max_batch_size=8)
        expected = network(torch.stack(items)).tolist()
    outputs: list[Any] = [None] * len(items)

    async def call(index: int) -> None:
        output = await batcher(items[index])
        outputs[index] = output.tolist()  # complete: it blocks nobody

    async with aiopar.DeviceExecutor(devices) as executor:
        with aiopar.use_executor(executor):
            async with batcher, anyio.create_task_group() as tasks:
                for index in range(len(items)):
                    tasks.start_soon(call, index)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output == pytest.approx(wanted, abs=1e-5)


async def test_nested_items_and_outputs() -> None:
    def fn(batch: dict[str, Any]) -> tuple[Tensor, list[str]]:
        return batch["x"] * batch["n"][:, None], batch["name"]

    async with Batcher(fn, max_batch_size=2, max_queue_delay=LONG) as batcher:
        outputs: dict[str, Any] = {}

        async def call(name: str, n: int) -> None:
            item = {"x": torch.ones(2), "n": n, "name": name}
            outputs[name] = await batcher(item)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, "a", 2)
            tasks.start_soon(call, "b", 3)
    assert {name: (x.tolist(), other) for name, (x, other) in outputs.items()} == {
        "a": ([2.0, 2.0], "a"),
        "b": ([3.0, 3.0], "b"),
    }


async def test_unbatch_fn_is_run_on_the_worker_and_the_default_on_the_loop() -> None:
    threads: dict[str, threading.Thread] = {}

    class Outputs(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, *args: Any, **kwargs: Any) -> Any:
            if func is Tensor.unbind:
                threads["default"] = threading.current_thread()
            return Tensor.__torch_function__.__func__(cls, func, *args, **kwargs)  # type: ignore[attr-defined]

    def fn(batch: Tensor) -> Tensor:
        threads["fn"] = threading.current_thread()
        return batch.as_subclass(Outputs)

    def unbatch_fn(outputs: Tensor) -> list[Any]:
        threads["unbatch_fn"] = threading.current_thread()
        return outputs.tolist()

    async with Batcher(fn) as batcher:
        assert (await batcher(torch.tensor(1))).item() == 1
    assert threads["default"] is threading.current_thread()
    assert threads["fn"] is not threading.current_thread()
    async with Batcher(fn, unbatch_fn=unbatch_fn) as batcher:
        assert await batcher(torch.tensor(1)) == 1
    assert threads["unbatch_fn"] is threads["fn"]


async def test_a_function_runs_under_the_state_of_the_code_that_made_the_batcher() -> None:
    def fn(items: list[int]) -> list[bool]:
        return [torch.is_grad_enabled()] * len(items)

    with torch.no_grad():
        batcher = Batcher(fn, collate_fn=list)
    async with batcher:
        assert not await batcher(1)
        with torch.inference_mode():
            call = batcher(2)
        assert not await call


@pytest.mark.parametrize("kind", ["function", "async function", "pool"])
async def test_a_batch_sees_nothing_that_another_batch_has_left_behind(kind: str) -> None:
    seen: list[Any] = []

    def leave_behind(batch: Any) -> Any:
        seen.append((snapshot(), _VARIABLE.get()))
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        _VARIABLE.set(1)
        return batch

    async def leave_behind_async(batch: Any) -> Any:
        return leave_behind(batch)

    class Leaving(nn.Module):
        def forward(self, batch: Any) -> Any:
            return leave_behind(batch)

    functions: dict[str, Any] = {"function": leave_behind, "async function": leave_behind_async}
    async with AsyncExitStack() as stack:
        if kind == "pool":
            pool = ReplicaPool(Leaving(), devices=["cpu"], inference_mode=False)
            functions[kind] = await stack.enter_async_context(pool)
        batcher = await stack.enter_async_context(Batcher(functions[kind], max_batch_size=1))
        for _ in range(3):
            await batcher(torch.ones(1))
        assert seen == [(PLAIN, 0)] * 3
        assert snapshot() == PLAIN, "on the loop's thread"


async def test_a_function_may_wait_for_other_calls() -> None:
    def fn(items: list[int]) -> list[int]:
        return aiopar.wait_all([aiopar.fork(pow, item, 2) for item in items])

    async with aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(fn, collate_fn=list) as batcher:
                assert await outcomes_of(batcher, range(10)) == [n * n for n in range(10)]
