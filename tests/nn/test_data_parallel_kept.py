"""The replicas that a `DataParallel` keeps outside grad mode."""

import asyncio
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import aiopar
from aiopar.testing import Gate

from ..freeing import survivors, without_gc
from .sample_modules import batch

# torch takes "cpu:0" and "cpu" for two devices, aiopar for one: replicas on the CPU share weights,
# and are rebuilt only when the module itself changes. On other devices there are copies.
Devices = tuple[torch.device, ...]


class Wrapped:
    """A module, a wrapper that was used, and the module's output for comparison."""

    def __init__(self, devices: Devices, module: nn.Module | None = None) -> None:
        self.module: Any = module or nn.Sequential(
            nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2)
        )
        self.module.to(devices[0]).eval()
        self.dp = aiopar.DataParallel(self.module, devices)
        self.x = batch().to(devices[0])
        self.check()

    def check(self) -> None:
        with torch.no_grad():
            output, expected = asyncio.run(self.dp(self.x)), self.module(self.x)
        assert output.dtype == expected.dtype
        assert torch.allclose(output.cpu(), expected.cpu(), atol=1e-6)

    @property
    def rebuilds(self) -> int:
        return self.dp._kept.rebuilds + self.dp._kept.buffer_refreshes


def optimizer_step(module: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(batch().to(module[0].weight.device)).sum().backward()
    optimizer.step()


def training_step(module: Any) -> None:
    module.train()
    optimizer_step(module)
    module.eval()


def in_place(module: Any) -> None:
    with torch.no_grad():
        module[0].weight.mul_(2)
        module[1].running_mean.add_(1)


def load(module: Any) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()})


def replace(module: Any) -> None:
    module[3] = nn.Linear(4, 3).to(module[0].weight.device)


def to_dtype_and_back(module: Any) -> None:
    module.half().float()


CHANGES: dict[str, Callable[[Any], object]] = {
    "an optimizer's step": optimizer_step,
    "a step in training": training_step,
    "in place": in_place,
    "load_state_dict": load,
    "a replaced submodule": replace,
    "another dtype and back": to_dtype_and_back,
    "requires_grad_": lambda module: module.requires_grad_(False),
}


