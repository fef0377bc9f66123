"""`DataParallel`: outputs, gradients, state, many calls at once, cancellation, errors."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import aiopar

from .comparisons import same, same_grads
from .sample_modules import FACTORIES, batch, each_duplicate, make

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]

PER_CHUNK = {"batch-norm"}  # statistics of each chunk, as in torch's DataParallel
BATCH_SECOND = {"lstm", "gru", "weight-norm-lstm"}


def wrap(kind: str, devices: Devices) -> tuple[aiopar.DataParallel[Any], nn.Module, Tensor]:
    """A wrapped module, an equal module, and an input."""
    module, reference = make(kind).to(devices[0]), make(kind).to(devices[0])
    dp = aiopar.DataParallel(module, devices, dim=1 if kind in BATCH_SECOND else 0)
    return dp, reference, batch().to(devices[0])


# These tests run a loop per call: torch reads files in the reference and in optimizers, which would
# block a loop. The warning: an LSTM with weight norm keeps a graph from its construction, which was
# on another stream than those of the workers.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
class TestEquality:
    @pytest.mark.parametrize("kind", FACTORIES)
    def test_outputs_in_evaluation(self, kind: str, devices: Devices) -> None:
        dp, reference, x = wrap(kind, devices)
        dp.eval(), reference.eval()
        with torch.inference_mode():
            y, expected = asyncio.run(dp(x)), reference(x)
        assert y.device == devices[0]
        assert y.is_inference()
        assert same(y, expected)

    @pytest.mark.parametrize("kind", sorted(FACTORIES.keys() - PER_CHUNK))
    def test_outputs_and_gradients(self, kind: str, devices: Devices) -> None:
        dp, reference, x = wrap(kind, devices)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, expected = asyncio.run(dp(ours)), reference(theirs)
        assert same(y, expected)
        # Not squares: their sum is a constant behind a LayerNorm, and its gradients are roundings.
        y.pow(3).sum().backward()
        expected.pow(3).sum().backward()
        assert same_grads(dp.module, reference)
        assert same(ours.grad, theirs.grad)

    def test_batch_norm_in_training_is_per_chunk_with_statistics_of_the_first(
        self, devices: Devices
    ) -> None:
        dp, reference, x = wrap("batch-norm", devices)
        references = [reference, *(copy.deepcopy(reference) for _ in devices[1:])]
        for mode in torch.enable_grad, torch.no_grad:
            with mode():
                y = asyncio.run(dp(x))
            chunks = x.chunk(len(devices))
            expected = torch.cat([m(part) for m, part in zip(references, chunks, strict=True)])
            assert same(y, expected)
        buffers = dict(dp.module.named_buffers())
        for name, buffer in reference.named_buffers():
            assert same(buffers[name], buffer)
        dp.eval(), reference.eval()
        with torch.no_grad():
            assert same(asyncio.run(dp(x)), reference(x))


class InTurn(nn.Module):
    """Runs the module that it wraps in one replica after the other."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        replica = aiopar.current_replica()
        for index in range(replica.count):
            if index == replica.index:
                y: Tensor = self.inner(x)
            replica.barrier()
        return y


