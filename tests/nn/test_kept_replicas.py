"""The replicas that `DataParallel` keeps outside grad mode: up to date, copied only if needed.

Replicas on the module's device share its weights; on another device they have copies. Tests that
look for weights that are copied again use simulated devices.
"""

import asyncio
import copy
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm

import aiopar
from aiopar.testing import Gate
from tests import simdevice

from ..freeing import survivors, without_gc
from .sample_modules import (
    CPU,
    ELSEWHERE,
    OwnParameter,
    WithAttributes,
    batch,
    each_placement,
    run,
    under,
)

Devices = Sequence[Any]
MIXED = (CPU, *ELSEWHERE, CPU)


def model() -> Any:  # mypy knows too little of the modules in a Sequential
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))


def kept(dp: aiopar.DataParallel[Any]) -> list[Any]:
    """The replicas of one call outside grad mode."""
    replicas: list[Any] = aiopar.wait(under(torch.no_grad, dp.replicate, dp.module, dp.device_ids))
    return replicas


def weights(dp: aiopar.DataParallel[Any]) -> list[Tensor]:
    return [weight for replica in kept(dp) for weight in replica.parameters()]


def same_objects(ours: Sequence[object], theirs: Sequence[object]) -> bool:
    return len(ours) == len(theirs) and all(a is b for a, b in zip(ours, theirs, strict=True))


class Wrapped:
    """A module in evaluation, a wrapper that was used, and an input."""

    def __init__(self, devices: Devices, module: nn.Module | None = None) -> None:
        self.module: Any = model() if module is None else module
        self.module.to(devices[0]).eval()
        self.dp = aiopar.DataParallel(self.module, devices)
        self.x = batch().to(devices[0])
        self.check()

    def check(self) -> None:
        """The wrapper computes what the module computes now."""
        with torch.no_grad():
            output, expected = aiopar.wait(self.dp(self.x)), self.module(self.x)
        assert output.dtype == expected.dtype
        assert torch.allclose(output.cpu(), expected.cpu(), atol=1e-6)


# What users do to a module between two calls.


def no_grad(edit: Callable[[Any], object]) -> Callable[[Any], object]:
    return torch.no_grad()(edit)


def optimizer_step(module: Any, **options: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
    module(batch().to(module[0].weight.device)).sum().backward()
    optimizer.step()


def training_step(module: Any) -> None:
    module.train()
    optimizer_step(module)
    module.eval()


def load(module: Any, **options: Any) -> None:
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, **options)


def replace(module: Any) -> None:
    module[3] = nn.Linear(4, 3).to(module[0].weight.device)


def add(module: Any) -> None:
    module.append(nn.Linear(2, 2).to(module[0].weight.device))


def replace_parameter(module: Any) -> None:
    module[3].bias = nn.Parameter(torch.ones_like(module[3].bias))


def delete_parameter(module: Any) -> None:
    module[3].bias = None


def rename_buffer(module: Any) -> None:
    module[1].renamed = module[1].running_mean
    del module[1].running_mean
    module[1].register_buffer("running_mean", module[1].renamed + 1)


def parametrize(module: Any) -> None:
    nn.utils.parametrizations.weight_norm(module[0])
    with torch.no_grad():
        module[0].parametrizations.weight.original0.mul_(2)


def one_vector(module: Any) -> None:
    ones = torch.ones(38 + 8, device=module[0].weight.device)
    nn.utils.vector_to_parameters(ones, module.parameters())


