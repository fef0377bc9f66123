"""The batches of an epoch are torch's: same indices, same order, same use of the generators."""

import asyncio
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    TensorDataset,
    get_worker_info,
)
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.distributed import DistributedSampler

from aiopar.data import AsyncDataLoader
from tests.data.datasets import AsyncPlain, Failing, FailingAsync, Plain, same
from tests.data.loaders import SAMPLERS, N, Options, epochs, read, values


class Squares:
    """A map-style dataset of mappings."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": torch.tensor([index, index**2]), "name": str(index), "y": index / 2}


class Asking(Squares):
    """Its samples name the torch worker."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"worker": str(get_worker_info())}


class Batched(Squares):
    """Fetches a batch at once."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        self.asked.append(indices)
        return [self[index] for index in indices]


class Numbers(IterableDataset[int]):
    """Shards itself, as torch's documentation says."""

    def __init__(self, count: int = N) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, self.count, step))

    def __len__(self) -> int:
        return self.count


def _both(dataset: Any, options: Options, workers: int, **more: Any) -> tuple[Any, Any]:
    """Three epochs of our loader and of torch's, and the generators after each epoch."""

    def torch_epochs() -> list[Any]:
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(11)
        loader: DataLoader[Any] = DataLoader(dataset, **options(generator))
        seen = []
        for _ in range(3):
            batches = [values(batch) for batch in loader]
            seen.append((batches, generator.get_state().tolist(), torch.get_rng_state().tolist()))
        return seen

    def our_epochs() -> list[Any]:
        generator = torch.Generator().manual_seed(7)
        torch.manual_seed(11)
        loader = AsyncDataLoader(dataset, **options(generator), num_workers=workers, **more)
        seen = []
        for _ in range(3):
            [batches] = epochs(loader)
            seen.append((batches, generator.get_state().tolist(), torch.get_rng_state().tolist()))
        return seen

    return our_epochs(), torch_epochs()


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
def test_batches_and_generators_are_torchs(options: Options, workers: int) -> None:
    ours, torchs = _both(torch.arange(100, 100 + N), options, workers)
    assert ours == torchs


@pytest.mark.parametrize("batch_size", [1, 4, None])
@pytest.mark.parametrize(
    "dataset",
    [
        Squares(),
        Asking(),
        Batched(),
        Subset(Squares(), range(2, 17)),  # type: ignore[arg-type]
        TensorDataset(torch.arange(N), torch.rand(N, 2)),
        StackDataset(a=torch.arange(N), b=Squares()),  # type: ignore[arg-type]
        [(n, [str(n)], {"z": torch.ones(n % 2 + 1)[:1]}) for n in range(9)],
        {n: n * 2.5 for n in range(7)},
        Numbers(),
    ],
    ids=lambda dataset: type(dataset).__name__,
)
def test_datasets_and_their_default_collation_are_torchs(
    dataset: Any, batch_size: int | None
) -> None:
    ours, torchs = _both(dataset, lambda g: {"batch_size": batch_size, "generator": g}, 2)
    assert ours == torchs


@pytest.mark.parametrize("batch_size", [4, None])
def test_a_collate_fn_gets_the_same_samples_as_by_torch(batch_size: int | None) -> None:
    options = {"batch_size": batch_size, "collate_fn": repr}
    ours, torchs = _both(range(N), lambda g: {**options, "shuffle": True, "generator": g}, 2)
    assert ours == torchs


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("seeded", [False, True])
def test_a_datapipe_draws_the_same_numbers_as_by_torch(seeded: bool, persistent: bool) -> None:
    """And the same numbers again in a resumed epoch."""

    def options(generator: torch.Generator) -> dict[str, Any]:
        return {"batch_size": 4, "generator": generator if seeded else None}

    pipe = IterableWrapper(range(N)).shuffle().map(str).shuffle()
    ours, torchs = _both(pipe, options, 2)
    assert ours == torchs
    assert ours[0] != ours[1]

    def loader() -> AsyncDataLoader[Any]:
        made = options(torch.Generator().manual_seed(3))
        return AsyncDataLoader(pipe, **made, persistent_workers=persistent)

    async def resume() -> tuple[list[Any], list[Any]]:
        first, second = loader(), loader()
        await read(first)
        async with first as stream:
            await anext(stream)
            state = first.state_dict()
            remains = [values(batch) async for batch in stream]
        following = await read(first)
        second.load_state_dict(state)
        return [remains, following], [await read(second), await read(second)]

    expected, again = asyncio.run(resume())
    assert again == expected


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3, 8, 9])
def test_iterables_are_batched_as_torch_batches_them(count: int, drop_last: bool) -> None:
    def options(generator: torch.Generator) -> dict[str, Any]:
        return {"batch_size": 3, "drop_last": drop_last, "generator": generator}

    ours, torchs = _both(Numbers(count), options, 2)
    assert ours == torchs
    assert epochs(AsyncDataLoader(Plain(count), 3, drop_last=drop_last))[0] == torchs[0][0]
    assert epochs(AsyncDataLoader(AsyncPlain(count), 3, drop_last=drop_last))[0] == torchs[0][0]


