"""`backward` of many calls at once: no gradient of a shared parameter is lost."""

import asyncio

import anyio
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn

import aiopar


class Shared(nn.Module):
    """Many parameters, dense and sparse, for losses of small integers: sums of them are exact."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            [nn.Parameter(torch.ones(4, dtype=torch.float64)) for _ in range(8)]
        )
        self.table = nn.Embedding(5, 4, sparse=True, dtype=torch.float64)

    def forward(self, factor: int) -> Tensor:
        row = self.table(torch.tensor([factor % 5])).sum()
        total: Tensor = sum((weight * factor).sum() for weight in self.weights) + row
        return total

    def gradients(self) -> list[list[float]]:
        found = [parameter.grad for parameter in self.parameters()]
        return [gradient.to_dense().tolist() for gradient in found if gradient is not None]


class TestConcurrency:
    @settings(max_examples=30)
    @given(
        factors=st.lists(st.integers(1, 9), min_size=2, max_size=40),
        begun=st.booleans(),
        together=st.integers(1, 3),
    )
    def test_shared_parameters_get_the_gradients_of_one_after_the_other(
        self, factors: list[int], begun: bool, together: int
    ) -> None:
        module, expected = Shared(), Shared()
        if begun:  # else all of them race to be the first gradient
            for shared in module, expected:
                shared(1).backward()
        for factor in factors:
            expected(factor).backward()

        async def main() -> None:
            async with aiopar.DeviceExecutor(["cpu"] * 4, num_threads=1) as executor:
                with aiopar.use_executor(executor):
                    losses = [module(factor) for factor in factors]
                    calls = [
                        aiopar.backward(losses[start : start + together])
                        for start in range(0, len(losses), together)
                    ]
                await asyncio.gather(*calls)

        asyncio.run(main())
        assert module.gradients() == expected.gradients()

    @pytest.mark.anyio
    async def test_while_forwards_come_and_go(self) -> None:
        # Forward, backward and the end of graphs in all orders, so that the nodes that add up
        # come and go as well.
        module, expected = Shared(), Shared()
        factors = list(range(1, 101))
        for factor in factors:
            expected(factor).backward()
        async with aiopar.DeviceExecutor(["cpu"] * 4, num_threads=1) as executor:

            async def step(factor: int) -> None:
                with aiopar.use_executor(executor):
                    await aiopar.backward(await aiopar.run_sync(module, factor))

            async with anyio.create_task_group() as tasks:
                for factor in factors:
                    tasks.start_soon(step, factor)
        assert module.gradients() == expected.gradients()
