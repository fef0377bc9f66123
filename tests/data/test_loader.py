"""`AsyncDataLoader`: bounds, errors, time limits, statistics, and its end in every way."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.data import AsyncDataLoader
from aiopar.testing import Gate
from tests.data.loaders import read, read_into, values
from tests.freeing import survivors, without_gc


class Item:
    """A sample that can be weakly referenced."""

    def __init__(self, index: int) -> None:
        self.index = index


class Held:
    """A dataset whose samples wait at a gate."""

    def __init__(self, gate: Gate, count: int = 100) -> None:
        self.gate, self.count = gate, count
        self.refs: list[weakref.ref[Item]] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Item:
        self.gate()
        item = Item(index)
        self.refs.append(weakref.ref(item))
        return item


class Failing:
    """Some of its samples fail."""

    def __init__(self, bad: set[int], count: int = 12) -> None:
        self.bad, self.count = bad, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"bad sample {index}")
        return index


class FailingAsync(Failing):
    async def __getitem__(self, index: int) -> int:  # type: ignore[override]
        await anyio.lowlevel.checkpoint()
        return super().__getitem__(index)


def same(samples: list[Any]) -> list[Any]:
    """A collate function that makes no tensors."""
    return samples


def _threads() -> list[str]:
    return [thread.name for thread in _running()]


async def _no_threads() -> None:
    # A thread says that it ends just before it does.
    await _until(lambda: not _threads())


def _running() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if "aiopar-loader" in thread.name]


@pytest.fixture(autouse=True)
def _threads_of_one_test_are_gone_before_the_next() -> Iterator[None]:
    yield
    for thread in _running():
        thread.join(30)


async def _until(condition: Callable[[], object]) -> None:
    with anyio.fail_after(30):
        while not condition():
            await anyio.lowlevel.checkpoint()


def _reached(gate: Gate, count: int) -> bool:
    return gate.count >= count


# How far it runs ahead.


@pytest.mark.anyio
@pytest.mark.parametrize(("workers", "prefetch"), [(1, 1), (1, 3), (2, 1), (3, 2)])
async def test_no_more_than_prefetch_factor_batches_a_worker_are_ahead(
    workers: int, prefetch: int
) -> None:
    gate = Gate()
    gate.open()
    loader = AsyncDataLoader(
        Held(gate), 2, num_workers=workers, prefetch_factor=prefetch, collate_fn=same
    )
    bound = workers * prefetch
    async with loader as stream:
        for read_so_far in range(1, 8):
            await anext(stream)
            # Workers go on when the buffer is half empty.
            fetched = 2 * (read_so_far + bound // 2)
            await _until(partial(_reached, gate, fetched))
            assert gate.count <= 2 * (read_so_far + bound)
        stats = stream.stats()
        assert stats.bound == bound
        assert stats.buffered <= bound


@pytest.mark.anyio
async def test_a_slow_consumer_holds_up_an_endless_source() -> None:
    alive: list[weakref.ref[Item]] = []
    peak = 0

    def endless() -> Iterator[Item]:
        n = 0
        while True:
            item = Item(n)
            alive.append(weakref.ref(item))
            n += 1
            yield item

    loader = AsyncDataLoader(endless(), 4, num_workers=2, prefetch_factor=2, collate_fn=same)
    async with loader as stream:
        for _ in range(2000):
            batch = await anext(stream)
            assert len(batch) == 4
            alive = [ref for ref in alive if ref() is not None]
            peak = max(peak, len(alive))
    # Those ahead, that which is read, and for each worker one that it is about to let go of.
    assert peak <= 4 * (4 + 1 + 2) + 1


@pytest.mark.anyio
async def test_an_async_iterable_is_bounded_as_well() -> None:
    pulled = 0

    async def endless() -> AsyncIterator[int]:
        nonlocal pulled
        while True:
            pulled += 1
            yield pulled

    loader = AsyncDataLoader(endless(), 3, num_workers=2, prefetch_factor=2, collate_fn=same)
    async with loader as stream:
        for n in range(1, 50):
            assert len(await anext(stream)) == 3
            assert pulled <= 3 * (n + 4)


@pytest.mark.anyio
async def test_num_workers_fetches_at_once_in_threads() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate), 1, num_workers=4, collate_fn=same)
        stream = aiter(loader)
        async with anyio.create_task_group() as group:
            group.start_soon(stream.__anext__)
            await gate.entered(4)
            assert gate.held == 4
            gate.open()
        await stream.aclose()


@pytest.mark.anyio
@pytest.mark.parametrize(("batch_size", "limit"), [(1, 6), (4, 6), (8, 3), (None, 5)])
async def test_num_workers_samples_at_once_as_tasks(batch_size: int | None, limit: int) -> None:
    running = peak = 0
    all_in = anyio.Event()

    class Async:
        def __len__(self) -> int:
            return 40

        async def __getitem__(self, index: int) -> int:
            nonlocal running, peak
            running += 1
            peak = max(peak, running)
            if running == limit:
                all_in.set()
            await all_in.wait()
            await anyio.lowlevel.checkpoint()
            running -= 1
            return index

    loader = AsyncDataLoader(Async(), batch_size, num_workers=limit, collate_fn=lambda x: x)
    batches = await read(loader)
    assert peak == limit
    size = batch_size or 40
    expected = [list(range(first, first + size)) for first in range(0, 40, size)]
    assert batches == (expected if batch_size else expected[0])


@pytest.mark.anyio
async def test_async_getitems_is_awaited_for_each_batch() -> None:
    asked: list[list[int]] = []

    class Async:
        def __len__(self) -> int:
            return 7

        async def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            await anyio.lowlevel.checkpoint()
            return [-index for index in indices]

    assert await read(AsyncDataLoader(Async(), 3)) == [[0, -1, -2], [-3, -4, -5], [-6]]
    assert asked == [[0, 1, 2], [3, 4, 5], [6]]
    subset: Any = torch.utils.data.Subset(FailingAsync(set()), [3, 5, 7])  # type: ignore[arg-type]
    assert await read(AsyncDataLoader(subset, 2)) == [[3, 5], [7]]
    both: Any = torch.utils.data.ConcatDataset([subset, subset])
    assert await read(AsyncDataLoader(both, 4)) == [[3, 5, 7, 3], [5, 7]]


@pytest.mark.anyio
async def test_out_of_order_a_slow_batch_does_not_stop_the_others() -> None:
    with Gate() as gate:

        def hold_the_first(samples: list[int]) -> list[int]:
            return gate(samples) if 0 in samples else samples

        loader = AsyncDataLoader(
            range(12), 2, num_workers=2, collate_fn=hold_the_first, in_order=False
        )
        async with loader as stream:
            seen = [await anext(stream) for _ in range(3)]
            assert seen == [[2, 3], [4, 5], [6, 7]]
            gate.open()
            rest = [batch async for batch in stream]
            assert sorted(rest) == [[0, 1], [8, 9], [10, 11]]


# Errors.


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
@pytest.mark.parametrize("workers", [1, 3])
async def test_an_error_comes_after_the_batches_before_it(
    dataset: type[Failing], workers: int
) -> None:
    loader = AsyncDataLoader(dataset({7, 9}), 2, num_workers=workers)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="bad sample 7") as raised:
        await read_into(seen, loader)
    assert seen == [[0, 1], [2, 3], [4, 5]]
    notes = raised.value.__notes__
    assert notes[0].startswith("fetching sample 7 of batch 3")
    if dataset is Failing:
        assert ", in worker " in notes[0]
    assert loader.failures == ()
    await _no_threads()
    # What was delivered is told also now: to begin again with the batch that failed.
    assert loader.state_dict()["batches"] == 3


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
@pytest.mark.parametrize("in_order", [True, False])
async def test_max_failures_leaves_samples_out(dataset: type[Failing], in_order: bool) -> None:
    loader = AsyncDataLoader(
        dataset({1, 4, 5, 8}), 2, num_workers=2, max_failures=4, in_order=in_order
    )
    batches = await read(loader)
    assert sorted(batches) == [[0], [2, 3], [6, 7], [9], [10, 11]]
    failures = sorted(loader.failures, key=lambda failed: failed.index)
    assert [(failed.index, failed.batch) for failed in failures] == [(1, 0), (4, 2), (5, 2), (8, 4)]
    assert all(isinstance(failed.error, ValueError) for failed in failures)
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples, stats.failures) == (5, 8, 4)
    assert len(await read(loader)) == 5, "each epoch has its own"


@pytest.mark.anyio
@pytest.mark.parametrize("dataset", [Failing, FailingAsync])
async def test_one_failure_too_many_is_raised_in_order(dataset: type[Failing]) -> None:
    loader = AsyncDataLoader(dataset({1, 4, 5, 8}), 2, num_workers=3, max_failures=2)
    seen: list[Any] = []
    with pytest.raises(ValueError, match="bad sample 5"):
        await read_into(seen, loader)
    assert seen == [[0], [2, 3]]
    assert [failed.index for failed in loader.failures] == [1, 4]


@pytest.mark.anyio
async def test_what_fails_together_is_left_out_together() -> None:
    class Batched(Failing):
        def __getitems__(self, indices: list[int]) -> list[int]:
            return [self[index] for index in indices]

    loader = AsyncDataLoader(Batched({4}), 3, max_failures=1)
    assert await read(loader) == [[0, 1, 2], [6, 7, 8], [9, 10, 11]]
    [failed] = loader.failures
    assert (failed.index, failed.batch) == ([3, 4, 5], 1)

    def refuse(samples: list[int]) -> list[int]:
        if 5 in samples:
            raise KeyError(5)
        return samples

    loader = AsyncDataLoader(range(9), 3, collate_fn=refuse, max_failures=1)
    assert await read(loader) == [[0, 1, 2], [6, 7, 8]]
    [failed] = loader.failures
    assert (failed.index, failed.batch, type(failed.error)) == ([3, 4, 5], 1, KeyError)


@pytest.mark.anyio
async def test_an_error_of_a_source_or_a_sampler_is_always_raised() -> None:
    def source() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    async def async_source() -> AsyncIterator[int]:
        for n in source():
            yield n

    class Broken(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return source()

    for loader in (
        AsyncDataLoader(source(), 2, max_failures=9),
        AsyncDataLoader(async_source(), 2, max_failures=9),
        AsyncDataLoader(range(9), 2, sampler=Broken(), max_failures=9),
    ):
        seen: list[Any] = []
        with pytest.raises(OSError, match="the disk is gone"):
            await read_into(seen, loader)
        assert seen == [[0, 1], [2, 3]]


@pytest.mark.anyio
async def test_a_sample_may_not_end_the_epoch() -> None:
    class Stops(Failing):
        def __getitem__(self, index: int) -> int:
            raise StopIteration

    with pytest.raises(RuntimeError, match="the call raised StopIteration"):
        await read(AsyncDataLoader(Stops(set())))


@pytest.mark.anyio
async def test_timeout_names_what_did_not_come_and_loses_nothing() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate, 4), 2, timeout=0.05, collate_fn=len)
        async with loader as stream:
            with pytest.raises(TimeoutError, match=r"AsyncDataLoader: .* within 0.05 s.*'load'"):
                await anext(stream)
            gate.open()
            batches: list[int] = []
            with anyio.fail_after(30):
                while len(batches) < 2:
                    try:
                        batches += [await anext(stream)]
                    except TimeoutError:
                        continue
            assert batches == [2, 2]


# The end.


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A file of 40 numbers."""
    path = tmp_path / "lines"
    path.write_text("".join(f"{n}\n" for n in range(40)))
    return path


