"""`DataParallel`: what the wrapped module computes, on several devices, awaited."""

import asyncio
import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar

from .sample_modules import FACTORIES, batch, make

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]

# On the meta device nothing has a value, but placement is told apart on every machine.
META = torch.device("meta")


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    return {
        name: None if parameter.grad is None else parameter.grad.cpu()
        for name, parameter in module.named_parameters()
    }


def same(ours: Any, theirs: Any) -> bool:
    return bool(torch.allclose(ours.cpu(), theirs.cpu(), atol=1e-6))


def same_grads(ours: nn.Module, theirs: nn.Module) -> bool:
    left, right = grads(ours), grads(theirs)
    assert left.keys() == right.keys()
    return all(
        (left[name] is None and right[name] is None) or same(left[name], right[name])
        for name in left
    )


PER_CHUNK = {"batch-norm"}  # statistics of each chunk, as in torch's DataParallel
BATCH_SECOND = {"lstm", "gru", "weight-norm-lstm"}


def wrap(kind: str, devices: Devices) -> tuple[aiopar.DataParallel, nn.Module, Tensor]:
    """The module wrapped, one like it, and an input."""
    module, reference = make(kind).to(devices[0]), make(kind).to(devices[0])
    dp = aiopar.DataParallel(module, devices, dim=1 if kind in BATCH_SECOND else 0)
    return dp, reference, batch().to(devices[0])


# Plain functions with an event loop for each call: what torch does in the reference and in
# optimizers reads files, which a loop must not. A module that keeps a graph of its own alive from
# when it was made (an LSTM with weight norm) began that on another stream than the workers have.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream:UserWarning")
class TestEquality:
    @pytest.mark.parametrize("kind", FACTORIES)
    def test_outputs_in_evaluation(self, kind: str, devices: Devices) -> None:
        dp, reference, x = wrap(kind, devices)
        dp.eval(), reference.eval()
        with torch.inference_mode():
            y, expected = asyncio.run(dp(x)), reference(x)
        assert y.device == devices[0]
        assert y.is_inference()
        assert same(y, expected)

    @pytest.mark.parametrize("kind", sorted(FACTORIES.keys() - PER_CHUNK))
    def test_outputs_and_gradients(self, kind: str, devices: Devices) -> None:
        dp, reference, x = wrap(kind, devices)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        y, expected = asyncio.run(dp(ours)), reference(theirs)
        assert same(y, expected)
        y.pow(2).sum().backward()
        expected.pow(2).sum().backward()
        assert same_grads(dp.module, reference)
        assert same(ours.grad, theirs.grad)

    @pytest.mark.parametrize("kind", sorted(FACTORIES.keys() - PER_CHUNK))
    def test_three_steps_end_in_the_same_weights(self, kind: str, devices: Devices) -> None:
        dp, reference, x = wrap(kind, devices)
        ours, theirs = (torch.optim.SGD(m.parameters(), 0.05) for m in (dp, reference))
        for _ in range(3):
            ours.zero_grad()
            theirs.zero_grad()
            asyncio.run(dp(x)).pow(2).mean().backward()
            reference(x).pow(2).mean().backward()
            ours.step()
            theirs.step()
        after, expected = dp.module.state_dict(), reference.state_dict()
        assert after.keys() == expected.keys()
        assert all(same(after[name], expected[name]) for name in after)
        with torch.no_grad():  # replicas that are kept see the steps
            assert same(asyncio.run(dp(x)), reference(x))

    def test_batch_norm_in_training_is_per_chunk_with_statistics_of_the_first(
        self, devices: Devices
    ) -> None:
        dp, reference, x = wrap("batch-norm", devices)
        references = [reference, *(copy.deepcopy(reference) for _ in devices[1:])]
        for mode in torch.enable_grad, torch.no_grad:
            with mode():
                y = asyncio.run(dp(x))
            chunks = x.chunk(len(devices))
            expected = torch.cat([m(part) for m, part in zip(references, chunks, strict=True)])
            assert same(y, expected)
        buffers = dict(dp.module.named_buffers())
        for name, buffer in reference.named_buffers():
            assert same(buffers[name], buffer)
        dp.eval(), reference.eval()
        with torch.no_grad():
            assert same(asyncio.run(dp(x)), reference(x))

    def test_autocast_with_gradients(self, devices: Devices) -> None:
        module = nn.Linear(6, 3).to(devices[0])
        reference, x = copy.deepcopy(module), batch().to(devices[0])
        with torch.autocast(devices[0].type, torch.bfloat16):
            y, expected = asyncio.run(aiopar.DataParallel(module, devices)(x)), reference(x)
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        expected.float().sum().backward()
        ours, theirs = grads(module), grads(reference)
        assert all(torch.allclose(ours[name], theirs[name], rtol=2e-2) for name in theirs)  # type: ignore[arg-type]  # both have gradients

    def test_every_backward_adds_up(self) -> None:
        dp, reference, x = wrap("containers", (torch.device("cpu"),) * 3)
        for _ in range(2):
            asyncio.run(dp(x)).sum().backward()
            reference(x).sum().backward()
        assert same_grads(dp.module, reference)


