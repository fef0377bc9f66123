"""`scatter`, `scatter_kwargs` and `gather` as users await them."""

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import pytest
import torch

import aiopar
from aiopar.executor._worker import current_worker

Devices = tuple[torch.device, ...]


@pytest.mark.anyio
async def test_round_trip(devices: Devices) -> None:
    x = torch.arange(5.0)
    pieces = await aiopar.scatter({"x": x, "name": "text"}, devices)
    assert [piece["x"].device for piece in pieces] == list(devices)
    assert [piece["name"] for piece in pieces] == ["text"] * len(devices)
    gathered = await aiopar.gather(pieces, "cpu")
    assert gathered["name"] == "text"
    assert torch.equal(gathered["x"], x)


@pytest.mark.asyncio
async def test_scatter_kwargs(devices: Devices) -> None:
    x = torch.arange(4.0)
    args, kwargs = await aiopar.scatter_kwargs((x,), MappingProxyType({"y": x}), devices)
    assert len(args) == len(kwargs) == len(devices)
    for (first,), named in zip(args, kwargs, strict=True):
        assert torch.equal(first, named["y"])
    assert await aiopar.scatter_kwargs((), None, devices) == ((), ())


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


@pytest.mark.asyncio
async def test_gradients_flow_through_both(devices: Devices) -> None:
    x = torch.ones(4, requires_grad=True)
    pieces = await aiopar.scatter(x, devices)
    joined = await aiopar.gather([piece * 3 for piece in pieces], "cpu")
    await aiopar.run_sync(torch.autograd.backward, [joined.sum()])
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


class Where(torch.Tensor):
    """Says on which worker it is cut."""

    seen: list[object]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.narrow:
            cls.seen.append(current_worker())
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


@pytest.mark.asyncio
async def test_it_is_done_on_a_worker_of_the_first_device() -> None:
    Where.seen = []
    async with aiopar.DeviceExecutor(["meta", "cpu"]) as executor:
        with aiopar.use_executor(executor):
            call = aiopar.scatter(torch.ones(2).as_subclass(Where), ["cpu", "cpu"])
        await call
        assert Where.seen == [executor.on("cpu")._dispatcher.workers[0]] * 2


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
        (lambda: aiopar.scatter(1, "cpu"), TypeError, "sequence of devices"),
        (lambda: aiopar.scatter((X, torch.ones(3)), TWO), ValueError, "differ in size"),
        (lambda: aiopar.scatter(X, TWO, 1), ValueError, "dim 1 is out of range"),
        (lambda: aiopar.scatter(X, TWO, chunk_sizes=[3, 0]), ValueError, "add up to 3"),
        (lambda: aiopar.scatter_kwargs((), {}, ["nowhere"]), ValueError, "unknown device"),
        (lambda: aiopar.scatter_kwargs((X,), {"y": X[:1]}, TWO), ValueError, "differ in size"),
        (lambda: aiopar.scatter_kwargs(X, {}, TWO), TypeError, "inputs must be a tuple"),  # type: ignore[arg-type]
        (lambda: aiopar.scatter_kwargs((), WRONG, TWO), TypeError, "kwargs must be .* not list"),
        (lambda: aiopar.gather([1], "nowhere"), ValueError, "unknown device"),
        (lambda: aiopar.gather([1], 99), ValueError, "99"),
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
async def test_inputs_that_have_changed_since_the_call_are_split_as_they_are_now() -> None:
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
def test_in_a_transform_they_say_so_first(verb: Any) -> None:
    target = torch.nn.Identity() if verb is aiopar.data_parallel else TWO

    def rows(row: torch.Tensor) -> torch.Tensor:
        both = (row, row[:1])
        verb(*(both, TWO) if target is TWO else (target, both, TWO))
        return row

    with pytest.raises(RuntimeError, match=r"from within a torch\.func transform"):
        torch.func.vmap(rows)(torch.ones(2, 3))


@pytest.mark.asyncio
async def test_outputs_that_nest_differently_raise_when_awaited() -> None:
    call = aiopar.gather([X, [X]], "cpu")
    with pytest.raises(ValueError, match="different types"):
        await call
