"""How far a pipeline is: what is kept of its source, and what a state dict must have."""

from collections.abc import Iterator

import pytest
import torch

from aiopar.data import Pipeline
from aiopar.data._cursor import PipelinePosition, begun, put_back, resumed


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


def test_the_position_is_that_of_when_it_was_asked_for() -> None:
    source = Live()
    position = begun(source, [torch.Generator()])
    source.state["next"] = 7
    state = position.state_dict()
    assert state["source"] == {"next": 0}
    state["source"]["next"] = 8
    assert position.state_dict()["source"] == {"next": 0}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("delivered", "3", "delivered must be an int, not str"),
        ("delivered", -1, "delivered must be at least 0, got -1"),
        ("seeds", None, "'NoneType' object is not iterable"),
        ("seeds", ["3"], "a seed must be an int, not str"),
        ("generators", [None], "expected a torch.ByteTensor, but got NoneType"),
        ("generators", [], "1 seeds of 0 generators"),
        ("source", 3, "the state has its source's own, which a range cannot take"),
    ],
)
def test_a_state_is_checked_when_it_is_loaded(name: str, value: object, words: str) -> None:
    pipeline = Pipeline(range(3)).shuffle(2)
    state = pipeline.state_dict()
    with pytest.raises(ValueError, match=words):
        pipeline.load_state_dict({**state, name: value})


def test_the_generators_go_back_where_a_state_is_loaded_and_the_source_where_it_is_used() -> None:
    source, generator = Live(), torch.Generator().manual_seed(3)
    position = begun(source, [generator])
    after = generator.get_state()
    generator.manual_seed(4)
    source.state["next"] = 7
    position = PipelinePosition.from_state_dict(position.state_dict(), randoms=1)
    put_back([generator], position)
    assert torch.equal(generator.get_state(), after)
    assert resumed(position, source, [generator]) is position
    assert torch.equal(generator.get_state(), after), "it may have been drawn from meanwhile"
    assert source.state == {"next": 0}
    source.state["next"] = 9
    assert position.state_dict()["source"] == {"next": 0}, "it has taken a copy in"


def test_behind_an_iteration_that_has_ended_the_next_begins() -> None:
    generator = torch.Generator().manual_seed(3)
    unbroken = [begun(range(3), [generator]) for _ in range(2)]
    unbroken[0].ended = True
    put_back([generator], unbroken[0])
    following = resumed(unbroken[0], range(3), [generator])
    assert following.seeds == unbroken[1].seeds
    assert following.delivered == 0
