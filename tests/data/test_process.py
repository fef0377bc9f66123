"""torch's worker processes in an `AsyncDataLoader`."""

import asyncio
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from typing import Any

import anyio
import psutil
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler, get_worker_info

from aiopar.data import AsyncDataLoader
from tests.data.datasets import Failing
from tests.data.iterators import Expecting, Late, Turning
from tests.data.loaders import SAMPLERS, Eager, N, epochs, read, values
from tests.data.stateful import (
    Keeping,
    KeepingSampler,
    Lines,
    Positioned,
    Rolling,
    StatefulIterators,
    Turns,
)
from tests.freeing import without_gc
from tests.gil import needs_gil
from tests.programs import run


class Sharded(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        assert info is not None, "only in a worker process"
        return iter(range(info.id, N, info.num_workers))


BAD = Failing({3, 6}, 8)


class Stopping(Failing):
    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise StopIteration("bad sample 5")
        return index


class BrokenSampler(Sampler[int]):
    """Fails while the first processes start."""

    def __iter__(self) -> Iterator[int]:
        yield 0
        yield 1
        raise LookupError("broken sampler")


class Dying(Failing):
    def __getitem__(self, index: int) -> int:
        os._exit(3)


def _torchs(dataset: Any, seed: int, count: int, **options: Any) -> list[list[Any]]:
    torch.manual_seed(seed)
    loader: DataLoader[Any] = DataLoader(dataset, num_workers=2, **options)
    return [[values(batch) for batch in loader] for _ in range(count)]


_earlier: set[int] = set()


@pytest.fixture(autouse=True, scope="module")
def _note_earlier_children() -> None:
    """Executors of other tests have processes."""
    _earlier.update(one.pid for one in psutil.Process().children(recursive=True))


def _children() -> list[psutil.Process]:
    """The child processes of these tests, without those of multiprocessing itself."""
    tracker: Any = resource_tracker._resource_tracker
    server: Any = forkserver._forkserver
    kept = (tracker._pid, server._forkserver_pid, *_earlier)
    return [one for one in psutil.Process().children(recursive=True) if one.pid not in kept]


@pytest.mark.parametrize("name", ["shuffled", "batch sampler", "no batching", "eager"])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_those_of_torchs_processes(name: str, persistent: bool) -> None:
    options = SAMPLERS[name]
    expected = _torchs(
        range(N), 1, 2, persistent_workers=persistent, **options(torch.Generator().manual_seed(3))
    )
    torch.manual_seed(1)
    loader = AsyncDataLoader(
        range(N),
        num_workers=2,
        worker_type="process",
        persistent_workers=persistent,
        **options(torch.Generator().manual_seed(3)),
    )

    async def main() -> list[list[Any]]:
        seen = [await read(loader) for _ in range(2)]
        await loader.aclose()
        return seen

    assert asyncio.run(main()) == expected
    assert not _children()


def test_iterable_datasets_shard_themselves_as_with_torch() -> None:
    [expected] = _torchs(Sharded(), 0, 1, batch_size=3)
    loader = AsyncDataLoader(Sharded(), 3, num_workers=2, worker_type="process")
    assert epochs(loader) == [expected]
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples) == (8, N)


def test_from_dataloader_has_its_processes() -> None:
    def theirs() -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            range(N),  # type: ignore[arg-type]
            4,
            shuffle=True,
            num_workers=2,
            generator=generator,
            collate_fn=_in_process,
        )

    [expected] = [[numbers for numbers, _ in theirs()]]
    [ours] = epochs(AsyncDataLoader.from_dataloader(theirs()))
    assert [numbers for numbers, _ in ours] == expected
    pids = {pid for _, pid in ours}
    assert len(pids) == 2
    assert os.getpid() not in pids


def _in_process(samples: list[int]) -> tuple[list[int], int]:
    return samples, os.getpid()


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["plain break", "break", "cancel", "end"])
async def test_no_process_is_left(way: str) -> None:
    loader = AsyncDataLoader(range(40), 2, num_workers=2, worker_type="process")
    if way == "plain break":
        async for _ in loader:
            break
        await loader.aclose()
    with anyio.CancelScope() as scope:
        async with loader as stream:
            async for _ in stream:
                if way == "break":
                    break
                if way == "cancel":
                    scope.cancel()
    assert not await anyio.to_thread.run_sync(_children)