WEIGHT_CHANGES: dict[str, Callable[[Any], object]] = {
    "optimizer step": optimizer_step,
    "optimizer step over all tensors": lambda m: optimizer_step(m, foreach=True),
    "step in training": training_step,
    "load_state_dict": load,
    "load_state_dict(assign=True)": lambda m: load(m, assign=True),
    "in-place edit": no_grad(lambda m: m[0].weight.mul_(2)),
    "in-place edit in inference mode": torch.inference_mode()(lambda m: m[0].bias.add_(1)),
    "edit through detach": lambda m: m[0].weight.detach().zero_(),
    "parameters from one vector": one_vector,
    "requires_grad_": lambda m: m.requires_grad_(False),
    "to(dtype) and back": lambda m: m.half().float(),
    "replaced submodule": replace,
    "added submodule": add,
    "deleted submodule": lambda m: m.__delitem__(3),
    "submodule used twice": lambda m: m.insert(2, m[1]),
    "replaced parameter": replace_parameter,
    "deleted parameter": delete_parameter,
    "replaced buffer": rename_buffer,
    "parametrized": parametrize,
}
OTHER_CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda m: None,
    "buffer edit": lambda m: m[1].running_mean.add_(1),
    "train and eval": lambda m: m.train().eval(),
    "plain attribute": lambda m: setattr(m[1], "eps", 0.1),
    "hook": lambda m: m[0].register_forward_hook(lambda _m, _i, out: out * 2),
    "hook with kwargs": lambda m: m.register_forward_pre_hook(
        lambda _m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True
    ),
    "class": lambda m: setattr(m[2], "__class__", nn.Tanh),
}


class TestCopiedWhenNeeded:
    @pytest.mark.parametrize("change", [*WEIGHT_CHANGES, *OTHER_CHANGES])
    def test_outputs_after_a_change(self, change: str, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        edit = WEIGHT_CHANGES.get(change) or OTHER_CHANGES[change]
        edit(wrapped.module)
        wrapped.check()
        wrapped.check()

    @pytest.mark.sim
    @pytest.mark.parametrize("change", WEIGHT_CHANGES)
    def test_weights_are_copied_once_after_a_change(self, change: str) -> None:
        wrapped = Wrapped(MIXED)
        before = weights(wrapped.dp)
        WEIGHT_CHANGES[change](wrapped.module)
        after = weights(wrapped.dp)
        assert not same_objects(before, after)
        assert same_objects(after, weights(wrapped.dp))

    @pytest.mark.sim
    @pytest.mark.parametrize("change", OTHER_CHANGES)
    def test_weights_stay_after_another_change(self, change: str) -> None:
        wrapped = Wrapped(MIXED)
        before = weights(wrapped.dp)
        OTHER_CHANGES[change](wrapped.module)
        assert same_objects(before, weights(wrapped.dp))
        # In grad mode each call replicates; that leaves kept replicas alone.
        aiopar.wait(wrapped.dp(wrapped.x)).sum().backward()
        assert same_objects(before, weights(wrapped.dp))

    @pytest.mark.sim
    def test_after_a_step_of_a_fused_optimizer(self) -> None:
        """Fused steps do not raise the version of the weights."""
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), 0.1, fused=True)
        wrapped = Wrapped(MIXED, module)
        module(batch()).sum().backward()
        version = module[0].weight._version
        optimizer.step()
        assert module[0].weight._version == version, "if it is raised, the hook may go"
        wrapped.check()
        before = weights(wrapped.dp)
        optimizer_step(model(), fused=True)  # another model
        assert same_objects(before, weights(wrapped.dp))

    @pytest.mark.sim
    def test_buffers_alone_are_copied_when_only_they_have_changed(self) -> None:
        wrapped = Wrapped((CPU, CPU, "sim:0"))
        wrapped.dp.train()
        old = kept(wrapped.dp)
        for replica in old:
            run(replica, batch())  # writes running statistics: replica 0 to the module's own
        new = kept(wrapped.dp)
        assert wrapped.module[1].num_batches_tracked == 1
        assert [int(replica[1].num_batches_tracked) for replica in new] == [1, 1, 1]
        assert new[2][0].weight is old[2][0].weight
        assert new[0][1].running_mean is wrapped.module[1].running_mean

    @pytest.mark.sim
    def test_after_writes_to_the_copies(self) -> None:
        wrapped = Wrapped(MIXED)
        with torch.no_grad():
            kept(wrapped.dp)[1][0].weight.zero_()
        wrapped.check()

    @pytest.mark.sim
    def test_after_another_storage_at_the_same_address(self) -> None:
        """As after `.half().float()`, when the allocator gives the freed address again."""
        module = nn.Linear(1, 1, bias=False)
        memory = bytearray(4)
        module.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(1, 1)
        before = module.weight._version, module.weight.data_ptr()
        dp = aiopar.DataParallel(module, (CPU, "sim:0"))
        assert kept(dp)[1].weight.item() == 0
        module.weight.data = torch.frombuffer(memory, dtype=torch.float32).view(1, 1)
        module.weight.data.fill_(5)
        assert (module.weight._version, module.weight.data_ptr()) == before
        assert kept(dp)[1].weight.item() == 5

    def test_a_module_that_is_patched_later_is_refused(self) -> None:
        wrapped = Wrapped((CPU, CPU))
        wrapped.module[0].forward = wrapped.module[3].forward
        for _ in range(2):
            with pytest.raises(TypeError, match="module '0'"):
                kept(wrapped.dp)
        del wrapped.module[0].forward
        wrapped.check()

    @pytest.mark.sim
    def test_a_copy_that_fails_is_made_by_the_next_call(self) -> None:
        wrapped = Wrapped(MIXED)
        simdevice.set_memory_limit("sim:0", 1)
        optimizer_step(wrapped.module)
        with pytest.raises(torch.OutOfMemoryError):
            kept(wrapped.dp)
        simdevice.set_memory_limit("sim:0", 1 << 30)
        wrapped.check()

    @pytest.mark.sim
    def test_two_sets_of_weights_are_never_needed(self) -> None:
        module = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)]).to("sim:0")
        dp = aiopar.DataParallel(module, ELSEWHERE)
        kept(dp)
        simdevice.set_memory_limit("sim:1", 10 * 256 * 256 * 4)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(2)
        copied = kept(dp)[1]
        pairs = zip(copied.parameters(), module.parameters(), strict=True)
        assert all(torch.equal(ours.cpu(), theirs.cpu()) for ours, theirs in pairs)

    @pytest.mark.sim
    def test_copies_are_complete(self) -> None:
        """The next call may use them on another stream at once."""
        module = model().to("sim:0")
        dp = aiopar.DataParallel(module, ELSEWHERE)
        torch.accelerator.synchronize()
        simdevice.set_copy_latency(0.002)
        kept(dp)
        assert simdevice.pending_streams("sim:1") == 0
        module[1].running_mean.add_(1)
        kept(dp)
        assert simdevice.pending_streams("sim:1") == 0


