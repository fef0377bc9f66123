"""Whether calls of a `DataParallel` share their replicas."""

from typing import Any

import pytest
import torch
from torch import nn

import aiopar
from aiopar.nn._parallel_apply import ParallelCall


class TestReplicasOfSeveralCalls:
    """Those of torch's own layers, if nobody but their forward comes to see them."""

    @pytest.fixture
    def ran(self, monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
        """The replicas that were run; all are kept alive, so that no id comes again."""
        replicas: list[nn.Module] = []
        begin = ParallelCall.__init__

        def noting(call: ParallelCall, modules: Any, *args: Any) -> None:
            replicas.extend(modules)
            begin(call, modules, *args)

        monkeypatch.setattr(ParallelCall, "__init__", noting)
        return replicas

    async def run_twice(self, dp: aiopar.DataParallel) -> None:
        for _ in range(2):
            with torch.no_grad():
                call = dp(torch.ones(2, 2))
            await call

    def wrapped(self, kind: type[aiopar.DataParallel] = aiopar.DataParallel) -> Any:
        return kind(nn.Sequential(nn.Linear(2, 2)), ["cpu", "cpu"])

    @pytest.mark.asyncio
    async def test_are_the_same(self, ran: list[nn.Module]) -> None:
        dp = self.wrapped()
        await self.run_twice(dp)
        assert len(ran) == 4
        assert len(set(ran)) == 2
        assert dp.module not in ran

    @pytest.mark.asyncio
    async def test_are_others_for_a_callback(self, ran: list[nn.Module]) -> None:
        dp = self.wrapped()
        copied: list[int] = []
        dp.module[0].__dict__["__data_parallel_replicate__"] = lambda _ctx, i: copied.append(i)
        await self.run_twice(dp)
        assert len(set(ran)) == 4
        assert copied == [0, 1] * 2

    @pytest.mark.asyncio
    async def test_are_others_for_a_hook_of_all_modules(self, ran: list[nn.Module]) -> None:
        handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
        try:
            await self.run_twice(self.wrapped())
        finally:
            handle.remove()
        assert len(set(ran)) == 4

    @pytest.mark.asyncio
    async def test_are_others_for_an_observer(self, ran: list[nn.Module]) -> None:
        async with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
            executor.add_observer(aiopar.ExecutorObserver())
            with aiopar.use_executor(executor):
                await self.run_twice(self.wrapped())
        assert len(set(ran)) == 4

    @pytest.mark.asyncio
    async def test_are_others_for_an_override(self, ran: list[nn.Module]) -> None:
        class Looks(aiopar.DataParallel):
            def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
                assert not hasattr(replicas[0], "mark")
                replicas[0].mark = replicas
                return super().parallel_apply(replicas, inputs, kwargs)

        dp = self.wrapped(Looks)
        await self.run_twice(dp)
        assert len(set(ran)) == 4
        with torch.no_grad():
            call = dp.replicate(dp.module, dp.device_ids)
        assert not hasattr((await call)[0], "mark")
