"""`replicate`: what a replica has, and that training through replicas trains the original."""

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .sample_modules import (
    CPU,
    ELSEWHERE,
    FACTORIES,
    Buffers,
    OwnParameter,
    Tied,
    WithAttributes,
    batch,
    each_kind,
    each_placement,
    make,
    run,
)
from .waiting import replicate

Devices = Sequence[Any]


def loss_of(output: Tensor) -> Tensor:
    return (output * output).sum()


def replicated_backward(module: nn.Module, devices: Devices, x: Tensor) -> list[Tensor]:
    replicas = replicate(module, devices)
    chunks = x.chunk(len(devices))
    outputs = [run(replica, chunk) for replica, chunk in zip(replicas, chunks, strict=True)]
    torch.autograd.backward([loss_of(output) for output in outputs])
    return outputs


def plain_backward(module: nn.Module, count: int, x: Tensor) -> list[Tensor]:
    outputs = [module(chunk) for chunk in x.chunk(count)]
    torch.autograd.backward([loss_of(output) for output in outputs])
    return outputs


def assert_same_grads(module: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(module.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None:
            torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@each_kind
@each_placement
def test_outputs_and_gradients_equal_those_of_the_module(kind: str, placement: Devices) -> None:
    module, reference = make(kind), make(kind)
    outputs = replicated_backward(module, placement, batch())
    expected = plain_backward(reference, len(placement), batch())
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    assert any(parameter.grad is not None for parameter in module.parameters())
    assert_same_grads(module, reference)


@pytest.mark.parametrize("kind", ["tied", "buffers"])
def test_gradients_across_devices(kind: str, devices: Devices) -> None:
    with devices[0]:  # not `.to`, which unties parameters on some backends
        module = FACTORIES[kind]()
    reference = make(kind)
    reference.load_state_dict(module.state_dict())
    replicated_backward(module, devices, batch())
    plain_backward(reference, len(devices), batch())
    assert_same_grads(module, reference)


@each_kind
@each_placement
def test_a_replica_lists_its_own_copies(kind: str, placement: Devices) -> None:
    module = make(kind)
    for replica in replicate(module, placement):
        assert type(replica) is type(module)
        assert [n for n, _ in replica.named_modules()] == [n for n, _ in module.named_modules()]
        assert not set(replica.modules()) & set(module.modules())
        for named in ("named_parameters", "named_buffers"):
            ours, theirs = dict(getattr(replica, named)()), dict(getattr(module, named)())
            assert list(ours) == list(theirs)
        state, expected = replica.state_dict(), module.state_dict()
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key].cpu(), expected[key]) for key in state)


