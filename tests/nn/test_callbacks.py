"""Replication callbacks: who is called, when, with which context, and what stays of it."""

import asyncio
import contextvars
import copy
import io
import itertools
import pickle
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar._worker import current_worker
from aiopar.testing import Gate
from tests import simdevice

from ..freeing import survivors, without_gc
from .sample_modules import CPU, batch

CPUS = ["cpu", "cpu"]
Devices = tuple[torch.device, ...]
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])


class Call(NamedTuple):
    name: str
    copy_id: int
    ctx: aiopar.CallbackContext


class Told(nn.Module):
    """Notes callbacks in a list that its copies share; adds the number of its copy."""

    def __init__(self, name: str = "", log: list[Call] | None = None) -> None:
        super().__init__()
        self.name = name
        self.log = [] if log is None else log
        self.copy_id = -1

    def __data_parallel_replicate__(self, ctx: aiopar.CallbackContext, copy_id: int) -> None:
        self.log.append(Call(self.name, copy_id, ctx))
        self.copy_id = copy_id

    def forward(self, x: Tensor) -> Tensor:
        return x + self.copy_id

    @property
    def copy_ids(self) -> list[int]:
        return [call.copy_id for call in self.log]

    @property
    def contexts(self) -> set[aiopar.CallbackContext]:
        return {call.ctx for call in self.log}


class Fails(nn.Identity):
    def __init__(self, copy_id: int = 1) -> None:
        super().__init__()
        self.failing: int | None = copy_id

    def __data_parallel_replicate__(self, ctx: aiopar.CallbackContext, copy_id: int) -> None:
        if copy_id == self.failing:
            raise KeyError("own")


def replicas(module: nn.Module, count: int = 2) -> list[nn.Module]:
    return asyncio.run(aiopar.replicate(module, [CPU] * count))


class TestExec:
    def test_copy_0_first_in_the_order_of_modules_a_context_a_position(self) -> None:
        log: list[Call] = []
        inner = nn.ModuleList([Told("0.0", log), nn.Linear(1, 1), Told("0.2", log)])
        copies = replicas(nn.Sequential(inner, Told("1", log)), 3)
        names = ["0.0", "0.2", "1"]  # breadth first it would be 1, 0.0, 0.2
        for _ in range(2):  # fresh contexts each time
            before = {call.ctx for call in log}
            del log[:]
            aiopar.exec_data_parallel_replication_callback(copies)
            assert [call[:2] for call in log] == [
                (name, copy_id) for copy_id in range(3) for name in names
            ]
            of_first = {call.name: call.ctx for call in log[:3]}
            assert len(set(of_first.values()) - before) == 3
            assert all(call.ctx is of_first[call.name] for call in log)

    def test_a_shared_submodule_has_one_position(self) -> None:
        shared = Told()
        module = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
        aiopar.exec_data_parallel_replication_callback(replicas(module))
        assert shared.copy_ids == [0, 1]
        assert len(shared.contexts) == 1

    def test_callbacks_may_change_the_tree(self) -> None:
        class Grows(nn.Sequential):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                if copy_id == 0:
                    self.insert(0, Told("new", log))

        log: list[Call] = []
        told = Told("old", log)
        aiopar.exec_data_parallel_replication_callback(replicas(Grows(told)))
        assert [call[:2] for call in log] == [("old", 0), ("old", 1)]
        assert len(told.contexts) == 1

    def test_on_the_instance(self) -> None:
        module: Any = nn.Linear(1, 1)
        called: list[int] = []
        module.__data_parallel_replicate__ = lambda _ctx, copy_id: called.append(copy_id)
        aiopar.exec_data_parallel_replication_callback(iter(replicas(module)))
        assert called == [0, 1]

    def test_nothing_to_call(self) -> None:
        aiopar.exec_data_parallel_replication_callback([])
        copies = replicas(nn.Linear(1, 1))
        before = [set(vars(replica)) for replica in copies]
        aiopar.exec_data_parallel_replication_callback(copies)
        assert [set(vars(replica)) for replica in copies] == before

    @pytest.mark.parametrize(
        ("module", "where"),
        [
            (Fails(), "the module (Fails)"),
            (nn.Sequential(Told(), nn.ModuleList([Fails()])), "module '1.0' (Fails)"),
        ],
    )
    def test_an_error_names_module_and_copy(self, module: nn.Module, where: str) -> None:
        with pytest.raises(KeyError, match="own") as raised:
            aiopar.exec_data_parallel_replication_callback(replicas(module, 3))
        assert raised.value.__notes__ == [f"in the replication callback of {where}, copy 1"]

    def test_bad_arguments(self) -> None:
        told = Told()
        with pytest.raises(ValueError, match=r"copies of one module.* \[1, 2\] submodules"):
            aiopar.exec_data_parallel_replication_callback([told, nn.Sequential(told)])
        not_modules: Any = [told, 3]
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
            aiopar.exec_data_parallel_replication_callback(not_modules)
        assert told.log == []