def test_a_batch_of_a_dataset_with_getitems_is_asked_for_at_once() -> None:
    dataset = Batched()
    epochs(AsyncDataLoader(dataset, 10))
    assert [len(indices) for indices in dataset.asked] == [10, 10, 3]


class _Table:
    """Rows, with no `len`."""

    def __init__(self, rows: list[int]) -> None:
        self.rows = rows


MADE: dict[str, tuple[Callable[[list[int]], Any], Callable[[Any], Any]]] = {
    "list": (list, list),
    "generator": (lambda indices: (n * 10 for n in indices), list),
    "table": (_Table, lambda table: table.rows),
    "columns": (lambda indices: {"a": torch.tensor(indices), "b": 1, "c": 2}, values),
    "one number": (sum, str),
}
"""Results of `__getitems__`, each with a function that collates it."""


@pytest.mark.anyio
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("made", MADE)
async def test_the_result_of_getitems_goes_to_collate_fn_unchanged(
    made: str, is_async: bool
) -> None:
    make, collate = MADE[made]

    class Whole:
        def __len__(self) -> int:
            return 6

        def __getitems__(self, indices: list[int]) -> Any:
            return make(indices)

    class WholeAsync(Whole):
        async def __getitems__(self, indices: list[int]) -> Any:
            return make(indices)

    theirs: DataLoader[Any] = DataLoader(Whole(), 4, collate_fn=collate)  # type: ignore[arg-type]
    loader = AsyncDataLoader(WholeAsync() if is_async else Whole(), 4, collate_fn=collate)
    assert await read(loader) == list(theirs)
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples) == (2, 6)


@pytest.mark.parametrize(("persistent", "draws"), [(False, 3), (True, 1)])
def test_with_persistent_workers_the_base_seed_is_drawn_once(persistent: bool, draws: int) -> None:
    ours, expected = (torch.Generator().manual_seed(7) for _ in range(2))
    epochs(AsyncDataLoader(range(4), generator=ours, persistent_workers=persistent), 3)
    for _ in range(draws):
        torch.empty((), dtype=torch.int64).random_(generator=expected)
    assert torch.equal(ours.get_state(), expected.get_state())


def test_set_epoch_reaches_sampler_batch_sampler_and_dataset() -> None:
    def sampler() -> DistributedSampler[int]:
        return DistributedSampler(range(N), num_replicas=2, rank=1, shuffle=True, seed=3)  # type: ignore[arg-type]

    ours, inside = sampler(), sampler()
    loader = AsyncDataLoader(range(N), 4, sampler=ours)
    batched = AsyncDataLoader(range(N), batch_sampler=BatchSampler(inside, 4, drop_last=False))
    for epoch in range(3):
        reference = sampler()
        reference.set_epoch(epoch)
        expected = [values(batch) for batch in DataLoader(range(N), 4, sampler=reference)]  # type: ignore[arg-type]
        loader.set_epoch(epoch)
        batched.set_epoch(epoch)
        assert epochs(loader) == epochs(batched) == [expected]


def test_the_length_is_torchs() -> None:
    for options in SAMPLERS.values():
        generator = torch.Generator()
        theirs: DataLoader[Any] = DataLoader(range(N), **options(generator))  # type: ignore[arg-type]
        assert len(AsyncDataLoader(range(N), **options(generator))) == len(theirs)
    assert len(AsyncDataLoader(Numbers(9), 4)) == 3
    assert len(AsyncDataLoader(Numbers(9), 4, drop_last=True)) == 2
    assert len(AsyncDataLoader({n: n for n in range(5)}.keys(), 2)) == 3
    with pytest.raises(TypeError, match="has no len"):
        len(AsyncDataLoader(iter([1, 2])))
    with pytest.raises(TypeError, match="has no len"):
        len(AsyncDataLoader(range(9), sampler=iter([1, 2])))


