"""How far an iteration of a pipeline is, and what the next needs to go on behind it."""

import copy
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .._checks import as_int, check_int
from ._item import END
from ._own_state import NoState, own_state
from ._seeds import draw_seed

_KEYS = {"delivered", "ended", "seeds", "generators", "source"}


@dataclass(slots=True)
class PipelinePosition:
    """Of one iteration; also when that is gone."""

    seeds: list[int]
    """What each random step was seeded with."""
    generators: list[torch.Tensor]
    """The state of the generator that each seed was drawn from, for the next iteration."""
    source: Any
    """The source's own state when the iteration began (or, once it has ended, now), or `NoState`;
    None: it has none."""
    delivered: int = 0
    ended: bool = False
    """Whether the reader was told that there is no more."""

    def state_dict(self) -> dict[str, Any]:
        """A copy, as a dict.

        Raises:
            ValueError: The source gives no state.
        """
        if isinstance(self.source, NoState):
            self.source.refuse("source")
        return {
            "delivered": self.delivered,
            "ended": self.ended,
            "seeds": list(self.seeds),
            "generators": list(self.generators),
            "source": copy.deepcopy(self.source),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], randoms: int) -> "PipelinePosition":
        """The position that a `state_dict` describes, of a pipeline with that many random steps.

        Raises:
            TypeError: It is no mapping.
            ValueError: It is that of another pipeline, or no state at all.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"expected a state dict, got {type(state).__name__}")
        if set(state) != _KEYS:
            raise ValueError(f"expected the keys {sorted(_KEYS)}, got {sorted(map(str, state))}")
        position = cls(**copy.deepcopy(dict(state)))
        try:
            position._check()
        except (TypeError, ValueError) as error:
            raise ValueError(f"this is no state of a pipeline: {error}") from None
        if len(position.seeds) != randoms:
            raise ValueError(
                f"the state is that of a pipeline with {len(position.seeds)} shuffles, this one "
                f"has {randoms}"
            )
        return position

    def _check(self) -> None:
        """Raise where an iteration would, which is late, and in words about something else."""
        check_int("delivered", self.delivered, at_least=0)
        for seed in self.seeds:
            as_int("a seed", seed)
        for generator in self.generators:
            torch.Generator().set_state(generator)
        if len(self.generators) != len(self.seeds):
            raise ValueError(f"{len(self.seeds)} seeds of {len(self.generators)} generators")


def begun(
    source: Any, generators: Sequence[torch.Generator], *, first: bool = False
) -> PipelinePosition:
    """The position of an iteration that begins: one seed is drawn from each generator.

    Args:
        source: Of the pipeline.
        generators: Of its random steps.
        first: Whether none began before.
    """
    seeds = [draw_seed(generator) for generator in generators]
    return PipelinePosition(seeds, _states(generators), own_state(source, iterated=not first))


def now(
    last: PipelinePosition | None, source: Any, generators: Sequence[torch.Generator]
) -> PipelinePosition:
    """The position of the iteration that began last; between two, as if one had just ended."""
    # As they are now, not as it left them: others may have drawn from them since (dropout, from
    # torch's own), before the next iteration does.
    states = _states(generators)
    if last is not None and not last.ended:
        return replace(last, generators=states)
    delivered = 0 if last is None else last.delivered
    state = own_state(source, iterated=last is not None)
    return PipelinePosition([0] * len(states), states, state, delivered, ended=True)


def _states(generators: Sequence[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def put_back(generators: Sequence[torch.Generator], position: PipelinePosition) -> None:
    """Set them to what a state has of them; called where it is loaded.

    Not where the next iteration begins: who iterates the pipeline (another one, a loader) may draw
    from the same generator first, torch's own above all, and that draw would come twice.
    """
    for generator, state in zip(generators, position.generators, strict=True):
        generator.set_state(state)


def resumed(
    position: PipelinePosition, source: Any, generators: Sequence[torch.Generator]
) -> PipelinePosition:
    """The position of the iteration that goes on from `position`; the source is put back to it."""
    if position.source is not None:
        source.load_state_dict(copy.deepcopy(position.source))  # which it may take for its own
    # After the end, the next one is to begin.
    first = position.source is None
    return begun(source, generators, first=first) if position.ended else position


def from_its_beginning(source: Any) -> Any:
    """The items of a source that was put back to where an epoch begins.

    Some sources are at their end there, and yield nothing once, before they begin again: those of
    torchdata, whose state was taken behind the last item of the epoch before.
    """
    return _async_items(source) if isinstance(source, AsyncIterable) else _items(source)


# By `next` alone: `for` and `yield from` call `iter` again, where what is its own iterator
# may start over.
def _items(source: Iterable[Any]) -> Iterator[Any]:
    items: Any = iter(source)
    try:
        item = next(items, END)
        if item is END:
            items = iter(source)
            item = next(items, END)
        while item is not END:
            yield item
            item = next(items, END)
    finally:
        if hasattr(items, "close"):
            items.close()


async def _async_items(source: AsyncIterable[Any]) -> AsyncIterator[Any]:
    items = aiter(source)
    try:
        item = await anext(items, END)
        if item is END:
            items = aiter(source)
            item = await anext(items, END)
        while item is not END:
            yield item
            item = await anext(items, END)
    finally:
        if hasattr(items, "aclose"):
            await items.aclose()
