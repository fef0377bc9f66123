"""Resuming: the next batch is the next of the unbroken run, in this and in later epochs."""

import asyncio
import io
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import BatchSampler, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from aiopar.data import AsyncDataLoader
from aiopar.testing import Gate
from tests.data.loaders import SAMPLERS, N, Options, epochs, read, values


class Positioned(Sampler[int]):
    """A stateful sampler as torchdata's: at its end it says so; after loading it goes on there."""

    def __init__(self) -> None:
        self.rounds = 0
        self.yielded = 0
        self._next: int | None = None

    def __iter__(self) -> Iterator[int]:
        if self._next is None:
            self.rounds += self.yielded == N
            self.yielded = 0
        self._next = None
        order = random.Random(self.rounds).sample(range(N), N)
        for index in order[self.yielded :]:
            self.yielded += 1
            yield index

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds, self._next = state["rounds"], state["yielded"]
        self.yielded = state["yielded"]


class Rolling(Sampler[int]):
    """A stateful sampler that is at the beginning of its next round when it has ended."""

    def __init__(self) -> None:
        self.rounds = self.position = 0

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.rounds).sample(range(N), N)
        while self.position < N:
            self.position += 1
            yield order[self.position - 1]
        self.rounds, self.position = self.rounds + 1, 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self.rounds, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.rounds, self.position = state["rounds"], state["position"]


class Lines(IterableDataset[int]):
    """A stateful dataset; counts what is read of it."""

    def __init__(self) -> None:
        self.position = self.reads = 0

    def __iter__(self) -> Iterator[int]:
        while self.position < N:
            self.position += 1
            self.reads += 1
            yield self.position * 10
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class AsyncLines(Lines):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for line in Lines.__iter__(self):
            yield line


class PositionedLines(Lines):
    """One that is still at its end when it has ended, and begins anew with the next `iter`."""

    def __init__(self) -> None:
        super().__init__()
        self._next: int | None = None

    def __iter__(self) -> Iterator[int]:
        self.position, self._next = self._next or 0, None
        while self.position < N:
            self.position += 1
            yield self.position * 10

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self._next = state["position"]


class AsyncPositionedLines(PositionedLines):
    __iter__ = None  # type: ignore[assignment]

    async def __aiter__(self) -> AsyncIterator[int]:
        for line in PositionedLines.__iter__(self):
            yield line


class AsyncOnes:
    def __len__(self) -> int:
        return N

    async def __getitem__(self, index: int) -> int:
        await asyncio.sleep(0)
        return index


class _Plain:
    def __iter__(self) -> Iterator[int]:
        return iter(range(N))


class _Async:
    async def __aiter__(self) -> AsyncIterator[int]:
        for n in range(N):
            yield n


RESUMED: dict[str, Options] = {
    **{name: _options for name, _options in SAMPLERS.items() if name != "lazy"},
    "positioned": lambda g: {"batch_size": 4, "sampler": Positioned(), "generator": g},
    "positioned, no remainder": lambda g: {"batch_size": 1, "sampler": Positioned()},
    "positioned, drop_last": lambda g: {
        "batch_size": 4,
        "sampler": Positioned(),
        "drop_last": True,
    },
    "rolling": lambda g: {"batch_size": 4, "sampler": Rolling(), "generator": g},
    "rolling, no batching": lambda g: {"batch_size": None, "sampler": Rolling()},
    "rolling batches": lambda g: {"batch_sampler": BatchSampler(Rolling(), 5, drop_last=False)},
    "async": lambda g: {"dataset": AsyncOnes(), "batch_size": 4, "shuffle": True, "generator": g},
    "iterable": lambda g: {"dataset": _Plain(), "batch_size": 4, "generator": g},
    "iterable, no batching": lambda g: {"dataset": _Plain(), "batch_size": None},
    "async iterable": lambda g: {"dataset": _Async(), "batch_size": 4, "generator": g},
    "stateful iterable": lambda g: {"dataset": Lines(), "batch_size": 4, "generator": g},
    "stateful async iterable": lambda g: {"dataset": AsyncLines(), "batch_size": 4},
    "positioned iterable": lambda g: {"dataset": PositionedLines(), "batch_size": 4},
    "positioned async iterable": lambda g: {"dataset": AsyncPositionedLines(), "batch_size": 4},
}


def _loader(options: Options, workers: int, seed: int, **more: Any) -> AsyncDataLoader:
    torch.manual_seed(seed)
    arguments = {"dataset": range(N)} | options(torch.Generator().manual_seed(seed)) | more
    return AsyncDataLoader(**arguments, num_workers=workers)