@pytest.mark.anyio
@pytest.mark.parametrize("way", ["break", "error", "cancel", "aclose", "end"])
@pytest.mark.parametrize("kind", ["map", "iterable", "async map", "async iterable"])
async def test_nothing_is_left_behind(way: str, kind: str, lines: Path) -> None:
    """No thread, no task, no file."""
    files: list[Any] = []

    def read_lines() -> Iterator[int]:
        with lines.open() as file:
            files.append(file)
            yield from map(int, file)

    async def count() -> AsyncIterator[int]:
        files.append(opened := _Opened())
        try:
            for n in range(40):
                yield n
        finally:
            opened.closed = True

    datasets: dict[str, Any] = {
        "map": range(40),
        "iterable": read_lines(),
        "async map": FailingAsync(set()),
        "async iterable": count(),
    }
    tasks = _tasks()
    loader = AsyncDataLoader(datasets[kind], 2, num_workers=2)
    with anyio.CancelScope() as scope:
        try:
            async with loader as stream:
                async for _ in stream:
                    if way == "break":
                        break
                    if way == "error":
                        raise ZeroDivisionError
                    if way == "cancel":
                        scope.cancel()
                    if way == "aclose":
                        await stream.aclose()
        except ZeroDivisionError:
            assert way == "error"
    await _no_threads()
    assert len(files) == ("iterable" in kind)
    assert all(file.closed for file in files)
    assert _tasks() == tasks