class Whole(Numbers):
    """Each process has all samples."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count))


class Understated(Numbers):
    """Has three numbers more than its `len`."""

    def __len__(self) -> int:
        return super().__len__() - 3


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize("batch_size", [None, 1, 2, 3])
def test_a_length_that_was_too_short_gives_one_warning_at_the_end(
    batch_size: int | None, recwarn: pytest.WarningsRecorder
) -> None:
    unasked = AsyncDataLoader(Understated(9), batch_size)
    right = AsyncDataLoader(Numbers(9), batch_size)
    asked = AsyncDataLoader(Understated(9), batch_size)
    assert len(right) > len(asked)
    assert epochs(unasked) == epochs(right)
    assert not recwarn
    assert epochs(asked) == epochs(right)
    [warning] = recwarn
    message = r"Length of IterableDataset .* was reported to be 6 .* in \d batches$"
    assert re.search(message, str(warning.message))
    assert warning.filename.endswith("loaders.py"), "where it is read"


@pytest.mark.filterwarnings("always")
@pytest.mark.parametrize(("dataset", "batches"), [(Numbers(10), 4), (Whole(10), 6)])
def test_with_processes_only_too_many_samples_give_a_warning(
    dataset: Numbers, batches: int, recwarn: pytest.WarningsRecorder
) -> None:
    loader = AsyncDataLoader(dataset, 4, num_workers=2, worker_type="process")
    assert len(loader) == 3
    assert len(epochs(loader)[0]) == batches
    warned = [one for one in recwarn if "shared out among" in str(one.message)]
    assert len(warned) == (1 if batches == 6 else 0)  # CPython 3.12 also warns of the fork


def test_from_dataloader_has_its_settings() -> None:
    generator = torch.Generator().manual_seed(2)
    kept: list[Callable[[], DataLoader[Any]]] = [
        lambda: DataLoader(range(N), 4, shuffle=True, generator=generator),  # type: ignore[arg-type]
        lambda: DataLoader(range(N), 4, drop_last=True, collate_fn=repr),  # type: ignore[arg-type]
        lambda: DataLoader(range(N), None, sampler=RandomSampler(range(N), generator=generator)),  # type: ignore[arg-type]
        lambda: DataLoader(range(N), batch_sampler=[[1, 2], [0]]),  # type: ignore[arg-type]
        lambda: DataLoader(Numbers(), 5, drop_last=True),
        lambda: DataLoader(Numbers(), None),
    ]
    for make in kept:
        theirs = make()
        generator.manual_seed(2)
        expected = [values(batch) for batch in theirs]
        generator.manual_seed(2)
        ours = AsyncDataLoader.from_dataloader(make())
        assert epochs(ours) == [expected]
        assert ours.batch_size == theirs.batch_size
        assert ours.drop_last == theirs.drop_last
        assert ours.generator is theirs.generator


# Datasets that are asynchronous in part.


class AsyncOne(FailingAsync):
    """Asynchronous for one sample, plain for many."""

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class AsyncMany(Failing):
    """Plain for one sample, asynchronous for many."""

    async def __getitems__(self, indices: list[int]) -> list[int]:
        return [-index for index in indices]


class Unseen(Failing):
    """Plain methods that return coroutines."""

    def __getitem__(self, index: int) -> Any:
        return self.fetch(index)

    async def fetch(self, index: int) -> int:
        return index


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
async def test_only_an_async_method_is_awaited(
    dataset: Any, batch_size: int | None, batches: list[Any]
) -> None:
    loader = AsyncDataLoader(dataset, batch_size, collate_fn=same)
    assert await read(loader) == batches


@pytest.mark.anyio
@pytest.mark.parametrize("batch_size", [2, None])
async def test_a_coroutine_is_not_a_sample(batch_size: int | None) -> None:
    loader = AsyncDataLoader(Unseen(set()), batch_size, collate_fn=same)
    with pytest.raises(TypeError, match="returned a coroutine") as raised:
        await read(loader)
    assert raised.value.__notes__[0].startswith("fetching sample")


# Empty epochs.


class Arrived:
    """A dataset or sampler of the items of one day; some days have none."""

    def __init__(self) -> None:
        self.days = iter([[1, 2], [], [3], [], [], [4]])

    def __iter__(self) -> Iterator[int]:
        return iter(next(self.days))

    def __len__(self) -> int:
        return 2


class ArrivedRows(Arrived, IterableDataset[int]):
    pass


class StatefulArrived(ArrivedRows):
    """Its state has nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError("nothing was loaded")


EMPTY: dict[str, Callable[[], dict[str, Any]]] = {
    "iterable": lambda: {"dataset": ArrivedRows()},
    "stateful iterable": lambda: {"dataset": StatefulArrived()},
    "sampler": lambda: {"dataset": range(9), "sampler": Arrived()},
    "drop_last": lambda: {
        "dataset": [1, 2, 3],
        "batch_size": 4,
        "shuffle": True,
        "drop_last": True,
    },
}
"""The arguments of a loader with empty epochs."""


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_an_empty_epoch_counts_as_by_torch(make: Callable[[], dict[str, Any]]) -> None:
    torch.manual_seed(5)
    theirs: DataLoader[Any] = DataLoader(**make())
    expected = [[values(batch) for batch in theirs] for _ in range(6)]
    after = torch.get_rng_state()
    torch.manual_seed(5)
    assert epochs(AsyncDataLoader(**make()), 6) == expected
    assert [] in expected
    assert torch.equal(torch.get_rng_state(), after)
