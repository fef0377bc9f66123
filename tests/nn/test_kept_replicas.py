"""`KeptReplicas`: never out of date, nothing copied twice, and no call sees another."""

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
from tests import simdevice
from tests.nn.sample_modules import CPU, ELSEWHERE, FACTORIES, batch, make

Devices = Sequence[torch.device]
MIXED = (CPU, *ELSEWHERE, CPU)


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Replicas are kept outside grad mode alone."""
    with torch.no_grad():
        yield


def model() -> Any:  # a Sequential; mypy knows of its modules' attributes too little
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))


def simulated() -> Devices:
    return torch.device("sim:0"), torch.device("sim:1")


def assert_fresh(kept: KeptReplicas[Any], module: nn.Module) -> None:
    """Every replica computes what the module computes now."""
    for replica in kept.call_copies():
        expected = copy.deepcopy(module)(batch())
        torch.testing.assert_close(copy.deepcopy(replica)(batch()), expected, rtol=0, atol=0)


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


# What users do to a module between two calls. True: weights on other devices are copied anew.
def _optimizer(module: Any, **options: Any) -> None:
    with torch.enable_grad():
        optimizer = torch.optim.Adam(module.parameters(), 0.1, **options)
        module(batch()).sum().backward()
        optimizer.step()


def _load(module: Any, **options: Any) -> None:
    torch.manual_seed(1)
    state = {name: torch.rand_like(t.float()).to(t) for name, t in module.state_dict().items()}
    module.load_state_dict(state, **options)


def _tie(module: Any) -> None:
    module[3].bias = nn.Parameter(torch.ones(2))


def _untie(module: Any) -> None:
    module[3].bias = None


def _wrap(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module[0])
    module[0].parametrizations.weight.original0.mul_(2)


def _reorder(module: Any) -> None:
    module.insert(2, module[1])


def _rename(module: Any) -> None:
    module[1].renamed = module[1].running_mean
    del module[1].running_mean
    module[1].register_buffer("running_mean", module[1].renamed + 1)


CHANGES: dict[str, tuple[Callable[[Any], object], bool]] = {
    "nothing": (lambda _: None, False),
    "optimizer step": (_optimizer, True),
    "fused optimizer step": (lambda m: _optimizer(m, fused=True), True),
    "load_state_dict": (_load, True),
    "load_state_dict(assign=True)": (lambda m: _load(m, assign=True), True),
    "in-place edit": (lambda m: m[0].weight.mul_(2), True),
    "in-place edit in inference mode": (torch.inference_mode()(lambda m: m[0].bias.add_(1)), True),
    "edit through detach": (lambda m: m[0].weight.detach().zero_(), True),
    "parameters made one vector": (
        lambda m: nn.utils.vector_to_parameters(torch.ones(38 + 8), m.parameters()),
        True,
    ),
    "requires_grad_": (lambda m: m.requires_grad_(False), True),
    "to(dtype) and back": (lambda m: m.half().float(), True),
    "replaced submodule": (lambda m: m.__setitem__(3, nn.Linear(4, 2)), True),
    "added submodule": (lambda m: m.append(nn.Linear(2, 2)), True),
    "deleted submodule": (lambda m: m.__delitem__(3), True),
    "submodule used twice": (_reorder, True),
    "replaced parameter": (_tie, True),
    "deleted parameter": (_untie, True),
    "replaced buffer": (_rename, True),
    "parametrized": (_wrap, True),
    "buffer edit": (lambda m: m[1].running_mean.add_(1), False),
    "eval": (lambda m: m.eval(), False),
    "plain attribute": (lambda m: setattr(m[2], "p", 1.0), False),
    "hook": (lambda m: m[0].register_forward_hook(lambda _m, _i, out: out * 2), False),
    "hook with kwargs": (
        lambda m: m.register_forward_pre_hook(lambda _m, a, k: ((a[0] * 2,), k), with_kwargs=True),
        False,
    ),
    "class": (lambda m: setattr(m[2], "__class__", nn.AlphaDropout), False),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("placement", [(CPU,), (CPU, CPU), ELSEWHERE, MIXED])
def test_fresh_after(change: str, placement: Devices) -> None:
    module = model()
    kept = KeptReplicas(module, placement)
    assert_fresh(kept, module)
    edit, copies_weights = CHANGES[change]
    edit(module)
    assert_fresh(kept, module)
    if placement == MIXED:
        assert kept.rebuilds == (2 if copies_weights else 1)
    refreshes = kept.buffer_refreshes
    rebuilds = kept.rebuilds
    assert_fresh(kept, module)
    assert (kept.rebuilds, kept.buffer_refreshes) == (rebuilds, refreshes)


def test_to_another_dtype() -> None:
    module = model().eval()
    kept = KeptReplicas(module, MIXED)
    kept.call_copies()
    module.double()
    for replica in kept.call_copies():
        assert torch.equal(replica(batch().double()), module(batch().double()))


def test_another_storage_at_the_same_address() -> None:
    """As after `.half()` and `.float()`, when the allocator gives the freed address again."""
    module = nn.Linear(1, 1, bias=False)
    memory = bytearray(4)
    module.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(1, 1)
    before = module.weight._version, module.weight.data_ptr()
    kept = KeptReplicas(module, ELSEWHERE)
    assert kept.call_copies()[0].weight.item() == 0
    module.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(1, 1)
    module.weight.data.fill_(5)
    assert (module.weight._version, module.weight.data_ptr()) == before
    assert kept.call_copies()[0].weight.item() == 5


@pytest.mark.sim
def test_renewing_needs_no_memory_for_two_sets_of_weights() -> None:
    module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).to("sim:0")
    kept = KeptReplicas(module, simulated())
    kept.call_copies()
    simdevice.set_memory_limit("sim:1", 10 * 256 * 256 * 4)
    for parameter in module.parameters():
        parameter.mul_(2)
    copied = kept.call_copies()[1]
    pairs = zip(copied.parameters(), module.parameters(), strict=True)
    assert all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs)


@pytest.mark.sim
def test_copies_are_complete_when_they_are_handed_out() -> None:
    """The next call may compute with them on another stream, at once."""
    module = model().to("sim:0")
    kept = KeptReplicas(module, simulated())
    torch.accelerator.synchronize()
    simdevice.set_copy_latency(0.002)
    kept.call_copies()
    assert simdevice.pending_streams("sim:1") == 0
    module[1].running_mean.add_(1)
    kept.call_copies()
    assert simdevice.pending_streams("sim:1") == 0
    assert (kept.rebuilds, kept.buffer_refreshes) == (1, 1)


def test_shared_weights_need_no_rebuild_after_an_optimizer_step() -> None:
    module = nn.Linear(6, 2)
    kept = KeptReplicas(module, [CPU, CPU])
    kept.call_copies()
    module.weight.add_(1)
    assert all(torch.equal(r(batch()), module(batch())) for r in kept.call_copies())
    assert kept.rebuilds == 1


def test_another_model_s_fused_optimizer_is_no_reason_to_copy() -> None:
    kept = KeptReplicas(model(), MIXED)
    kept.call_copies()
    _optimizer(model(), fused=True)
    kept.call_copies()
    assert kept.rebuilds == 1


def test_weights_that_hold_are_not_copied_again() -> None:
    module = model()
    kept = KeptReplicas(module, ELSEWHERE)
    before = kept.call_copies()[0]
    module[0].weight.add_(1)
    after = kept.call_copies()[0]
    assert after[0].weight is not before[0].weight
    assert after[0].bias is before[0].bias
    assert after[3].weight is before[3].weight


def test_refresh_after_an_edit_through_data() -> None:
    module = model()
    kept = KeptReplicas(module, MIXED)
    kept.call_copies()
    module[0].weight.data.zero_()
    kept.refresh()
    assert_fresh(kept, module)
    assert kept.rebuilds == 2


def test_buffers_alone_are_copied_when_only_they_change() -> None:
    module = model().train()
    kept = KeptReplicas(module, [CPU, CPU, ELSEWHERE[0]])
    old = kept.call_copies()
    for replica in old:
        replica(batch())  # writes running statistics, to the module's own in replica 0
    new = kept.call_copies()
    assert (kept.rebuilds, kept.buffer_refreshes) == (1, 1)
    assert module[1].num_batches_tracked == 1
    assert [int(r[1].num_batches_tracked) for r in new] == [1, 1, 1]
    assert new[2][0].weight is old[2][0].weight
    assert new[0][1].running_mean is module[1].running_mean


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


def test_a_module_that_was_patched_meanwhile_is_refused() -> None:
    module = model()
    kept = KeptReplicas(module, [CPU, CPU])
    kept.call_copies()
    module[0].forward = module[3].forward
    for _ in range(2):
        with pytest.raises(TypeError, match="module '0'"):
            kept.call_copies()
    del module[0].forward
    assert len(kept.call_copies()) == 2


def test_a_copy_that_fails_is_made_by_the_next_call() -> None:
    module = model()
    kept = KeptReplicas(module, MIXED)
    kept.call_copies()
    good = module[3]
    module[3] = nn.Linear(4, 2, device="meta")  # cannot be copied to the CPU
    with pytest.raises(NotImplementedError, match="meta"):
        kept.call_copies()
    module[3] = good
    assert_fresh(kept, module)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
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