class _Opened:
    closed = False


def _tasks() -> int:
    return len(asyncio.all_tasks()) if asyncio._get_running_loop() else 0


@pytest.mark.anyio
async def test_a_plain_break_ends_it_too() -> None:
    """Without `async with` nobody waits; workers end after the sample that they run."""
    gate = Gate()
    gate.open()
    with without_gc():
        dataset = Held(gate)
        loader = AsyncDataLoader(dataset, 2, num_workers=2, collate_fn=same)
        async for _ in loader:
            break
        del _
        await _no_threads()
        fetched = gate.count
        assert await survivors(dataset.refs) == []
        assert gate.count == fetched < 20
        ref = weakref.ref(loader)
        del loader
        assert ref() is None


@pytest.mark.anyio
async def test_a_batch_goes_with_its_reader() -> None:
    gate = Gate()
    gate.open()
    with without_gc():
        dataset = Held(gate, 6)
        async with AsyncDataLoader(dataset, 2, collate_fn=same) as stream:
            async for batch in stream:
                del batch
        assert await survivors(dataset.refs) == []


@pytest.mark.anyio
async def test_an_error_goes_with_who_caught_it() -> None:
    class Wrong(Exception):
        pass

    refs: list[weakref.ref[Any]] = []

    class Raising(Failing):
        def __getitem__(self, index: int) -> int:
            error = Wrong(index)
            refs.append(weakref.ref(error))
            try:
                raise error
            finally:
                del error

    with without_gc():
        for max_failures in (0, 2):
            loader = AsyncDataLoader(Raising(set()), 2, max_failures=max_failures)
            with pytest.raises(Wrong):
                await read(loader)
            kept = {failed.index for failed in loader.failures}
            assert len(kept) == max_failures
            del loader
        assert await survivors(refs) == []


