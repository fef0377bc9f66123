"""Synchronized BatchNorm: over any number of replicas what BatchNorm is on the whole batch."""

import asyncio
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings, strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import aiopar

Devices = tuple[torch.device, ...]
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
CPUS = (torch.device("cpu"),) * 2


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("cpu",), id="cpu"),
        pytest.param(("cpu",) * 2, id="cpu,cpu"),
        pytest.param(("cpu",) * 4, id="four"),
        pytest.param(("sim:0", "sim:1"), id="sim:0,sim:1", marks=pytest.mark.sim),
        pytest.param(("cuda:0", "cuda:0"), id="cuda:0,cuda:0", marks=pytest.mark.gpu),
    ],
)
def devices(request: pytest.FixtureRequest) -> Devices:
    """The devices of tests/conftest.py, and four replicas."""
    return tuple(torch.device(name) for name in request.param)


class Chunked(aiopar.DataParallel[Any]):
    """Splits the batch into chunks of the given sizes, also into empty ones."""

    def __init__(self, module: nn.Module, devices: Devices, sizes: tuple[int, ...]) -> None:
        super().__init__(module, devices)
        self.sizes = sizes

    async def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        used = device_ids[: len(self.sizes)]
        return await aiopar.scatter_kwargs(inputs, kwargs, used, chunk_sizes=self.sizes)


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def step(module: nn.Module, forward: Callable[[Tensor], Any], x: Tensor) -> dict[str, Tensor]:
    """Output, gradients and buffers after one forward and backward."""
    x = x.clone().requires_grad_()
    y = forward(x)
    if torch.is_grad_enabled():
        (y * values(*y.shape, seed=1).to(y)).sum().backward()
    found = {"output": y, "input.grad": x.grad, **dict(module.named_buffers())}
    found |= {f"{name}.grad": p.grad for name, p in module.named_parameters()}
    return {name: value.detach().cpu() for name, value in found.items() if value is not None}


def step_of(dp: aiopar.DataParallel[Any], x: Tensor) -> dict[str, Tensor]:
    return step(dp.module, lambda x: asyncio.run(dp(x)), x)


def pair(norm: nn.Module, device: torch.device) -> tuple[nn.Module, nn.Module]:
    """The module with synchronized layers, and with plain ones."""
    norm = norm.to(device)
    return aiopar.convert_sync_batchnorm(copy.deepcopy(norm)), norm


def check(norm: nn.Module, x: Tensor, devices: Devices, **tolerance: Any) -> None:
    """Two steps in a `DataParallel` equal two steps on the whole batch."""
    ours, theirs = pair(norm, devices[0])
    dp = aiopar.DataParallel(ours, devices)
    for _ in range(2):
        x = x.to(devices[0])
        torch.testing.assert_close(step_of(dp, x), step(theirs, theirs, x), **tolerance)


class Case(NamedTuple):
    norm: nn.Module
    batches: list[Tensor]
    sizes: list[tuple[int, ...]]


@st.composite
def cases(draw: st.DrawFn, most: int) -> Case:
    """A BatchNorm, two batches, and how each is split among at most `most` replicas."""
    dims = draw(st.integers(0, 3))
    shape = draw(st.tuples(*[st.integers(1, 3)] * (1 + dims)))
    norm: nn.Module = PLAIN[max(dims, 1) - 1](
        shape[0],
        momentum=draw(st.sampled_from([0.1, 1.0, None])),
        affine=draw(st.booleans()),
        track_running_stats=draw(st.booleans()),
        dtype=torch.float64,
    ).train(draw(st.integers(0, 3)) > 0)
    for index, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, generator=torch.Generator().manual_seed(index))
    chunks = st.lists(st.integers(0, 4), min_size=1, max_size=most).map(tuple)
    sizes = draw(st.lists(chunks, min_size=2, max_size=2))
    scale, offset = draw(st.sampled_from([(1.0, 0.0), (1e-3, 10.0), (5.0, -300.0)]))
    batches = [values(sum(size), *shape, seed=3) * scale + offset for size in sizes]
    # One value per channel is an error, which has its own test.
    assume(all(batch.numel() != shape[0] for batch in batches))
    return Case(norm, batches, sizes)