@dataclass
class Output:
    logits: Tensor
    name: str
    hidden: tuple[Tensor, ...] = ()


class Structured(nn.Module):
    """Keyword arguments in; whatever is asked for out."""

    def __init__(self, make_output: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)
        self.make_output = make_output

    def forward(self, *, x: Tensor, scale: Tensor, offset: float = 0.0) -> Any:
        return self.make_output(self.linear(x) * scale + offset, x.sum())


def identity(output: Any) -> Any:
    return output


class TestArgumentsAndOutputs:
    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        ("make_output", "logits", "total"),
        [
            (lambda y, s: {"y": y, "s": s}, lambda out: out["y"], lambda out: out["s"]),
            (lambda y, s: (y, [s]), lambda out: out[0], lambda out: out[1][0]),
            (
                lambda y, s: Output(y, "same", (s,)),
                lambda out: out.logits,
                lambda out: out.hidden[0],
            ),
        ],
        ids=["dict", "tuple", "dataclass"],
    )
    async def test_keywords_alone_and_structured_outputs(
        self,
        devices: Devices,
        make_output: Callable[..., Any],
        logits: Callable[[Any], Tensor],
        total: Callable[[Any], Tensor],
    ) -> None:
        module = Structured(make_output).to(devices[0])
        x, scale = batch().to(devices[0]), torch.rand(8, 1, device=devices[0])
        output = await aiopar.DataParallel(module, devices)(x=x, scale=scale, offset=2.0)
        expected = module(x=x, scale=scale, offset=2.0)
        assert type(output) is type(expected)
        assert same(logits(output), logits(expected))
        assert total(output).shape == ((len(devices),) if len(devices) > 1 else ())
        assert same(total(output).sum(), total(expected))

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
    async def test_a_batch_smaller_than_the_devices_uses_fewer(self) -> None:
        class Count(nn.Module):
            def forward(self, x: Tensor) -> int:
                return aiopar.current_replica().count

        dp = aiopar.DataParallel(Count(), ["cpu"] * 4)
        assert [await dp(torch.ones(n)) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 3, 4, 3, 3]

    @pytest.mark.asyncio
    async def test_without_arguments_there_is_one_call(self) -> None:
        class Weight(nn.Linear):
            def forward(self) -> Tensor:  # type: ignore[override]
                return self.weight

        module = Weight(2, 3)
        assert torch.equal(await aiopar.DataParallel(module, CPUS)(), module.weight)

    @pytest.mark.asyncio
    async def test_what_is_no_tensor_goes_to_every_replica(self) -> None:
        class Given(nn.Module):
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return args, kwargs

        for device_ids in ["cpu"], CPUS:
            dp = aiopar.DataParallel(Given(), device_ids)
            table = torch.ones(3)
            args, kwargs = await dp("text", aiopar.Replicated({"t": table}), x=torch.ones(2))
            assert args[0] == "text"
            assert args[1]["t"].shape == (3 * len(device_ids),)  # each replica returned all of it
            assert kwargs["x"].shape == (2,)

    @pytest.mark.asyncio
    async def test_another_dimension(self) -> None:
        class Rows(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                assert x.shape == (6, 4)
                return x * 2

        x = batch().T.contiguous()
        assert torch.equal(await aiopar.DataParallel(Rows(), CPUS, dim=1)(x), x * 2)

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_inputs_that_cannot_be_split(self, device_ids: list[str]) -> None:
        # On one device too: what works there goes on working where there are more.
        dp = aiopar.DataParallel(nn.Bilinear(2, 2, 2), device_ids)
        with pytest.raises(ValueError, match="differ in size along dim 0"):
            await dp(torch.ones(2, 2), torch.ones(3, 2))
        dp.dim = 5
        with pytest.raises(ValueError, match="dim 5 is out of range"):
            await dp(torch.ones(2, 2), torch.ones(2, 2))


class TestDevices:
    def test_none_and_empty_are_one_cpu_replica_where_there_is_no_accelerator(self) -> None:
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
    @pytest.mark.parametrize("output_device", ["cpu", -1])
    async def test_outputs_gathered_on_the_cpu(
        self, devices: Devices, output_device: str | int
    ) -> None:
        module = nn.Linear(6, 3).to(devices[0])
        x = batch().to(devices[0])
        y = await aiopar.DataParallel(module, devices, output_device)(x)
        assert y.device.type == "cpu"
        assert same(y, module(x))

    @pytest.mark.asyncio
    async def test_inputs_may_be_on_any_device(self, devices: Devices) -> None:
        module = nn.Linear(6, 3).to(devices[0])
        y = await aiopar.DataParallel(module, devices)(batch())
        assert y.device == devices[0]

    @pytest.mark.asyncio
    async def test_another_output_device(self) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), CPUS, "meta")
        assert (await dp(batch())).device == META
        alone = aiopar.DataParallel(nn.Linear(6, 3), ["cpu"], META)
        assert (await alone(batch())).device == META

    def test_one_device_takes_the_module(self) -> None:
        module = nn.Linear(2, 2)
        aiopar.DataParallel(module, [META])
        assert module.weight.device == META

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_a_module_on_the_wrong_device(self, device_ids: list[str]) -> None:
        module = nn.Linear(6, 3)
        module.register_buffer("elsewhere", None)
        dp = aiopar.DataParallel(module, device_ids)
        module.elsewhere = torch.ones(1, device=META)
        for mode in torch.enable_grad, torch.no_grad:
            with mode():
                call = dp(batch())
            with pytest.raises(
                RuntimeError,
                match=r"module must have its parameters and buffers on device cpu "
                r"\(device_ids\[0\]\) but found one of them on device: meta",
            ):
                await call

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
    def test_bad_arguments(self, args: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            aiopar.DataParallel(*args)

    @pytest.mark.asyncio
    async def test_more_replicas_than_workers(self) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), ["cpu"] * 3)
        async with aiopar.DeviceExecutor(CPUS) as executor:
            with aiopar.use_executor(executor):
                call = dp(batch())
            with pytest.raises(ValueError, match="3 calls at once"):
                await call