class TestReplicas:
    @pytest.mark.sim
    def test_running_calls_keep_the_weights_they_started_with(self) -> None:
        wrapped = Wrapped(MIXED)
        running = kept(wrapped.dp)[1]
        before = run(running, batch())
        in_place = WEIGHT_CHANGES["in-place edit"]
        in_place(wrapped.module)
        wrapped.module[1].running_mean.add_(1)
        wrapped.check()
        assert torch.equal(run(running, batch()), before)

    @pytest.mark.sim
    def test_copies_are_leaves_like_their_originals(self) -> None:
        module = nn.Linear(2, 2)
        module.bias.requires_grad_(False)
        replica = kept(aiopar.DataParallel(module, (CPU, "sim:0")))[1]
        assert isinstance(replica.weight, nn.Parameter)
        assert replica.weight is not module.weight
        assert replica.weight.is_leaf
        assert (replica.weight.requires_grad, replica.bias.requires_grad) == (True, False)

    @each_placement
    def test_tensors_keep_their_attributes(self, placement: Devices) -> None:
        for replica in kept(aiopar.DataParallel(WithAttributes(), [CPU, *placement])):
            assert replica() == [True, True, True, False]
            assert type(replica.own) is OwnParameter

    @pytest.mark.sim
    def test_made_in_inference_mode_they_are_no_inference_tensors(self) -> None:
        module = model().eval()
        dp = aiopar.DataParallel(module, MIXED)
        call = under(torch.inference_mode, dp.replicate, module, dp.device_ids)
        for replica in aiopar.wait(call):
            assert not any(tensor.is_inference() for tensor in replica.state_dict().values())

    @pytest.mark.sim
    def test_of_a_module_made_in_inference_mode(self) -> None:
        with torch.inference_mode():
            module = model().eval()
        dp = aiopar.DataParallel(module, MIXED)
        assert same_objects(weights(dp), weights(dp))
        with torch.no_grad():
            for replica in kept(dp):
                assert torch.equal(run(replica, batch()), module(batch()))

    def test_sparse_buffers(self) -> None:
        module: Any = nn.Linear(6, 2)
        module.register_buffer("mask", torch.eye(6).to_sparse())
        dp = aiopar.DataParallel(module.eval(), (CPU, CPU))
        first, second = kept(dp)
        assert first.mask is module.mask
        assert second.mask.to_dense().equal(torch.eye(6))
        assert kept(dp)[1].mask is second.mask
        module.mask.mul_(2)
        assert kept(dp)[1].mask.to_dense().equal(2 * torch.eye(6))

    @pytest.mark.sim
    def test_scripted(self) -> None:
        script: Any = torch.jit.script(model().eval())
        dp = aiopar.DataParallel(script, MIXED)
        for _ in range(2):
            with torch.no_grad():
                for replica in kept(dp):
                    assert torch.equal(run(replica, batch()), script(batch()))
                next(script.parameters()).mul_(2)


