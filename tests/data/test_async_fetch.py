"""Fetching samples as tasks."""

import pytest

import aiopar
from aiopar.data._cursor import Request
from aiopar.data._fetch import AsyncFetch, Collation
from aiopar.data._outcome import StopFlag
from aiopar.errors import Left


@pytest.mark.anyio
async def test_when_the_reader_has_left_no_sample_is_begun() -> None:
    begun: list[int] = []
    leaving = StopFlag()

    class Dataset:
        async def __getitem__(self, index: int) -> int:
            begun.append(index)
            leaving.is_set = index == 1
            return index

    collate = Collation(list, batched=True, by_index=True, max_failures=0, leaving=leaving)
    fetch = AsyncFetch(Dataset(), collate, aiopar.get_executor(), 1)
    with pytest.raises(Left):
        await fetch(Request(0, [0, 1, 2, 3]))
    assert begun == [0, 1]