class TestTensors:
    def test_on_the_original_device_replica_0_has_the_original_parameters(self) -> None:
        module = Tied()
        first, second = replicate(module, [CPU, CPU])
        for mine, other, theirs in zip(
            first.parameters(), second.parameters(), module.parameters(), strict=True
        ):
            assert mine is theirs
            assert other.data_ptr() == theirs.data_ptr()

    def test_outside_grad_mode_all_replicas_have_the_original_parameters(self) -> None:
        module = nn.Linear(2, 2)
        with torch.no_grad():
            assert all(r.weight is module.weight for r in replicate(module, [CPU, CPU]))

    @pytest.mark.parametrize("detach", [False, True])
    @each_placement
    def test_versions_are_those_of_the_replica(self, placement: Devices, detach: bool) -> None:
        first, *others = replicate(Tied(), [*placement, *placement], detach=detach)
        before = [p._version for replica in (first, *others) for p in replica.parameters()]
        last = others.pop()
        with torch.no_grad():
            for parameter in last.parameters():
                parameter.clamp_(-1, 1)
        after = [p._version for replica in (first, *others) for p in replica.parameters()]
        assert after == before[: len(after)]

    def test_sparse_gradients(self) -> None:
        module = nn.Embedding(3, 1, sparse=True)
        for replica in replicate(module, [CPU, CPU]):
            replica(torch.tensor([2])).sum().backward()
        assert module.weight.grad is not None
        assert module.weight.grad.to_dense().tolist() == [[0], [0], [2]]

    @pytest.mark.sim
    def test_replicas_on_another_device_share_one_copy(self) -> None:
        module = nn.Linear(2, 2)
        first, other, second = replicate(module, [*ELSEWHERE, ELSEWHERE[0]])
        assert first.weight.data_ptr() == second.weight.data_ptr()
        assert first.weight is not other.weight
        assert first.weight.untyped_storage()._cdata != module.weight.untyped_storage()._cdata

    @pytest.mark.sim
    def test_ties_are_kept(self) -> None:
        for replica in replicate(Tied(), [CPU, *ELSEWHERE]):
            assert replica.decode.weight is replica.embed.weight
            assert replica.twin is replica.embed
        for other in replicate(Buffers(), [CPU, *ELSEWHERE, CPU]):
            assert other.offset is other.same

    @pytest.mark.sim
    def test_a_tensor_that_is_parameter_and_buffer(self) -> None:
        module = nn.Linear(2, 2)
        module.register_buffer("view", module.weight)
        for replica in replicate(module, [CPU, *ELSEWHERE, CPU]):
            assert replica.view is replica.weight

    @pytest.mark.sim
    def test_frozen_parameters_stay_frozen(self) -> None:
        for replica in replicate(Tied(), [CPU, *ELSEWHERE]):
            assert not replica.frozen.weight.requires_grad
            assert replica.embed.weight.requires_grad

    @each_placement
    def test_detached(self, placement: Devices) -> None:
        module = Buffers()
        for replica in replicate(module, placement, detach=True):
            assert not any(t.requires_grad for t in (*replica.parameters(), *replica.buffers()))
        first, second = replicate(module, [CPU, CPU], detach=True)
        assert first.weight.data_ptr() == module.weight.data_ptr() == second.weight.data_ptr()
        assert first.learned.data_ptr() == module.learned.data_ptr() != second.learned.data_ptr()

    @pytest.mark.parametrize("mode", ["grad", "no_grad", "inference", "detached"])
    @each_placement
    def test_tensors_keep_their_attributes_and_parameters_are_parameters(
        self, placement: Devices, mode: str
    ) -> None:
        module = WithAttributes()
        modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
        with modes.get(mode, nullcontext)():
            replicas = replicate(module, placement, detach=mode == "detached")
        own = [parameter.data_ptr() for parameter in module.parameters()]
        for index, replica in enumerate(replicas):
            # Parameters are leaves. With gradients, copies are not.
            leaf = mode != "grad" or (index == 0 and placement[0] == CPU)
            assert replica() == [leaf, leaf, True, False]
            assert (type(replica.own) is OwnParameter) is leaf
            if mode == "detached" and placement[index] == CPU:
                assert [one.data_ptr() for one in replica.parameters()] == own

    @pytest.mark.sim
    def test_replica_0_has_the_original_buffers_and_the_others_their_own(self) -> None:
        module: Any = nn.BatchNorm1d(3)
        first, second, third = replicate(module, [CPU, CPU, ELSEWHERE[0]])
        assert first.running_mean is module.running_mean
        storages = {r.running_mean.data_ptr() for r in (first, second, third)}
        assert len(storages) == 3
        second(torch.randn(4, 3) + 5)
        assert module.num_batches_tracked == 0
        first(torch.randn(4, 3) + 5)
        assert module.num_batches_tracked == 1
        assert module.running_mean.abs().sum() > 0

    @pytest.mark.sim
    def test_plain_tensors_and_references_are_shared_with_the_original(self) -> None:
        module: Any = nn.Sequential(nn.Linear(2, 2))
        module.plain = torch.ones(1)
        module.layers = [module[0]]
        replica = replicate(module, ELSEWHERE)[0]
        assert replica.plain is module.plain
        assert replica.layers[0] is module[0]
        assert replica[0] is not module[0]


@pytest.mark.sim
def test_a_module_tree_with_a_cycle() -> None:
    module: Any = nn.Linear(2, 2)
    module.add_module("child", nn.ReLU())
    module.child.add_module("parent", module)
    replica = replicate(module, ELSEWHERE)[0]
    assert replica.child.parent is replica


class TestHooks:
    def test_hook_dicts_are_copies(self) -> None:
        module = nn.Linear(2, 2)
        calls: list[str] = []
        handle = module.register_forward_hook(lambda *_: calls.append("original"))
        first, second = replicate(module, [CPU, CPU])
        first.register_forward_hook(lambda *_: calls.append("first"), prepend=True)
        handle.remove()
        for each in (module, first, second):
            each(torch.ones(1, 2))
        assert calls == ["first", "original", "original"]

    def test_all_containers_are_copies(self) -> None:
        module = nn.Linear(2, 2)
        replica = replicate(module, [CPU])[0]
        shared = {
            name
            for name, value in vars(module).items()
            if isinstance(value, dict | set) and vars(replica)[name] is value
        }
        assert shared == set()

    def test_zero_grad_warns_that_it_is_a_replica(self) -> None:
        replica = replicate(nn.Linear(2, 2), [CPU])[0]
        with pytest.warns(UserWarning, match="has no effect"):
            replica.zero_grad()