class TestManyAtOnce:
    @pytest.mark.anyio
    async def test_fifty_tasks(self) -> None:
        module = make("containers")
        dp = aiopar.DataParallel(module, CPUS)
        inputs = [batch() + i for i in range(50)]
        outputs: dict[int, Tensor] = {}

        async def one(index: int) -> None:
            with torch.no_grad() if index % 2 else torch.enable_grad():
                call = dp(inputs[index])
            outputs[index] = await call

        async with anyio.create_task_group() as tasks:
            for index in range(50):
                tasks.start_soon(one, index)
        for index, x in enumerate(inputs):
            assert outputs[index].requires_grad == (index % 2 == 0)
            assert same(outputs[index], module(x))

    @pytest.mark.asyncio
    async def test_nested_in_a_replica(self) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = aiopar.DataParallel(nn.Linear(6, 3), CPUS)

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = aiopar.wait(self.inner(x)) + 1
                return y

        module = Outer()
        reference = copy.deepcopy(module.inner.module)
        x = batch()
        async with aiopar.DeviceExecutor(CPUS) as executor:  # as many workers as one level needs
            with aiopar.use_executor(executor):
                calls = [aiopar.DataParallel(module, CPUS)(x) for _ in range(5)]
            outputs = await asyncio.gather(*calls)
        for y in outputs:
            assert same(y, reference(x) + 1)
        await aiopar.run_sync(torch.autograd.backward, [outputs[0].sum(), reference(x).sum()])
        assert same_grads(module.inner.module, reference)


