"""`backward`: torch's gradients, of everything that torch takes, and torch's errors."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

import aiopar
from tests.gradients import leaf

Devices = tuple[torch.device, ...]


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor, aiopar.use_executor(executor):
        yield executor


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def gradients(module: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in module.parameters()]
    assert None not in found
    return [gradient.clone() for gradient in found if gradient is not None]


def equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


class TestGradients:
    @pytest.mark.anyio
    async def test_are_those_of_torch(self, devices: Devices) -> None:
        ours = model().to(devices[0])
        theirs = copy.deepcopy(ours)
        x = torch.randn(5, 3, dtype=torch.float64, device=devices[0])
        theirs(x).square().sum().backward()
        loss = await aiopar.run_sync(lambda: ours(x).square().sum(), device=devices[0])
        await aiopar.backward(loss)
        assert equal(gradients(ours), gradients(theirs))

    @pytest.mark.asyncio
    async def test_of_several_losses_are_summed(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        await aiopar.backward([weight.sum(), (weight * 3).sum()])
        await aiopar.backward(weight[0] * factor for factor in (10, 100))
        assert weight.grad is not None
        assert weight.grad.tolist() == [114, 4]

    @pytest.mark.asyncio
    async def test_of_losses_that_are_no_scalars(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        await aiopar.backward(weight * 1, torch.tensor([10.0, 100.0]).double())
        await aiopar.backward((weight * 1, weight.sum()), [torch.tensor([1.0, 0.0]).double(), None])
        assert weight.grad is not None
        assert weight.grad.tolist() == [12, 101]

    @pytest.mark.asyncio
    async def test_a_graph_that_is_retained_can_be_used_again(
        self, executor: aiopar.DeviceExecutor
    ) -> None:
        weight = leaf(3)
        loss = weight.square().sum()
        await aiopar.backward(loss, retain_graph=True)
        await aiopar.backward(loss)
        assert weight.grad is not None
        assert weight.grad.tolist() == [12]
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            await aiopar.backward(loss)

    @pytest.mark.asyncio
    @pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
    async def test_gradients_of_gradients(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(2)
        await aiopar.backward(weight.pow(3).sum(), create_graph=True)
        first, weight.grad = weight.grad, None  # which is a cycle otherwise
        assert first is not None
        await aiopar.backward(first.sum())
        assert weight.grad is not None
        assert (first.item(), weight.grad.item()) == (12, 12)

    @pytest.mark.asyncio
    @pytest.mark.parametrize(
        "as_inputs",
        [
            pytest.param(lambda tensor: tensor, id="tensor"),
            pytest.param(lambda tensor: [tensor], id="list"),
            pytest.param(lambda tensor: {"weight": tensor}, id="mapping"),
            pytest.param(get_gradient_edge, id="edge"),
        ],
    )
    async def test_of_some_inputs_only(
        self, executor: aiopar.DeviceExecutor, as_inputs: Callable[[Tensor], Any]
    ) -> None:
        wanted, other = leaf(1, 2), leaf(3, 4)
        await aiopar.backward((wanted * other).sum(), inputs=as_inputs(wanted))
        assert wanted.grad is not None
        assert wanted.grad.tolist() == [3, 4]
        assert other.grad is None

    @pytest.mark.asyncio
    async def test_of_an_edge_of_the_graph(self, executor: aiopar.DeviceExecutor) -> None:
        weight = leaf(1, 2)
        await aiopar.backward([get_gradient_edge((weight * 2).sum()), weight.sum()])
        assert weight.grad is not None
        assert weight.grad.tolist() == [3, 3]

    @pytest.mark.asyncio
    async def test_of_a_replicated_model_arrive_in_the_original(self, devices: Devices) -> None:
        module = model().to(devices[0])
        expected = copy.deepcopy(module).cpu()
        x = torch.randn(6, 3, dtype=torch.float64)
        expected(x).square().sum().backward()
        y = await aiopar.DataParallel(module, devices, "cpu")(x)
        await aiopar.backward(y.square().sum())
        for ours, theirs in zip(gradients(module), gradients(expected), strict=True):
            assert torch.allclose(ours.cpu(), theirs)


class TestBadArguments:
    """Each raises when the call is made, and makes no coroutine that nobody awaits."""

    @pytest.mark.parametrize(
        ("args", "error", "message"),
        [
            ((3,), TypeError, "losses must be a tensor or several, not int"),
            (([leaf(1), 3],), TypeError, r"losses\[1\] must be a tensor, not int"),
            (([],), ValueError, "losses is empty"),
            ((leaf(1), 3), TypeError, "grad_tensors must be a tensor or several, not int"),
            ((leaf(1), [3]), TypeError, r"grad_tensors\[0\] must be a tensor or None, not int"),
            (
                ([leaf(1), leaf(1)], [torch.ones(1)]),
                ValueError,
                "grad_tensors has 1 entries, but there are 2 losses",
            ),
            ((leaf(1), torch.ones(2)), RuntimeError, r"Mismatch in shape: grad_output\[0\]"),
            ((leaf(1, 2),), RuntimeError, "only for scalar outputs: element 0 .* shape of .2,"),
            (
                ([leaf(1), torch.ones(1)],),
                RuntimeError,
                "element 1 of tensors does not require grad and does not have a grad_fn",
            ),
            ((leaf(1), None, None, False, 3), TypeError, "inputs must be a tensor or several"),
            ((leaf(1), None, None, False, [3]), TypeError, r"inputs\[0\] must be a tensor"),
            ((leaf(1), None, None, False, {}), ValueError, "inputs is empty"),
        ],
    )
    def test_they_raise_at_once(self, args: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            aiopar.backward(*args)  # type: ignore[unused-coroutine]  # there is none

    @pytest.mark.parametrize(
        "losses", [torch.ones(1), leaf(1, 2), [leaf(1), torch.ones(1)]], ids=str
    )
    def test_torch_s_words_are_kept(self, losses: Any) -> None:
        with pytest.raises(RuntimeError) as ours:
            aiopar.backward(losses)  # type: ignore[unused-coroutine]  # there is none
        with pytest.raises(RuntimeError) as theirs:
            torch.autograd.backward(losses)
        assert str(ours.value).startswith(str(theirs.value))