@pytest.mark.anyio
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_failures": 1},
        {"persistent_workers": True},
        {"sampler": BrokenSampler()},
        {"sampler": BrokenSampler(), "persistent_workers": True},
    ],
    ids=["sample", "skipped", "persistent", "sampler", "sampler, persistent"],
)
async def test_an_error_that_is_kept_leaves_no_process(options: Any) -> None:
    loader = AsyncDataLoader(BAD, 2, num_workers=2, worker_type="process", **options)
    with without_gc():
        with pytest.raises((ValueError, LookupError)) as kept:
            await read(loader)
        await loader.aclose()
        left = await anyio.to_thread.run_sync(_children)
    assert not left
    assert kept.value.__traceback__ is not None
    assert all(failed.error.__traceback__ is None for failed in loader.failures)


@pytest.mark.asyncio
async def test_persistent_processes_survive_a_break_and_end_with_the_loader() -> None:
    loader = AsyncDataLoader(
        range(40), 2, num_workers=2, worker_type="process", persistent_workers=True
    )
    async for _ in loader:
        break
    first = await anyio.to_thread.run_sync(_children)
    assert len(first) == 2
    assert len(await read(loader)) == 20
    assert await anyio.to_thread.run_sync(_children) == first
    await loader.aclose()
    assert not await anyio.to_thread.run_sync(_children)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "dataset",
    [
        pytest.param(range(40), id="broken off"),
        pytest.param(BAD, id="failed", marks=needs_gil("an idle thread keeps its error")),
    ],
)
async def test_persistent_processes_end_when_the_loader_is_dropped(dataset: Any) -> None:
    def loader() -> AsyncDataLoader[Any]:
        return AsyncDataLoader(dataset, 2, worker_type="process", persistent_workers=True)

    async def begun() -> None:
        with suppress(ValueError):
            async for _ in loader():
                if isinstance(dataset, range):
                    break

    # The garbage collector would wait for the processes, perhaps on the loop's thread.
    with without_gc(), anyio.fail_after(20):
        await begun()
        while await anyio.to_thread.run_sync(_children):
            pass


@pytest.mark.parametrize(
    ("options", "workers"),
    [
        (SAMPLERS["shuffled"], 2),
        (SAMPLERS["shuffled by torch's generator"], 1),
        (lambda g: {"batch_size": 4, "sampler": Eager(), "generator": g}, 1),
        (lambda g: {"batch_size": 4, "sampler": Positioned(), "generator": g}, 1),
        (lambda g: {"batch_sampler": BatchSampler(Rolling(), 4, drop_last=False)}, 1),
        (lambda g: {"dataset": Sharded(), "batch_size": 3}, 2),
        (lambda g: {"dataset": Lines(), "batch_size": 3}, 2),
        (lambda g: {"dataset": Keeping(), "batch_size": 3}, 2),
        (lambda g: {"dataset": StatefulIterators(), "batch_size": 3}, 2),
        (lambda g: {"batch_size": 3, "sampler": KeepingSampler()}, 1),
        (lambda g: {"batch_sampler": Turning([[n, 1] for n in range(7)])}, 1),
        (lambda g: {"batch_sampler": Late([[n, 1] for n in range(7)])}, 1),
        (lambda g: {"batch_size": 4, "sampler": Turns()}, 1),
        (lambda g: {"batch_sampler": Expecting([[n, 1] for n in range(7)])}, 1),
    ],
    ids=[
        *("shuffled", "torch's", "eager", "positioned", "rolling"),
        *("iterable", "stateful iterable", "keeping", "iterators", "keeping sampler"),
        *("turning", "late", "turns", "expecting"),
    ],
)
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("after_the_last", [False, True])
def test_resuming(options: Any, workers: int, persistent: bool, after_the_last: bool) -> None:
    def loader(seed: int) -> AsyncDataLoader[Any]:
        torch.manual_seed(seed)
        arguments = {"dataset": range(N)} | options(torch.Generator().manual_seed(seed))
        return AsyncDataLoader(
            **arguments, num_workers=workers, worker_type="process", persistent_workers=persistent
        )

    async def main() -> None:
        unbroken, seen = loader(1), []
        for epoch in range(3):
            async for batch in unbroken:
                seen.append((epoch, values(batch)))
                if epoch == 0 if after_the_last else len(seen) == 9:
                    state, cut, begun = unbroken.state_dict(), len(seen), epoch
        await unbroken.aclose()
        resumed = loader(2)
        resumed.load_state_dict(state)
        rest = [(epoch, batch) for epoch in range(begun, 3) for batch in await read(resumed)]
        await resumed.aclose()
        assert rest == seen[cut:]

    asyncio.run(main())