class Writes(nn.Module):
    """Writes to its weights in forward, under `no_grad`, and then computes with them."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(3 * torch.randn(5, 6))
        self.frozen = nn.Parameter(3 * torch.randn(6, 6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.frozen, self.weight:
            with torch.no_grad():
                weight.copy_(self.write(weight))
            x = torch.tanh(x @ weight.T)
        return x


class Renormalized(nn.Module):
    """Embeddings with `max_norm`, which write to weights that the outputs are tied to."""

    def __init__(self, kind: type[nn.Embedding] | type[nn.EmbeddingBag]) -> None:
        super().__init__()
        self.layer = kind(9, 4, max_norm=1.0)
        nn.init.normal_(self.layer.weight, std=3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x.abs().mul(100).long() % 9)
        return y @ self.layer.weight.T


WRITERS: dict[str, Callable[[], nn.Module]] = {
    "clamp": lambda: Writes(lambda weight: weight.clamp(-0.5, 0.5)),
    "normalize": lambda: Writes(nn.functional.normalize),
    "embedding": lambda: Renormalized(nn.Embedding),
    "embedding-bag": lambda: Renormalized(nn.EmbeddingBag),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 3)),
}


class TestForwardsThatWriteToTheirWeights:
    """They train as without the wrapper, and replica 0 leaves its writes in the module."""

    @pytest.mark.parametrize("writer", WRITERS)
    def test_gradients_and_weights(self, writer: str, devices: Devices) -> None:
        torch.manual_seed(0)
        plain = WRITERS[writer]().to(devices[0])
        dp = aiopar.DataParallel(InTurn(copy.deepcopy(plain)), devices)
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (dp, plain))
        # Each replica writes to the same rows. The gradient of x needs the weights in backward.
        x = batch().to(devices[0]).repeat(len(devices), 1).requires_grad_()
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            asyncio.run(dp(x)).pow(2).mean().backward()  # type: ignore[no-untyped-call]
            plain(x).pow(2).mean().backward()
            assert same_grads(dp.module.inner, plain)  # type: ignore[arg-type]  # a module
            ours.step()
            theirs.step()
        pairs = zip(dp.module.parameters(), plain.parameters(), strict=True)
        assert all(same(after, expected) for after, expected in pairs)

    def test_hooks_of_parameters_run_once(self) -> None:
        dp = aiopar.DataParallel(InTurn(WRITERS["clamp"]()), CPUS)
        module: Any = dp.module
        weight = module.inner.weight
        calls: list[str] = []
        weight.register_hook(lambda grad: calls.append("gradient"))
        weight.register_post_accumulate_grad_hook(lambda _: calls.append("accumulated"))
        asyncio.run(dp(batch().requires_grad_())).sum().backward()  # type: ignore[no-untyped-call]
        assert calls == ["gradient", "accumulated"]

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_recomputed(self, use_reentrant: bool) -> None:
        class Recomputed(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def forward(self, x: Tensor) -> Any:
                return checkpoint(self.inner, x, use_reentrant=use_reentrant)

        plain = WRITERS["clamp"]()
        dp = aiopar.DataParallel(InTurn(Recomputed(copy.deepcopy(plain))), CPUS)
        x = batch().requires_grad_()
        for y in asyncio.run(dp(x)), plain(x):
            y.pow(2).sum().backward()
        module: Any = dp.module
        assert same_grads(module.inner.inner, plain)


class TestManyAtOnce:
    @pytest.mark.anyio
    async def test_fifty_tasks(self) -> None:
        module = make("containers")
        dp = aiopar.DataParallel(module, CPUS)
        inputs = [batch() + i for i in range(50)]
        outputs: dict[int, Tensor] = {}

        async def one(index: int) -> None:
            with torch.no_grad() if index % 2 else torch.enable_grad():
                call = dp(inputs[index])
            outputs[index] = await call

        async with anyio.create_task_group() as tasks:
            for index in range(50):
                tasks.start_soon(one, index)
        for index, x in enumerate(inputs):
            assert outputs[index].requires_grad == (index % 2 == 0)
            assert same(outputs[index], module(x))

    @pytest.mark.asyncio
    async def test_nested_in_a_replica(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = aiopar.DataParallel(nn.Linear(6, 3), CPUS)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = aiopar.wait(self.inner(x)) + 1
                return y

        module = Outer()
        reference = copy.deepcopy(module.inner.module)
        x = batch()
        async with aiopar.DeviceExecutor(CPUS) as executor:  # only the workers that one level needs
            with aiopar.use_executor(executor):
                calls = [aiopar.DataParallel(module, CPUS)(x) for _ in range(5)]
            outputs = await asyncio.gather(*calls)
        for y in outputs:
            assert same(y, reference(x) + 1)
        await aiopar.run_sync(torch.autograd.backward, [outputs[0].sum(), reference(x).sum()])
        assert same_grads(module.inner.module, reference)


class TestErrors:
    def test_one_device_runs_a_compiled_module(self) -> None:
        module = nn.Linear(6, 3)
        compiled: Any = torch.compile(module, backend="eager")
        assert same(asyncio.run(aiopar.DataParallel(compiled, ["cpu"])(batch())), module(batch()))


class TestState:
    def test_state_dict_is_that_of_torchs_wrapper(self) -> None:
        module = make("containers")
        ours, theirs = aiopar.DataParallel(module, CPUS), nn.DataParallel(module)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(name.startswith("module.") for name in ours.state_dict())
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        plain = make("containers")
        plain.load_state_dict(
            {name.removeprefix("module."): value for name, value in ours.state_dict().items()}
        )
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict(module.state_dict())

    @pytest.mark.asyncio
    @each_duplicate
    async def test_duplicates_of_a_used_wrapper(self, duplicate: Callable[[Any], Any]) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), CPUS)
        with torch.no_grad():
            await dp(batch())
        # In a worker: torch.save opens a zip file.
        again = await aiopar.run_sync(duplicate, dp)
        assert list(again.children()) == [again.module]
        assert again.module is not dp.module
        assert again.device_ids == dp.device_ids
        with torch.no_grad():
            assert same(await again(batch()), dp.module(batch()))
            again.module.weight.zero_()
            assert same(await again(batch()), again.module.bias.expand(8, 3))
            assert same(await dp(batch()), dp.module(batch()))
