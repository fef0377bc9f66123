"""`data_parallel`: `DataParallel` for one call."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

import aiopar

from .sample_modules import batch, make

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]


@pytest.mark.anyio
async def test_equals_the_module(devices: Devices) -> None:
    module, x = make("tied").to(devices[0]), batch().to(devices[0])
    y = await aiopar.data_parallel(module, x, devices)
    assert y.device == devices[0]
    assert y.requires_grad
    assert torch.allclose(y.cpu(), module(x).cpu(), atol=1e-6)
    with torch.inference_mode():
        call = aiopar.data_parallel(module, (x,), devices, output_device=-1)
    y = await call
    assert y.device.type == "cpu"
    assert y.is_inference()


class Given(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


@pytest.mark.asyncio
@pytest.mark.parametrize("device_ids", [None, ["cpu"], CPUS])
async def test_arguments(device_ids: list[str] | None) -> None:
    x = batch()

    async def given(inputs: Any, **kwargs: Any) -> Any:
        return await aiopar.data_parallel(Given(), inputs, device_ids, **kwargs)

    args, kwargs = await given((x, 3), module_kwargs={"y": x})
    assert args[1] == ([3, 3] if device_ids is CPUS else 3)
    assert torch.equal(args[0], x)
    assert torch.equal(kwargs["y"], x)
    assert await given(None) == ((), {})
    assert await given(()) == ((), {})
    [[listed]], _ = await given([x])  # a list is one argument
    assert torch.equal(listed, x)
    (turned,), _ = await given(x, dim=1)
    assert torch.equal(turned, x)
    # Any iterable of devices, and any mapping.
    kept = MappingProxyType({"y": x})
    _, kwargs = await aiopar.data_parallel(Given(), (x,), iter(CPUS), module_kwargs=kept)
    assert torch.equal(kwargs["y"], x)
    assert len(aiopar.DataParallel(Given(), iter(CPUS)).device_ids) == len(CPUS)


def test_the_module_stays_where_it_is() -> None:
    module = nn.Linear(2, 2, device="meta")
    for device_ids in ["cpu"], CPUS:
        with pytest.raises(
            RuntimeError, match=r"on device cpu .* found one of them on device: meta"
        ):
            _ = aiopar.data_parallel(module, torch.ones(1, 2), device_ids)
    assert module.weight.device.type == "meta"
