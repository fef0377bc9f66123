"""The reprs of public objects: their class, settings and state, and no data."""

from collections.abc import Callable, Iterator

import pytest
import torch

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from aiopar.serve import Batcher, ReplicaPool
from aiopar.testing import Gate, Sequencer


class _Unit(aiopar.Parallelizable):
    def forward_backward(self, x: object) -> object:
        return x


def _double(n: int) -> int:
    return 2 * n


def _countdown(n: torch.Tensor) -> Iterator[torch.Tensor]:
    yield n
    yield n - 1


def _closed_parallel() -> aiopar.Parallel:
    parallel = aiopar.Parallel(1, _Unit())
    parallel.close()
    return parallel


def _passed_gate() -> Gate:
    gate = Gate()
    gate.open()
    gate()
    return gate


def _failed_sequence() -> Sequencer:
    sequence = Sequencer()
    with sequence(0):
        pass
    with pytest.raises(ZeroDivisionError), sequence(1):
        raise ZeroDivisionError
    return sequence


def _pipeline() -> "Pipeline[int]":
    return Pipeline(range(9)).map(_double)


TWO = ("cpu", "cpu")
LINEAR = torch.nn.Linear(1, 1)


@pytest.mark.parametrize(
    ("make", "shown"),
    [
        (lambda: aiopar.DeviceExecutor(TWO), "<DeviceExecutor on cpu, cpu>"),
        (
            lambda: aiopar.DeviceExecutor(["cpu"] * 10),
            "<DeviceExecutor on cpu, cpu, cpu, cpu, cpu, cpu, cpu, cpu, ... (10)>",
        ),
        (lambda: aiopar.DeviceExecutor(TWO).on(worker=0), "<DeviceExecutor on cpu, a view>"),
        (
            lambda: aiopar.DeviceExecutor(TWO).iterate(_countdown, torch.ones(3)),
            "<Iteration of _countdown, 0 ahead>",
        ),
        (lambda: aiopar.as_completed([aiopar.Future()]), "<as_completed with 1 to come>"),
        (lambda: aiopar.Parallel(2, _Unit(), devices=TWO), "<Parallel on cpu, cpu, 0 pending>"),
        (_closed_parallel, "<Parallel on cpu, 0 pending, closed>"),
        (_pipeline, "<Pipeline of range: map(_double)>"),
        (lambda: Pipeline([torch.ones(3)]), "<Pipeline of list>"),
        (
            lambda: _pipeline().filter(_double).flat_map(range).shuffle(5).batch(3).prefetch(2),
            "<Pipeline of range: map(_double), filter(_double), flat_map(range), shuffle(5), "
            "batch(3), prefetch(2)>",
        ),
        (lambda: _pipeline().to("cpu"), "<Pipeline of range: map(_double), to(cpu)>"),
        (lambda: aiter(_pipeline()), "<Stream 'pipeline' at item 0>"),
        (lambda: aiopar.map(_double, [7]), "<Stream 'map' at item 0>"),
        (
            lambda: AsyncDataLoader([1, 2, 3], 2, num_workers=3),
            "<AsyncDataLoader of list, batch_size 2, 3 workers>",
        ),
        (lambda: aiter(AsyncDataLoader([1, 2, 3], 2)), "<LoaderStream at batch 0>"),
        (lambda: Batcher(_double), "<Batcher '_double', 0 waiting, not open>"),
        (lambda: Batcher(_countdown).stream(torch.ones(3)), "<OutputStream not begun>"),
        (
            lambda: ReplicaPool(LINEAR, TWO, name="tiny"),
            "<ReplicaPool 'tiny' on cpu, cpu, not open>",
        ),
        (Gate, "<Gate closed, 0 held, 0 entered>"),
        (_passed_gate, "<Gate open, 0 held, 1 entered>"),
        (Sequencer, "<Sequencer at step 0>"),
        (_failed_sequence, "<Sequencer at step 1, failed>"),
    ],
)
def test_repr(make: Callable[[], object], shown: str) -> None:
    assert repr(make()) == shown


@pytest.mark.parametrize(
    "kind",
    [
        *(aiopar.DeviceExecutor, aiopar.Parallel, aiopar.as_completed, Pipeline, AsyncDataLoader),
        *(Batcher, ReplicaPool, aiopar.ModelStore, Gate, Sequencer),
    ],
)
def test_repr_of_a_half_made_object(kind: type[object]) -> None:
    # As a debugger shows it in an `__init__` that failed.
    assert repr(kind.__new__(kind)) == f"<{kind.__name__} half made>"


@pytest.mark.anyio
async def test_repr_during_and_after_use() -> None:
    executor = aiopar.DeviceExecutor(TWO)
    pool = ReplicaPool(LINEAR, TWO, executor=executor)
    batcher = Batcher(_countdown, name="down")
    async with executor, pool, batcher:
        assert repr(pool) == "<ReplicaPool 'Linear' on cpu, cpu, ready>"
        assert repr(batcher) == "<Batcher 'down', 0 waiting, ready>"
        async with executor.iterate(range, 3) as numbers:
            await anext(numbers)
            assert repr(numbers) in (
                "<Iteration of range, 0 ahead>",
                "<Iteration of range, 1 ahead>",
            )
        assert repr(numbers) == "<Iteration of range, closed>"
        async with batcher.stream(torch.tensor(2)) as parts:
            await anext(parts)
            assert repr(parts) in ("<OutputStream with 0 ready>", "<OutputStream with 1 ready>")
        assert repr(parts) == "<OutputStream closed>"
        async with _pipeline() as items:
            await anext(items)
            assert repr(items) == "<Stream 'pipeline' at item 1>"
        assert repr(items) == "<Stream 'pipeline' at item 1, closed>"
        async with AsyncDataLoader([1, 2, 3], 2) as batches:
            await anext(batches)
            assert repr(batches) == "<LoaderStream at batch 1>"
        assert repr(batches) == "<LoaderStream at batch 1, closed>"
    assert repr(pool) == "<ReplicaPool 'Linear' on cpu, cpu, closed>"
    assert repr(batcher) == "<Batcher 'down', 0 waiting, closed>"
    assert repr(executor) == "<DeviceExecutor on cpu, cpu, shut down>"