class Squares(nn.Linear):
    """Its copies compute with a function of the weight, and carry what else can be set."""

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        weight = self.weight
        del self.weight
        self.weight = weight.square() * (copy_id + 1)
        self.own = copy_id
        self.register_buffer("offset", torch.ones_like(self.bias))
        self.add_module("added", nn.Identity())
        self.register_forward_hook(lambda module, _args, output: output + module.offset)


def squared(module: nn.Linear, x: Tensor) -> Tensor:
    """The output of two copies of `Squares` with the weights of `module`."""
    pieces = [
        nn.functional.linear(piece, module.weight.square() * (copy_id + 1), module.bias) + 1
        for copy_id, piece in enumerate(x.chunk(2))
    ]
    return torch.cat(pieces)


class TestDataParallel:
    @pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
    def test_at_every_replication(self, devices: Devices, mode: Any) -> None:
        told = Told()
        dp = aiopar.DataParallel(nn.Sequential(nn.Identity(), told), devices)
        x = torch.zeros(4, device=devices[0])
        # With one device there is no replication: as in torch.
        copy_ids = [0, 1] if len(devices) > 1 else []
        for number in (1, 2, 3):
            with mode():
                y = asyncio.run(dp(x))
            assert y.tolist() == ([0.0, 0.0, 1.0, 1.0] if copy_ids else [-1.0] * 4)
            assert told.copy_ids == copy_ids * number
            assert len(told.contexts) == (number if copy_ids else 0)

    @pytest.mark.asyncio
    @MODES
    async def test_fewer_copies_than_devices(self, mode: Any) -> None:
        told = Told()
        dp = aiopar.DataParallel(told, ["cpu"] * 4)
        for size in (3, 4, 1):
            del told.log[:]
            with mode():
                call = dp(torch.zeros(size))
            await call
            assert told.copy_ids == list(range(size))

    def test_on_a_worker_under_the_state_of_the_caller(self, devices: Devices) -> None:
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
        seen: list[Any] = []

        class Looks(nn.Linear):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                worker = current_worker()
                assert worker is not None
                here = torch.is_grad_enabled(), torch.is_autocast_enabled(self.weight.device.type)
                seen.append((worker.device, self.weight.device, *here, variable.get()))

        dp = aiopar.DataParallel(Looks(6, 3).to(devices[0]), devices)
        variable.set("the caller's")
        with torch.no_grad(), torch.autocast(devices[0].type, torch.bfloat16):
            asyncio.run(dp(batch().to(devices[0])))
        expected = [(devices[0], device, False, True, "the caller's") for device in devices]
        assert seen == (expected if len(devices) > 1 else [])

    @MODES
    def test_what_they_set_is_gone_after_the_call(self, devices: Devices, mode: Any) -> None:
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
        # Nor was it taken for a change of what is kept.
        assert dp._kept.rebuilds == (1 if mode is torch.no_grad and len(devices) > 1 else 0)

    def test_gradients_through_what_they_changed(self, devices: Devices) -> None:
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
    def test_their_kernels_are_done_before_forward_reads(self, mode: Any) -> None:
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
    async def test_in_a_module_list(self, mode: Any) -> None:
        class Stack(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = nn.ModuleList([Told("first"), Told("second")])

            def forward(self, x: Tensor) -> Tensor:
                for layer in self.layers:
                    x = layer(x)
                return x

        with mode():
            call = aiopar.DataParallel(Stack(), CPUS)(torch.zeros(2))
        assert (await call).tolist() == [0.0, 2.0]

    @pytest.mark.asyncio
    @MODES
    async def test_defined_later(self, mode: Any) -> None:
        class Late(nn.Identity):
            pass

        module: Any = nn.Sequential(Late(), nn.Identity())
        dp = aiopar.DataParallel(module, CPUS)
        called: list[int] = []

        async def calls() -> list[int]:
            called.clear()
            with mode():
                call = dp(torch.zeros(2))
            await call
            return called

        assert await calls() == []
        Late.__data_parallel_replicate__ = lambda _self, _ctx, copy_id: called.append(copy_id)  # type: ignore[attr-defined]  # that is the point
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
                    gate()  # both calls have their copies and contexts, none has run
                self.ctx = ctx

            def forward(self, x: Tensor) -> Any:
                return x + self.ctx.number

        dp = aiopar.DataParallel(Numbered(), CPUS)
        outputs: list[list[float]] = []

        async def one() -> None:
            with mode():
                call = dp(torch.zeros(2))
            outputs.append((await call).tolist())

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
            with mode():
                call = dp(torch.ones(2))
            with pytest.raises(KeyError, match="own") as raised:
                await call
            assert raised.value.__notes__ == [
                "in the replication callback of module '1' (Fails), copy 1"
            ]
        module[1].failing = None
        with mode():
            call = dp(torch.ones(2))
        assert (await call).tolist() == [1.0, 1.0]

    @pytest.mark.anyio
    @MODES
    async def test_cancelled_in_a_callback_then_a_good_call(self, mode: Any) -> None:
        gate = Gate()

        class Held(Told):
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
            with mode():
                call = dp(torch.zeros(2))
            return await call

        with gate:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(one)
                await gate.entered()
                tasks.cancel_scope.cancel()
                gate.open()
        # What runs is awaited: the callbacks ran to their end, and nothing came after them.
        assert (held.copy_ids, forwards) == ([0, 1], [])
        assert (await one()).tolist() == [0.0, 1.0]

    @pytest.mark.asyncio
    @MODES
    async def test_nested_in_a_replica(self, mode: Any) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = aiopar.DataParallel(nn.Sequential(inner), CPUS)
                self.told = outer

            def forward(self, x: Tensor) -> Tensor:
                y: Tensor = aiopar.wait(self.inner(x))
                result: Tensor = y + 10 * self.told(torch.zeros(1))
                return result

        inner, outer = Told(), Told()
        async with aiopar.DeviceExecutor(CPUS) as executor:
            with aiopar.use_executor(executor), mode():
                call = aiopar.DataParallel(Outer(), CPUS)(torch.zeros(8))
            assert (await call).tolist() == [0, 0, 1, 1, 10, 10, 11, 11]
        assert outer.copy_ids == [0, 1]
        # By the outer wrapper, and by the inner one in each of its copies.
        assert sorted(inner.copy_ids) == [0, 0, 0, 1, 1, 1]
        assert len(inner.contexts) == 3

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
            with mode():
                call = dp(torch.zeros(2))
            await call
            del call
            assert len(alive) == 4
            assert await survivors(alive) == []


class Counted(aiopar.DataParallel):
    """Counts its replications."""

    replications = 0


class Sync(Counted):
    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.replications += 1
        return aiopar.wait(aiopar.replicate(module, device_ids))


class Returns(Counted):
    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.replications += 1
        return aiopar.replicate(module, device_ids)


class Async(Counted):
    async def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.replications += 1
        return await aiopar.replicate(module, device_ids)


class SyncInherited(Counted):
    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.replications += 1
        return aiopar.wait(super().replicate(module, device_ids))


class AsyncInherited(aiopar.ReplicationCallbackDataParallel, Counted):
    async def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        self.replications += 1
        return await super().replicate(module, device_ids)


def on_instance(module: nn.Module, devices: Any) -> Counted:
    dp = Counted(module, devices)

    def replicate(module: nn.Module, device_ids: Any) -> Any:
        dp.replications += 1
        return aiopar.replicate(module, device_ids)

    dp.replicate = replicate  # type: ignore[method-assign]
    return dp


def saved(dp: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(dp, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


class TestPatch:
    @pytest.mark.anyio
    @MODES
    @pytest.mark.parametrize("inherited", [SyncInherited, AsyncInherited])
    async def test_they_are_called_once_where_they_were_before(
        self, inherited: type[Counted], mode: Any
    ) -> None:
        told = Told()
        dp = inherited(told, CPUS)
        for _ in range(3):
            del told.log[:]
            with mode():
                call = dp(torch.zeros(2))
            assert (await call).tolist() == [0.0, 1.0]
            assert told.copy_ids == [0, 1]
            aiopar.patch_replication_callback(dp)
        assert dp.replications == 3

    @pytest.mark.anyio
    @MODES
    @pytest.mark.parametrize("make", [Sync, Returns, Async, on_instance])
    async def test_they_are_called_once_where_they_were_not(
        self, make: Callable[..., Counted], mode: Any
    ) -> None:
        class Looks(Told):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                super().__data_parallel_replicate__(ctx, copy_id)
                looked.append((current_worker() is not None, torch.is_grad_enabled()))

        looked: list[Any] = []
        told = Looks()
        dp = make(told, CPUS)
        for expected in ([], [0, 1], [0, 1]):
            del told.log[:]
            with mode():
                call = dp(torch.zeros(2))
            assert (await call).tolist() == ([0.0, 1.0] if expected else [-1.0, -1.0])
            assert told.copy_ids == expected
            aiopar.patch_replication_callback(dp)
        assert dp.replications == 3
        assert looked == [(True, mode is torch.enable_grad)] * 4

    @pytest.mark.asyncio
    @MODES
    @pytest.mark.parametrize(
        "kind", [aiopar.DataParallel, aiopar.ReplicationCallbackDataParallel, Counted]
    )
    async def test_one_that_runs_them_stays_as_it_is(
        self, kind: type[aiopar.DataParallel], mode: Any
    ) -> None:
        told = Told()
        dp = kind(told, CPUS)
        fields = set(vars(dp))
        for number in (1, 2):
            with mode():
                call = dp(torch.zeros(2))
            await call
            assert told.copy_ids == [0, 1] * number
            aiopar.patch_replication_callback(dp)
            assert set(vars(dp)) == fields

    @pytest.mark.asyncio
    async def test_replicate_itself(self) -> None:
        told = Told()
        dp = Async(nn.Sequential(told), CPUS)
        aiopar.patch_replication_callback(dp)
        first, second = await dp.replicate(module=dp.module, device_ids=CPUS)
        assert (first[0].copy_id, second[0].copy_id) == (0, 1)
        assert told.copy_id == -1

    def test_torchs_wrapper(self) -> None:
        told = Told()  # without parameters torch replicates on a machine without accelerators
        theirs = nn.DataParallel(nn.Sequential(told))
        assert [r[0].copy_id for r in theirs.replicate(theirs.module, [0, 1])] == [-1, -1]
        for _ in range(2):
            aiopar.patch_replication_callback(theirs)
            del told.log[:]
            assert [r[0].copy_id for r in theirs.replicate(theirs.module, [0, 1])] == [0, 1]
            assert told.copy_ids == [0, 1]
        assert len(told.contexts) == 1
        assert told.copy_id == -1

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [Sync, Async])
    @pytest.mark.parametrize(
        "duplicate",
        [copy.deepcopy, lambda dp: pickle.loads(pickle.dumps(dp)), saved],
        ids=["deepcopy", "pickle", "torch.save"],
    )
    async def test_copies_of_a_patched_one(
        self, kind: type[Counted], duplicate: Callable[[Any], Any]
    ) -> None:
        told = Told()
        dp = kind(nn.Sequential(told), CPUS)
        aiopar.patch_replication_callback(dp)
        again = await aiopar.run_sync(duplicate, dp)  # in a worker: torch.save opens a zip file
        aiopar.patch_replication_callback(again)
        assert (await again(torch.zeros(2))).tolist() == [0.0, 1.0]
        # The copy uses its own `replicate`, on its own module, and neither of the original.
        assert (again.module[0].copy_ids, again.replications) == ([0, 1], 1)
        assert (told.copy_ids, dp.replications) == ([], 0)

    def test_copies_of_torchs_wrapper(self) -> None:
        theirs = nn.DataParallel(nn.Sequential(Told()))
        aiopar.patch_replication_callback(theirs)
        for again in copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs)):
            assert [r[0].copy_id for r in again.replicate(again.module, [0, 1])] == [0, 1]

    @pytest.mark.parametrize("given", [nn.Linear(1, 1), aiopar.DataParallel, None])
    def test_anything_else(self, given: Any) -> None:
        with pytest.raises(
            TypeError, match=r"expected an aiopar\.DataParallel or a torch\.nn\.DataParallel, got "
        ):
            aiopar.patch_replication_callback(given)