@pytest.mark.anyio
async def test_a_cancelled_read_loses_no_batch() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate, 6), 2, collate_fn=lambda items: items[0].index)
        async with loader as stream:
            with anyio.move_on_after(0.01):
                await anext(stream)
            gate.open()
            assert [first async for first in stream] == [0, 2, 4]


@pytest.mark.anyio
async def test_one_iteration_at_a_time() -> None:
    loader = AsyncDataLoader(range(4), 2)
    async with loader as stream:
        assert values(await anext(stream)) == [0, 1]
        with pytest.raises(RuntimeError, match=r"iterated already.*or make another loader"):
            aiter(loader)
        with pytest.raises(RuntimeError, match="iterated already"):
            async with loader:
                pass
        assert values(await anext(stream)) == [2, 3]
    assert await read(loader) == [[0, 1], [2, 3]], "that was closed"
    async for _ in loader:
        break
    assert await read(loader) == [[0, 1], [2, 3]], "that is gone"


@pytest.mark.anyio
async def test_two_tasks_may_not_read_one_stream_at_once() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate), collate_fn=len)
        async with loader as stream, anyio.create_task_group() as group:
            group.start_soon(stream.__anext__)
            await gate.entered()
            with pytest.raises(RuntimeError, match="read by another task already"):
                await anext(stream)
            gate.open()


