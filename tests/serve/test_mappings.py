"""A batch that is a mapping: keyword arguments of a module, one argument of a function."""

import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar import Batcher, ReplicaPool
from aiopar.data import Pipeline
from tests.workers import Workers

pytestmark = pytest.mark.asyncio


class Named(nn.Module):
    """Takes its tensors by name."""

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids.sum(1) if mask is None else (ids * mask).sum(1)


class OptionalInput(nn.Module):
    """Can be called without arguments, as the models of transformers."""

    def forward(self, ids: Any = None) -> Any:
        return ids.sum(1)


class OneDict(nn.Module):
    """Takes one mapping, and has keyword arguments too, as a sentence-transformers model."""

    def forward(self, batch: Mapping[str, Tensor], **options: Any) -> Tensor:
        assert not options
        return (batch["ids"] * batch["mask"]).sum(1)


class Anything(nn.Module):
    """Passes everything on, as wrappers do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        return self.module(*inputs, **kwargs)  # type: ignore[no-any-return]  # a module's call


BATCH = {"ids": torch.tensor([[1, 2, 3]]), "mask": torch.tensor([[1, 1, 0]])}
ITEM = {name: tensor[0] for name, tensor in BATCH.items()}
SUM = torch.tensor([3])


async def read(stream: Any) -> list[Any]:
    async with stream as outputs:
        return [output async for output in outputs]


def collated(kind: Callable[[Any], Any], items: list[Any]) -> Any:
    return kind(aiopar.serve.collate(items))


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize(
    "module",
    [
        pytest.param(Named(), id="names"),
        pytest.param(OneDict(), id="one dict"),
        pytest.param(Anything(Named()), id="wrapped names"),
        pytest.param(Anything(OneDict()), id="wrapped dict"),
    ],
)
async def test_every_way_to_a_module_has_one_rule(
    workers: Workers, module: nn.Module, kind: Callable[[Any], Any]
) -> None:
    batch, collate_fn = kind(BATCH), partial(collated, kind)
    with aiopar.use_executor(workers):
        async with ReplicaPool(module, ["cpu"], warmup=batch) as pool:
            outputs = [await pool(batch)]
            outputs += await read(aiopar.map(module, [batch, (batch,)], devices=["cpu"]))
            outputs += await read(aiopar.map(pool, [batch]))
            for fn in (pool, module):
                async with Batcher(fn, collate_fn=collate_fn, unbatch_fn=list) as batcher:
                    outputs.append((await batcher(ITEM)).unsqueeze(0))
    outputs += await read(Pipeline([batch]).map(module))
    assert outputs == [SUM] * 7


async def test_a_data_parallel_passes_a_dict_on_as_torch_but_a_batcher_of_it_has_the_rule() -> None:
    named, one_dict = (aiopar.DataParallel(module, ["cpu"] * 2) for module in (Named(), OneDict()))
    assert torch.equal(await one_dict(BATCH), SUM)
    with pytest.raises(AttributeError, match="'dict' object has no attribute"):
        await named(BATCH)
    for dp in (named, one_dict):
        async with Batcher(dp) as batcher:
            assert await batcher(ITEM) == SUM[0]
        assert await read(aiopar.map(dp, [BATCH])) == [SUM]
        assert await read(Pipeline([BATCH]).map(dp)) == [SUM]


async def test_a_function_gets_a_mapping_as_it_is() -> None:
    async with Batcher(OneDict().forward) as batcher:
        assert await batcher(ITEM) == SUM[0]
    for devices in (None, ["cpu"]):
        assert await read(aiopar.map(OneDict().forward, [BATCH], devices=devices)) == [SUM]


async def test_an_error_says_which_name_forward_refused(workers: Workers) -> None:
    """As for a tokenizer's `token_type_ids`, which not every model takes."""
    async with ReplicaPool(Named(), ["cpu"], executor=workers) as pool:
        with pytest.raises(AttributeError, match="has no attribute 'sum'") as caught:
            await pool({**BATCH, "token_type_ids": BATCH["mask"]})
    assert (
        "called with dict {ids: Tensor int64 [1, 3], mask: Tensor int64 [1, 3], "
        "token_type_ids: Tensor int64 [1, 3]} (no keyword arguments: got an unexpected keyword "
        "argument 'token_type_ids')"
    ) in caught.value.__notes__


async def test_the_refused_name_is_bounded_and_no_private_key_is_shown(workers: Workers) -> None:
    async with ReplicaPool(Named(), ["cpu"], executor=workers) as pool:
        for key in ("4111 1111", "k" * 10_000):
            with pytest.raises(AttributeError, match="has no attribute 'sum'") as caught:
                await pool({**BATCH, key: BATCH["mask"]})
            note = next(note for note in caught.value.__notes__ if "no keyword arg" in note)
            assert "4111" not in note
            assert len(note) < 1000


def traced(module: nn.Module, *inputs: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        made: nn.Module = torch.jit.trace(module, inputs)  # type: ignore[no-untyped-call]  # of torch
    return made


async def test_an_empty_mapping_has_no_arguments() -> None:
    async with ReplicaPool(OptionalInput(), ["cpu"]) as pool:
        with pytest.raises(AttributeError) as caught:
            await pool({})
    assert "called with no arguments" in caught.value.__notes__


@pytest.mark.may_block("torch.jit, torch.compile and torch.fx read source files")
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda module: traced(module, *module.example), id="traced"),
        pytest.param(lambda module: torch.compile(module, backend="eager"), id="compiled"),
        pytest.param(torch.fx.symbolic_trace, id="graph"),
    ],
)
async def test_what_torch_makes_of_a_module_has_the_names_of_the_module(
    made: Callable[[nn.Module], nn.Module],
) -> None:
    class Names(Named):
        example = (*BATCH.values(),)

    class Dict(nn.Module):
        example = (BATCH,)

        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return (batch["ids"] * batch["mask"]).sum(1)

    for module in (Names(), Dict()):
        async with Batcher(made(module)) as batcher:
            assert await batcher(ITEM) == SUM[0]


@pytest.mark.may_block("transformers is imported")
async def test_the_encoding_of_a_tokenizer_needs_no_wrapper() -> None:
    """A `BatchEncoding` is a `UserDict` that can be moved."""
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding(dict(BATCH))
    async with ReplicaPool(Named(), ["cpu"], warmup=encoding) as pool, Batcher(pool) as batcher:
        assert torch.equal(await pool(encoding), SUM)
        assert await batcher(transformers.BatchEncoding(dict(ITEM))) == SUM[0]
    assert await read(aiopar.map(Named(), [encoding])) == [SUM]
