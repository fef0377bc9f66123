"""`KeptReplicas` of a module that changes: never out of date, nothing copied twice."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from aiopar.nn._kept_replicas import KeptReplicas
from tests import simdevice
from tests.nn.kept import MIXED, assert_fresh, model
from tests.nn.sample_modules import CPU, ELSEWHERE, batch

Devices = Sequence[torch.device]


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    """Replicas are kept outside grad mode alone."""
    with torch.no_grad():
        yield


def simulated() -> Devices:
    return torch.device("sim:0"), torch.device("sim:1")


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
