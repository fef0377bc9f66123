"""The arguments of `AsyncDataLoader`: torch's checks, and its own."""

import math
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

import aiopar
from aiopar.data import AsyncDataLoader
from tests.data.datasets import FailingAsync
from tests.data.loaders import epochs, values


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (range(3), {"batch_size": 0}),
        (range(3), {"batch_size": 2.0}),
        (range(3), {"drop_last": 1}),
        (range(3), {"batch_size": None, "drop_last": True}),
        (range(3), {"sampler": RandomSampler(range(3)), "shuffle": True}),
        (range(3), {"batch_sampler": [[1]], "batch_size": 2}),
        (range(3), {"batch_sampler": [[1]], "drop_last": True}),
        (range(3), {"batch_sampler": [[1]], "sampler": [1]}),
        (range(3), {"timeout": -1}),
        (Stream(), {"shuffle": True}),
        (Stream(), {"sampler": [1]}),
        (Stream(), {"batch_sampler": [[1]]}),
        (Stream(), {"sampler": 3}),  # of a wrong type, and not allowed at all
        (Stream(), {"batch_sampler": 3}),
        (range(3), {"sampler": 3, "shuffle": True}),
        (range(3), {"batch_sampler": 3, "batch_size": 2}),
        ([], {"shuffle": True}),
    ],
)
def test_arguments_that_torch_refuses_are_refused_in_its_words(dataset: Any, options: Any) -> None:
    with pytest.raises((TypeError, ValueError)) as theirs:
        DataLoader(dataset, **options)
    with pytest.raises(theirs.type) as ours:
        AsyncDataLoader(dataset, **options)
    assert str(ours.value).startswith(str(theirs.value))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"num_workers": 0}, ValueError, "num_workers must be at least 1, got 0"),
        ({"num_workers": 1.5}, TypeError, "num_workers must be an int, not float"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1, got 0"),
        ({"max_failures": -1}, ValueError, "max_failures must be at least 0, got -1"),
        ({"max_failures": True}, TypeError, "max_failures must be an int, not bool"),
        ({"timeout": "1"}, TypeError, "timeout must be a number, not str"),
        ({"timeout": math.nan}, ValueError, "timeout must be at least 0, got nan"),
        ({"worker_type": "fibre"}, ValueError, 'must be "thread" or "process", got \'fibre\''),
        ({"executor": 3}, TypeError, "executor must be a DeviceExecutor, not int"),
        ({"generator": 3}, TypeError, "generator must be a torch.Generator, not int"),
        ({"sampler": 3}, TypeError, "sampler must be a Sampler or an iterable, not int"),
        ({"sampler": RandomSampler}, TypeError, "an iterable, not the class RandomSampler"),
        ({"batch_sampler": 3}, TypeError, "batch_sampler must be a Sampler or .*, not int"),
        ({"device": "cpu", "devices": ["cpu"]}, ValueError, "expected a device or devices"),
        ({"device": "nowhere"}, ValueError, "unknown device 'nowhere'"),
        ({"devices": []}, ValueError, "devices is empty"),
        ({"multiprocessing_context": "fork"}, ValueError, 'needs worker_type="process"'),
        ({"collate_fn": FailingAsync.__getitem__}, TypeError, "is a coroutine function"),
        ({"worker_init_fn": 3}, TypeError, "expected a callable, got 3"),
        (
            {"dataset": FailingAsync(set()), "worker_init_fn": print},
            ValueError,
            "an async dataset is read by",
        ),
        (
            {"dataset": FailingAsync(set()), "worker_type": "process"},
            ValueError,
            "this one is asynchronous",
        ),
        ({"dataset": iter(()), "worker_type": "process"}, ValueError, "share itself out among"),
        ({"dataset": 3}, TypeError, "must have __getitem__ or __getitems__.*; got int"),
        (
            {"dataset": FailingAsync, "batch_sampler": [[0]]},
            TypeError,
            "; got the class FailingAsync",
        ),
        ({"dataset": Stream}, TypeError, "; got the class Stream"),
        (
            {"worker_type": "process", "multiprocessing_context": "none"},
            ValueError,
            "valid start method",
        ),
    ],
)
def test_wrong_arguments_are_refused(options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        AsyncDataLoader(**({"dataset": range(3)} | options))


def test_a_prefetch_factor_of_none_is_torchs_default() -> None:
    loader = AsyncDataLoader(range(9), num_workers=3, prefetch_factor=None)
    epochs(loader)
    stats = loader.stats()
    assert stats is not None
    assert stats.bound == 6


def test_the_attributes_are_torchs() -> None:
    dataset, generator = range(9), torch.Generator()
    for options in (
        {"batch_size": 4, "drop_last": True, "generator": generator},
        {"batch_sampler": [[1], [2]]},
        {"batch_size": None, "sampler": [1]},
        {"collate_fn": repr},
    ):
        ours = AsyncDataLoader(dataset, **options)
        theirs: DataLoader[Any] = DataLoader(dataset, **options)  # type: ignore[arg-type]
        for name in ("batch_size", "drop_last", "generator", "collate_fn", "dataset"):
            assert getattr(ours, name) is getattr(theirs, name)
        assert type(ours.sampler) is type(theirs.sampler)
        assert type(ours.batch_sampler) is type(theirs.batch_sampler)
    assert ours.num_workers == 1


WORKERS = {
    "num_workers": 2,
    "prefetch_factor": 4,
    "worker_init_fn": print,
    "persistent_workers": True,
    "timeout": 7,
    "in_order": False,
}


@pytest.mark.parametrize("options", [WORKERS, {"num_workers": 1}], ids=["given", "defaults"])
@pytest.mark.parametrize("how", [{}, {"worker_type": "process"}], ids=["threads", "processes"])
def test_the_attributes_of_the_workers_are_torchs(
    options: dict[str, Any], how: dict[str, Any]
) -> None:
    dataset: Any = range(9)
    ours, theirs = AsyncDataLoader(dataset, **options, **how), DataLoader(dataset, **options)
    for name in (*WORKERS, "pin_memory", "multiprocessing_context"):
        assert getattr(ours, name) == getattr(theirs, name)
        with pytest.raises(AttributeError):
            setattr(ours, name, None)


def test_the_context_of_worker_processes_is_torchs() -> None:
    loader = AsyncDataLoader(range(9), worker_type="process", multiprocessing_context="spawn")
    assert loader.multiprocessing_context.get_start_method() == "spawn"


@pytest.mark.filterwarnings("ignore:'pin_memory' argument")
def test_pin_memory_is_returned_as_it_was_given() -> None:
    assert AsyncDataLoader(range(9), pin_memory=True).pin_memory is True


class OwnIterator(DataLoader[int]):
    """Like the loaders of PyG: each batch of torch's iterator is transformed."""

    def _get_iterator(self) -> Any:
        return (batch + 1 for batch in super()._get_iterator())


class OwnIndices(DataLoader[int]):
    @property
    def _index_sampler(self) -> Any:
        return [[1], [2]]


def patched(dataset: Any) -> DataLoader[int]:
    loader = DataLoader[int](dataset)
    loader._get_iterator = lambda: iter([[1], [2]])  # type: ignore[method-assign,assignment,return-value]
    return loader


@pytest.mark.parametrize("make", [OwnIterator, OwnIndices, patched])
def test_from_dataloader_refuses_a_loader_that_iterates_in_its_own_way(make: Any) -> None:
    own = make(range(3))
    with pytest.raises(TypeError, match=rf"{type(own).__name__} iterates .* own.*batch_size=None"):
        AsyncDataLoader.from_dataloader(own)
    assert epochs(AsyncDataLoader(own, batch_size=None)) == [[*map(values, own)]]


def test_from_dataloader_needs_a_dataloader() -> None:
    with pytest.raises(TypeError, match="expected a torch DataLoader, got list"):
        AsyncDataLoader.from_dataloader([])  # type: ignore[arg-type]


def test_a_view_on_an_executor_is_accepted() -> None:
    with aiopar.DeviceExecutor(["cpu", "cpu"]) as executor:
        loader = AsyncDataLoader(range(5), 2, executor=executor.on(worker=1))
        assert epochs(loader) == [[[0, 1], [2, 3], [4]]]
        first, second = executor.stats().workers
        assert first.completed == 0 < second.completed
        loader = AsyncDataLoader(range(5), 2, executor=executor)
        assert epochs(loader, 2) == [[[0, 1], [2, 3], [4]]] * 2, "it stays open"


def test_an_executor_of_processes_is_refused() -> None:
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        refused = pytest.raises(
            NotImplementedError, match=r'process:0/cpu: use worker_type="process"'
        )
        with refused:
            AsyncDataLoader(range(3), executor=executor)