async def _run(loader: AsyncDataLoader, cut: int, count: int) -> tuple[list[Any], Any]:
    """The batches of `count` epochs, one after the other, and the state after `cut` of them."""
    seen: list[Any] = []
    state = loader.state_dict()
    for epoch in range(count):
        if len(seen) == cut:
            state = loader.state_dict()  # between two epochs
        async for batch in loader:
            seen.append((epoch, values(batch)))
            if len(seen) == cut:
                state = loader.state_dict()
    return seen, state


async def _resumed(loader: AsyncDataLoader, state: Any, epoch: int, count: int) -> list[Any]:
    loader.load_state_dict(state)
    return [(e, batch) for e in range(epoch, count) for batch in await read(loader)]


def _through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
@settings(max_examples=15)
@given(data=st.data())
def test_the_resumed_run_is_the_rest_of_the_unbroken_one(
    options: Options, data: st.DataObject
) -> None:
    workers, later = (data.draw(st.integers(1, 5)) for _ in range(2))
    prefetch = data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 5))

    async def main() -> None:
        unbroken, _ = await _run(_loader(options, 1, seed), 0, 3)
        cut = data.draw(st.integers(0, len(unbroken)))
        again, state = await _run(_loader(options, workers, seed, prefetch_factor=prefetch), cut, 3)
        assert again == unbroken
        # Where the epoch was when the state was taken: in the last batch's epoch, but for states
        # taken between two.
        epoch = unbroken[cut][0] if cut < len(unbroken) else 3
        if cut and state["in_epoch"]:
            epoch = unbroken[cut - 1][0]
        resumed = _loader(options, later, seed + 100)
        assert await _resumed(resumed, _through_a_file(state), epoch, 3) == unbroken[cut:]

    asyncio.run(main())


@pytest.mark.parametrize("options", RESUMED.values(), ids=RESUMED)
@settings(max_examples=6)
@given(cuts=st.lists(st.integers(1, 4), min_size=1, max_size=5), workers=st.integers(1, 3))
def test_a_run_may_be_broken_again_and_again(
    options: Options, cuts: list[int], workers: int
) -> None:
    async def main() -> None:
        unbroken, _ = await _run(_loader(options, 1, 3), 0, 2)
        loader, seen, epoch = _loader(options, workers, 3), [], 0
        for cut in cuts:
            # Read so many batches, leave the loop, go on in another loader.
            async with loader as stream:
                for _ in range(cut):
                    batch = await anext(stream, None)
                    if batch is None:  # the epoch has ended, and what remains is the next
                        epoch += 1
                        break
                    seen.append((epoch, values(batch)))
            state = loader.state_dict()
            assert state["in_epoch"] == (batch is not None)
            loader = _loader(options, workers, 50 + cut)
            loader.load_state_dict(state)
            if epoch == 2:
                break
        for last in range(epoch, 2):
            seen += [(last, batch) for batch in await read(loader)]
        assert seen == unbroken

    asyncio.run(main())


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
        assert lines.reads == N - 4, "a stateful dataset goes on where it was"

    asyncio.run(main())


@pytest.mark.asyncio
async def test_out_of_order_the_state_knows_which_batches_came() -> None:
    gate = Gate()

    def hold_the_first(samples: list[int]) -> list[int]:
        return gate(samples) if 0 in samples else samples

    def loader() -> AsyncDataLoader:
        return AsyncDataLoader(
            range(12), 2, num_workers=2, collate_fn=hold_the_first, in_order=False
        )

    with gate:
        broken = loader()
        stream = aiter(broken)
        came = [await anext(stream), await anext(stream)]
        assert came == [[2, 3], [4, 5]], "the first batch is held"
        state = broken.state_dict()
        gate.open()
        await stream.aclose()
    resumed = loader()
    resumed.load_state_dict(state)
    assert sorted(await read(resumed)) == [[0, 1], [6, 7], [8, 9], [10, 11]]


@pytest.mark.parametrize("sampler", [Positioned, Rolling])
def test_out_of_order_with_a_stateful_sampler(sampler: type[Positioned] | type[Rolling]) -> None:
    held = Gate()

    async def main() -> None:
        first = next(iter(sampler()))

        def hold_the_first(samples: list[int]) -> list[int]:
            return held(samples) if first in samples else samples

        def loader() -> AsyncDataLoader:
            return AsyncDataLoader(
                range(N),
                4,
                sampler=sampler(),
                num_workers=2,
                collate_fn=hold_the_first,
                in_order=False,
            )

        with held:
            broken = loader()
            stream = aiter(broken)
            came = [await anext(stream) for _ in range(3)]
            state = broken.state_dict()
            held.open()
            came += [batch async for batch in stream]
        unbroken = came
        resumed = loader()
        resumed.load_state_dict(state)
        rest = await read(resumed)
        assert sorted(rest) == sorted(unbroken[3:])
        assert sorted(await read(resumed)) == sorted(await read(broken)), "the next epoch"

    asyncio.run(main())


