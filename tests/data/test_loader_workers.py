"""The workers of an `AsyncDataLoader`: when they start and end, and under which state."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import aiopar
from aiopar.data import AsyncDataLoader
from tests.data.datasets import Failing
from tests.data.loaders import loader_threads, no_threads, read

pytestmark = pytest.mark.usefixtures("_threads_of_one_test_are_gone_before_the_next")


@pytest.mark.anyio
async def test_persistent_workers_live_until_the_loader_is_closed() -> None:
    started: list[int] = []
    loader = AsyncDataLoader(
        range(6), num_workers=2, persistent_workers=True, worker_init_fn=started.append
    )
    for _ in range(3):
        await read(loader)
        assert loader_threads()
    assert len(started) <= 2
    await loader.aclose()
    await no_threads()
    assert len(await read(loader)) == 6, "the loader can be iterated again"
    await loader.aclose()


@pytest.mark.anyio
async def test_a_worker_init_fn_that_fails_is_called_again_in_the_next_epoch() -> None:
    started: list[int] = []

    def start(number: int) -> None:
        started.append(number)
        if len(started) == 1:
            raise LookupError("not ready")

    loader = AsyncDataLoader(range(6), persistent_workers=True, worker_init_fn=start)
    with pytest.raises(LookupError, match="not ready"):
        await read(loader)
    assert len(await read(loader)) == 6
    assert started == [0, 0]
    await loader.aclose()


def _seed_by_info(_: int) -> object:
    info: Any = get_worker_info()
    return info.seed


class _SharedByInfo(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info: Any = torch.utils.data.get_worker_info()
        return iter(range(info.id, 8, info.num_workers))


class _IndexedByInfo(Failing):
    def __getitem__(self, index: int) -> int:
        info: Any = get_worker_info()
        return index + int(info.id)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "loader",
    [
        AsyncDataLoader(range(6), worker_init_fn=_seed_by_info),
        AsyncDataLoader(_SharedByInfo(), worker_init_fn=int),
        AsyncDataLoader(_SharedByInfo(), worker_init_fn=_seed_by_info),
        AsyncDataLoader(_IndexedByInfo(set())),
    ],
)
async def test_code_that_needs_the_info_of_a_worker_process_is_told_so(
    loader: AsyncDataLoader[Any],
) -> None:
    with pytest.raises(AttributeError, match='worker_type="process"'):
        await read(loader)


@pytest.mark.anyio
async def test_other_missing_attributes_are_not_explained_by_worker_processes() -> None:
    def fail(_: int) -> object:
        nothing: Any = None
        return nothing.id

    with pytest.raises(AttributeError) as raised:
        await read(AsyncDataLoader(range(6), worker_init_fn=fail))
    assert not any("worker_type" in note for note in raised.value.__notes__)


@pytest.mark.anyio
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("by_index", [False, True])
async def test_worker_init_fn_comes_before_anything_is_read(
    persistent: bool, by_index: bool
) -> None:
    threads = threading.local()
    seen: list[int] = []

    class ByIndex(Failing):
        def __getitem__(self, index: int) -> int:
            seen.append(threads.number)
            return index

    class Told(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return map(ByIndex(set()).__getitem__, range(60))

    def tell(number: int) -> None:
        assert not hasattr(threads, "number"), "called once"
        threads.number = number

    loader: AsyncDataLoader[Any] = AsyncDataLoader(
        ByIndex(set(), 60) if by_index else Told(),
        2,
        num_workers=3,
        worker_init_fn=tell,
        persistent_workers=persistent,
    )
    for _ in range(2):
        assert len(await read(loader)) == 30
    await loader.aclose()
    assert len(seen) == 120
    assert set(seen) <= {0, 1, 2}


@pytest.mark.sim
@pytest.mark.anyio
@pytest.mark.parametrize("devices", [["sim:0", "cpu", "cpu"], ["sim:0"]], ids=["mixed", "sim"])
async def test_only_the_cpu_workers_of_an_executor_load(devices: list[str]) -> None:
    names: set[str] = set()
    taken = 0

    def endless() -> Iterator[int]:
        nonlocal taken
        while True:
            names.add(threading.current_thread().name)
            taken += 1
            yield taken

    def note(samples: list[int]) -> list[int]:
        names.add(threading.current_thread().name)
        return samples

    async with aiopar.DeviceExecutor(devices, thread_name_prefix="mine") as executor:
        loader = AsyncDataLoader(endless(), 3, num_workers=2, collate_fn=note, executor=executor)
        async with loader as stream:
            for n in range(1, 50):
                assert len(await anext(stream)) == 3
                assert taken <= 3 * (n + 4), "as many ahead as on the loader's own threads"
    expected = "mine-cpu-" if "cpu" in devices else "aiopar-loader-cpu-"
    assert all(name.startswith(expected) for name in names)
