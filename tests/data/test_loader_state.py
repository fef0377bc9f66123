"""`AsyncDataLoader.state_dict`: its content, and which states can be loaded when."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from aiopar.data import AsyncDataLoader
from aiopar.testing import Gate
from tests.data.iterators import Late
from tests.data.loaders import N, epochs, read, values
from tests.data.stateful import Live, Positioned, Rolling

# Out of order.


@pytest.mark.parametrize("sampler", [Positioned, Rolling, lambda: SequentialSampler(range(N))])
def test_out_of_order_the_state_knows_which_batches_came(sampler: Callable[[], Any]) -> None:
    held = Gate()

    async def main() -> None:
        first = next(iter(sampler()))

        def hold_the_first(samples: list[int]) -> list[int]:
            return held(samples) if first in samples else samples

        def loader() -> AsyncDataLoader[Any]:
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


class HeldLate(Late):
    """A sampler that has no state before it is iterated, and waits before its third batch."""

    def __init__(self, batches: list[list[int]], gate: Gate) -> None:
        super().__init__(batches)
        self.gate = gate

    def __next__(self) -> Any:
        if self.place == 2:
            self.gate()
        return super().__next__()


def test_out_of_order_the_state_is_right_while_delivered_batches_are_drawn_again() -> None:
    batches = [[n, n + 1] for n in range(0, 18, 2)]

    def loader(fetching: Gate, drawing: Gate) -> AsyncDataLoader[Any]:
        def hold_the_first(indices: list[int]) -> list[int]:
            return fetching(indices) if 0 in indices else indices

        return AsyncDataLoader(
            range(N),
            batch_sampler=HeldLate(batches, drawing),
            collate_fn=hold_the_first,
            num_workers=2,
            in_order=False,
        )

    async def main() -> None:
        with Gate() as fetching, Gate() as drawing, Gate() as opened:
            opened.open()
            broken = loader(fetching, opened)
            async with broken as stream:
                came = [await anext(stream) for _ in range(3)]
                state = broken.state_dict()
                fetching.open()
            assert (state["delivered"], state["ahead"], state["source"]) == (0, [1, 2, 3], None)
            resumed = loader(opened, drawing)
            resumed.load_state_dict(state)
            async with resumed as stream:
                came.append(await anext(stream))
                state = resumed.state_dict()
                drawing.open()
            # Batch 1 is not drawn again yet: the sampler's state after it is not known.
            assert (state["delivered"], state["ahead"]) == (1, [1, 2, 3])
            rest = loader(opened, opened)
            rest.load_state_dict(state)
            came += await read(rest)
        assert sorted(came) == batches

    asyncio.run(main())


# Generators and samplers.


def test_without_a_generator_the_default_one_goes_on_where_it_was() -> None:
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
    assert torch.get_rng_state().equal(before), "the default generator is put back after the draw"


def test_with_a_generator_the_default_one_is_not_touched() -> None:
    loader = AsyncDataLoader(range(N), 4, shuffle=True, generator=torch.Generator())
    before = torch.get_rng_state()
    state = loader.state_dict()
    loader.load_state_dict(state)
    epochs(loader)
    assert state["default_generator"] is None
    assert torch.get_rng_state().equal(before)


def test_the_epoch_that_was_set_is_part_of_the_state() -> None:
    def loader() -> AsyncDataLoader[Any]:
        sampler: Any = DistributedSampler(range(N), num_replicas=2, rank=0, seed=3)  # type: ignore[arg-type]
        return AsyncDataLoader(range(N), 4, sampler=sampler)

    unbroken, resumed = loader(), loader()
    unbroken.set_epoch(5)
    resumed.load_state_dict(unbroken.state_dict())
    assert epochs(resumed) == epochs(unbroken)
    assert epochs(loader()) != epochs(unbroken), "epoch 0 has another order"


class Keeping(IterableDataset[int]):
    """Draws from torch's default generator, whose state is part of its own."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[int]:
        while self.place < N:
            self.place += 1
            yield int(torch.randint(N, ()))
        self.place = 0

    def __len__(self) -> int:
        return N

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        torch.set_rng_state(state["generator"])


