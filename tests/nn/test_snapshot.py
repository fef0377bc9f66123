"""`Snapshot` sees every change of a tree, and knows whose forward makes none."""

import dis
import functools
import importlib
import pkgutil
from collections import OrderedDict
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import nn

from aiopar.nn._module_copy import ModuleTree
from aiopar.nn._snapshot import Snapshot, all_from_torch

from .kept import model
from .test_kept_replicas_changes import CHANGES

# What is inside of tensors and settings is not the tree's.
UNSEEN = {
    "nothing",
    "in-place edit",
    "in-place edit in inference mode",
    "edit through detach",
    "parameters made one vector",
    "optimizer step",
    "fused optimizer step",
    "load_state_dict",
    "requires_grad_",
    "buffer edit",
}


def tree(root: nn.Module) -> list[nn.Module]:
    return [*root.modules()]


def leaves_no_trace(root: nn.Module) -> bool:
    modules = tree(root)
    return all_from_torch(modules) and Snapshot(modules).leaves_no_trace()


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_tree_are_seen(change: str) -> None:
    module = model()
    snapshot = Snapshot(tree(module))
    assert snapshot.holds()
    with torch.no_grad():
        CHANGES[change][0](module)
    assert snapshot.holds() == (change in UNSEEN)


def _rename_last_attribute(module: Any) -> None:
    module.after = module.__dict__.pop("last")


def _rename_only_buffer(module: Any) -> None:
    buffer = module._buffers.pop("only")
    module.register_buffer("other", buffer)


def _equal_tensor(module: Any) -> None:
    module.last = torch.ones(1)


SMALL_CHANGES: dict[str, Callable[[Any], object]] = {
    "an attribute more": lambda m: setattr(m, "more", 1),
    "an attribute less": lambda m: delattr(m, "last"),
    "an attribute renamed": _rename_last_attribute,
    "another tensor, equal": _equal_tensor,
    "a buffer renamed": _rename_only_buffer,
    "a buffer that is saved": lambda m: m._non_persistent_buffers_set.clear(),
    "a hook": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
    "a hook less": lambda m: m._forward_hooks.clear(),
    "another hook": lambda m: m._forward_hooks.update({0: print}),
    "another dict of hooks": lambda m: m.__dict__.update(_backward_hooks=OrderedDict()),
    "another __dict__": lambda m: setattr(m, "__dict__", {**m.__dict__, "last": None}),
}


@pytest.mark.parametrize("change", SMALL_CHANGES)
def test_small_changes_are_seen(change: str) -> None:
    module = nn.Module()
    module.register_buffer("only", torch.ones(1), persistent=False)
    module._forward_hooks[0] = lambda *_: None
    module.last = torch.ones(1)
    snapshot = Snapshot([module])
    assert snapshot.holds()
    SMALL_CHANGES[change](module)
    assert not snapshot.holds()