class Normalizes(nn.Module):
    """Updates running statistics in evaluation too: `F.batch_norm` leaves no trace of it."""

    mean: Tensor
    variance: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("variance", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        batch_norm(x, self.mean, self.variance, training=True, momentum=0.5)
        return (x - self.mean) / self.variance


class Counts(nn.Module):
    """Counts calls in a scalar, and adds up inputs in a matrix."""

    count: Tensor
    total: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("total", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.total += x.sum(0)
        return x * self.count + self.total.sum(0)


class TorchCall:
    """A call of torch's wrapper: replica 0 has the buffers of the module, the others copies."""

    def __init__(self, module: nn.Module, x: Tensor, count: int) -> None:
        self.chunks = x.chunk(count)
        self.replicas = [module, *(copy.deepcopy(module) for _ in self.chunks[1:])]

    def run(self) -> Tensor:
        pairs = zip(self.replicas, self.chunks, strict=True)
        return torch.cat([replica(chunk) for replica, chunk in pairs])


class TestForwardsThatWriteToBuffers:
    """Each call starts from the buffers of the module, also in evaluation."""

    @pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
    @pytest.mark.parametrize("writer", [Normalizes, Counts])
    def test_calls_in_a_row(self, writer: type[nn.Module], mode: Any, devices: Devices) -> None:
        module = writer().to(devices[0]).eval()
        reference = copy.deepcopy(module)
        dp = aiopar.DataParallel(module, devices)
        for scale in (1, 2, 3):
            x = scale * batch().to(devices[0]) + scale
            with mode():
                output = aiopar.wait(dp(x))
                expected = TorchCall(reference, x, len(devices)).run()
            torch.testing.assert_close(output, expected)
            torch.testing.assert_close(module.state_dict(), reference.state_dict())

    @pytest.mark.parametrize("held", ["before", "after"])
    def test_calls_at_once(self, held: str, devices: Devices) -> None:
        """One call is held before or after its writes, while another one runs."""
        gate = Gate()

        class Held(Normalizes):
            def forward(self, x: Tensor) -> Tensor:
                if held == "before" and x.mean() > 50:
                    gate()
                y = super().forward(x)
                if held == "after" and x.mean() > 50:
                    gate()
                return y

        module = Held().to(devices[0]).eval()
        reference = copy.deepcopy(module)
        dp = aiopar.DataParallel(module, devices)
        x = batch().to(devices[0])

        async def overlap() -> tuple[Tensor, Tensor]:
            executor = aiopar.DeviceExecutor([*devices, *devices])
            with executor, aiopar.use_executor(executor), gate:
                with torch.no_grad():
                    first, second = dp(x + 100), dp(x)
                holding = asyncio.create_task(first)
                await gate.entered(len(devices))
                output = await second
                gate.open()
                return await holding, output

        outputs = asyncio.run(overlap())
        with torch.no_grad():
            first = TorchCall(reference, x + 100, len(devices))
            if held == "before":
                second = TorchCall(reference, x, len(devices)).run()
                expected = first.run(), second
            else:
                expected = first.run(), TorchCall(reference, x, len(devices)).run()
        torch.testing.assert_close(outputs, expected)


class Codebook(nn.Module):
    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(2, 6))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.table.data += x.detach().sum(0)
        return x + self.table.sum(0)


def norm_without_a_count() -> nn.Module:
    norm = nn.BatchNorm1d(6)
    norm.num_batches_tracked = None  # a count would be noticed
    return norm


class TestOutputsAreUpToDate:
    @pytest.mark.parametrize("make", [Codebook, norm_without_a_count])
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_after_a_forward_in_training_that_writes_to_buffers_without_a_trace(
        self, make: Callable[[], nn.Module], mode: Any, devices: Devices
    ) -> None:
        wrapped = Wrapped(devices, make())
        wrapped.dp.train()
        asyncio.run(under(mode, wrapped.dp, wrapped.x))
        wrapped.dp.eval()
        wrapped.check()

    @pytest.mark.asyncio
    async def test_modes_are_up_to_date(self, devices: Devices) -> None:
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
            call = under(torch.inference_mode, dp, x)
            expected = training, inner, requires_grad
            each = tuple([value] * len(devices) for value in expected)
            assert await call == (each if len(devices) > 1 else expected)

    def test_edits_through_data_need_a_refresh(self, devices: Devices) -> None:
        wrapped = Wrapped(devices)
        wrapped.module[0].weight.data.mul_(2)
        wrapped.module[1].running_mean.data.add_(1)
        wrapped.dp.refresh()
        wrapped.check()

    def test_after_assigning_another_module(self, devices: Devices) -> None:
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


class Notes(nn.Module):
    """Sets attributes in forward, as many models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 2)
        self.calls = 0
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
        self.calls += 1
        result: Tensor = self.layer(x) * self.calls
        return result


class TestWhatForwardSets:
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
    @each_placement
    def test_does_not_persist(self, mode: Any, placement: Devices) -> None:
        module = Notes().to(placement[0])
        dp = aiopar.DataParallel(module, [*placement, placement[0]])
        expected = run(module.layer, batch()) * 2
        for _ in range(3):
            call = under(mode, dp, batch().to(placement[0]))
            torch.testing.assert_close(aiopar.wait(call).cpu(), expected)
        assert vars(module).keys() == vars(Notes()).keys()
        assert module.scale.tolist() == [1.0, 1.0]

    def test_is_not_seen_by_another_call(self) -> None:
        dp = aiopar.DataParallel(Notes(), (CPU, CPU))
        together = threading.Barrier(8)

        def call(_: int) -> None:
            together.wait()
            for replica in kept(dp):
                replica(batch())

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(call, range(8)))


@pytest.mark.anyio
@pytest.mark.parametrize("device_ids", [["cpu"], ["cpu", "cpu"]])
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])
async def test_reference_counting_frees_everything(device_ids: list[str], mode: Any) -> None:
    alive: list[weakref.ref[Any]] = []
    failing = [True]

    class Own(Exception):
        """Built-in errors cannot be weakly referenced."""

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
            call = under(mode, dp, x)
            try:
                alive.append(weakref.ref(await call))
            except Own as error:
                alive.append(weakref.ref(error))
            del x, call
        alive += weakref.ref(dp), weakref.ref(dp.module)
        del dp
        assert await survivors(alive) == []
