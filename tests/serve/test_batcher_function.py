"""The function of a `Batcher`: its input, its state, and its outputs."""

import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, BatchObserver, ReplicaPool
from tests import simdevice
from tests.caller_states import PLAIN, snapshot
from tests.home import AtHome, elsewhere
from tests.workers import MakeWorkers, Workers

from .batches import current_executor, outcomes_of, together

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

    async with current_executor(devices), batcher, anyio.create_task_group() as tasks:
        for index in range(len(items)):
            tasks.start_soon(call, index)
    for output, wanted in zip(outputs, expected, strict=True):
        assert output == pytest.approx(wanted, abs=1e-5)


def nested(batch: dict[str, Any]) -> tuple[Tensor, list[str]]:
    return batch["x"] * batch["n"][:, None], batch["name"]


async def test_nested_items_and_outputs(workers: Workers) -> None:
    items = [{"x": torch.ones(2), "n": n, "name": name} for name, n in (("a", 2), ("b", 3))]
    outputs = await together(nested, items, workers=workers)
    assert [(x.tolist(), name) for x, name in outputs] == [([2.0, 2.0], "a"), ([3.0, 3.0], "b")]


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


class Modes(nn.Module):
    """Returns the grad mode that its parameter sees, and whether its output has a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.kept: Tensor | None = None

    def forward(self, batch: Tensor) -> Tensor:
        self.kept = batch * self.weight
        return self.kept


class ModesByStep(Modes):
    def forward(self, batch: Tensor) -> Iterator[Tensor]:  # type: ignore[override]  # a generator
        yield batch * self.weight
        yield batch * self.weight


@pytest.mark.parametrize("training", [False, True])
async def test_outputs_of_a_module_have_no_graph_whoever_runs_it(
    workers: Workers, training: bool
) -> None:
    """In a batcher, a pool and `aiopar.map`. The caller's own function is its own affair."""
    module, item = Modes().train(training), torch.ones(2)
    outputs: list[Tensor] = []
    with aiopar.use_executor(workers):
        async with Batcher(module) as batcher, ReplicaPool(module, ["cpu"]) as pool:
            outputs += [await batcher(item), (await pool(item.unsqueeze(0)))[0]]
            async with Batcher(pool) as of_pool:
                outputs.append(await of_pool(item))
        async with aiopar.map(module, [item], devices=["cpu"]) as stream:
            outputs += [output async for output in stream]
    assert [output.numpy().tolist() for output in outputs] == [[1.0, 1.0]] * 4
    async with Batcher(module.forward) as batcher:  # a thread, as no graph leaves a process
        assert (await batcher(item)).requires_grad


async def test_a_module_in_a_batcher_can_be_trained_afterwards() -> None:
    """Inference mode would leave tensors in it that have no place in a graph."""
    module = Modes()
    async with Batcher(module) as batcher:
        await batcher(torch.ones(2))
    assert module.kept is not None
    (grad,) = torch.autograd.grad((module.kept * module.weight).sum(), [module.weight])
    assert grad == 2


async def test_steps_of_a_module_and_a_data_parallel_have_no_graph() -> None:
    async with Batcher(ModesByStep()) as batcher:
        parts = [part async for part in batcher.stream(torch.ones(2))]
    async with Batcher(aiopar.DataParallel(Modes(), ["cpu"] * 2)) as batcher:
        parts.append(await batcher(torch.ones(2)))
    assert [part.requires_grad for part in parts] == [False] * 3


class State(nn.Module):
    def forward(self, items: Any) -> list[tuple[bool, bool, bool, int]]:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        return [(*modes, torch.is_autocast_enabled("cpu"), _VARIABLE.get())] * len(items)


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("in_pool", [False, True])
async def test_a_batch_runs_under_the_state_of_the_code_that_made_the_batcher(
    workers: Workers, in_pool: bool, observed: bool
) -> None:
    async with ReplicaPool(State(), ["cpu"], executor=workers, inference_mode=False) as pool:
        _VARIABLE.set(1)
        with aiopar.use_executor(workers):
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                batcher = Batcher(pool if in_pool else State().forward, collate_fn=list)
            _VARIABLE.set(2)
            if observed:
                batcher.add_observer(BatchObserver())
            async with batcher:
                with torch.inference_mode():
                    call = batcher(1)
                assert await call == (False, False, True, 0 if elsewhere(workers) else 1)


class LeaveBehind(nn.Module):
    """Notes the state of its thread, and changes it."""

    def __init__(self, seen: list[Any]) -> None:
        super().__init__()
        self.note = AtHome(seen.append)

    def forward(self, batch: Any) -> Any:
        self.note((snapshot(), _VARIABLE.get()))
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled("cpu", True)
        _VARIABLE.set(1)
        return batch


@pytest.mark.parametrize("kind", ["function", "async function", "pool"])
async def test_a_batch_sees_nothing_that_another_batch_has_left_behind(
    workers: Workers, kind: str
) -> None:
    seen: list[Any] = []
    leave_behind = LeaveBehind(seen)

    async def leave_behind_async(batch: Any) -> Any:
        return leave_behind(batch)

    functions: dict[str, Any] = {
        "function": leave_behind.forward,
        "async function": leave_behind_async,
    }
    async with AsyncExitStack() as stack:
        stack.enter_context(aiopar.use_executor(workers))
        if kind == "pool":
            pool = ReplicaPool(leave_behind, devices=["cpu"], inference_mode=False)
            functions[kind] = await stack.enter_async_context(pool)
        batcher = await stack.enter_async_context(Batcher(functions[kind], max_batch_size=1))
        for _ in range(3):
            await batcher(torch.ones(1))
        assert seen == [(PLAIN, 0)] * 3
        assert snapshot() == PLAIN, "on the loop's thread"


def squares(items: list[int]) -> list[int]:
    return aiopar.wait_all([aiopar.fork(pow, item, 2) for item in items])


async def test_a_function_may_wait_for_other_calls(make_workers: MakeWorkers) -> None:
    async with make_workers(1) as executor:
        with aiopar.use_executor(executor):
            async with Batcher(squares, collate_fn=list) as batcher:
                assert await outcomes_of(batcher, range(10)) == [n * n for n in range(10)]