class TestLeavesNoTrace:
    def test_all_from_torch(self) -> None:
        modules = (
            model(),
            nn.TransformerEncoderLayer(4, 2),
            nn.ModuleDict({"a": nn.Conv1d(1, 1, 1)}),
        )
        assert all(leaves_no_trace(module) for module in modules)

    @pytest.mark.parametrize(
        "child",
        [
            type("Own", (nn.Linear,), {})(2, 2),
            nn.LSTM(2, 2),
            nn.LazyLinear(2),
            nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)),
            nn.DataParallel(nn.Identity()),
        ],
        ids=lambda child: type(child).__name__,
    )
    def test_others_may(self, child: nn.Module) -> None:
        assert not leaves_no_trace(nn.Sequential(nn.ReLU(), child))

    def test_hooks_may(self) -> None:
        module = model()
        handle = module[0].register_forward_pre_hook(lambda *_: None)
        assert not leaves_no_trace(module)
        handle.remove()
        assert leaves_no_trace(module)

    def test_callbacks_may(self) -> None:
        module = model()
        module[0].__dict__["__data_parallel_replicate__"] = lambda _ctx, _copy_id: None
        assert not leaves_no_trace(module)

    @pytest.mark.parametrize("name", ["forward", "_conv_forward", "__call__", "_call_impl"])
    def test_who_patches_torch_may(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Any = getattr(nn.Conv1d, name)

        @functools.wraps(original)  # which says that it was torch's
        def noting(self: Any, *args: Any) -> Any:
            self.seen = args
            return original(self, *args)

        module = nn.Conv1d(1, 1, 1)
        snapshot = Snapshot([module])
        assert leaves_no_trace(module)
        owner = nn.Module if name in vars(nn.Module) else nn.Conv1d
        monkeypatch.setattr(owner, name, noting)
        assert not leaves_no_trace(module)
        assert not snapshot.holds()

    def test_a_method_more_that_nobody_calls_does_not(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(nn.Module, "applied_in_my_way", lambda _self: None, raising=False)
        assert leaves_no_trace(model())

    def test_a_patch_of_generated_code_may(self, monkeypatch: pytest.MonkeyPatch) -> None:
        generated: dict[str, Any] = {}
        exec("def forward(self, x): self.seen = x; return x", {}, generated)  # of no module
        monkeypatch.setattr(nn.Linear, "forward", generated["forward"])
        assert not leaves_no_trace(nn.Linear(1, 1))

    @pytest.mark.parametrize("name", ["__setattr__", "__getattribute__"])
    def test_one_that_python_calls_may(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        original: Any = getattr(nn.Linear, name)

        def noting(*args: Any) -> Any:
            return original(*args)

        monkeypatch.setattr(nn.Linear, name, noting, raising=False)
        assert not leaves_no_trace(nn.Linear(1, 1))


def test_what_moves_from_one_container_to_the_next_is_seen() -> None:
    moved, other = nn.Linear(1, 1), nn.Linear(1, 1)
    module: Any = nn.ModuleDict(
        {"one": nn.ModuleDict({"a": nn.ReLU(), "b": moved}), "two": nn.ModuleDict({"c": other})}
    )
    snapshot, module_tree = Snapshot(tree(module)), ModuleTree(module)
    del module["one"]["b"]
    del module["two"]["c"]
    module["two"].update([("b", moved), ("c", other)])
    assert not snapshot.holds()
    assert not module_tree.unchanged()


def test_an_edit_while_it_is_made_that_is_undone_is_no_part_of_it_or_seen() -> None:
    """`train` while half of the modules were looked at, then `eval`."""

    class Looked(nn.Module):
        @property
        def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
            if armed:
                armed.pop()
                module.train()
            found: dict[str, Any] = fields(self)
            return found

    fields = nn.Module.__dict__["__dict__"].__get__
    armed: list[None] = []
    module = nn.Sequential(nn.ReLU(), Looked(), nn.ReLU()).eval()
    modules = tree(module)
    armed.append(None)
    snapshot = Snapshot(modules)
    module.eval()
    assert [one["training"] for one in snapshot.fields] == [False, False, True, True]
    assert not snapshot.holds()


def _torch_s_kinds() -> Iterator[type[nn.Module]]:
    for info in pkgutil.iter_modules(nn.modules.__path__, "torch.nn.modules."):
        for kind in vars(importlib.import_module(info.name)).values():
            if isinstance(kind, type) and issubclass(kind, nn.Module):
                yield kind


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _sets_attributes(function: FunctionType) -> bool:
    names = ("STORE_ATTR", "DELETE_ATTR")
    return any(
        step.opname in names or step.argval in ("setattr", "register_buffer", "register_parameter")
        for code in _codes(function.__code__)
        for step in dis.get_instructions(code)
    )


def test_no_forward_of_torch_modules_sets_an_attribute() -> None:
    """Nor any method that it might call: all but those that make, move and edit modules."""
    editing = {"__init__", "__setitem__", "__delitem__", "__setstate__", "append"}
    kinds = {kind for kind in _torch_s_kinds() if all_from_torch([object.__new__(kind)])}
    assert {nn.Linear, nn.BatchNorm2d, nn.MultiheadAttention, nn.Sequential} <= kinds
    setting = {
        f"{kind.__name__}.{name}"
        for kind in kinds
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]
        for name, method in vars(base).items()
        if isinstance(method, FunctionType) and name not in editing and _sets_attributes(method)
    }
    assert setting == set()
