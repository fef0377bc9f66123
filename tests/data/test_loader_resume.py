"""A resumed loader gives the rest of the unbroken run, in this and in later epochs."""

import asyncio
import functools
import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler

import aiopar
from aiopar.data import AsyncDataLoader, Pipeline
from tests.data.datasets import AsyncPlain, FailingAsync, Plain
from tests.data.iterators import (
    AsyncExpecting,
    AsyncLate,
    AsyncStateful,
    AsyncTurning,
    Expecting,
    Late,
    Stateful,
    Turning,
)
from tests.data.loaders import SAMPLERS, N, Options, read, values
from tests.data.stateful import (
    FETCHED,
    AsyncKeeping,
    AsyncLines,
    AsyncPositionedLines,
    AsyncStatefulIterators,
    BeginsWhenAsked,
    CountedByItsLoader,
    Days,
    Keeping,
    KeepingLate,
    KeepingSampler,
    LateLines,
    Lines,
    Positioned,
    PositionedLines,
    Rolling,
    StatefulIterators,
    Turns,
)

RESUMED: dict[str, Options] = {
    **{name: _options for name, _options in SAMPLERS.items() if name != "lazy"},
    "positioned": lambda g: {"batch_size": 4, "sampler": Positioned(), "generator": g},
    "positioned, drop_last": lambda g: {
        "batch_size": 4,
        "sampler": Positioned(),
        "drop_last": True,
    },
    "rolling": lambda g: {"batch_size": 4, "sampler": Rolling(), "generator": g},
    "rolling, no batching": lambda g: {"batch_size": None, "sampler": Rolling()},
    "rolling batches": lambda g: {"batch_sampler": BatchSampler(Rolling(), 5, drop_last=False)},
    "async": lambda g: {
        "dataset": FailingAsync(set(), N),
        "batch_size": 4,
        "shuffle": True,
        "generator": g,
    },
    "iterable": lambda g: {"dataset": Plain(N), "batch_size": 4, "generator": g},
    "iterable, no batching": lambda g: {"dataset": Plain(N), "batch_size": None},
    "async iterable": lambda g: {"dataset": AsyncPlain(N), "batch_size": 4, "generator": g},
    "stateful iterable": lambda g: {"dataset": Lines(), "batch_size": 4, "generator": g},
    "stateful async iterable": lambda g: {"dataset": AsyncLines(), "batch_size": 4},
    "positioned iterable": lambda g: {"dataset": PositionedLines(), "batch_size": 4},
    "positioned async iterable": lambda g: {"dataset": AsyncPositionedLines(), "batch_size": 4},
    "own iterator": lambda g: {"dataset": Stateful(range(N)), "batch_size": 4},
    "own async iterator": lambda g: {"dataset": AsyncStateful(range(N)), "batch_size": 4},
    "turning": lambda g: {"dataset": Turning(range(N)), "batch_size": 4, "generator": g},
    "turning, async": lambda g: {"dataset": AsyncTurning(range(N)), "batch_size": 4},
    "turning sampler": lambda g: {"batch_size": None, "sampler": Turning(range(N))},
    "turning batches": lambda g: {"batch_sampler": Turning([[n, 1] for n in range(N)])},
    "late": lambda g: {"dataset": Late(range(N)), "batch_size": 4},
    "late, async": lambda g: {"dataset": AsyncLate(range(N)), "batch_size": 4},
    "late sampler": lambda g: {"batch_size": None, "sampler": Late(range(N))},
    "late generator": lambda g: {"dataset": LateLines(), "batch_size": 4},
    "expecting": lambda g: {"dataset": Expecting(range(N)), "batch_size": 4},
    "expecting, async": lambda g: {"dataset": AsyncExpecting(range(N)), "batch_size": 4},
    "begins when asked": lambda g: {"dataset": BeginsWhenAsked(), "batch_size": 4},
    "days": lambda g: {"dataset": Days(), "batch_size": 4},
    "turns": lambda g: {"sampler": Turns(), "batch_size": 4},
    "keeping": lambda g: {"dataset": Keeping(), "batch_size": 4},
    "keeping, drop_last": lambda g: {"dataset": Keeping(), "batch_size": 4, "drop_last": True},
    "keeping, late": lambda g: {"dataset": KeepingLate(), "batch_size": 4},
    "keeping, async": lambda g: {"dataset": AsyncKeeping(), "batch_size": 4},
    "keeping sampler": lambda g: {"sampler": KeepingSampler(), "batch_size": 4},
    "iterators": lambda g: {"dataset": StatefulIterators(), "batch_size": 4, "generator": g},
    "iterators, async": lambda g: {"dataset": AsyncStatefulIterators(), "batch_size": 4},
    "shuffled pipeline": lambda g: {
        "dataset": Pipeline(range(N)).shuffle(7, generator=g),
        "batch_size": 4,
    },
    "shuffled pipeline, one generator": lambda g: {
        "dataset": Pipeline(range(N)).shuffle(7, generator=g),
        "batch_size": 4,
        "generator": g,
    },
    "another kind of state": lambda g: {"dataset": CountedByItsLoader(), "batch_size": 4},
    "expecting sampler": lambda g: {"batch_size": None, "sampler": Expecting(range(N))},
}


