"""Batches that arrive on their devices: copied beside kernels, from reused pinned memory."""

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

import aiopar
from aiopar.data import AsyncDataLoader
from aiopar.data._pinned import DeviceCopies, PinnedBuffers
from tests import simdevice
from tests.data.loaders import read, values
from tests.data.streams import until

Pair = namedtuple("Pair", "x y")


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
async def test_batches_arrive_as_a_chunk_for_each_device(devices: tuple[torch.device, ...]) -> None:
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
    assert list(pieces[0][0].y) == ["0", "1", "2", "3"], "what is no tensor goes whole to each"


@pytest.mark.anyio
async def test_async_datasets_and_iterables_too(devices: tuple[torch.device, ...]) -> None:
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
async def test_processes_too(devices: tuple[torch.device, ...]) -> None:
    if devices[0].type != "cpu":
        pytest.skip("a process that has used the accelerator is not to be forked")
    loader = AsyncDataLoader(range(6), 2, worker_type="process", device="cpu")
    assert await read(loader) == [[0, 1], [2, 3], [4, 5]]


def _copying_elsewhere(computing: torch.Stream) -> AsyncDataLoader:
    # A device has 32 streams, which are handed out in turn: another test may have used them up.
    while True:
        loader = AsyncDataLoader(_pairs(12), 2, num_workers=2, device="sim:0")
        copies = loader._iterations._copies
        assert copies is not None
        if computing not in copies._streams:
            return loader


@pytest.mark.sim
@pytest.mark.anyio
async def test_the_next_batch_is_copied_while_kernels_run() -> None:
    """The consumer's kernels are held: batches come all the same, whole."""
    async with aiopar.DeviceExecutor(["sim:0"], synchronize=False) as executor:
        computing = await executor.run_sync(torch.accelerator.current_stream, 0)
        loader = _copying_elsewhere(computing)
        batches, results = [], []
        async with loader as stream:
            with simdevice.paused(computing):
                async for batch in stream:
                    batches.append(batch)
                    results.append(await executor.run_sync(torch.mul, batch.x, 2))
        assert len(batches) == 6, "all came"
        doubled = [await executor.run_sync(result.tolist) for result in results]
    assert [[row[0] for row in rows] for rows in doubled] == [
        [2.0 * n, 2.0 * (n + 1)] for n in range(0, 12, 2)
    ]


@pytest.mark.sim
@pytest.mark.asyncio
async def test_the_next_batch_is_copied_before_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[Any] = []
    copy = DeviceCopies.__call__

    def noting(*args: Any, **options: Any) -> Any:
        copied.append(copy(*args, **options))
        return copied[-1]

    monkeypatch.setattr(DeviceCopies, "__call__", noting)
    async with aiopar.DeviceExecutor(["sim:0"]) as executor:
        computing = await executor.run_sync(torch.accelerator.current_stream, 0)
        async with _copying_elsewhere(computing) as stream:
            batch = await anext(stream)
            with simdevice.paused(computing):
                computed = executor.submit(torch.neg, batch.x)
                await until(lambda: len(copied) == 2)
                assert not computed.done()
            await computed


@pytest.mark.sim
@pytest.mark.asyncio
async def test_memory_is_not_used_again_before_the_consumer_has_read_it() -> None:
    own = torch.Stream("sim:0")
    loader = AsyncDataLoader(_pairs(2), 2, device="sim:0")
    with own:
        stream = aiter(loader)
    async with stream:
        batch = await anext(stream)
        assert own.stream_id in simdevice.recorded_streams(batch.x)


@pytest.mark.sim
@pytest.mark.anyio
async def test_pinned_memory_is_used_again() -> None:
    loader = AsyncDataLoader(_pairs(60), 2, num_workers=2, device="sim:0")
    copies = loader._iterations._copies
    assert copies is not None
    for _ in range(3):
        async for batch in loader:
            assert not batch.x.is_pinned()
    free = copies._buffers._free
    assert 1 <= sum(map(len, free.values())) <= 2
    assert all(buffer.is_pinned() for buffers in free.values() for buffer in buffers)


@pytest.mark.sim
def test_buffers_are_shared_by_sizes_that_are_near() -> None:
    buffers = PinnedBuffers()
    first = buffers.take(5000)
    assert first.numel() == 8192
    second = buffers.take(8192)
    assert first.data_ptr() != second.data_ptr()
    buffers.give_back([first])
    assert buffers.take(4097).data_ptr() == first.data_ptr()
    assert buffers.take(1).numel() == 4096
    with torch.inference_mode():
        assert not buffers.take(1 << 20).is_inference()


@pytest.mark.sim
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
def test_any_tensor_is_copied_as_to_copies_it(tensor: Any) -> None:
    tensor = tensor() if callable(tensor) else tensor
    copied = DeviceCopies([torch.device("sim:0")], whole=True)([tensor])[0]
    expected = tensor.to("sim:0")
    assert copied.stride() == expected.stride()
    assert copied.dtype == expected.dtype
    assert values(copied.cpu()) == values(tensor)


@pytest.mark.sim
def test_what_autograd_follows_it_can_still_follow() -> None:
    weight = torch.ones(3, requires_grad=True)
    copied = DeviceCopies([torch.device("sim:0")], whole=True)(weight * 2)
    copied.sum().backward()
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
async def test_pin_memory_without_an_accelerator_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="no accelerator is found"):
        loader = AsyncDataLoader(range(4), 2, pin_memory=True)
    assert await read(loader) == [[0, 1], [2, 3]]