def test_without_a_generator_torchs_own_goes_on_where_it_was() -> None:
    torch.manual_seed(1)
    loader = AsyncDataLoader(range(N), 4, shuffle=True)

    async def main() -> tuple[Any, Any, Any]:
        async with loader as stream:
            await anext(stream)
            torch.rand(5)  # as dropout would
            state = loader.state_dict()
            drawn = torch.rand(3)
            rest = [values(batch) async for batch in stream]
        return state, drawn, rest

    state, drawn, rest = asyncio.run(main())
    torch.manual_seed(2)
    loader.load_state_dict(state)
    assert torch.rand(3).equal(drawn)
    before = torch.get_rng_state()
    assert epochs(loader) == [rest]
    assert torch.get_rng_state().equal(before), "what is drawn again is put back"


def test_a_generator_of_ones_own_leaves_torchs_alone() -> None:
    loader = AsyncDataLoader(range(N), 4, shuffle=True, generator=torch.Generator())
    before = torch.get_rng_state()
    state = loader.state_dict()
    loader.load_state_dict(state)
    epochs(loader)
    assert state["now"] is None
    assert torch.get_rng_state().equal(before)


def test_with_persistent_workers_no_base_seed_is_drawn_after_resuming() -> None:
    def loader(seed: int) -> AsyncDataLoader:
        return _loader(SAMPLERS["shuffled"], 2, seed, persistent_workers=True)

    async def main() -> None:
        one = loader(1)
        first, state = await _run(one, 7, 4)  # in the second epoch
        assert state["seeded"]
        other = loader(2)
        assert await _resumed(other, state, 1, 4) == first[7:]
        await one.aclose()
        await other.aclose()

    asyncio.run(main())


def test_the_epoch_that_was_set_is_part_of_it() -> None:
    def loader() -> AsyncDataLoader:
        sampler: Any = DistributedSampler(range(N), num_replicas=2, rank=0, seed=3)  # type: ignore[arg-type]
        return AsyncDataLoader(range(N), 4, sampler=sampler)

    unbroken, resumed = loader(), loader()
    unbroken.set_epoch(5)
    resumed.load_state_dict(unbroken.state_dict())
    assert epochs(resumed) == epochs(unbroken)
    assert epochs(loader()) != epochs(unbroken), "epoch 0 has another order"


def test_a_loaded_state_is_the_state_until_it_is_used() -> None:
    options = SAMPLERS["shuffled"]
    loader, other = _loader(options, 2, 1), _loader(options, 2, 2)

    async def main() -> None:
        async with loader as stream:
            await anext(stream)
        state = loader.state_dict()
        other.load_state_dict(state)
        again = other.state_dict()
        assert again["batches"] == state["batches"] == 1
        assert again["generators"]["generator"].equal(state["generators"]["generator"])
        state["generators"].clear()
        state["batches"] = 99
        assert len(await read(other)) == 5, "it is a copy"

    asyncio.run(main())


def test_a_state_of_something_else_is_refused() -> None:
    loader = AsyncDataLoader(range(N), shuffle=True)
    with pytest.raises(TypeError, match="a loader's state is a dict, not list"):
        loader.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no loader's state: missing=\['ahead'.*unknown=\['x'\]"):
        loader.load_state_dict({"x": 1})
    other = AsyncDataLoader(range(N), shuffle=True, generator=torch.Generator())
    with pytest.raises(ValueError, match=r"draws from \['generator'\], this one .* \['torch'\]"):
        loader.load_state_dict(other.state_dict())


class Live(Positioned):
    """Its state is one dict: handed out, taken in, and written to as it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < N:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def _fail(samples: list[int]) -> Any:
    raise LookupError("mine")


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["thread", "process"])
async def test_a_sampler_that_shares_its_state_is_put_back_all_the_same(way: Any) -> None:
    def loader(**options: Any) -> AsyncDataLoader:
        return AsyncDataLoader(range(N), 4, sampler=Live(), worker_type=way, **options)

    broken = loader()
    async with broken as stream:
        assert values(await anext(stream)) == [0, 1, 2, 3]
        state = broken.state_dict()
    failing = loader(collate_fn=_fail)
    failing.load_state_dict(state)
    with pytest.raises(LookupError):
        await read(failing)
    # It has drawn from the sampler, and delivered nothing.
    resumed = loader()
    resumed.load_state_dict(failing.state_dict())
    assert await read(resumed) == [[*range(n, min(n + 4, N))] for n in range(4, N, 4)]


@pytest.mark.asyncio
async def test_while_it_is_iterated_no_state_is_loaded() -> None:
    loader = AsyncDataLoader(range(N))
    async with loader as stream:
        await anext(stream)
        with pytest.raises(RuntimeError, match="is being iterated: close the iteration first"):
            loader.load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
    assert len(await read(loader)) == N - 1
