"""Batches arrive on their devices: copied while kernels run, from reused pinned memory."""

from collections import namedtuple
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from tests import simdevice
from tests.data.loaders import read, values
from tests.data.streams import until
from tests.sample_trees import Graph, MovingFrames

Pair = namedtuple("Pair", "x y")
WIDTH = 1 << 14


def _pairs(count: int, width: int = 4) -> list[Pair]:
    return [Pair(torch.full((width,), float(n)), str(n)) for n in range(count)]


async def _on(device: torch.device, batch: Tensor) -> list[float]:
    """The first column, read back on a worker."""
    return await aiopar.run_sync(batch[:, 0].tolist, device=device)


@pytest.mark.anyio
@pytest.mark.parametrize("prefetch", [1, 2])
@pytest.mark.parametrize("workers", [1, 3])
async def test_batches_arrive_on_the_device(
    devices: tuple[torch.device, ...], workers: int, prefetch: int
) -> None:
    loader = AsyncDataLoader(
        _pairs(10), 4, num_workers=workers, prefetch_factor=prefetch, device=devices[-1]
    )
    for _ in range(2):
        seen = []
        async for batch in loader:
            assert type(batch) is Pair
            assert batch.x.device == devices[-1]
            assert list(batch.y) == [str(int(n)) for n in await _on(devices[-1], batch.x)]
            seen += batch.y
        assert seen == [str(n) for n in range(10)]


@pytest.mark.anyio
async def test_batches_arrive_as_one_chunk_per_device(devices: tuple[torch.device, ...]) -> None:
    loader = AsyncDataLoader(_pairs(10), 4, num_workers=2, devices=devices)
    pieces = [pieces async for pieces in loader]
    chunks = [[4], [4], [2]] if len(devices) == 1 else [[2, 2], [2, 2], [1, 1]]
    assert [[len(piece.x) for piece in batch] for batch in pieces] == chunks
    seen: list[float] = []
    for batch in pieces:
        for piece, device in zip(batch, devices, strict=True):
            assert piece.x.device == device
            seen += await _on(device, piece.x)
    assert seen == list(range(10))
    assert list(pieces[0][0].y) == ["0", "1", "2", "3"], "a list is not split"


class Moved:
    """Returns another object, by a parameter with any name."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, where: torch.device) -> "Moved":
        return Moved(self.x.to(where))


class Quiet(Graph):
    """Moves itself, and returns nothing."""

    def to(self, device: torch.device) -> None:  # type: ignore[override]
        super().to(device)


class Dated:
    """Its `to` takes no device."""

    def to(self, zone: str) -> None:
        raise AssertionError("not a device")


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Graph, Quiet, Moved, MovingFrames])
async def test_objects_move_themselves(make: Any) -> None:
    given, dated = make(torch.ones(2)), Dated()
    items: list[Any] = [{"of": given, "when": dated}]
    rows = AsyncDataLoader(items * 2, None, device="meta")
    chunks = AsyncDataLoader([{"x": torch.ones(2), **items[0]}], None, devices=["meta", "cpu"])
    [pair] = [batch async for batch in chunks]
    moved = [batch async for batch in rows] + [item async for item in Pipeline(items).to("meta")]
    for batch, device in [(pair[0], "meta"), (pair[1], "cpu"), *((each, "meta") for each in moved)]:
        assert type(batch["of"]) is make
        assert _x_of(batch["of"]).device.type == device
        assert batch["when"] is dated
    assert _x_of(given).device.type == "cpu", "the source's own object"


def _x_of(moved: Any) -> Tensor:
    x: Tensor = moved.parts["x"] if isinstance(moved, Graph) else moved.x
    return x


@pytest.mark.anyio
async def test_batches_of_async_datasets_and_iterables_arrive_too(
    devices: tuple[torch.device, ...],
) -> None:
    class Async:
        def __len__(self) -> int:
            return 6

        async def __getitem__(self, index: int) -> Tensor:
            return torch.full((3,), float(index))

    async def source() -> Any:
        for n in range(6):
            yield torch.full((3,), float(n))

    datasets: list[Any] = [Async(), source(), map(torch.full, [(3,)] * 6, map(float, range(6)))]
    for dataset in datasets:
        loader = AsyncDataLoader(dataset, 2, num_workers=2, device=devices[0])
        seen = []
        async for batch in loader:
            assert batch.device == devices[0]
            seen += await _on(devices[0], batch)
        assert seen == list(range(6))


@pytest.mark.anyio
async def test_batches_of_processes_arrive_too(devices: tuple[torch.device, ...]) -> None:
    if devices[0].type != "cpu":
        pytest.skip("a process that has used the accelerator is not to be forked")
    loader = AsyncDataLoader(range(6), 2, worker_type="process", device="cpu")
    assert await read(loader) == [[0, 1], [2, 3], [4, 5]]


async def _copying_elsewhere(computing: torch.Stream) -> AsyncDataLoader[Any]:
    """A loader of six batches that does not copy on the stream `computing`."""
    # A device has 32 streams and uses them in turn: the loader may get the same one.
    while True:
        loader = AsyncDataLoader(_pairs(12, WIDTH), 2, num_workers=2, device="sim:0", timeout=10)
        async with loader as stream:
            with simdevice.paused(computing), suppress(TimeoutError):
                await anext(stream)
                return loader


@pytest.mark.sim
@pytest.mark.anyio
async def test_the_next_batch_is_copied_while_kernels_run() -> None:
    """The consumer's kernels are paused, and all batches come."""
    async with aiopar.DeviceExecutor(["sim:0"], synchronize=False) as executor:
        computing = await executor.run_sync(torch.accelerator.current_stream, 0)
        loader = await _copying_elsewhere(computing)
        batches, results = [], []
        async with loader as stream:
            with simdevice.paused(computing):
                async for batch in stream:
                    batches.append(batch)
                    results.append(await executor.run_sync(torch.mul, batch.x[:, :3], 2))
        assert len(batches) == 6
        doubled = [await executor.run_sync(result.tolist) for result in results]
    assert [[row[0] for row in rows] for rows in doubled] == [
        [2.0 * n, 2.0 * (n + 1)] for n in range(0, 12, 2)
    ]