SEED, EPOCHS = 1, 3


def _loader(options: Options, workers: int, seed: int = SEED, **more: Any) -> AsyncDataLoader[Any]:
    torch.manual_seed(seed)
    arguments = {"dataset": range(N)} | options(torch.Generator().manual_seed(seed)) | more
    # Existing workers: these tests start hundreds of epochs.
    executor = aiopar.get_executor()
    return AsyncDataLoader(**arguments, num_workers=workers, executor=executor)


@functools.cache
def _unbroken(options: Options) -> list[Any]:
    """The batches of all epochs, with the number of each batch's epoch."""

    async def main() -> list[Any]:
        loader = _loader(options, 1)
        return [(epoch, batch) for epoch in range(EPOCHS) for batch in await read(loader)]

    return asyncio.run(main())


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
@settings(max_examples=8)
@given(
    cuts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    workers=st.integers(1, 5),
    prefetch=st.integers(1, 3),
)
def test_the_resumed_run_is_the_rest_of_the_unbroken_one(
    options: Options, cuts: list[int], workers: int, prefetch: int
) -> None:
    """However often the run is broken."""
    unbroken = _unbroken(options)

    async def main() -> None:
        loader, seen, epoch = _loader(options, workers, prefetch_factor=prefetch), [], 0
        for cut in cuts:
            # Read `cut` batches, leave the loop, go on in another loader.
            async with loader as stream:
                for _ in range(cut):
                    batch = await anext(stream, None)
                    if batch is None:  # the epoch has ended, and the next one remains
                        epoch += 1
                        break
                    seen.append((epoch, values(batch)))
            state = loader.state_dict()
            assert state["ended"] == (batch is None)
            loader = _loader(options, cut, seed=50 + cut)
            loader.load_state_dict(_through_a_file(state))
            if epoch == EPOCHS:
                break
        for last in range(epoch, EPOCHS):
            seen += [(last, batch) for batch in await read(loader)]
        assert seen == unbroken

    asyncio.run(main())


@pytest.mark.asyncio
@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
async def test_a_state_from_after_the_last_batch_does_not_begin_the_next_epoch(
    options: Options,
) -> None:
    unbroken = _loader(options, 1)
    expected = [await read(unbroken) for _ in range(3)]
    broken, seen = _loader(options, 1), []
    async for batch in broken:
        seen.append(values(batch))
        state = broken.state_dict()  # in the end: after the last batch
    assert seen == expected[0]
    resumed = _loader(options, 1, 2)
    resumed.load_state_dict(state)
    assert await read(resumed) == []
    state = resumed.state_dict()
    assert [await read(resumed) for _ in range(2)] == expected[1:]
    between = _loader(options, 1, 3)
    between.load_state_dict(state)
    assert [await read(between) for _ in range(2)] == expected[1:]


def test_a_resumed_empty_epoch_begins_once() -> None:
    def loader(seed: int) -> AsyncDataLoader[Any]:
        torch.manual_seed(seed)
        return AsyncDataLoader([1, 2, 3], 4, shuffle=True, drop_last=True)

    async def main() -> None:
        unbroken = loader(1)
        assert await read(unbroken) == []
        state = unbroken.state_dict()
        assert await read(unbroken) == []
        after = torch.get_rng_state()
        resumed = loader(2)
        resumed.load_state_dict(state)
        assert await read(resumed) == []
        assert torch.equal(torch.get_rng_state(), after)

    asyncio.run(main())


