"""How far a pipeline is: what is kept of its source, and what a state dict must have."""

from collections.abc import Iterator

import pytest
import torch

from aiopar.data import Pipeline


class Live:
    """A source whose state is one dict: handed out, taken in, and written to as it is read."""

    def __init__(self) -> None:
        self.state = {"next": 0}

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < 10:
            self.state["next"] += 1
            yield self.state["next"] - 1

    def state_dict(self) -> dict[str, int]:
        return self.state

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.state = state


@pytest.mark.anyio
async def test_a_source_that_shares_its_state_is_put_back_all_the_same() -> None:
    pipeline: Pipeline[int] = Pipeline(Live())
    async with pipeline as stream:
        assert [await anext(stream) for _ in range(3)] == [0, 1, 2]
        state = pipeline.state_dict()
    for _ in range(2):  # a state may be loaded again
        resumed = Pipeline(Live())
        resumed.load_state_dict(state)
        async with resumed as stream:
            assert [await anext(stream) for _ in range(2)] == [3, 4]
            later = resumed.state_dict()
        again = Pipeline(Live())
        again.load_state_dict(later)
        assert [n async for n in again] == [5, 6, 7, 8, 9]


@pytest.mark.asyncio
async def test_the_state_is_a_copy() -> None:
    source = Live()
    pipeline: Pipeline[int] = Pipeline(source)
    async with pipeline as stream:
        await anext(stream)
        state = pipeline.state_dict()
        assert state["source"] == {"next": 0}, "the source has gone on"
        state["source"]["next"] = 8
        assert pipeline.state_dict()["source"] == {"next": 0}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delivered", "3", "delivered must be an int, not str"),
        ("delivered", -1, "delivered must be at least 0, got -1"),
        ("seeds", None, "'NoneType' object is not iterable"),
        ("seeds", ["3"], "a seed must be an int, not str"),
        ("generators", {"0": None}, "the state of a generator must be a Tensor, not NoneType"),
        ("generators", {}, "1 seeds of 0 generators"),
        ("source", 3, "the state has its source's own, which a range cannot take"),
    ],
)
def test_a_state_is_checked_when_it_is_loaded(name: str, value: object, words: str) -> None:
    pipeline = Pipeline(range(3)).shuffle(2)
    state = pipeline.state_dict()
    with pytest.raises(ValueError, match=words):
        pipeline.load_state_dict({**state, name: value})


@pytest.mark.asyncio
async def test_loading_sets_the_generators_and_iterating_puts_the_source_back() -> None:
    source, generator = Live(), torch.Generator().manual_seed(3)
    pipeline = Pipeline(source).shuffle(4, generator=generator)
    async with pipeline as stream:
        begun = [await anext(stream) for _ in range(3)]
        state = pipeline.state_dict()
        rest = [n async for n in stream]
    after = generator.get_state()
    generator.manual_seed(4)
    source.state["next"] = 7
    pipeline.load_state_dict(state)
    assert torch.equal(generator.get_state(), after)
    assert source.state["next"] == 7
    torch.rand(1, generator=generator)  # as another pipeline with this generator does
    after = generator.get_state()
    assert [n async for n in pipeline] == rest
    assert torch.equal(generator.get_state(), after), "the seed is not drawn again"
    assert sorted(begun + rest) == list(range(10))


@pytest.mark.asyncio
async def test_after_an_iteration_that_has_ended_the_next_begins() -> None:
    def make() -> Pipeline[int]:
        return Pipeline(range(9)).shuffle(4, generator=torch.Generator().manual_seed(3))

    unbroken, resumed = make(), make()
    assert len([n async for n in unbroken]) == 9
    resumed.load_state_dict(unbroken.state_dict())
    assert [n async for n in resumed] == [n async for n in unbroken]