@pytest.mark.sim
@pytest.mark.asyncio
async def test_the_next_batch_is_copied_before_it_is_asked_for() -> None:
    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        computing = await executor.run_sync(torch.accelerator.current_stream, 0)
        loader = await _copying_elsewhere(computing)
        before = torch.accelerator.memory_allocated(0)
        async with loader as stream:
            batch = await anext(stream)
            with simdevice.paused(computing):
                computed = executor.submit(torch.neg, batch.x[:, 0])
                two = before + 2 * batch.x.nbytes
                await until(lambda: torch.accelerator.memory_allocated(0) >= two)
                assert not computed.done()
            await computed


@pytest.mark.sim
@pytest.mark.asyncio
async def test_memory_is_not_reused_before_the_consumer_has_read_it() -> None:
    own = torch.Stream("sim:0")
    loader = AsyncDataLoader(_pairs(2), 2, device="sim:0")
    with own:
        stream = aiter(loader)
    async with stream:
        batch = await anext(stream)
        assert own.stream_id in simdevice.recorded_streams(batch.x)


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pinned buffers that were made, in bytes."""
    sizes: list[int] = []
    empty = torch.empty

    def noting(*size: int, **options: Any) -> Tensor:
        if options.get("pin_memory"):
            sizes.append(size[0])
        return empty(*size, **options)

    monkeypatch.setattr(torch, "empty", noting)
    return sizes


@pytest.mark.sim
@pytest.mark.anyio
async def test_pinned_memory_is_reused(pinned: list[int]) -> None:
    loader = AsyncDataLoader(_pairs(60), 2, num_workers=2, device="sim:0")
    for _ in range(3):
        async for batch in loader:
            assert not batch.x.is_pinned()
    assert 1 <= len(pinned) <= 2


@pytest.mark.sim
@pytest.mark.asyncio
async def test_similar_sizes_share_buffers(pinned: list[int]) -> None:
    tensors = [torch.ones(size, dtype=torch.uint8) for size in (5000, 8192, 4097, 1, 4096)]
    async with Pipeline(tensors).to("sim:0") as stream:
        assert [len(tensor) async for tensor in stream] == [5000, 8192, 4097, 1, 4096]
    assert pinned == [8192, 4096]


@pytest.mark.sim
@pytest.mark.asyncio
async def test_a_buffer_made_in_inference_mode_is_reused_outside(pinned: list[int]) -> None:
    loader = AsyncDataLoader(_pairs(2), 2, device="sim:0")
    with torch.inference_mode():
        stream = aiter(loader)
    for one in (stream, loader):
        async for batch in one:
            assert batch.x.is_inference() == (one is stream)
    assert len(pinned) == 1


@pytest.mark.sim
@pytest.mark.asyncio
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4),
        torch.arange(12).view(3, 4).t(),
        torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        torch.arange(12)[::3],
        torch.ones(3, dtype=torch.bool),
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.complex(torch.ones(2), torch.ones(2)).conj(),
        torch.ones(3).expand(2, 3),
        torch.arange(6.0).pin_memory,
    ],
    ids=lambda tensor: str(getattr(tensor, "shape", "pinned")),
)
async def test_a_tensor_is_copied_as_by_to(tensor: Any) -> None:
    tensor = tensor() if callable(tensor) else tensor
    [copied] = [copied async for copied in Pipeline([tensor]).to("sim:0")]
    expected = tensor.to("sim:0")
    assert copied.stride() == expected.stride()
    assert copied.dtype == expected.dtype
    assert values(copied.cpu()) == values(tensor)


@pytest.mark.sim
@pytest.mark.asyncio
async def test_gradients_flow_through_the_copy() -> None:
    weight = torch.ones(3, requires_grad=True)
    [copied] = [copied async for copied in Pipeline([weight * 2]).to("sim:0")]
    await aiopar.backward(copied.sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.sim
@pytest.mark.anyio
async def test_a_copy_that_fails_is_the_consumers_error() -> None:
    loader = AsyncDataLoader(torch.ones(4, 1 << 10), 2, max_failures=9, device="sim:0")
    torch.accelerator.synchronize(0)
    simdevice.set_memory_limit("sim:0", torch.accelerator.memory_allocated(0) + 1024)
    with pytest.raises(torch.OutOfMemoryError, match="in stage 'device'") as raised:
        await read(loader)
    del raised
    simdevice.set_memory_limit("sim:0", 16 << 30)
    assert len([batch async for batch in loader]) == 2


@pytest.mark.sim
@pytest.mark.anyio
async def test_pin_memory_gives_pinned_batches() -> None:
    loader = AsyncDataLoader(_pairs(4), 2, pin_memory=True)
    async for batch in loader:
        assert batch.x.is_pinned()
        assert batch.x.device.type == "cpu"


@pytest.mark.asyncio
async def test_pin_memory_without_an_accelerator_warns() -> None:
    with pytest.warns(UserWarning, match="no accelerator is found"):
        loader = AsyncDataLoader(range(4), 2, pin_memory=True)
    assert await read(loader) == [[0, 1], [2, 3]]