@pytest.mark.asyncio
async def test_a_state_within_an_epoch_needs_as_many_processes_if_they_share_out_the_dataset() -> (
    None
):
    def loader(count: int, dataset: Any) -> AsyncDataLoader[Any]:
        return AsyncDataLoader(dataset, 3, num_workers=count, worker_type="process")

    shared, by_index = loader(2, Sharded()), loader(2, range(N))
    for one in (shared, by_index):
        async with one as stream:
            await anext(stream)
    with pytest.raises(ValueError, match="processes=2, this loader has 1"):
        loader(1, Sharded()).load_state_dict(shared.state_dict())
    loader(1, range(N)).load_state_dict(by_index.state_dict())
    await read(shared)
    loader(1, Sharded()).load_state_dict(shared.state_dict())  # between two epochs


@pytest.mark.asyncio
@pytest.mark.parametrize("sampler", ["shuffled by torch's generator", "eager"])
async def test_persistent_processes_resume_in_the_first_epoch(sampler: str) -> None:
    options = SAMPLERS[sampler](torch.Generator().manual_seed(1))
    loader = AsyncDataLoader(
        range(N), **options, num_workers=2, worker_type="process", persistent_workers=True
    )
    begin, seen = loader.state_dict(), []
    async for batch in loader:
        seen.append(values(batch))
        if len(seen) == 2:
            middle = loader.state_dict()
    following = await read(loader)
    loader.load_state_dict(middle)
    assert await read(loader) == seen[2:]
    assert await read(loader) == following
    loader.load_state_dict(begin)
    assert await read(loader) == seen
    await loader.aclose()


@pytest.mark.asyncio
async def test_errors() -> None:
    def loader(dataset: Any, **options: Any) -> AsyncDataLoader[Any]:
        return AsyncDataLoader(dataset, 2, worker_type="process", **options)

    stream = aiter(loader(BAD))
    assert values(await anext(stream)) == [0, 1]
    with pytest.raises(ValueError, match="bad sample 3") as raised:
        await anext(stream)
    assert raised.value.__notes__[0] == "fetching batch 1, in a worker process"
    skipping = loader(BAD, max_failures=2)
    assert await read(skipping) == [[0, 1], [4, 5]]
    assert [(failed.index, failed.batch) for failed in skipping.failures] == [
        ([2, 3], 1),
        ([6, 7], 3),
    ]
    with pytest.raises(ValueError, match="bad sample 6"):
        await read(loader(BAD, max_failures=1))
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        await read(loader(Dying(set(), 8), max_failures=5))


@pytest.mark.asyncio
@pytest.mark.parametrize("in_order", [True, False])
async def test_a_sample_may_not_end_the_epoch(in_order: bool) -> None:
    def loader(max_failures: int) -> AsyncDataLoader[Any]:
        return AsyncDataLoader(
            Stopping(set(), 8),
            2,
            num_workers=2,
            worker_type="process",
            in_order=in_order,
            max_failures=max_failures,
        )

    with pytest.raises(RuntimeError, match="the call raised StopIteration") as raised:
        await read(loader(0))
    assert isinstance(raised.value.__cause__, StopIteration)
    assert "bad sample 5" in str(raised.value.__cause__)
    assert sorted(await read(loader(1))) == [[0, 1], [2, 3], [6, 7]]


@pytest.mark.asyncio
async def test_out_of_order_it_is_unknown_which_batch_has_failed() -> None:
    loader = AsyncDataLoader(
        BAD, 2, worker_type="process", in_order=False, max_failures=2, num_workers=2
    )
    assert sorted(await read(loader)) == [[0, 1], [4, 5]]
    assert [(failed.index, failed.batch) for failed in loader.failures] == [(None, None)] * 2
    for failed in loader.failures:
        assert failed.error.__notes__[0] == "fetching a batch, in a worker process"


@pytest.mark.asyncio
async def test_out_of_order_there_is_no_state() -> None:
    loader = AsyncDataLoader(range(4), worker_type="process", in_order=False)
    with pytest.raises(RuntimeError, match="needs in_order=True"):
        loader.state_dict()
    assert sorted(await read(loader)) == [[0], [1], [2], [3]]


# A fetch that never ends.


class Stuck:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index:
            threading.Event().wait()
        return index