class TestRefreshed:
    @pytest.mark.parametrize("change", CHANGES)
    def test_after(self, change: str, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        for _ in range(2):
            CHANGES[change](wrapped.module)
            wrapped.check()

    def test_after_a_forward_in_training_that_writes_statistics(self, devices: Devices) -> None:
        class Normalizing(nn.Module):
            mean: Tensor
            variance: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(6))
                self.register_buffer("variance", torch.ones(6))

            def forward(self, x: Tensor) -> Tensor:
                # No count of batches goes with it, as with `nn.BatchNorm`.
                return batch_norm(x, self.mean, self.variance, training=self.training)

        wrapped = Wrapped(devices, Normalizing())
        wrapped.dp.train()
        asyncio.run(wrapped.dp(wrapped.x))
        wrapped.dp.eval()
        wrapped.check()

    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    def test_after_a_forward_that_writes_statistics_when_another_call_has_ended(
        self, mode: Any, devices: Devices
    ) -> None:
        gate = Gate()

        class Late(nn.Module):
            mean: Tensor

            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(6))

            def forward(self, x: Tensor) -> Tensor:
                if self.training:
                    gate()
                    batch_norm(x, self.mean, torch.ones_like(self.mean), training=True)
                return x - self.mean

        wrapped = Wrapped(devices, Late())

        async def overlap() -> None:
            executor = aiopar.DeviceExecutor([*devices, *devices])
            with executor, aiopar.use_executor(executor), gate:
                wrapped.dp.train()
                with mode():
                    call = wrapped.dp(wrapped.x)
                calibrating = asyncio.create_task(call)
                await gate.entered(len(devices))
                wrapped.dp.eval()
                with torch.no_grad():
                    call = wrapped.dp(wrapped.x)
                await call
                gate.open()
                await calibrating

        asyncio.run(overlap())
        wrapped.check()
        before = wrapped.rebuilds
        wrapped.check()
        assert wrapped.rebuilds == before

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    def test_after_calibrating_outside_grad_mode(self, mode: Any, devices: Devices) -> None:
        norm = nn.BatchNorm1d(6)
        norm.num_batches_tracked = None  # what else would tell that statistics were written
        wrapped = Wrapped(devices, norm)
        wrapped.dp.train()
        with mode():
            call = wrapped.dp(wrapped.x)
        asyncio.run(call)
        wrapped.dp.eval()
        wrapped.check()

    def test_after_another_dtype(self, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        wrapped.module.double()
        wrapped.x = wrapped.x.double()
        wrapped.check()

    @pytest.mark.asyncio
    async def test_modes_are_those_of_the_moment(self, devices: Devices) -> None:
        class Training(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Identity()
                self.weight = nn.Parameter(torch.ones(1))

            def forward(self, x: Tensor) -> tuple[bool, bool, bool]:
                return self.training, self.inner.training, self.weight.requires_grad

        module = Training().to(devices[0])
        dp = aiopar.DataParallel(module, devices)
        x = torch.ones(len(devices))
        for training, inner, requires_grad in [
            (True, True, True),
            (False, False, True),
            (False, True, False),
        ]:
            module.train(training)
            module.inner.train(inner)
            module.weight.requires_grad_(requires_grad)
            with torch.inference_mode():
                call = dp(x)
            assert await call == (training, inner, requires_grad)

    def test_edits_through_data_need_a_refresh(self, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        wrapped.module[0].weight.data.mul_(2)
        wrapped.module[1].running_mean.data.add_(1)
        wrapped.dp.refresh()
        wrapped.check()

    def test_another_module_in_its_place(self, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        wrapped.dp.module = wrapped.module = Wrapped(devices).module
        wrapped.check()


def test_tangents_of_buffers_are_not_lost() -> None:
    forward_ad: Any = torch.autograd.forward_ad

    class Scaled(nn.Module):
        scale: Tensor

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = Scaled()
    with forward_ad.dual_level():
        module.register_buffer("scale", forward_ad.make_dual(torch.ones(1), torch.full((1,), 3.0)))
        with torch.no_grad():
            call = aiopar.DataParallel(module, ["cpu", "cpu"])(torch.ones(4))
        assert forward_ad.unpack_dual(asyncio.run(call)).tangent.tolist() == [3.0] * 4


class TestNotRebuilt:
    def test_without_a_change(self, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        before = wrapped.rebuilds
        for _ in range(3):
            wrapped.check()
            wrapped.module.train(not wrapped.module.training).eval()
            with torch.inference_mode():
                asyncio.run(wrapped.dp(wrapped.x))
            # A call in grad mode replicates, and leaves what is kept alone.
            asyncio.run(wrapped.dp(wrapped.x)).sum().backward()
        assert wrapped.rebuilds == before

    def test_one_device_keeps_none(self) -> None:
        assert Wrapped((torch.device("cpu"),)).rebuilds == 0

    def test_refresh_rebuilds_once(self) -> None:
        wrapped = Wrapped((torch.device("cpu"),) * 2)
        before = wrapped.rebuilds
        wrapped.dp.refresh()
        wrapped.check()
        wrapped.check()
        assert wrapped.rebuilds == before + 1


class Counter(nn.Module):
    """Sets an attribute in forward, as in torch's example of what does not persist."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


@pytest.mark.asyncio
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
async def test_what_forward_sets_does_not_persist(mode: Any) -> None:
    dp = aiopar.DataParallel(Counter(), ["cpu", "cpu"])
    for _ in range(3):
        with mode():
            call = dp(torch.zeros(2))
        assert (await call).tolist() == [1.0, 1.0]
    assert dp.module.calls == 0


@pytest.mark.anyio
@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu", "cpu"]])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
async def test_everything_is_freed_by_reference_counting(device_ids: list[str], mode: Any) -> None:
    alive: list[weakref.ref[Any]] = []
    failing = [True]

    class Own(Exception):
        """A built-in one takes no weak references."""

    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            alive.append(weakref.ref(y))
            if failing and aiopar.current_replica().index == 0:
                raise Own(failing.pop())
            return y

    dp = aiopar.DataParallel(Fails(6, 3), device_ids)
    with without_gc():
        for _ in range(2):
            x = batch()
            alive.append(weakref.ref(x))
            with mode():
                call = dp(x)
            try:
                alive.append(weakref.ref(await call))
            except Own as error:
                alive.append(weakref.ref(error))
            del x, call
        alive += weakref.ref(dp), weakref.ref(dp.module)
        del dp
        assert await survivors(alive) == []
