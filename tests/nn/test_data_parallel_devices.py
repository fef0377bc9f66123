"""`DataParallel`: devices of the module, the inputs and the outputs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar
from tests import simdevice

from .comparisons import same
from .sample_modules import Buffers, batch, under

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]

# Every machine has it: a second device for tests of placement.
META = torch.device("meta")


def _call(module: Any, *args: Any) -> object:
    return aiopar.data_parallel(module, 1, *args)


class TestDevices:
    def test_none_and_empty_are_one_cpu_replica_without_an_accelerator(self) -> None:
        if torch.accelerator.is_available():
            pytest.skip("there is an accelerator")
        given: list[Any] = [None, [], ()]
        for device_ids in given:
            dp = aiopar.DataParallel(nn.Linear(1, 1), device_ids)
            assert dp.device_ids == [torch.device("cpu")]
            assert dp.output_device == torch.device("cpu")

    @pytest.mark.sim
    def test_none_is_every_accelerator(self) -> None:
        dp = aiopar.DataParallel(nn.Linear(1, 1), output_device=1)
        assert dp.device_ids == [torch.device("sim:0"), torch.device("sim:1")]
        assert dp.output_device == torch.device("sim:1")
        assert aiopar.DataParallel(nn.Linear(1, 1), []).device_ids == [torch.device("cpu")]
        assert aiopar.DataParallel(nn.Linear(1, 1), [1, "sim:0"]).src_device_obj.index == 1

    @pytest.mark.asyncio
    async def test_another_output_device(self) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), CPUS, "meta")
        assert (await dp(batch())).device == META
        alone = aiopar.DataParallel(nn.Linear(6, 3), ["cpu"], META)
        assert (await alone(batch())).device == META

    def test_with_one_device_the_module_is_moved_there(self) -> None:
        module = nn.Linear(2, 2)
        aiopar.DataParallel(module, [META])
        assert module.weight.device == META

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_a_module_on_the_wrong_device(self, device_ids: list[str]) -> None:
        module = nn.Linear(6, 3)
        module.register_buffer("elsewhere", None)
        dp = aiopar.DataParallel(module, device_ids)
        with torch.no_grad():
            before = await dp(batch())
        module.elsewhere = torch.ones(1, device=META)
        for mode in torch.enable_grad, torch.no_grad, torch.no_grad:
            call = under(mode, dp, batch())
            with pytest.raises(
                RuntimeError,
                match=r"module must have its parameters and buffers on device cpu "
                r"\(device_ids\[0\]\) but found one of them on device: meta",
            ):
                await call
        module.register_buffer("elsewhere", None)
        with torch.no_grad():
            assert torch.equal(await dp(batch()), before)

    @pytest.mark.parametrize("verb", [aiopar.DataParallel, _call])
    @pytest.mark.parametrize(
        ("args", "error", "message"),
        [
            ((3,), TypeError, "expected a torch.nn.Module, got int"),
            ((nn.Identity(), "cpu"), TypeError, "sequence of devices"),
            ((nn.Identity(), ["nowhere"]), ValueError, "unknown device 'nowhere'"),
            ((nn.Identity(), [99]), ValueError, "99"),
            ((nn.Identity(), CPUS, "nowhere"), ValueError, "unknown device 'nowhere'"),
            ((nn.Identity(), CPUS, 99), ValueError, "99"),
            ((nn.Identity(), CPUS, None, 0.5), TypeError, "dim must be an int"),
        ],
    )
    def test_bad_arguments_raise_at_once(
        self, verb: Any, args: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            verb(*args)


class Shifted(nn.Module):
    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return x + shift


@pytest.mark.sim
class TestLeavesOfSeveralReplicas:
    """A leaf that several replicas use gets its gradients on one stream; torch warns of several."""

    @pytest.fixture(autouse=True)
    def _warned_each_time(self) -> Iterator[None]:
        before = torch.is_warn_always_enabled()
        torch.set_warn_always(True)
        yield
        torch.set_warn_always(before)

    @pytest.mark.asyncio
    async def test_buffers(self) -> None:
        module = Buffers().to("sim:0")
        module.learned = torch.ones(6, device="sim:0", requires_grad=True)
        y = await aiopar.DataParallel(module, [0, 1])(batch())
        await aiopar.backward(y.sum())
        assert module.learned.grad is not None
        assert same(module.learned.grad, (batch() * module.weight.detach().cpu()).sum(0))

    @pytest.mark.asyncio
    @pytest.mark.parametrize("shape", [(), (6,)])
    async def test_replicated_inputs(self, shape: tuple[int, ...]) -> None:
        shift = torch.ones(shape, device="sim:0", requires_grad=True)
        y = await aiopar.DataParallel(Shifted(), [0, 1])(batch(), aiopar.Replicated(shift))
        await aiopar.backward(y.sum())
        assert shift.grad is not None
        assert same(shift.grad, torch.full(shape, 48.0 / max(shift.numel(), 1)))


@pytest.mark.anyio
async def test_assigned_device_ids() -> None:
    dp = aiopar.DataParallel(nn.Identity(), ["cpu", "cpu"])
    setattr(dp, "device_ids", ["cpu", "cpu"])  # noqa: B010  # strings, not torch.device
    assert torch.equal(await dp(torch.ones(4)), torch.ones(4))


@pytest.mark.sim
@pytest.mark.asyncio
@pytest.mark.parametrize("grad", [True, False])
async def test_without_synchronization_the_output_is_stream_ordered(
    grad: bool,
) -> None:
    devices = ["sim:0", "sim:0"]

    class Uneven(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if aiopar.current_replica().index == 0:
                simdevice.sleep(0.2, "sim:0")
            return x * 2

    async with aiopar.DeviceExecutor(devices, synchronize=False) as executor:
        with aiopar.use_executor(executor), torch.set_grad_enabled(grad):
            dp = aiopar.DataParallel(Uneven(), devices)
            x = torch.ones(4, device="sim:0")
            torch.accelerator.synchronize()
            with torch.Stream("sim:0"):
                y = await dp(x)
                assert y.tolist() == [2.0] * 4
