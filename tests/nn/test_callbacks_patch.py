"""`patch_replication_callback`: callbacks run once per replication."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import aiopar

from .callback_modules import Logged
from .sample_modules import each_duplicate, under

CPUS = ["cpu", "cpu"]
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])


class Counted(aiopar.DataParallel[Any]):
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


class AsyncInherited(aiopar.ReplicationCallbackDataParallel[Any], Counted):
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


class TestPatch:
    @pytest.mark.anyio
    @MODES
    @pytest.mark.parametrize("inherited", [SyncInherited, AsyncInherited])
    async def test_a_wrapper_that_calls_the_inherited_replicate(
        self, inherited: type[Counted], mode: Any
    ) -> None:
        logged = Logged()
        dp = inherited(logged, CPUS)
        for _ in range(3):
            del logged.log[:]
            assert (await under(mode, dp, torch.zeros(2))).tolist() == [0.0, 1.0]
            assert logged.copy_ids == [0, 1]
            aiopar.patch_replication_callback(dp)
        assert dp.replications == 3

    @pytest.mark.anyio
    @MODES
    @pytest.mark.parametrize("make", [Sync, Returns, Async, on_instance])
    async def test_a_wrapper_that_does_not_call_the_inherited_replicate(
        self, make: Callable[..., Counted], mode: Any
    ) -> None:
        class Looks(Logged):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                super().__data_parallel_replicate__(ctx, copy_id)
                on_worker = threading.current_thread() is not threading.main_thread()
                looked.append((on_worker, torch.is_grad_enabled()))

        looked: list[Any] = []
        logged = Looks()
        dp = make(logged, CPUS)
        for expected in ([], [0, 1], [0, 1]):
            del logged.log[:]
            call = under(mode, dp, torch.zeros(2))
            assert (await call).tolist() == ([0.0, 1.0] if expected else [-1.0, -1.0])
            assert logged.copy_ids == expected
            aiopar.patch_replication_callback(dp)
        assert dp.replications == 3
        assert looked == [(True, mode is torch.enable_grad)] * 4

    @pytest.mark.asyncio
    @MODES
    @pytest.mark.parametrize(
        "kind", [aiopar.DataParallel, aiopar.ReplicationCallbackDataParallel[Any], Counted]
    )
    async def test_a_wrapper_without_its_own_replicate_is_left_unchanged(
        self, kind: type[aiopar.DataParallel[Any]], mode: Any
    ) -> None:
        logged = Logged()
        dp = kind(logged, CPUS)
        fields = set(vars(dp))
        for number in (1, 2):
            await under(mode, dp, torch.zeros(2))
            assert logged.copy_ids == [0, 1] * number
            aiopar.patch_replication_callback(dp)
            assert set(vars(dp)) == fields

    def test_torchs_wrapper(self) -> None:
        logged = Logged()  # without parameters torch replicates on a machine without accelerators
        theirs = nn.DataParallel(nn.Sequential(logged))
        assert [r[0].copy_id for r in theirs.replicate(theirs.module, [0, 1])] == [-1, -1]
        for _ in range(2):
            aiopar.patch_replication_callback(theirs)
            del logged.log[:]
            assert [r[0].copy_id for r in theirs.replicate(theirs.module, [0, 1])] == [0, 1]
            assert logged.copy_ids == [0, 1]
        assert len(logged.contexts) == 1
        assert logged.copy_id == -1

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [Sync, Async])
    @each_duplicate
    async def test_duplicates_of_a_patched_wrapper(
        self, kind: type[Counted], duplicate: Callable[[Any], Any]
    ) -> None:
        logged = Logged()
        dp = kind(nn.Sequential(logged), CPUS)
        aiopar.patch_replication_callback(dp)
        again = await aiopar.run_sync(duplicate, dp)  # in a worker: torch.save opens a zip file
        aiopar.patch_replication_callback(again)
        assert (await again(torch.zeros(2))).tolist() == [0.0, 1.0]
        # The duplicate uses its own `replicate` and its own module.
        assert (again.module[0].copy_ids, again.replications) == ([0, 1], 1)
        assert (logged.copy_ids, dp.replications) == ([], 0)

    @pytest.mark.parametrize("given", [nn.Linear(1, 1), aiopar.DataParallel, None])
    def test_anything_else(self, given: Any) -> None:
        with pytest.raises(
            TypeError, match=r"expected an aiopar\.DataParallel or a torch\.nn\.DataParallel, got "
        ):
            aiopar.patch_replication_callback(given)
