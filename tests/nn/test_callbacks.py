"""Replication callbacks: which submodules are called, in what order, with which context."""

import asyncio
from typing import Any

import pytest
from torch import nn

import aiopar

from .callback_modules import Call, Fails, Logged
from .sample_modules import CPU


def replicas(module: nn.Module, count: int = 2) -> list[nn.Module]:
    return asyncio.run(aiopar.replicate(module, [CPU] * count))


class TestExec:
    def test_copy_0_first_then_in_the_order_of_modules_with_shared_contexts(self) -> None:
        log: list[Call] = []
        inner = nn.ModuleList([Logged("0.0", log), nn.Linear(1, 1), Logged("0.2", log)])
        copies = replicas(nn.Sequential(inner, Logged("1", log)), 3)
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

    def test_a_shared_submodule_is_called_once_per_copy(self) -> None:
        shared = Logged()
        module = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
        aiopar.exec_data_parallel_replication_callback(replicas(module))
        assert shared.copy_ids == [0, 1]
        assert len(shared.contexts) == 1

    def test_callbacks_may_change_the_tree(self) -> None:
        class Grows(nn.Sequential):
            def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
                if copy_id == 0:
                    self.insert(0, Logged("new", log))

        log: list[Call] = []
        logged = Logged("old", log)
        aiopar.exec_data_parallel_replication_callback(replicas(Grows(logged)))
        assert [call[:2] for call in log] == [("old", 0), ("old", 1)]
        assert len(logged.contexts) == 1

    @pytest.mark.parametrize(
        ("module", "where"),
        [
            (Fails(), "the module (Fails)"),
            (nn.Sequential(Logged(), nn.ModuleList([Fails()])), "module '1.0' (Fails)"),
        ],
    )
    def test_an_error_names_module_and_copy(self, module: nn.Module, where: str) -> None:
        with pytest.raises(KeyError, match="own") as raised:
            aiopar.exec_data_parallel_replication_callback(replicas(module, 3))
        assert raised.value.__notes__ == [f"in the replication callback of {where}, copy 1"]

    def test_bad_arguments(self) -> None:
        logged = Logged()
        with pytest.raises(ValueError, match=r"copies of one module.* \[1, 2\] submodules"):
            aiopar.exec_data_parallel_replication_callback([logged, nn.Sequential(logged)])
        not_modules: Any = [logged, 3]
        with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got int"):
            aiopar.exec_data_parallel_replication_callback(not_modules)
        assert logged.log == []
