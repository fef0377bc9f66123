"""`iter` once an epoch, as torch: also for what is its own iterator, and starts over there."""

from typing import Any

import pytest
from torch.utils.data import DataLoader

from aiopar.data import AsyncDataLoader
from tests.data.iterators import OfNextOnly, Restarting, RestartingDataset
from tests.data.loaders import values

pytestmark = pytest.mark.anyio


async def _first(loader: AsyncDataLoader) -> list[Any]:
    """An epoch, or as much of it as tells that it does not end."""
    seen: list[Any] = []
    async with loader as stream:
        async for batch in stream:
            seen.append(values(batch))
            if len(seen) == 20:
                break
    return seen


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [2, 3])
async def test_a_dataset_is_begun_once_an_epoch(batch_size: int, drop_last: bool) -> None:
    theirs, ours, plain = (
        RestartingDataset(range(7)),
        RestartingDataset(range(7)),
        Restarting(range(7)),
    )
    torchs: DataLoader[Any] = DataLoader(theirs, batch_size, drop_last=drop_last)
    loader = AsyncDataLoader(ours, batch_size, drop_last=drop_last)
    streamed = AsyncDataLoader(plain, batch_size, drop_last=drop_last)
    for _ in range(2):
        expected = [values(batch) for batch in torchs]
        assert await _first(loader) == await _first(streamed) == expected
        assert ours.iters == plain.iters == theirs.iters


@pytest.mark.parametrize("batch_size", [2, None])
async def test_samples_of_what_has_next_alone(batch_size: int | None) -> None:
    dataset = OfNextOnly(range(5))
    expected = [values(batch) for batch in DataLoader(dataset, batch_size)]
    assert await _first(AsyncDataLoader(dataset, batch_size)) == expected