@pytest.mark.anyio
async def test_persistent_workers_live_until_the_loader_is_closed() -> None:
    started: list[int] = []
    loader = AsyncDataLoader(
        range(6), num_workers=2, persistent_workers=True, worker_init_fn=started.append
    )
    for _ in range(3):
        await read(loader)
        assert _threads()
    assert len(started) <= 2
    await loader.aclose()
    await _no_threads()
    assert len(await read(loader)) == 6, "it begins anew"
    await loader.aclose()


@pytest.mark.anyio
async def test_worker_init_fn_is_called_once_in_each_worker() -> None:
    threads = threading.local()
    started: list[int] = []

    def start(number: int) -> None:
        threads.number = number
        started.append(number)

    class Seen(Failing):
        def __getitem__(self, index: int) -> int:
            assert threads.number in (0, 1, 2)
            return index

    loader = AsyncDataLoader(Seen(set(), 60), num_workers=3, worker_init_fn=start)
    assert len(await read(loader)) == 60
    assert sorted(started) == list(range(len(started)))
    assert 1 <= len(started) <= 3


@pytest.mark.anyio
async def test_an_executor_of_ones_own_is_left_open() -> None:
    def where(samples: list[int]) -> str:
        return threading.current_thread().name

    async with aiopar.DeviceExecutor(["cpu", "cpu"], thread_name_prefix="mine") as executor:
        loader = AsyncDataLoader(range(6), 2, collate_fn=where, executor=executor)
        names = await read(loader)
        assert all(name.startswith("mine-cpu") for name in names)
        assert await executor.run_sync(abs, -1) == 1


@pytest.mark.sim
@pytest.mark.anyio
@pytest.mark.parametrize("devices", [["sim:0", "cpu", "cpu"], ["sim:0"]], ids=["mixed", "sim"])
async def test_of_an_executor_with_accelerators_only_the_cpu_workers_load(
    devices: list[str],
) -> None:
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


@pytest.mark.anyio
async def test_what_workers_do_is_done_under_the_callers_state() -> None:
    def state(samples: list[int]) -> tuple[bool, bool]:
        return torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    loader = AsyncDataLoader(range(2), collate_fn=state)
    with torch.inference_mode():
        stream = aiter(loader)
    assert [seen async for seen in stream] == [(False, True)] * 2
    assert await read(loader) == [[True, False]] * 2


@pytest.mark.asyncio
async def test_the_statistics() -> None:
    loader = AsyncDataLoader(range(10), 4)
    assert loader.stats() is None
    async with loader as stream:
        await anext(stream)
        running = loader.stats()
        assert running is not None
        assert (running.batches, running.samples, running.bound) == (1, 4, 2)
        assert running.elapsed_seconds >= running.consumer_seconds >= 0
    await read(loader)
    stats = loader.stats()
    assert stats is not None
    assert (stats.batches, stats.samples, stats.failures, stats.buffered) == (3, 10, 0, 0)
    assert "is the bottleneck" in stats.bottleneck


@pytest.mark.asyncio
async def test_statistics_say_who_waited() -> None:
    with Gate() as gate:
        loader = AsyncDataLoader(Held(gate, 4), 1, collate_fn=len)
        async with loader as stream, anyio.create_task_group() as group:
            group.start_soon(stream.__anext__)
            await gate.entered()
            gate.open()
            while (running := loader.stats()) is None or not running.batches:
                await anyio.lowlevel.checkpoint()
            assert running.consumer_seconds > 0
            await _until(lambda: stream.stats().worker_seconds > 0)


@pytest.mark.anyio
async def test_an_empty_dataset_has_no_batches() -> None:
    assert await read(AsyncDataLoader([])) == []
    assert await read(AsyncDataLoader(iter([]))) == []
    assert await read(AsyncDataLoader(range(3), 5, drop_last=True)) == []
    gc.collect()
    await _no_threads()
