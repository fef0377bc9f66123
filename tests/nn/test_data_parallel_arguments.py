"""`DataParallel`: the arguments of the replicas, and how their outputs are joined."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar

from .comparisons import same
from .sample_modules import batch

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]


class Asynchronous(nn.Module):
    async def forward(self, x: Tensor) -> Tensor:
        return x


class TestArgumentsAndOutputs:
    @pytest.mark.asyncio
    @pytest.mark.parametrize("size", [0, 1, 3, 5])
    async def test_batches_that_do_not_divide(self, devices: Devices, size: int) -> None:
        module = nn.Linear(6, 3).to(devices[0])
        x = batch()[:size].to(devices[0])
        for mode in torch.enable_grad, torch.no_grad:
            with mode():
                call = aiopar.DataParallel(module, devices)(x)
            assert same(await call, module(x))

    @pytest.mark.asyncio
    async def test_an_lstm_has_another_batch_dimension_in_its_state(self, devices: Devices) -> None:
        lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True).to(devices[0])
        x, h, c = (
            torch.randn(*shape, device=devices[0]) for shape in [(5, 7, 4)] + [(2, 5, 3)] * 2
        )
        states: list[Any] = [aiopar.Split((h, c), dim=1), [aiopar.Split(h, 1), aiopar.Split(c, 1)]]
        expected, (h_n, c_n) = lstm(x, (h, c))
        for dims in (0, (1, 1)), (0, 1):
            dp = aiopar.DataParallel(lstm, devices, output_dims=dims)
            for state in states:
                y, (h_y, c_y) = await dp(x, state)
                assert same(y, expected)
                assert same(h_y, h_n)
                assert same(c_y, c_n)
            y, (h_y, _) = await aiopar.data_parallel(lstm, x, devices, output_dims=dims)
            assert same(h_y, lstm(x)[1][0])
        if len(devices) > 1:
            with pytest.raises(ValueError, match=r"inputs\[1\]\[0\] has 2; .*Split\(\.\.\., dim"):
                _ = dp(x, (h, c))

    @pytest.mark.asyncio
    async def test_without_an_input_to_split(self) -> None:
        class Given(nn.Module):
            def forward(self, given: Any) -> list[Any]:
                return [given]

        dp = aiopar.DataParallel(Given(), CPUS)
        for given in ["a", "b"], SimpleNamespace(x=torch.ones(2)), None:
            with pytest.raises(ValueError, match=r"nothing can be split over 2 replicas.*Split"):
                _ = dp(given)
            with pytest.raises(ValueError, match=r"nothing can be split over 2 replicas.*Split"):
                _ = aiopar.data_parallel(Given(), (), CPUS, module_kwargs={"given": given})
            assert await aiopar.DataParallel(Given(), ["cpu"])(given) == [given]
        assert await dp(aiopar.Replicated("a")) == ["a", "a"]  # the caller asked for it
        assert await dp(given=aiopar.Split(["a", "b"])) == [["a"], ["b"]]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_inputs_that_cannot_be_split(self, device_ids: list[str]) -> None:
        # On one device too, so that code goes on working with more devices.
        dp = aiopar.DataParallel(nn.Bilinear(2, 2, 2), device_ids)
        with pytest.raises(ValueError, match="differ in size along dim 0"):
            _ = dp(torch.ones(2, 2), torch.ones(3, 2))
        handle = dp.register_forward_pre_hook(lambda *_: None)
        call = dp(torch.ones(2, 2), torch.ones(3, 2))  # a hook may change them
        with pytest.raises(ValueError, match="differ in size along dim 0"):
            await call
        handle.remove()
        dp.dim = 5
        with pytest.raises(ValueError, match="dim 5 is out of range"):
            _ = dp(torch.ones(2, 2), torch.ones(2, 2))

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    @pytest.mark.parametrize("module", [Asynchronous(), aiopar.DataParallel(nn.Identity(), CPUS)])
    async def test_a_module_that_returns_a_coroutine(
        self, module: nn.Module, device_ids: list[str]
    ) -> None:
        with pytest.raises(TypeError, match="is a coroutine function, and workers run plain ones"):
            await aiopar.DataParallel(module, device_ids)(batch())
        with pytest.raises(TypeError, match="is a coroutine function, and workers run plain ones"):
            await aiopar.data_parallel(module, batch(), device_ids)
