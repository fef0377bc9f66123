"""Epochs without a batch, between others: they are epochs, as torch's are."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from aiopar.data import AsyncDataLoader
from tests.data.loaders import epochs, values


class Arrived:
    """What has arrived since the epoch before: as a dataset, or as a sampler."""

    def __init__(self) -> None:
        self.days = iter([[1, 2], [], [3], [], [], [4]])

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.days))

    def __len__(self) -> int:
        return 2


class ArrivedRows(Arrived, IterableDataset[int]):
    pass


class AsyncArrived(Arrived):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> Any:
        for n in Arrived.__iter__(self):
            yield n


class StatefulArrived(ArrivedRows):
    """Its days are all that is left of it."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was loaded")


class AsyncStatefulArrived(StatefulArrived):
    __iter__ = None  # type: ignore[assignment]
    __aiter__ = AsyncArrived.__aiter__


EMPTY: dict[str, Callable[[bool], dict[str, Any]]] = {
    "iterable": lambda torchs: {"dataset": ArrivedRows()},
    "plain iterable": lambda torchs: {"dataset": ArrivedRows() if torchs else Arrived()},
    "async iterable": lambda torchs: {"dataset": ArrivedRows() if torchs else AsyncArrived()},
    "stateful iterable": lambda torchs: {"dataset": StatefulArrived()},
    "stateful async iterable": lambda torchs: {
        "dataset": ArrivedRows() if torchs else AsyncStatefulArrived()
    },
    "sampler": lambda torchs: {"dataset": range(9), "sampler": Arrived()},
    "drop_last": lambda torchs: {
        "dataset": [1, 2, 3],
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
    },
}
"""The arguments of a loader that has empty epochs, torch's or ours."""


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_an_empty_epoch_is_one_as_torchs(make: Callable[[bool], dict[str, Any]]) -> None:
    torch.manual_seed(5)
    theirs: DataLoader[Any] = DataLoader(**make(True))
    expected = [[values(batch) for batch in theirs] for _ in range(6)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert epochs(AsyncDataLoader(**make(False)), 6) == expected
    assert [] in expected
    assert torch.equal(torch.get_rng_state(), after)
