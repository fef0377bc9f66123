"""Replication callbacks of a `DataParallel`: when they run, and that nothing of them stays."""

import asyncio
import contextvars
import copy
import itertools
import threading
import weakref
from typing import Any

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.testing import Gate
from tests import simdevice

from ..freeing import survivors, without_gc
from .callback_modules import Fails, Logged
from .sample_modules import batch, under

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])


class Squares(nn.Linear):
    """Its callback changes the weight and sets everything else that can be set on a copy."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        weight = self.weight
        del self.weight
        self.weight = weight.square() * (copy_id + 1)
        self.own = copy_id
        self.register_buffer("offset", torch.ones_like(self.bias))
        self.add_module("added", nn.Identity())
        self.register_forward_hook(lambda module, _args, output: output + module.offset)


def squared(module: nn.Linear, x: Tensor) -> Tensor:
    """The output of two copies of `Squares` with the weights of `module`, after their callbacks."""
    pieces = [
        nn.functional.linear(piece, module.weight.square() * (copy_id + 1), module.bias) + 1
        for copy_id, piece in enumerate(x.chunk(2))
    ]
    return torch.cat(pieces)


class TestDataParallel:
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_at_every_replication(self, devices: Devices, mode: Any) -> None:
        logged = Logged()
        dp = aiopar.DataParallel(nn.Sequential(nn.Identity(), logged), devices)
        x = torch.zeros(4, device=devices[0])
        # With one device nothing is replicated, as in torch.
        copy_ids = [0, 1] if len(devices) > 1 else []
        for number in (1, 2, 3):
            with mode():
                y = asyncio.run(dp(x))
            assert y.tolist() == ([0.0, 0.0, 1.0, 1.0] if copy_ids else [-1.0] * 4)
            assert logged.copy_ids == copy_ids * number
            assert len(logged.contexts) == (number if copy_ids else 0)

    @pytest.mark.asyncio
    @MODES
    async def test_fewer_copies_than_devices(self, mode: Any) -> None:
        logged = Logged()
        dp = aiopar.DataParallel(logged, ["cpu"] * 4)
        for size in (3, 4, 1):
            del logged.log[:]
            await under(mode, dp, torch.zeros(size))
            assert logged.copy_ids == list(range(size))

    def test_on_a_worker_under_the_state_of_the_caller(self, devices: Devices) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
        seen: list[Any] = []

        class Looks(nn.Linear):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                assert threading.current_thread() is not threading.main_thread()
                here = torch.is_grad_enabled(), torch.is_autocast_enabled(self.weight.device.type)
                seen.append((self.weight.device, *here, variable.get()))

        dp = aiopar.DataParallel(Looks(6, 3).to(devices[0]), devices)
        variable.set("the caller's")
        with torch.no_grad(), torch.autocast(devices[0].type, torch.bfloat16):
            asyncio.run(dp(batch().to(devices[0])))
        expected = [(device, False, True, "the caller's") for device in devices]
        assert seen == (expected if len(devices) > 1 else [])

    @MODES
    def test_what_callbacks_set_is_gone_after_the_call(self, devices: Devices, mode: Any) -> None:
        module = Squares(6, 3).to(devices[0])
        dp = aiopar.DataParallel(module, devices)
        x = batch().to(devices[0])
        fields, state = set(vars(module)), copy.deepcopy(module.state_dict())
        for _ in range(3):
            with mode():
                y, expected = asyncio.run(dp(x)), squared(module, x)
            torch.testing.assert_close(y, expected if len(devices) > 1 else module(x))
            assert set(vars(module)) == fields
            assert list(module._parameters) == ["weight", "bias"]
            assert [*module._modules, *module._buffers, *module._forward_hooks] == []
            torch.testing.assert_close(dict(module.state_dict()), dict(state))

    def test_gradients_through_what_callbacks_changed(self, devices: Devices) -> None:
        module: Any = nn.Sequential(nn.Linear(6, 6), Squares(6, 3)).double().to(devices[0])
        reference = copy.deepcopy(module)
        ours, theirs = (batch().double().to(devices[0]).requires_grad_() for _ in range(2))
        asyncio.run(aiopar.DataParallel(module, devices)(ours)).pow(2).sum().backward()
        hidden = reference[0](theirs)
        expected = squared(reference[1], hidden) if len(devices) > 1 else reference[1](hidden)
        expected.pow(2).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)
        for (name, parameter), other in zip(
            module.named_parameters(), reference.parameters(), strict=True
        ):
            torch.testing.assert_close(parameter.grad, other.grad, msg=name)

    @pytest.mark.sim
    @MODES
    def test_kernels_of_callbacks_end_before_forward_reads(self, mode: Any) -> None:
        devices = torch.device("sim:0"), torch.device("sim:1")
        module = Squares(6, 3).to(devices[0])
        x = batch().to(devices[0])
        expected = squared(module, x).cpu()
        dp = aiopar.DataParallel(module, devices)
        simdevice.set_kernel_latency(0.01)
        with mode():
            y = asyncio.run(dp(x))
        torch.testing.assert_close(y.cpu(), expected)

    @pytest.mark.asyncio
    @MODES
    async def test_callbacks_that_are_defined_later(self, mode: Any) -> None:
        class Late(nn.Identity):
            pass

        module: Any = nn.Sequential(Late(), nn.Identity())
        dp = aiopar.DataParallel(module, CPUS)
        called: list[int] = []

        async def calls() -> list[int]:
            called.clear()
            await under(mode, dp, torch.zeros(2))
            return called

        assert await calls() == []
        Late.__data_parallel_replicate__ = lambda _self, _ctx, copy_id: called.append(copy_id)  # type: ignore[attr-defined]  # defined later
        assert await calls() == [0, 1]
        module[0] = nn.Identity()
        assert await calls() == []
        module[1].__data_parallel_replicate__ = lambda _ctx, copy_id: called.append(copy_id)
        assert await calls() == [0, 1]
        module[1] = Late()
        assert await calls() == [0, 1]

    @pytest.mark.anyio
    @MODES
    async def test_concurrent_calls_share_nothing(self, mode: Any) -> None:
        numbers, gate = itertools.count(), Gate()

        class Numbered(nn.Module):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                if copy_id == 0:
                    ctx.number = next(numbers)
                    gate()  # both calls have copies and contexts, and none runs yet
                self.ctx = ctx

            def forward(self, x: Tensor) -> Any:
                return x + self.ctx.number

        dp = aiopar.DataParallel(Numbered(), CPUS)
        outputs: list[list[float]] = []

        async def one() -> None:
            outputs.append((await under(mode, dp, torch.zeros(2))).tolist())

        async with aiopar.DeviceExecutor(CPUS) as executor:
            with aiopar.use_executor(executor), gate:
                async with anyio.create_task_group() as tasks:
                    for _ in range(2):
                        tasks.start_soon(one)
                    await gate.entered(2)
                    gate.open()
        assert sorted(outputs) == [[0.0, 0.0], [1.0, 1.0]]

    @pytest.mark.anyio
    @MODES
    async def test_an_error_then_a_good_call(self, mode: Any) -> None:
        module: Any = nn.Sequential(nn.Identity(), Fails())
        dp = aiopar.DataParallel(module, CPUS)
        for _ in range(2):
            call = under(mode, dp, torch.ones(2))
            with pytest.raises(KeyError, match="own") as raised:
                await call
            assert raised.value.__notes__ == [
                "in the replication callback of module '1' (Fails), copy 1"
            ]
        module[1].failing = None
        assert (await under(mode, dp, torch.ones(2))).tolist() == [1.0, 1.0]

    @pytest.mark.anyio
    @MODES
    async def test_cancelled_in_a_callback_then_a_good_call(self, mode: Any) -> None:
        gate = Gate()

        class Held(Logged):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                gate()
                super().__data_parallel_replicate__(ctx, copy_id)

            def forward(self, x: Tensor) -> Tensor:
                forwards.append(self.copy_id)
                return super().forward(x)

        forwards: list[int] = []
        held = Held()
        dp = aiopar.DataParallel(held, CPUS)

        async def one() -> Any:
            return await under(mode, dp, torch.zeros(2))

        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                await gate.entered()
                tasks.cancel_scope.cancel()
                gate.open()
        # Both callbacks were awaited, and no forward ran after them.
        assert (held.copy_ids, forwards) == ([0, 1], [])
        assert (await one()).tolist() == [0.0, 1.0]

    @pytest.mark.anyio
    @MODES
    async def test_contexts_are_freed_with_the_call(self, mode: Any) -> None:
        alive: list[weakref.ref[Any]] = []

        class Watched(nn.Identity):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                self.ctx = ctx
                alive.extend([weakref.ref(self), weakref.ref(ctx)])

        dp = aiopar.DataParallel(nn.Sequential(Watched()), CPUS)
        with without_gc():
            call = under(mode, dp, torch.zeros(2))
            await call
            del call
            assert len(alive) == 4
            assert await survivors(alive) == []