class TestErrors:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if aiopar.current_replica().index == aiopar.current_replica().count - 1:
                raise KeyError("own")
            return x

    @pytest.mark.asyncio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_names_replica_and_device(self, device_ids: list[str]) -> None:
        with pytest.raises(KeyError, match="own") as raised:
            await aiopar.DataParallel(self.Fails(), device_ids)(batch())
        assert raised.value.__notes__ == [f"in replica {len(device_ids) - 1} on device cpu"]

    def test_a_module_that_was_compiled_is_refused_and_never_emptied(self) -> None:
        module = nn.Linear(6, 3)
        compiled: Any = torch.compile(module, backend="eager")
        for mode in torch.enable_grad, torch.no_grad:
            with mode(), pytest.raises(TypeError, match=r"torch\.compile"):
                asyncio.run(aiopar.DataParallel(compiled, CPUS)(batch()))
        assert len(list(module.parameters())) == len(list(compiled.parameters())) == 2

    def test_one_device_runs_a_compiled_module_as_it_is(self) -> None:
        module = nn.Linear(6, 3)
        compiled: Any = torch.compile(module, backend="eager")
        assert same(asyncio.run(aiopar.DataParallel(compiled, ["cpu"])(batch())), module(batch()))


class TestState:
    def test_state_dict_is_that_of_torchs_wrapper(self) -> None:
        module = make("containers")
        ours, theirs = aiopar.DataParallel(module, CPUS), nn.DataParallel(module)
        assert list(ours.state_dict()) == list(theirs.state_dict())
        assert all(name.startswith("module.") for name in ours.state_dict())
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in theirs.named_parameters()]
        theirs.load_state_dict(ours.state_dict())
        ours.load_state_dict(theirs.state_dict())
        plain = make("containers")
        plain.load_state_dict(
            {name.removeprefix("module."): value for name, value in ours.state_dict().items()}
        )
        with pytest.raises(RuntimeError, match="Missing key"):
            ours.load_state_dict(module.state_dict())

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "duplicate",
        [
            copy.deepcopy,
            lambda dp: pickle.loads(pickle.dumps(dp)),
            lambda dp: torch.load(_saved(dp), weights_only=False),
        ],
        ids=["deepcopy", "pickle", "torch.save"],
    )
    async def test_copies_of_a_used_one(self, duplicate: Callable[[Any], Any]) -> None:
        dp = aiopar.DataParallel(nn.Linear(6, 3), CPUS)
        with torch.no_grad():
            await dp(batch())
        # In a worker: torch.save opens a zip file.
        again = await aiopar.run_sync(duplicate, dp)
        assert list(again.children()) == [again.module]
        assert again.module is not dp.module
        assert again.device_ids == dp.device_ids
        assert again._kept.module is again.module
        with torch.no_grad():
            assert same(await again(batch()), dp.module(batch()))
            again.module.weight.zero_()
            assert same(await again(batch()), again.module.bias.expand(8, 3))
            assert same(await dp(batch()), dp.module(batch()))

    def test_modes_reach_the_module(self) -> None:
        dp = aiopar.DataParallel(make("batch-norm"), CPUS)
        assert not dp.eval().module.training
        assert dp.double().module[0].weight.dtype == torch.float64  # type: ignore[index]
        assert not any(
            parameter.requires_grad for parameter in dp.requires_grad_(False).parameters()
        )


def _saved(dp: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    return file
