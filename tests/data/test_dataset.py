"""Datasets that are async in part: awaited by whichever method is called, and never handed out."""

from collections.abc import Coroutine
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Subset

from aiopar.data import AsyncDataLoader
from tests.data.datasets import Failing, FailingAsync, same
from tests.data.loaders import read


class AsyncOne(FailingAsync):
    """Asynchronous for one sample, plain for many."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class AsyncMany(Failing):
    """Plain for one sample, asynchronous for many."""

    async def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class Unseen(Failing):
    """It says of neither method that what it returns is to be awaited."""

    def __getitem__(self, index: int) -> Any:
        return self.fetch(index)

    async def fetch(self, index: int) -> int:
        return index


class UnseenMany(Unseen):
    def __getitems__(self, indices: list[int]) -> Coroutine[Any, Any, int]:
        return self.fetch(indices[0])


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("dataset", "batch_size", "batches"),
    [
        (AsyncOne(set(), 3), 2, [[0, -1], [-2]]),
        (AsyncOne(set(), 3), None, [0, 1, 2]),
        (AsyncMany(set(), 3), 2, [[0, -1], [-2]]),
        (AsyncMany(set(), 3), None, [0, 1, 2]),
        (Subset(AsyncOne(set(), 3), [2, 1]), None, [2, 1]),  # type: ignore[arg-type]
        (ConcatDataset([AsyncOne(set(), 2)] * 2), 3, [[0, 1, 0], [1]]),  # type: ignore[list-item]
        (ConcatDataset([AsyncMany(set(), 2)] * 2), 3, [[0, 1, 0], [1]]),  # type: ignore[list-item]
    ],
)
async def test_the_method_that_is_called_says_whether_it_is_awaited(
    dataset: Any, batch_size: int | None, batches: list[Any]
) -> None:
    loader = AsyncDataLoader(dataset, batch_size, collate_fn=same)
    assert await read(loader) == batches


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Unseen, UnseenMany])
@pytest.mark.parametrize("batch_size", [2, None])
async def test_a_coroutine_is_no_sample(dataset: type[Unseen], batch_size: int | None) -> None:
    loader = AsyncDataLoader(dataset(set()), batch_size, collate_fn=same)
    with pytest.raises(TypeError, match="returned a coroutine") as raised:
        await read(loader)
    assert raised.value.__notes__[0].startswith("fetching sample")
