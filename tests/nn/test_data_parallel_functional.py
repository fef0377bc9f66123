"""`data_parallel`: `DataParallel` for one call."""

from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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


@pytest.mark.asyncio
async def test_gradients() -> None:
    module, reference, x = nn.Linear(6, 3), nn.Linear(6, 3), batch()
    reference.load_state_dict(module.state_dict())
    y = await aiopar.data_parallel(module, x, CPUS)
    await aiopar.run_sync(torch.autograd.backward, [y.sum(), reference(x).sum()])
    assert module.weight.grad is not None
    assert reference.weight.grad is not None
    assert torch.allclose(module.weight.grad, reference.weight.grad)


def test_the_module_stays_where_it_is() -> None:
    module = nn.Linear(2, 2, device="meta")
    for device_ids in ["cpu"], CPUS:
        with pytest.raises(
            RuntimeError, match=r"on device cpu .* found one of them on device: meta"
        ):
            _call(module, torch.ones(1, 2), device_ids)
    assert module.weight.device.type == "meta"


@pytest.mark.parametrize(
    ("args", "error", "message"),
    [
        ((abs, 1), TypeError, r"expected a torch\.nn\.Module"),
        ((nn.Identity(), 1, "cpu"), TypeError, "sequence of devices"),
        ((nn.Identity(), 1, ["nowhere"]), ValueError, "unknown device 'nowhere'"),
        ((nn.Identity(), 1, CPUS, "nowhere"), ValueError, "unknown device 'nowhere'"),
        ((nn.Identity(), 1, CPUS, None, "0"), TypeError, "dim must be an int"),
    ],
)
def test_bad_arguments_raise_at_once(args: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        _call(*args)


def _call(*args: Any) -> Tensor:
    result: Tensor = aiopar.wait(aiopar.data_parallel(*args))
    return result