class TestEquality:
    @settings(max_examples=40)
    @given(data=st.data())
    def test_any_shape_in_any_chunks(self, devices: Devices, data: st.DataObject) -> None:
        case = data.draw(cases(len(devices)))
        ours, theirs = pair(case.norm, devices[0])
        for batch, sizes in zip(case.batches, case.sizes, strict=True):
            x = batch.to(devices[0])
            found = step_of(Chunked(ours, devices, sizes), x)
            torch.testing.assert_close(found, step(theirs, theirs, x), **EXACT)

    def test_float32(self, devices: Devices) -> None:
        x = values(10, 3, 4, 5, dtype=torch.float32) * 2 + 1
        check(nn.BatchNorm2d(3), x, devices, rtol=1e-5, atol=1e-5)

    def test_a_mean_that_is_large_against_the_deviation(self, devices: Devices) -> None:
        """Sums of squares in float32 would leave nothing of the variance."""
        norm = aiopar.SynchronizedBatchNorm1d(2, momentum=1.0).to(devices[0])
        x = (values(40, 2) + 3000).float()
        found = step_of(aiopar.DataParallel(norm, devices), x.to(devices[0]))
        exact = x.double()
        variance = exact.var(0).float()
        torch.testing.assert_close(found["running_var"], variance, rtol=1e-3, atol=0)
        expected = F.batch_norm(exact, None, None, training=True).float()
        torch.testing.assert_close(found["output"], expected, rtol=0, atol=2e-3)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("parameters", [torch.float32, None])
    @pytest.mark.parametrize("affine", [True, False])
    def test_low_precision(
        self, devices: Devices, dtype: torch.dtype, parameters: torch.dtype | None, affine: bool
    ) -> None:
        """Equal to float32 within the accuracy of the dtype."""
        norm = nn.BatchNorm2d(3, affine=affine, dtype=parameters or dtype)
        x = values(10, 3, 4, 4).to(dtype).to(devices[0])
        ours, _ = pair(norm, devices[0])
        exact = norm.float()
        found, expected = (
            step_of(aiopar.DataParallel(ours, devices), x),
            step(exact, exact, x.float()),
        )
        assert found["output"].dtype == found["input.grad"].dtype == dtype
        for name, value in expected.items():
            torch.testing.assert_close(found[name].to(value), value, rtol=2e-2, atol=4e-2)

    @pytest.mark.parametrize("memory", ["channels_last", "strided", "expanded"])
    def test_memory_formats(self, devices: Devices, memory: str) -> None:
        x = values(6, 4, 5, 3)
        if memory == "channels_last":
            x = x.to(memory_format=torch.channels_last)
        else:
            x = x[..., 1:2].expand(6, 4, 5, 3) if memory == "expanded" else x.transpose(2, 3)
        check(nn.BatchNorm2d(4, dtype=torch.float64), x, devices, **EXACT)

    @pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
    def test_frozen_parameters(self, devices: Devices, frozen: str) -> None:
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        for name, parameter in norm.named_parameters():
            parameter.requires_grad_(frozen not in {name, "both"})
        check(norm, values(7, 3), devices, **EXACT)

    def test_an_input_without_gradients(self, devices: Devices) -> None:
        ours, theirs = pair(nn.BatchNorm1d(3, dtype=torch.float64), devices[0])
        x = values(7, 3).to(devices[0])
        asyncio.run(aiopar.DataParallel(ours, devices)(x)).pow(3).sum().backward()
        theirs(x).pow(3).sum().backward()
        grads = [[p.grad for p in module.parameters()] for module in (ours, theirs)]
        torch.testing.assert_close(*grads, **EXACT)

    def test_a_layer_used_twice(self, devices: Devices) -> None:
        norm = nn.BatchNorm1d(3, dtype=torch.float64)
        module = nn.Sequential(norm, nn.Linear(3, 3, dtype=torch.float64), norm)
        check(module, values(7, 3), devices, **EXACT)

    def test_one_output_has_gradients_for_all_inputs(self, devices: Devices) -> None:
        ours, theirs = pair(nn.BatchNorm1d(3, dtype=torch.float64), devices[0])
        grads = []
        forward: Callable[[Tensor], Any]
        for forward in lambda x: asyncio.run(aiopar.DataParallel(ours, devices)(x)), theirs:
            x = values(8, 3).to(devices[0]).requires_grad_()
            forward(x)[0].pow(2).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads, **EXACT)
        assert grads[0] is not None
        assert grads[0].cpu()[-1].abs().min() > 0

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_training_mode_without_gradients(
        self, devices: Devices, mode: Callable[[], Any]
    ) -> None:
        """Replicas are kept, and their running statistics are the module's."""
        norm = nn.BatchNorm1d(3, momentum=None, dtype=torch.float64)
        with mode():
            check(norm, values(7, 3), devices, **EXACT)

    @pytest.mark.parametrize("norm", [nn.BatchNorm1d(3), nn.BatchNorm1d(3, affine=False)])
    def test_gradients_of_gradients(self, devices: Devices, norm: nn.Module) -> None:
        # The gradient that arrives at the norm does not require a gradient. torch's
        # `once_differentiable` would then silently drop the second pass through the norm.
        ours, theirs = pair(nn.Sequential(nn.Linear(3, 3), norm).double(), devices[0])
        dp = aiopar.DataParallel(ours, devices)
        x, factor = values(5, 3).to(devices[0]), values(5, 3, seed=1).to(devices[0])

        def penalty_gradients(model: nn.Module, y: Tensor) -> list[Tensor]:
            parameters = list(model.parameters())
            found = torch.autograd.grad((y * factor).sum(), parameters, create_graph=True)
            penalty = torch.stack([one.square().sum() for one in found]).sum()
            return list(torch.autograd.grad(penalty, parameters, materialize_grads=True))

        torch.testing.assert_close(
            penalty_gradients(ours, asyncio.run(dp(x))), penalty_gradients(theirs, theirs(x))
        )


