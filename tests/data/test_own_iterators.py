"""A loader calls `iter` once per epoch, as torch: iterators that start over are read right."""

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from aiopar.data import AsyncDataLoader, Pipeline
from tests.data.iterators import AsyncStateful, Expecting, Restarting, RestartingDataset, Stateful
from tests.data.loaders import values

DATA: Any = [10, 11, 12]


async def _first(loader: AsyncDataLoader[Any]) -> list[Any]:
    """An epoch, or its first 20 batches if it does not end."""
    seen: list[Any] = []
    async with loader as stream:
        async for batch in stream:
            seen.append(values(batch))
            if len(seen) == 20:
                break
    return seen


@pytest.mark.asyncio
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [2, 3])
async def test_a_dataset_is_iterated_once_per_epoch(batch_size: int, drop_last: bool) -> None:
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


@pytest.mark.asyncio
@pytest.mark.parametrize("batched", [True, False])
async def test_a_sampler_is_iterated_once_per_epoch(batched: bool) -> None:
    def options() -> dict[str, Any]:
        if batched:
            return {"batch_sampler": Restarting([[1, 2], [0], [2, 2]])}
        return {"batch_size": None, "sampler": Restarting([2, 0, 1])}

    expected = [values(batch) for batch in DataLoader(DATA, **options())]
    ours = options()
    loader = AsyncDataLoader(DATA, **ours)
    for epoch in range(1, 3):
        assert await _first(loader) == expected
        assert ours["batch_sampler" if batched else "sampler"].iters == epoch


@pytest.mark.asyncio
@pytest.mark.parametrize("make", [Stateful, AsyncStateful])
async def test_a_resumed_pipeline_iterates_its_source_once(make: Any) -> None:
    for cut in range(6):
        pipeline = Pipeline(make(range(5)))
        async with pipeline as stream:
            begun = [await anext(stream, None) for _ in range(cut)]
            state = pipeline.state_dict()
        source = make(range(5))
        resumed = Pipeline(source)
        resumed.load_state_dict(state)
        assert begun + [item async for item in resumed] == list(range(5))
        assert source.iters == 1
        assert [item async for item in resumed] == list(range(5))
        assert source.iters == 2


class InTensors(Expecting):
    def state_dict(self) -> Any:
        return {"place": [torch.tensor(self.place)]}

    def load_state_dict(self, state: Any) -> None:
        self._next = int(state["place"][0])


@pytest.mark.asyncio
async def test_a_state_is_loaded_again_unless_it_is_known_to_be_there() -> None:
    broken = AsyncDataLoader(InTensors(range(7)), 2)
    async with broken as stream:
        begun = [values(await anext(stream)) for _ in range(2)]
        state = broken.state_dict()
    resumed = AsyncDataLoader(InTensors(range(7)), 2)
    resumed.load_state_dict(state)
    whole = [[0, 1], [2, 3], [4, 5], [6]]
    assert begun + await _first(resumed) == whole
    assert await _first(resumed) == whole, "the next epoch begins at the first sample"


@pytest.mark.asyncio
async def test_an_error_of_load_state_dict_is_raised_by_the_iteration() -> None:
    class Refusing(Stateful):
        def load_state_dict(self, state: dict[str, int]) -> None:
            raise LookupError("of another version")

    broken = AsyncDataLoader(Stateful(range(7)), 2)
    async with broken as stream:
        await anext(stream)
        state = broken.state_dict()
    refusing = AsyncDataLoader(Refusing(range(7)), 2)
    refusing.load_state_dict(state)
    with pytest.raises(LookupError, match="of another version"):
        await _first(refusing)


class Breaking(Stateful):
    """Raises instead of giving its state after the fourth sample."""

    def state_dict(self) -> dict[str, int]:
        if self.place == 4:
            raise LookupError("no state")
        return super().state_dict()


@pytest.mark.asyncio
async def test_an_error_of_a_datasets_state_dict_is_raised_by_the_loaders() -> None:
    loader = AsyncDataLoader(Breaking(range(7)), 2)
    whole = [[0, 1], [2, 3], [4, 5], [6]]
    async with loader as stream:
        begun = [values(await anext(stream)) for _ in range(2)]
        with pytest.raises(ValueError, match=r"^the dataset gives no state: LookupError"):
            loader.state_dict()
        begun.append(values(await anext(stream)))
        state = loader.state_dict()
        assert begun + [values(batch) async for batch in stream] == whole
    resumed = AsyncDataLoader(Breaking(range(7)), 2)
    resumed.load_state_dict(state)
    assert begun + await _first(resumed) == whole