class Drawing(Keeping):
    """Draws its order in `iter`, also when it is resumed; its state has no generator."""

    def __iter__(self) -> Iterator[int]:
        order = torch.randperm(N).tolist()
        while self.place < N:
            self.place += 1
            yield order[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    ("make", "by", "way", "cut"),
    [
        *((Keeping, "dataset", "thread", cut) for cut in (0, 2)),
        *((Keeping, "sampler", "thread", cut) for cut in (0, 2)),
        *((Keeping, "sampler", "process", cut) for cut in (0, 2)),
        (Drawing, "dataset", "thread", 2),
        (Drawing, "sampler", "thread", 2),
        (Drawing, "sampler", "process", 2),
    ],
)
def test_a_state_that_sets_the_default_generator_is_not_undone(
    make: Any, by: str, way: Any, cut: int
) -> None:
    def loader() -> AsyncDataLoader[Any]:
        if by == "dataset":
            return AsyncDataLoader(make(), 4)
        return AsyncDataLoader(range(N), 4, sampler=make(), worker_type=way, num_workers=1)

    async def main() -> tuple[Any, Any]:
        torch.manual_seed(1)
        broken = loader()
        stream = aiter(broken)
        for _ in range(cut):
            await anext(stream)
        state = broken.state_dict()
        rest = [values(batch) async for batch in stream]
        torch.manual_seed(2)
        resumed = loader()
        resumed.load_state_dict(state)
        torch.rand(1)  # as other code does in between
        now = torch.get_rng_state()
        seen = await read(resumed)
        assert torch.equal(torch.get_rng_state(), now) == (make is Drawing)
        return seen, rest

    seen, rest = asyncio.run(main())
    assert seen == rest


def _fail(samples: list[int]) -> Any:
    raise LookupError("mine")


@pytest.mark.asyncio
@pytest.mark.parametrize("way", ["thread", "process"])
async def test_a_sampler_that_shares_its_state_dict_is_put_back(way: Any) -> None:
    def loader(**options: Any) -> AsyncDataLoader[Any]:
        return AsyncDataLoader(range(N), 4, sampler=Live(), worker_type=way, **options)

    broken = loader()
    async with broken as stream:
        assert values(await anext(stream)) == [0, 1, 2, 3]
        state = broken.state_dict()
    failing = loader(collate_fn=_fail)
    failing.load_state_dict(state)
    with pytest.raises(LookupError):
        await read(failing)
    # That loader has drawn from the sampler, and delivered nothing.
    resumed = loader()
    resumed.load_state_dict(failing.state_dict())
    assert await read(resumed) == [[*range(n, min(n + 4, N))] for n in range(4, N, 4)]


# What is refused.


def test_a_state_of_something_else_is_refused() -> None:
    loader = AsyncDataLoader(range(N), shuffle=True)
    with pytest.raises(TypeError, match="expected a state dict, got list"):
        loader.load_state_dict([])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"no state of a loader .*missing=\['ahead'.*unknown=\['x'\]"
    ):
        loader.load_state_dict({"x": 1})
    other = AsyncDataLoader(range(N), shuffle=True, generator=torch.Generator())
    with pytest.raises(ValueError, match=r"draws from \['generator'\], this one .* \['torch'\]"):
        loader.load_state_dict(other.state_dict())


@pytest.mark.asyncio
async def test_no_state_can_be_loaded_during_an_iteration() -> None:
    loader = AsyncDataLoader(range(N))
    async with loader as stream:
        await anext(stream)
        with pytest.raises(RuntimeError, match="is being iterated: close the iteration first"):
            loader.load_state_dict(loader.state_dict())
    loader.load_state_dict(loader.state_dict())
    assert len(await read(loader)) == N - 1
