"""The simulated accelerator as a device: placement, operators, gradients, autocast, randomness.

Its streams, memory and processes are tested in tests/simdevice/.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests import simdevice

pytestmark = pytest.mark.sim


@pytest.fixture(params=[True, False], ids=["inline", "queued"])
def either_way(request: pytest.FixtureRequest) -> bool:
    """Kernels run on the launching thread, and on the stream's."""
    simdevice.set_inline(request.param)
    return bool(request.param)


@pytest.fixture
def thread_device() -> Iterator[None]:
    """Put the current device of the test's thread back."""
    before = torch.accelerator.current_device_index()
    yield
    torch.accelerator.set_device_index(before)


def test_is_the_accelerator() -> None:
    simdevice.load()  # again: does nothing
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.get_device_module("sim").device_count() == 2
    torch.empty(1, device="sim")
    assert torch.get_device_module("sim").is_initialized()


def test_hidden_is_a_machine_without_accelerator() -> None:
    with simdevice.hidden():
        assert not torch.accelerator.is_available()
        assert torch.accelerator.device_count() == 0
    assert torch.accelerator.is_available()


def test_current_device_is_a_thread_s_own(thread_device: None) -> None:
    import threading

    torch.accelerator.set_device_index(1)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.accelerator.current_device_index()))
    thread.start()
    thread.join()
    assert seen == [0]
    assert torch.empty(1, device="sim").device == torch.device("sim:1")
    with torch.get_device_module("sim").device(0):
        assert torch.accelerator.current_device_index() == 0
    assert torch.accelerator.current_device_index() == 1


def test_unknown_device() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal 7, there are 2 devices"):
        torch.empty(1, device="sim:7")


def test_factories() -> None:
    assert torch.arange(3, device="sim:1").tolist() == [0, 1, 2]
    assert torch.eye(2, device="sim:1").tolist() == [[1, 0], [0, 1]]
    assert torch.tensor([[1.5]], device="sim").item() == 1.5
    assert sorted(torch.randperm(4, device="sim:1").tolist()) == [0, 1, 2, 3]
    assert torch.tril_indices(2, 2, device="sim:1").device == torch.device("sim:1")
    assert repr(torch.ones(1, device="sim:1")) == "tensor([1.], device='sim:1')"
    with torch.device("sim:1"):
        assert torch.zeros(2).device == torch.device("sim:1")


MIXED: dict[str, tuple[Callable[[], Any], str]] = {
    "two devices": (lambda: torch.ones(2, device="sim:0") + torch.ones(2, device="sim:1"), "sim:1"),
    "cpu operand": (lambda: torch.ones(2, 2, device="sim:0") @ torch.ones(2, 2), "cpu"),
    "cpu input": (lambda: nn.Linear(2, 2, device="sim:0")(torch.ones(1, 2)), "cpu"),
    "cpu result": (lambda: torch.ones(()).add_(torch.ones((), device="sim:0")), "cpu"),
    "list": (lambda: torch.cat([torch.ones(1, device="sim:0"), torch.ones(1)]), "cpu"),
}


@pytest.mark.parametrize("case", MIXED)
def test_mixed_devices_are_refused(case: str, either_way: bool) -> None:
    call, other = MIXED[case]
    with pytest.raises(
        RuntimeError, match="Expected all tensors to be on the same device, but"
    ) as e:
        call()
    assert "found at least two devices" in str(e.value)
    assert "sim:0" in str(e.value)
    assert other in str(e.value)


def _image(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.ConvTranspose2d(channels, 2, 2),
        nn.GroupNorm(1, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


MODULES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.LayerNorm(8), nn.Softmax(1)),
        (5, 4),
    ),
    "image": (lambda: _image(4), (2, 3, 8, 8)),
}


def _values(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = module(x)
    weights = torch.linspace(0.5, 1.5, y.numel(), device=y.device)
    torch.autograd.backward((y * weights.view_as(y)).sum())
    gradients = [p.grad for p in (*module.parameters(), x)]
    return [y.detach(), *(g for g in gradients if g is not None), *module.buffers()]


@pytest.mark.parametrize("name", MODULES)
def test_modules_equal_the_cpu_s(name: str, either_way: bool) -> None:
    make, shape = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), torch.randn(shape)
    on_sim = copy.deepcopy(module).to("sim:1")
    expected, found = _values(module, x), _values(on_sim, x.to("sim:1"))
    assert len(expected) == len(found) > 1
    for value, other in zip(expected, found, strict=True):
        assert other.device == torch.device("sim:1")
        torch.testing.assert_close(other.cpu(), value, atol=1e-5, rtol=1e-4)


def test_autocast() -> None:
    linear, x = nn.Linear(3, 3, device="sim"), torch.ones(2, 3, device="sim")
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = linear(x)
        assert y.dtype == torch.bfloat16
        assert torch.softmax(y, 1).dtype == torch.float32
        assert nn.Conv1d(3, 3, 1, device="sim")(torch.ones(1, 3, 3, device="sim")).dtype == y.dtype
        with torch.autocast("sim", enabled=False):
            assert linear(x).dtype == torch.float32
    y.float().sum().backward()
    assert linear.weight.grad is not None
    assert linear.weight.grad.dtype == torch.float32


def test_random_numbers_follow_the_seed(either_way: bool) -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(3)
        ones = torch.ones(64, device="sim:1")
        draws.append(
            [torch.randn(5, device="sim:1"), functional.dropout(ones), functional.dropout(ones)]
        )
    for first, again in zip(*draws, strict=True):
        assert torch.equal(first, again)
    assert not torch.equal(draws[0][1], draws[0][2])
    assert set(draws[0][1].tolist()) == {0.0, 2.0}