class TestBatchesLikeBatchNorm:
    """Batches that plain BatchNorm refuses, and empty batches."""

    @pytest.mark.parametrize("sizes", [(1,), (1, 0), (0, 1)])
    def test_one_value_per_channel_in_the_whole_batch(self, sizes: tuple[int, ...]) -> None:
        norm = aiopar.SynchronizedBatchNorm2d(3)
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel when training"
        ):
            asyncio.run(Chunked(norm, CPUS, sizes)(torch.ones(1, 3, 1, 1)))
        assert norm.running_mean is not None
        assert norm.running_mean.tolist() == [0, 0, 0]

    @pytest.mark.parametrize("sizes", [(0,), (0, 0)])
    def test_an_empty_batch(self, sizes: tuple[int, ...]) -> None:
        ours, theirs = pair(nn.BatchNorm2d(3), CPUS[0])
        x = torch.ones(0, 3, 2, 2)
        found, expected = step_of(Chunked(ours, CPUS, sizes), x), step(theirs, theirs, x)
        torch.testing.assert_close(found, expected)
        assert found["num_batches_tracked"] == 1

    @pytest.mark.parametrize("shape", [(4, 3), (4, 3, 1), (4, 3, 1, 1, 1)])
    def test_a_wrong_number_of_dimensions(self, shape: tuple[int, ...]) -> None:
        dp = aiopar.DataParallel(aiopar.SynchronizedBatchNorm2d(3), CPUS)
        with pytest.raises(ValueError, match=f"expected 4D input .got {len(shape)}D input"):
            asyncio.run(dp(torch.ones(shape)))

    @pytest.mark.parametrize("options", [{}, {"affine": False}, {"track_running_stats": False}])
    def test_a_wrong_number_of_channels(self, options: dict[str, bool]) -> None:
        dp = aiopar.DataParallel(aiopar.SynchronizedBatchNorm1d(3, **options), CPUS)
        for channels in 1, 4:
            with pytest.raises(ValueError, match=f"expected 3 channels, got {channels}"):
                asyncio.run(dp(torch.ones(4, channels)))

    def test_without_parameters_and_statistics_any_number_of_channels(self) -> None:
        norm = nn.BatchNorm1d(3, affine=False, track_running_stats=False)
        check(norm, values(6, 5), CPUS, **EXACT)
