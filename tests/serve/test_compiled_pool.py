"""`ReplicaPool(compile=...)`: replicas run compiled code, which is made before they serve."""

import gc
import os
import signal
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from tests.workers import Workers

from .batches import current_executor, outcomes_of
from .replicas import CPUS, Copies

pytestmark = pytest.mark.asyncio

ON_RAY = True

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)  # more than Dynamo compiles by default


class Compiled(nn.Module):
    """Adds 1 if it runs compiled code, and else 0; and its bias."""

    def __init__(self, bias: float = 0.0) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.tensor(bias))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias + float(torch.compiler.is_compiling())


class Backend:
    """Notes the graphs that it compiles, and each run of a compiled graph."""

    def __init__(self) -> None:
        self.compiled: list[nn.Module] = []
        self.runs: list[nn.Module] = []

    def __call__(self, graph: nn.Module, _: list[Tensor]) -> Callable[..., Any]:
        self.compiled.append(graph)

        def run(*inputs: Any) -> Any:
            self.runs.append(graph)
            return graph.forward(*inputs)

        return run


def layers() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh()).eval()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("make", [Layers, layers], ids=["own", "of torch"])
async def test_no_batch_compiles_with_fixed_sizes(make: Callable[[], nn.Module]) -> None:
    random, backend, copies, model = Random(0), Backend(), Copies(), make()
    ran: list[int] = []
    # A hook runs outside of the compiled code.
    model.register_forward_pre_hook(lambda module, _: copies.note(module))

    async def serve(batcher: Batcher[Tensor, Tensor], batches: int) -> None:
        compiled = len(backend.compiled)
        backend.runs.clear()
        for _ in range(batches):  # at least one batch each; often two at once, on both replicas
            items = torch.randn(random.randint(1, 32) + random.randint(0, 32), 4)
            outputs = await outcomes_of(batcher, list(items))
            torch.testing.assert_close(torch.stack(outputs), model(items))
        assert len(backend.compiled) == compiled
        ran.append(len(backend.runs))
        assert sum(ran) == sum(batcher.stats().batch_sizes.values()), "a batch ran eagerly"

    options = {"dynamic": False, "backend": backend}
    async with current_executor(CPUS):
        pool = ReplicaPool(model, warmup=torch.zeros(8, 4), compile=options)
        async with Batcher(pool, batch_sizes=SIZES) as batcher, pool:
            assert len(backend.compiled) == 2 * len(SIZES), "each replica compiles each size once"
            with torch.inference_mode():
                await serve(batcher, 500)
                assert len(batcher.stats().batch_sizes) == 32
                gc.disable()
                try:
                    await pool.load_state_dict(make().state_dict())
                    assert [ref() is None for ref in copies.refs()[:2]] == [True, True]
                finally:
                    gc.enable()
                model = make()
                await pool.swap(model)
                await serve(batcher, 20)


async def test_every_copy_is_compiled_on_its_worker(workers: Workers) -> None:
    x = torch.zeros(2)
    options = {"backend": "eager", "dynamic": True}
    pool = ReplicaPool(Compiled(), ["cpu"], executor=workers, warmup=x, compile=options)
    async with pool:
        assert (await pool(x)).tolist() == [1, 1]
        await pool.load_state_dict(Compiled(2.0).state_dict())
        assert (await pool(x)).tolist() == [3, 3]
        await pool.swap(Compiled(4.0))
        assert (await pool(x)).tolist() == [5, 5]


async def test_a_new_process_compiles_again() -> None:
    x = torch.zeros(2)
    async with aiopar.ProcessExecutor(["cpu"]) as executor:
        options = {"backend": "eager"}
        async with ReplicaPool(Compiled(), executor=executor, warmup=x, compile=options) as pool:
            os.kill(await executor.run_sync(os.getpid), signal.SIGKILL)
            assert (await pool(x)).tolist() == [1, 1]


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (1, TypeError, "compile must be a bool or a dict of options of torch.compile, not int"),
        ({"dynamik": True}, ValueError, "torch.compile has no option 'dynamik'"),
    ],
)
async def test_bad_options(given: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ReplicaPool(Compiled(), compile=given)
