"""scatter and gather together: what is scattered and gathered is what it was."""

import gc
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from aiopar._base.tree import tensors
from aiopar.nn._scatter_gather import gather_sync, scatter_kwargs_sync, scatter_sync

from ..sample_trees import (
    CONTAINERS,
    EMPTY,
    Derived,
    MaskedLMOutput,
    Sample,
    batches,
    equal,
    trees,
)

Devices = tuple[torch.device, ...]


@given(data=st.data(), batch=st.integers(0, 9), dim=st.integers(-3, 2), repeats=st.integers(1, 2))
def test_round_trip(
    devices: Devices, data: st.DataObject, batch: int, dim: int, repeats: int
) -> None:
    tree = data.draw(trees(batches(batch=batch, dim=dim)))
    pieces = scatter_sync(tree, devices * repeats, dim)
    assert 1 <= len(pieces) <= len(devices) * repeats
    for piece, device in zip(pieces, devices * repeats, strict=False):
        assert all(tensor.device == device for tensor in tensors(piece))
    assert equal(gather_sync(pieces, "cpu", dim), tree)


@given(data=st.data(), sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_round_trip_with_chunk_sizes(data: st.DataObject, sizes: list[int]) -> None:
    tree = data.draw(trees(batches(batch=sum(sizes), dim=0)))
    pieces = scatter_sync(tree, ["cpu"] * len(sizes), chunk_sizes=sizes)
    assert len(pieces) == len(sizes)
    assert equal(gather_sync(pieces, "cpu"), tree)


@given(data=st.data(), batch=st.integers(1, 5))
def test_round_trip_of_arguments(data: st.DataObject, batch: int) -> None:
    tree = trees(batches(batch=batch, dim=0))
    inputs = tuple(data.draw(st.lists(tree, max_size=3)))
    kwargs = data.draw(st.dictionaries(st.sampled_from("abc"), tree))
    calls = scatter_kwargs_sync(inputs, kwargs, ["cpu"] * 3)
    assert len(calls[0]) == len(calls[1])
    if inputs or kwargs:
        assert equal(gather_sync(calls[0], "cpu"), inputs)
        assert equal(gather_sync(calls[1], "cpu"), kwargs)
    else:
        assert calls == ((), ())


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container(devices: Devices, name: str) -> None:
    tree = CONTAINERS[name](torch.arange(10).view(5, 2), {"weights": [torch.arange(5.0)]})
    assert equal(gather_sync(scatter_sync(tree, devices), "cpu"), tree)


@pytest.mark.parametrize("empty", EMPTY, ids=lambda empty: type(empty).__name__)
def test_empty_containers(empty: Any) -> None:
    tree = (torch.arange(4), empty)
    assert equal(gather_sync(scatter_sync(tree, ["cpu"] * 2), "cpu"), tree)
    assert equal(gather_sync(scatter_sync(empty, ["cpu"] * 2), "cpu"), empty)


def test_dataclass_with_post_init_is_not_initialised_again() -> None:
    tree = Derived(torch.arange(4))
    pieces = scatter_sync(tree, ["cpu"] * 2)
    assert [piece.value.tolist() for piece in pieces] == [[0, 2], [4, 6]]
    assert equal(gather_sync(pieces, "cpu"), tree)


def test_model_output() -> None:
    output = MaskedLMOutput(logits=torch.arange(6).view(3, 2))
    pieces = scatter_sync(output, ["cpu"] * 2)
    assert [list(piece) for piece in pieces] == [["logits"], ["logits"]]
    assert equal(gather_sync(pieces, "cpu"), output)
    with_loss = [
        MaskedLMOutput(loss=torch.tensor(1.0 * i), logits=p.logits) for i, p in enumerate(pieces)
    ]
    gathered = gather_sync(with_loss, "cpu")
    assert gathered.loss is gathered["loss"]
    assert gathered.loss.tolist() == [0, 1]


def test_model_output_of_transformers() -> None:
    try:
        from transformers.modeling_outputs import MaskedLMOutput as RealOutput
        from transformers.tokenization_utils_base import BatchEncoding
    except ImportError:
        pytest.skip("transformers is not installed; its protocol is tested by sample_trees")
    logits, hidden = torch.rand(3, 2), torch.rand(3)
    output = RealOutput(logits=logits, hidden_states=(hidden,))
    joined = gather_sync(scatter_sync(output, ["cpu"] * 2), "cpu")
    assert type(joined) is RealOutput
    assert list(joined) == ["logits", "hidden_states"]
    assert torch.equal(joined["logits"], logits)
    assert torch.equal(joined["hidden_states"][0], hidden)
    encoding = BatchEncoding({"input_ids": torch.arange(4)})
    pieces = scatter_sync(encoding, ["cpu"] * 2)
    assert [piece["input_ids"].tolist() for piece in pieces] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_flow_back(devices: Devices, dim: int) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    weights = torch.randn(3, 5)
    pieces = scatter_sync(Sample(x, weights), devices, dim)
    joined = gather_sync([piece.image * piece.label for piece in pieces], "cpu", dim)
    joined.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


def test_gradients_of_scalars() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    pieces = scatter_sync((x, torch.arange(3.0)), ["cpu"] * 3)
    losses = gather_sync([scale * row.sum() for scale, row in pieces], "cpu")
    assert losses.tolist() == [0, 2, 4]
    losses.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 3


def test_inference_mode() -> None:
    with torch.inference_mode():
        tree = Sample(torch.arange(6.0).view(3, 2), "label")
        joined = gather_sync(scatter_sync(tree, ["cpu"] * 2), "cpu")
    assert equal(joined, tree)
    assert joined.image.is_inference()


def test_no_reference_cycle_is_left() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        gather_sync(scatter_sync([{"a": tensor}], ["cpu"] * 2), "cpu")
        with pytest.raises(ValueError, match="differ in size"):
            scatter_sync((tensor, torch.ones(3)), ["cpu"] * 2)
        del tensor
        assert alive() is None
    finally:
        gc.enable()
