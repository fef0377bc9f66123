"""`scatter` and `gather` together, and as users await them."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st

import aiopar
from aiopar._base.tree import children, has_tensors, tensors
from tests.freeing import collect_without_gil

from ..sample_trees import (
    EMPTY,
    MaskedLMOutput,
    Sample,
    batches,
    equal,
    trees,
)
from .waiting import gather, scatter, scatter_kwargs

Devices = tuple[torch.device, ...]


def split_trees(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Trees with at least one tensor that `gather` rebuilds exactly."""
    return trees(leaves, shared=[None]).filter(has_tensors)


def dims_of(tree: Any, dim: int) -> Any:
    """The `output_dims` of a tree, by which each list in it is a container."""
    if (parts := children(tree)) is None:
        return dim
    return parts[2]([dims_of(value, dim) for value in parts[1]])


@settings(max_examples=40)
@given(data=st.data(), batch=st.integers(0, 9), dim=st.integers(-3, 2), repeats=st.integers(1, 2))
def test_round_trip(
    devices: Devices, data: st.DataObject, batch: int, dim: int, repeats: int
) -> None:
    tree = data.draw(split_trees(batches(batch=batch, dim=dim)))
    pieces = scatter(tree, devices * repeats, dim)
    assert 1 <= len(pieces) <= len(devices) * repeats
    for piece, device in zip(pieces, devices * repeats, strict=False):
        assert all(tensor.device == device for tensor in tensors(piece))
    assert equal(gather(pieces, "cpu", output_dims=dims_of(tree, dim)), tree)


@settings(max_examples=40)
@given(data=st.data(), batch=st.integers(1, 5))
def test_round_trip_of_arguments(data: st.DataObject, batch: int) -> None:
    tree = split_trees(batches(batch=batch, dim=0))
    inputs = tuple(data.draw(st.lists(tree, max_size=3)))
    kwargs = data.draw(st.dictionaries(st.sampled_from("abc"), tree))
    calls = scatter_kwargs(inputs, kwargs, ["cpu"] * 3)
    assert len(calls[0]) == len(calls[1])
    if inputs or kwargs:
        assert equal(gather(calls[0], "cpu", output_dims=dims_of(inputs, 0)), inputs)
        assert equal(gather(calls[1], "cpu", output_dims=dims_of(kwargs, 0)), kwargs)
    else:
        assert calls == ((), ())


@pytest.mark.parametrize("empty", EMPTY, ids=lambda empty: type(empty).__name__)
def test_empty_containers(empty: Any) -> None:
    tree = (torch.arange(4), empty)
    assert equal(gather(scatter(tree, ["cpu"] * 2), "cpu"), tree)
    assert equal(gather(scatter(empty, ["cpu"] * 2), "cpu"), empty)


def test_model_output() -> None:
    output = MaskedLMOutput(logits=torch.arange(6).view(3, 2))
    pieces = scatter(output, ["cpu"] * 2)
    assert [list(piece) for piece in pieces] == [["logits"], ["logits"]]
    assert equal(gather(pieces, "cpu"), output)
    with_loss = [
        MaskedLMOutput(loss=torch.tensor(1.0 * i), logits=p.logits) for i, p in enumerate(pieces)
    ]
    gathered = gather(with_loss, "cpu")
    assert gathered.loss is gathered["loss"]
    assert gathered.loss.tolist() == [0, 1]


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_gradients_flow_back(devices: Devices, dim: int) -> None:
    x = torch.randn(3, 5, requires_grad=True)
    weights = torch.randn(3, 5)
    pieces = scatter(Sample(x, weights), devices, dim)
    joined = gather([piece.image * piece.label for piece in pieces], "cpu", dim)
    joined.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, weights)


def test_gradients_of_scalars() -> None:
    x = torch.tensor(2.0, requires_grad=True)
    pieces = scatter((x, torch.arange(3.0)), ["cpu"] * 3)
    losses = gather([scale * row.sum() for scale, row in pieces], "cpu")
    assert losses.tolist() == [0, 2, 4]
    losses.sum().backward()
    assert x.grad is not None
    assert x.grad.item() == 3


def test_no_reference_cycle_is_left() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        gather(scatter([{"a": tensor}], ["cpu"] * 2), "cpu")
        with pytest.raises(ValueError, match="differ in size"):
            scatter((tensor, torch.ones(3)), ["cpu"] * 2)
        del tensor
        collect_without_gil()
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.asyncio
async def test_options() -> None:
    x = torch.arange(6.0).view(2, 3)
    uneven = await aiopar.scatter(x, ["cpu"] * 2, 1, chunk_sizes=[1, 2])
    assert [piece.shape for piece in uneven] == [(2, 1), (2, 2)]
    assert torch.equal(await aiopar.gather(uneven, -1, 1), x)
    once: Any = iter([2, 1])
    assert [len(piece) for piece in await aiopar.scatter(x.T, TWO, chunk_sizes=once)] == [2, 1]
    args, _ = await aiopar.scatter_kwargs((x,), {}, ["cpu"] * 2, -1, chunk_sizes=[3, 0])
    assert [piece.shape for (piece,) in args] == [(2, 3), (2, 0)]


