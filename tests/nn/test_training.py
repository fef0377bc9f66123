"""Training loops over `DataParallel` end in the same weights as on the plain module."""

import asyncio
import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import aiopar
from tests import simdevice

Devices = tuple[torch.device, ...]
BATCHES = 4


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2)).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(7, 5, generator=generator, dtype=torch.double),
            torch.randn(7, 2, generator=generator, dtype=torch.double),
        )
        for _ in range(BATCHES)
    ]


class Training:
    """A model on several devices and an equal one on the first device, trained alike."""

    def __init__(
        self, devices: Devices, make_optimizer: Callable[..., torch.optim.Optimizer]
    ) -> None:
        self.device = devices[0]
        self.plain = make_model().to(self.device)
        self.model = aiopar.convert_sync_batchnorm(copy.deepcopy(self.plain))
        self.dp = aiopar.DataParallel(self.model, devices)
        self.optimizers = [make_optimizer(each.parameters()) for each in (self.plain, self.model)]
        self.batches = [(x.to(self.device), y.to(self.device)) for x, y in make_batches()]

    def accumulate(self, batches: list[tuple[Tensor, Tensor]]) -> None:
        """Add the gradients of all batches to both models."""
        for x, y in batches:
            torch.autograd.backward(mse_loss(self.plain(x), y))

        async def ours() -> None:
            for x, y in batches:
                output = await self.dp(x)
                loss = await aiopar.run_sync(mse_loss, output, y, device=self.device)
                await aiopar.backward(loss)

        asyncio.run(ours())

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        for ours, theirs in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            assert ours.grad is not None
            assert theirs.grad is not None
            yield ours.grad.cpu(), theirs.grad.cpu()

    def assert_alike(self) -> None:
        after, expected = self.model.state_dict(), self.plain.state_dict()
        assert after.keys() == expected.keys()
        for name in after:
            torch.testing.assert_close(after[name].cpu(), expected[name].cpu(), atol=1e-10, rtol=0)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    # The gradient of a bias before a BatchNorm is zero up to rounding: epsilon must be larger.
    return torch.optim.Adam(parameters, lr=0.01, eps=1e-4)


@pytest.mark.parametrize("make_optimizer", [sgd, adam])
def test_optimizers_step_as_on_one_device(
    devices: Devices, make_optimizer: Callable[..., torch.optim.Optimizer]
) -> None:
    training = Training(devices, make_optimizer)
    for batch in training.batches:
        training.accumulate([batch])
        training.step()
    training.assert_alike()


def test_gradients_accumulate_over_awaits_and_are_clipped(devices: Devices) -> None:
    training = Training(devices, sgd)
    training.accumulate(training.batches)
    norms = [
        nn.utils.clip_grad_norm_(each.parameters(), max_norm=0.5)
        for each in (training.model, training.plain)
    ]
    assert norms[0].item() == pytest.approx(norms[1].item(), abs=1e-10)
    assert norms[0] > 0.5
    for ours, theirs in training.gradients():
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)
    training.step()
    training.assert_alike()


def test_backwards_of_several_batches_at_once_add_up(devices: Devices) -> None:
    training = Training(devices, sgd)
    training.dp.eval(), training.plain.eval()  # at once, they would race for running statistics

    async def at_once() -> None:
        outputs = await asyncio.gather(*[training.dp(x) for x, _ in training.batches])
        losses = [
            await aiopar.run_sync(mse_loss, output, y, device=training.device)
            for output, (_, y) in zip(outputs, training.batches, strict=True)
        ]
        await asyncio.gather(*map(aiopar.backward, losses))

    # One worker per device: torch warns if graphs on several streams share a parameter.
    with aiopar.DeviceExecutor(devices) as executor, aiopar.use_executor(executor):
        asyncio.run(at_once())
    for x, y in training.batches:
        torch.autograd.backward(mse_loss(training.plain(x), y))
    for ours, theirs in training.gradients():
        torch.testing.assert_close(ours, theirs, atol=1e-10, rtol=0)


@pytest.mark.parametrize("overflows", [False, True])
def test_autocast_with_a_grad_scaler(devices: Devices, overflows: bool) -> None:
    kind = devices[0].type
    model = nn.Linear(5, 2).to(devices[0])
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(kind, init_scale=8.0)
    dp = aiopar.DataParallel(model, devices)
    x = torch.full((4, 5), float("inf") if overflows else 1.0, device=devices[0])

    async def forward_backward() -> Tensor:
        with torch.autocast(kind, torch.bfloat16):
            call = dp(x)
        output: Tensor = await call
        loss = output.float().sum()
        await aiopar.backward(scaler.scale(loss))
        return output

    assert asyncio.run(forward_backward()).dtype == torch.bfloat16
    scaler.step(optimizer)
    scaler.update()
    if overflows:
        assert scaler.get_scale() == 4.0
        assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    else:
        assert scaler.get_scale() == 8.0
        torch.testing.assert_close(before["bias"] - model.bias, torch.full_like(model.bias, 0.4))


@pytest.mark.sim
@pytest.mark.parametrize("synchronized", [False, True])
def test_backward_reads_what_was_allocated_on_other_streams(synchronized: bool) -> None:
    # Pieces of the batch and copies of the weights were allocated on other streams than the kernels
    # that read them. In backward, autograd frees them before these kernels have run.
    devices = (torch.device("sim:0"), torch.device("sim:1"))
    model = make_model().to(devices[0])
    dp = aiopar.DataParallel(
        aiopar.convert_sync_batchnorm(model) if synchronized else model, devices
    )
    simdevice.set_kernel_latency(0.002)
    simdevice.set_copy_latency(0.002)
    for x, y in make_batches():
        loss = mse_loss(asyncio.run(dp(x.to(devices[0]))), y.to(devices[0]))
        asyncio.run(aiopar.backward(loss))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            assert parameter.grad.cpu().isfinite().all(), name