class TestRefused:
    """Modules that cannot be replicated: the error names the module, which stays unchanged."""

    def refuse(self, module: nn.Module, error: type[Exception], match: str) -> None:
        names = [name for name, _ in module.named_parameters()]
        with pytest.raises(error, match=match):
            replicate(module, [CPU, CPU])
        assert [name for name, _ in module.named_parameters()] == names

    def test_something_else_than_a_module(self) -> None:
        anything: Any = abs
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got"):
            replicate(anything, ["cpu"])

    def test_compiled(self) -> None:
        inner = nn.Linear(2, 2)
        compiled: Any = torch.compile(inner, backend="eager")
        self.refuse(compiled, TypeError, r"the module \(OptimizedModule\).*torch.compile")
        self.refuse(nn.Sequential(nn.ReLU(), compiled), TypeError, "module '1'")
        assert inner(torch.ones(1, 2)).shape == (1, 2)

    def test_compiled_in_place(self) -> None:
        module = nn.Sequential(nn.Linear(2, 2))
        module[0].compile(backend="eager")
        self.refuse(module, TypeError, r"module '0' \(Linear\).*Module.compile")

    def test_exported(self) -> None:
        exported = torch.export.export(nn.Sequential(nn.Linear(2, 2)), (torch.ones(3, 2),))
        module, x = exported.module(), torch.ones(3, 2)
        for replica in replicate(module, [CPU, CPU]):
            assert torch.equal(replica(x), module(x))

    def test_patched_forward(self) -> None:
        module: Any = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Linear(2, 2)))
        module[1][0].forward = module[1][0].forward  # a bound method of the original
        self.refuse(module, TypeError, r"module '1.0' \(Linear\) has its forward patched")

    def test_lazy(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: lazy modules are in development
            module = nn.Sequential(nn.LazyLinear(2), nn.LazyBatchNorm1d())
        self.refuse(module, ValueError, r"module '0' \(LazyLinear\) has uninitialized")
        module(torch.ones(2, 3))
        assert len(replicate(module, [CPU, CPU])) == 2


class TestOwnProtocol:
    """Modules that define `_replicate_for_data_parallel`."""

    class Noted(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.notes: list[str] = ["original"]

        def _replicate_for_data_parallel(self) -> nn.Module:
            replica = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            replica.notes = ["replica"]
            return replica  # type: ignore[no-any-return]

    @pytest.mark.sim
    def test_it_is_used(self) -> None:
        module = self.Noted()
        for replica in replicate(module, [CPU, *ELSEWHERE]):
            assert replica.notes == ["replica"]
            torch.autograd.backward(run(replica, torch.ones(1, 2)).sum())
        assert module.bias.grad is not None
        assert module.bias.grad.tolist() == [3.0, 3.0]
        assert module.notes == ["original"]


class TestScripted:
    @pytest.mark.sim
    def test_gradients_reach_the_original(self) -> None:
        script = torch.jit.script(nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
        plain = nn.Linear(3, 2)
        module = nn.Sequential(script, plain)
        reference = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
        reference.load_state_dict(
            dict(zip(reference.state_dict(), module.state_dict().values(), strict=True))
        )
        outputs = replicated_backward(module, [CPU, *ELSEWHERE, CPU], batch())
        expected = plain_backward(reference, 4, batch())
        for ours, theirs in zip(outputs, expected, strict=True):
            torch.testing.assert_close(ours, theirs)
        assert_same_grads(module, reference)
        assert dict(script.named_buffers())["1.num_batches_tracked"] == 1


def test_buffers_in_the_layout_of_mkldnn() -> None:
    class Converted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.randn(3, 4).to_mkldnn())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.get_buffer("weight").to_dense().T

    module, x = Converted(), torch.randn(6, 4)
    for replica in replicate(module, [CPU, CPU]):
        assert replica.get_buffer("weight").is_mkldnn
        assert torch.equal(replica(x), module(x))