class Noted(torch.Tensor):
    """Notes the threads on which it is split."""

    threads: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.narrow:
            cls.threads.append(threading.get_ident())
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.asyncio
async def test_a_worker_of_the_first_device_splits() -> None:
    Noted.threads = []
    async with aiopar.DeviceExecutor(["meta", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            call = aiopar.scatter(torch.ones(2).as_subclass(Noted), ["cpu", "cpu"])
        await call
        assert Noted.threads == [await executor.on("cpu").submit(threading.get_ident)] * 2


@pytest.mark.asyncio
async def test_on_an_executor_without_workers_of_that_device() -> None:
    async with aiopar.DeviceExecutor(["meta"]) as executor:
        with aiopar.use_executor(executor):
            call = aiopar.scatter(torch.ones(2), ["cpu", "cpu"])
        assert len(await call) == 2


X, TWO = torch.ones(2), ["cpu"] * 2
WRONG: Any = [1]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: aiopar.scatter(1, []), ValueError, "at least one device"),
        (lambda: aiopar.scatter(1, [1_000_000]), ValueError, "device"),
        (lambda: aiopar.scatter(1, [None]), TypeError, "device"),  # type: ignore[list-item]
        (lambda: aiopar.scatter(1, "cpu"), TypeError, "sequence of devices"),
        (lambda: aiopar.scatter(X, TWO, True), TypeError, "dim must be an int, not bool"),
        (lambda: aiopar.scatter("x", TWO, 0.0), TypeError, "dim must be an int, not float"),  # type: ignore[arg-type]
        (lambda: aiopar.scatter((X, torch.ones(3)), TWO), ValueError, "differ in size"),
        (lambda: aiopar.scatter(X, TWO, 1), ValueError, "dim 1 is out of range"),
        (lambda: aiopar.scatter(X, TWO, chunk_sizes=[3, 0]), ValueError, "add up to 3"),
        (lambda: aiopar.scatter_kwargs((), {}, ["nowhere"]), ValueError, "unknown device"),
        (lambda: aiopar.scatter_kwargs((X,), {"y": X[:1]}, TWO), ValueError, "differ in size"),
        (lambda: aiopar.scatter_kwargs(X, {}, TWO), TypeError, "inputs must be a tuple"),  # type: ignore[arg-type]
        (lambda: aiopar.scatter_kwargs((), WRONG, TWO), TypeError, "kwargs must be .* not list"),
        (lambda: aiopar.gather([1], "nowhere"), ValueError, "unknown device"),
        (lambda: aiopar.gather([1], 99), ValueError, "99"),
        (lambda: aiopar.gather([1], None), TypeError, "device"),  # type: ignore[arg-type]
        (lambda: aiopar.gather(X, "cpu"), TypeError, "list or tuple"),  # type: ignore[arg-type]
        (lambda: aiopar.gather([], "cpu"), ValueError, "outputs is empty"),
        (lambda: aiopar.gather(WRONG, "cpu", "0"), TypeError, "dim"),  # type: ignore[arg-type]
    ],
)
async def test_bad_arguments_raise_at_once(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.asyncio
async def test_inputs_are_split_as_they_are_when_awaited() -> None:
    batch: dict[str, torch.Tensor] = {}
    call = aiopar.scatter(batch, TWO)
    batch["x"] = torch.arange(3)
    assert [piece["x"].tolist() for piece in await call] == [[0, 1], [2]]
    call = aiopar.scatter(batch, TWO)
    batch["y"] = torch.arange(2)
    with pytest.raises(ValueError, match="differ in size"):
        await call


@pytest.mark.asyncio
async def test_inputs_of_very_many_parts_are_checked_by_the_worker() -> None:
    parts = [*map(str, range(1000)), torch.ones(2), torch.ones(3)]
    call = aiopar.scatter(parts, TWO)
    with pytest.raises(ValueError, match="differ in size"):
        await call


@pytest.mark.parametrize("verb", [aiopar.scatter, aiopar.data_parallel])
def test_a_transform_is_refused_first(verb: Any) -> None:
    target = torch.nn.Identity() if verb is aiopar.data_parallel else TWO

    def rows(row: torch.Tensor) -> torch.Tensor:
        both = (row, row[:1])
        verb(*(both, TWO) if target is TWO else (target, both, TWO))
        return row

    with pytest.raises(RuntimeError, match=r"from within a torch\.func transform"):
        torch.func.vmap(rows)(torch.ones(2, 3))
