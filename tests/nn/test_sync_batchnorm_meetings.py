"""Synchronized BatchNorm: which copies meet, and what happens if one does not come."""

import asyncio
import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import aiopar
from aiopar import SynchronizedBatchNorm1d, current_replica
from aiopar.testing import Gate
from tests import simdevice

CPUS = ["cpu", "cpu"]
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}


def values(rows: int = 8, seed: int = 0) -> Tensor:
    """(rows, 3)"""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator, dtype=torch.float64)


def norm() -> SynchronizedBatchNorm1d:
    return SynchronizedBatchNorm1d(3, dtype=torch.float64)


def normalized(x: Tensor) -> Tensor:
    """The output of a new plain BatchNorm."""
    result: Tensor = nn.BatchNorm1d(3, dtype=torch.float64)(x)
    return result


def per_chunk(x: Tensor) -> Tensor:
    return torch.cat([normalized(chunk) for chunk in x.chunk(2)])


class Model(nn.Module):
    """Two norms; `between` is called between them."""

    def __init__(self, between: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.first, self.second = norm(), norm()
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.between(x)
        return self.second(torch.tanh(x))  # type: ignore[no-any-return]


def good_step(model: Model) -> None:
    """The model still computes what plain BatchNorm with the same state computes."""
    model.between = lambda x: None
    whole = aiopar.revert_sync_batchnorm(copy.deepcopy(model))
    x = values(seed=1)
    torch.testing.assert_close(asyncio.run(aiopar.DataParallel(model, CPUS)(x)), whole(x), **EXACT)
    torch.testing.assert_close(model.state_dict(), whole.state_dict(), **EXACT)


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = norm()


class Skips(Holds):
    def forward(self, x: Tensor) -> Tensor:
        return x if current_replica().index else self.norm(x)


class TestMissingReplicas:
    @pytest.mark.parametrize("failing", [0, 1])
    def test_a_replica_that_fails_between_two_layers(self, failing: int) -> None:
        def fail(_: Tensor) -> None:
            if current_replica().index == failing:
                raise KeyError("own")

        model = Model(fail)
        with pytest.raises(KeyError, match="own") as raised:
            asyncio.run(aiopar.DataParallel(model, CPUS)(values()))
        assert raised.value.__notes__ == [f"in replica {failing} on device cpu"]
        assert model.first.num_batches_tracked == 1
        assert model.second.num_batches_tracked == 0
        good_step(model)

    def test_a_replica_that_skips_the_layer(self) -> None:
        with pytest.raises(aiopar.ReplicaAborted, match="replica 1 returned before the meeting"):
            asyncio.run(aiopar.DataParallel(Skips(), CPUS)(values()))

    @pytest.mark.parametrize("elsewhere", ["another layer", "a meeting of its own"])
    def test_a_replica_that_calls_another_layer(self, elsewhere: str) -> None:
        class Differs(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = norm(), norm()

            def forward(self, x: Tensor) -> Any:
                if not current_replica().index:
                    return self.first(x)
                if elsewhere == "another layer":
                    return self.second(x)
                return current_replica().exchange(x)[1]

        module = Differs()
        theirs = "layer 'second'" if elsewhere == "another layer" else "a meeting"
        message = rf"called a SynchronizedBatchNorm1d \('first'\) while replica 1 called {theirs}:"
        with pytest.raises(RuntimeError, match=message) as caught:
            asyncio.run(aiopar.DataParallel(module, CPUS)(values()))
        assert caught.value.__notes__[0] == "in layer 'first' (SynchronizedBatchNorm1d)"
        assert module.first.num_batches_tracked == module.second.num_batches_tracked == 0

    @pytest.mark.anyio
    async def test_cancelled_in_the_middle(self) -> None:
        with Gate() as gate:

            def hold(_: Tensor) -> None:
                if current_replica().index == 1:  # the other waits for it in the second layer
                    current_replica().on_abort(gate.open)
                    gate()
                    raise KeyError("comes no more")

            model = Model(hold)
            with anyio.CancelScope() as scope:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(aiopar.DataParallel(model, CPUS), values())
                    await gate.entered()
                    scope.cancel()
        assert scope.cancelled_caught
        assert model.first.num_batches_tracked == 1
        assert model.second.num_batches_tracked == 0
        await anyio.to_thread.run_sync(good_step, model)


class TestWhichCopiesMeet:
    @pytest.mark.asyncio
    async def test_calls_at_once_do_not_mix(self) -> None:
        together = threading.Barrier(4)

        def wait(_: Tensor) -> None:
            together.wait(timeout=30)

        dp = aiopar.DataParallel(Model(wait), CPUS)
        batches = [values(seed=seed) + seed for seed in range(2)]
        # An executor per call: on shared workers one call could be queued behind the other.
        async with aiopar.DeviceExecutor(CPUS) as one, aiopar.DeviceExecutor(CPUS) as other:
            calls = []
            for executor, x in zip((one, other), batches, strict=True):
                with aiopar.use_executor(executor):
                    calls.append(dp(x))
            outputs = await asyncio.gather(*calls)
        for x, y in zip(batches, outputs, strict=True):
            torch.testing.assert_close(y, normalized(normalized(x).tanh()), **EXACT)

    @pytest.mark.asyncio
    async def test_modules_that_are_not_copies_do_not_meet(self) -> None:
        x = values()
        same = norm()
        for modules in ([norm(), norm()], [same, same]):
            outputs = await aiopar.parallel_apply(modules, x.chunk(2), devices=CPUS)
            torch.testing.assert_close(torch.cat(outputs), per_chunk(x), **EXACT)

    @pytest.mark.asyncio
    async def test_replicas_made_by_hand(self) -> None:
        x, original = values(), norm()
        replicas = await aiopar.replicate(original, CPUS)
        outputs = await aiopar.parallel_apply(replicas, x.chunk(2), devices=CPUS)
        torch.testing.assert_close(torch.cat(outputs), per_chunk(x), **EXACT)
        aiopar.exec_data_parallel_replication_callback(replicas)
        outputs = await aiopar.parallel_apply(replicas, x.chunk(2), devices=CPUS)
        torch.testing.assert_close(torch.cat(outputs), normalized(x), **EXACT)
        assert original.num_batches_tracked == 2

    @pytest.mark.asyncio
    async def test_in_a_call_that_a_replica_forks(self) -> None:
        class Forks(Holds):
            def forward(self, x: Tensor) -> Tensor:
                return aiopar.wait(aiopar.fork(self.norm, x))  # type: ignore[no-any-return]

        y = await aiopar.DataParallel(Forks(), CPUS)(values())
        torch.testing.assert_close(y, normalized(values()), **EXACT)

    @pytest.mark.asyncio
    async def test_in_a_nested_data_parallel_the_chunk_is_the_batch(self) -> None:
        class Outer(Holds):
            def __init__(self) -> None:
                super().__init__()
                self.inner = aiopar.DataParallel(norm(), CPUS)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(aiopar.wait(self.inner(x)) * x)  # type: ignore[no-any-return]

        x = values()
        for mode in torch.enable_grad, torch.no_grad:
            with mode():
                y = await aiopar.DataParallel(Outer(), CPUS)(x)
            torch.testing.assert_close(y.detach(), normalized(per_chunk(x) * x).detach(), **EXACT)

    @pytest.mark.parametrize("branches", [1, 2, 3])
    def test_not_in_another_parallel_call_inside_a_replica(self, branches: int) -> None:
        class Branches(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norms = nn.ModuleList([norm() for _ in range(branches)])

            def forward(self, x: Tensor) -> list[Tensor]:
                calls = aiopar.parallel_apply(
                    self.norms, [x] * branches, devices=["cpu"] * branches
                )
                return aiopar.wait(calls)

        # The copy of the first branch in replica 0 has the right index: it waits, and is released.
        with pytest.raises(RuntimeError) as raised:
            asyncio.run(aiopar.DataParallel(Branches(), CPUS)(values()))
        said = [str(raised.value), *raised.value.__notes__]
        assert any("copies meet in the call that they were made for" in text for text in said)

    def test_not_outside_of_a_parallel_call(self) -> None:
        replicas: list[nn.Module] = asyncio.run(aiopar.replicate(norm(), CPUS))
        aiopar.exec_data_parallel_replication_callback(replicas)
        with pytest.raises(RuntimeError, match=r"copy 1 of .* outside of a parallel call"):
            replicas[1](values())
        torch.testing.assert_close(replicas[1].eval()(values()), values(), rtol=1e-4, atol=0)

    def test_in_evaluation_copies_do_not_meet(self) -> None:
        y = asyncio.run(aiopar.DataParallel(Skips().eval(), CPUS)(values()))
        torch.testing.assert_close(y, values(), rtol=1e-4, atol=0)


class Checkpointed(Holds):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.norm, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class TestBackward:
    @pytest.mark.parametrize("reentrant", [False, True])
    def test_recomputation_raises_instead_of_waiting(self, reentrant: bool) -> None:
        module = Checkpointed(reentrant=reentrant)
        y = asyncio.run(aiopar.DataParallel(module, CPUS)(values().requires_grad_()))
        with pytest.raises(RuntimeError, match="called in a backward pass"):
            y.sum().backward()  # type: ignore[no-untyped-call]
        # With one device there are no copies.
        y = asyncio.run(aiopar.DataParallel(module, CPUS[:1])(values().requires_grad_()))
        y.sum().backward()  # type: ignore[no-untyped-call]


class TestNothingIsLeftBehind:
    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
    def test_a_duplicate_of_a_replica_is_no_replica(self, duplicate: Callable[[Any], Any]) -> None:
        class Duplicates(Holds):
            def forward(self, x: Tensor) -> Tensor:
                return duplicate(self.norm)(x)  # type: ignore[no-any-return]

        y = asyncio.run(aiopar.DataParallel(Duplicates(), CPUS)(values()))
        torch.testing.assert_close(y, per_chunk(values()), **EXACT)


@pytest.mark.sim
def test_moments_are_read_before_their_memory_is_used_again() -> None:
    devices = torch.device("sim:0"), torch.device("sim:1")
    dp = aiopar.DataParallel(norm().to(devices[0]), devices)
    x = values().to(devices[0])
    with torch.no_grad():  # autograd does not keep the moments
        asyncio.run(dp(x))
        simdevice.set_copy_latency(0.01)
        y = asyncio.run(dp(x))
    torch.testing.assert_close(y.cpu(), normalized(values()).detach(), **EXACT)