class StuckShards(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return map(Stuck().__getitem__, range(8))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("dataset", [Stuck(), StuckShards()], ids=["map", "iterable"])
def test_a_timeout_ends_stuck_processes(dataset: Any, persistent: bool) -> None:
    loader = AsyncDataLoader(
        dataset,
        None,
        num_workers=2,
        worker_type="process",
        timeout=0.05,
        persistent_workers=persistent,
    )

    async def read_and_leave() -> None:
        async with loader as stream:
            async for _ in stream:
                pass

    async def main() -> None:
        message = r"within 0.05 s; stage 'load' waits for input after \d items$"
        with pytest.raises(TimeoutError, match=message):
            await read_and_leave()
        await loader.aclose()

    asyncio.run(main())
    assert not _children()


def test_ctrl_c_ends_stuck_processes() -> None:
    code, out, err = run("""
        from contextlib import nullcontext
        from aiopar.data import AsyncDataLoader
        from tests.data.test_process import Stuck

        kept = []

        async def main(enter):
            loader = AsyncDataLoader(Stuck(), None, num_workers=2, worker_type="process")
            async with enter(loader) as stream:
                assert await anext(stream) == 0
                os.kill(os.getpid(), signal.SIGINT)
                await anext(stream)

        def keep(loader):
            kept.append(aiter(loader))
            return nullcontext(kept[0])

        for enter in (lambda loader: loader, lambda loader: nullcontext(aiter(loader)), keep):
            try:
                asyncio.run(main(enter))
            except KeyboardInterrupt:
                print("interrupted")
    """)
    assert (code, out) == (0, "interrupted\n" * 3), err


# A worker process dies, or was started anew.


class Pids:
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return os.getpid()


@pytest.mark.asyncio
@pytest.mark.skipif(not hasattr(os, "waitid"), reason="needs os.waitid")
async def test_a_death_is_an_error_only_where_the_loader_is_read() -> None:
    stream = aiter(AsyncDataLoader(Pids(), None, worker_type="process"))
    pid = await anext(stream)
    os.kill(pid, signal.SIGKILL)
    await anyio.to_thread.run_sync(os.waitid, os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    # As torch's handler of SIGCHLD does, which a torch loader installs in the main thread. It would
    # raise there, perhaps in the event loop.
    torch._C._error_if_any_worker_fails()
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        async for _ in stream:
            pass
    assert raised.value.__notes__[0] == f"worker process {pid} was ended by signal 9 (Killed)"


def _persistent() -> AsyncDataLoader[Any]:
    return AsyncDataLoader(
        range(N),
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        worker_type="process",
        persistent_workers=True,
    )


async def _resumes(loader: AsyncDataLoader[Any]) -> bool:
    """Whether another loader that loads the state has the rest of the epoch."""
    async with loader as stream:
        await anext(stream)
        state = loader.state_dict()
        rest = [values(batch) async for batch in stream]
    other = _persistent()
    other.load_state_dict(state)
    resumed = await read(other)
    await other.aclose()
    await loader.aclose()
    return resumed == rest


def _holds_in_a_child(ask: Callable[[], bool]) -> bool:
    if (pid := os.fork()) == 0:
        holds = False
        try:
            holds = ask()
        finally:
            os._exit(0 if holds else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("where", ["after a close", "in a child"])
def test_a_later_state_resumes(where: str) -> None:
    loader = _persistent()
    asyncio.run(read(loader))
    if where == "in a child":
        assert _holds_in_a_child(lambda: asyncio.run(_resumes(loader)))
    asyncio.run(loader.aclose())
    assert asyncio.run(_resumes(loader))


@pytest.mark.asyncio
async def test_all_processes_start_anew_if_one_has_died_between_two_epochs() -> None:
    loader, others = _persistent(), set(multiprocessing.active_children())
    await read(loader)
    (worker,) = set(multiprocessing.active_children()) - others
    worker.kill()
    await anyio.to_thread.run_sync(worker.join)
    with pytest.raises(RuntimeError, match="exited unexpectedly") as raised:
        await read(loader)
    assert raised.value.__notes__[0].startswith(f"worker process {worker.pid} ")
    assert await _resumes(loader)


# A process is forked while worker processes load.


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_child_that_frees_its_copy_ends_no_process(persistent: bool) -> None:
    loaders = [
        AsyncDataLoader(
            range(N), 2, num_workers=2, worker_type="process", persistent_workers=persistent
        )
    ]
    expected = [[n, n + 1][: N - n] for n in range(0, N, 2)]

    async def main() -> None:
        stream = aiter(loaders[0])
        streams = [stream]
        seen = [values(await anext(stream))]
        del stream

        def free() -> bool:
            # As in a worker process of another loader, which collects its garbage.
            streams.clear()
            loaders.clear()
            gc.collect()
            return True

        assert _holds_in_a_child(free)
        seen.extend([values(batch) async for batch in streams.pop()])
        assert seen == expected
        assert await read(loaders[0]) == expected
        await loaders[0].aclose()

    asyncio.run(main())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("worker_type", ["thread", "process"])
def test_a_child_has_persistent_workers_of_its_own(worker_type: Any) -> None:
    loader = AsyncDataLoader(
        range(N), num_workers=2, worker_type=worker_type, persistent_workers=True
    )

    async def in_process() -> Any:
        batches = await read(loader)
        await loader.aclose()
        return batches

    expected = asyncio.run(read(loader))
    assert _holds_in_a_child(lambda: asyncio.run(in_process()) == expected)
    assert asyncio.run(in_process()) == expected
