"""`KeptReplicas`: replicas of every kind of module, and no call sees another."""

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from aiopar.nn._kept_replicas import KeptReplicas
from tests.nn.kept import MIXED, assert_fresh, model
from tests.nn.sample_modules import CPU, ELSEWHERE, FACTORIES, batch, make

Devices = Sequence[torch.device]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Replicas are kept outside grad mode alone."""
    with torch.no_grad():
        yield


@pytest.mark.parametrize("kind", FACTORIES)
def test_replicas_of_every_kind_compute_what_the_module_does(kind: str) -> None:
    module = make(kind).eval()
    kept = KeptReplicas(module, MIXED)
    for _ in range(2):
        for replica in kept.call_copies():
            torch.testing.assert_close(replica(batch()), module(batch()))
            assert [n for n, _ in replica.named_parameters()] == [
                n for n, _ in module.named_parameters()
            ]
    assert (kept.rebuilds, kept.buffer_refreshes) == (1, 0)


def test_on_devices(devices: Devices) -> None:
    module = model().to(devices[0]).eval()
    kept = KeptReplicas(module, devices)
    for _ in range(2):
        for replica, device in zip(kept.call_copies(), devices, strict=True):
            result = replica(batch().to(device))
            assert result.device == device
            torch.testing.assert_close(result.to(devices[0]), module(batch().to(devices[0])))
        module[0].weight.mul_(2)
    assert kept.rebuilds == (2 if len(set(devices)) > 1 else 1)


def test_what_forward_writes_to_a_copy_does_not_last() -> None:
    module = model().train()
    kept = KeptReplicas(module, MIXED)
    kept.call_copies()[1](batch())  # buffers of replica 1
    assert_fresh(kept, module)
    kept.call_copies()[1][0].weight.zero_()
    assert_fresh(kept, module)


def test_a_running_call_keeps_the_weights_it_started_with() -> None:
    module = model()
    kept = KeptReplicas(module, ELSEWHERE)
    running = kept.call_copies()[0]
    before = running(batch())
    module[0].weight.zero_()
    module[1].running_mean.add_(1)
    assert_fresh(kept, module)
    assert torch.equal(running.train(False)(batch()), running(batch()))
    assert torch.equal(running.train()(batch()), before)


class Notes(nn.Module):
    """Sets attributes in forward, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        assert not hasattr(self, "seen")
        assert not hasattr(self.layer, "seen")
        assert not self.layer._forward_hooks
        self.seen = self.layer.seen = x
        self.layer.register_forward_hook(lambda _module, _args, out: out * self.scale)
        self.scale = self.scale * 2
        self.register_buffer("cache", x)
        result: Tensor = self.layer(x)
        return result


@pytest.mark.parametrize("placement", [(CPU, CPU), MIXED])
def test_what_forward_sets_on_self_is_gone_after_the_call(placement: Devices) -> None:
    module = Notes()
    kept = KeptReplicas(module, placement)
    expected = module.layer(batch()) * 2
    for _ in range(3):
        for replica in kept.call_copies():
            assert torch.equal(replica(batch()), expected)
    assert vars(module).keys() == vars(Notes()).keys()
    assert module.scale.tolist() == [1.0, 1.0]
    assert (kept.rebuilds, kept.buffer_refreshes) == (1, 0)


def test_calls_at_once_copy_once_and_do_not_see_each_other() -> None:
    module = Notes()
    kept = KeptReplicas(module, MIXED)
    expected = module.layer(batch()) * 2
    together = threading.Barrier(8)

    def call(_: int) -> list[Tensor]:
        together.wait()
        with torch.no_grad():
            return [replica(batch()) for replica in kept.call_copies()]

    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(call, range(8)):
            assert all(torch.equal(result, expected) for result in results)
    assert kept.rebuilds == 1


def test_first_built_in_inference_mode_there_are_no_inference_tensors() -> None:
    module = model().eval()
    kept = KeptReplicas(module, MIXED)
    with torch.inference_mode():
        replicas = kept.call_copies()
    assert not any(t.is_inference() for r in replicas for t in r.state_dict().values())
    assert_fresh(kept, module)  # ordinary operations on them
    assert kept.rebuilds == 1


def test_a_module_made_in_inference_mode() -> None:
    with torch.inference_mode():
        module = model().eval()
    kept = KeptReplicas(module, MIXED)
    for _ in range(2):
        for replica in kept.call_copies():
            assert torch.equal(replica(batch()), module(batch()))
    assert kept.rebuilds == 1


def test_sparse_buffers() -> None:
    module: Any = nn.Linear(6, 2)
    module.register_buffer("mask", torch.eye(6).to_sparse())
    kept = KeptReplicas(module, MIXED)
    for _ in range(2):
        for replica in kept.call_copies():
            assert replica.mask.to_dense().equal(torch.eye(6))
    assert (kept.rebuilds, kept.buffer_refreshes) == (1, 0)
    module.mask.mul_(2)
    assert kept.call_copies()[1].mask.to_dense().equal(2 * torch.eye(6))


def test_copies_are_leaves_as_their_originals() -> None:
    module = nn.Linear(2, 2)
    module.bias.requires_grad_(False)
    replica = KeptReplicas(module, ELSEWHERE).call_copies()[0]
    assert isinstance(replica.weight, nn.Parameter)
    assert replica.weight is not module.weight
    assert replica.weight.is_leaf
    assert (replica.weight.requires_grad, replica.bias.requires_grad) == (True, False)


def test_scripted() -> None:
    script: Any = torch.jit.script(model().eval())
    kept = KeptReplicas(script, MIXED)
    for _ in range(2):
        for replica in kept.call_copies():
            assert torch.equal(replica(batch()), script(batch()))
        next(script.parameters()).mul_(2)
    assert kept.rebuilds == 2


def _pickled(value: Any) -> Any:
    file = io.BytesIO()
    pickle.dump(value, file)
    return pickle.loads(file.getvalue())


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _pickled])
def test_duplicates_have_the_module_and_no_replicas(duplicate: Callable[[Any], Any]) -> None:
    module = model()
    kept = KeptReplicas(module, MIXED)
    kept.call_copies()
    both = duplicate({"module": module, "kept": kept})
    assert both["kept"].rebuilds == 0
    both["module"][0].weight.zero_()
    assert_fresh(both["kept"], both["module"])
    assert kept.rebuilds == 1