@pytest.mark.asyncio
@pytest.mark.parametrize(("cut", "words"), [(1, "begins each epoch at the state"), (6, None)])
async def test_a_dataset_that_keeps_its_state_and_has_no_initial_one(
    cut: int, words: str | None
) -> None:
    class Refusing(KeepingLate):
        def load_state_dict(self, state: dict[str, int] | None) -> None:
            assert state
            super().load_state_dict(state)

    loader, resumed = (AsyncDataLoader(Refusing(), 4) for _ in range(2))
    stream = aiter(loader)
    for _ in range(cut):
        await anext(stream)
    resumed.load_state_dict(loader.state_dict())
    assert len(await read(resumed)) == 6 - cut
    if words is None:
        assert await read(resumed) == []
    else:
        with pytest.raises(ValueError, match=words):
            await read(resumed)


def test_nothing_that_was_delivered_is_fetched_again() -> None:
    fetched: list[int] = []

    class Counting:
        def __len__(self) -> int:
            return N

        def __getitem__(self, index: int) -> int:
            fetched.append(index)
            return index

    async def main() -> None:
        loader = AsyncDataLoader(Counting(), 4, shuffle=True)
        async with loader as stream:
            delivered = [values(await anext(stream)) for _ in range(3)]
        state = loader.state_dict()
        fetched.clear()
        loader.load_state_dict(state)
        await read(loader)
        assert sorted(fetched) == sorted(set(range(N)) - {n for batch in delivered for n in batch})

        lines = Lines()
        streamed = AsyncDataLoader(lines, 4)
        async with streamed as stream:
            await anext(stream)
        streamed.load_state_dict(streamed.state_dict())
        lines.reads = 0
        await read(streamed)
        assert lines.reads == N - 4, "a stateful dataset is not read again"

        iterated = AsyncDataLoader(StatefulIterators(), 4)
        async with iterated as stream:
            await anext(stream)
        iterated.load_state_dict(iterated.state_dict())
        FETCHED.clear()
        assert len(await read(iterated)) == 5
        assert FETCHED[0] == 5, "nor is an iterator with a state"

    asyncio.run(main())


def test_within_an_epoch_the_batch_size_must_be_that_of_the_state() -> None:
    async def main() -> None:
        dataset, other = torch.arange(N), AsyncDataLoader(torch.arange(N), 3)
        loader = AsyncDataLoader(dataset, 4)
        async with loader as stream:
            await anext(stream)
        with pytest.raises(ValueError, match=r"batch_size=4, this loader has 3"):
            other.load_state_dict(loader.state_dict())
        sampler = BatchSampler(range(N), 4, drop_last=False)
        same = AsyncDataLoader(dataset, batch_sampler=sampler)
        same.load_state_dict(loader.state_dict())
        assert len(await read(same)) == -(-N // 4) - 1
        await read(loader)
        other.load_state_dict(loader.state_dict())
        assert len(await read(other)) == -(-N // 3), "between epochs any size is allowed"

    asyncio.run(main())


def test_with_a_stateful_dataset_another_batch_size_is_allowed() -> None:
    async def main() -> None:
        whole, loader, other = (AsyncDataLoader(Lines(), size) for size in (4, 4, 3))
        async with loader as stream:
            first = values(await anext(stream))
        other.load_state_dict(loader.state_dict())
        rest = [value for batch in await read(other) for value in batch]
        assert [*first, *rest] == [value for batch in await read(whole) for value in batch]

    asyncio.run(main())


def test_a_loaded_state_is_returned_until_it_is_used() -> None:
    options = SAMPLERS["shuffled"]
    loader, other = _loader(options, 2, 1), _loader(options, 2, 2)

    async def main() -> None:
        async with loader as stream:
            await anext(stream)
        state = loader.state_dict()
        other.load_state_dict(state)
        again = other.state_dict()
        assert again["delivered"] == state["delivered"] == 1
        assert again["generators"]["generator"].equal(state["generators"]["generator"])
        state["generators"].clear()
        state["delivered"] = 99
        assert len(await read(other)) == 5, "it is a copy"

    asyncio.run(main())
