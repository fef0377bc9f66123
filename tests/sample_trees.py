"""Containers that users put tensors in, and hypothesis strategies for trees of them."""

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from hypothesis import strategies as st
from torch import Tensor

Pair = namedtuple("Pair", "left right")  # both spellings of a namedtuple are tested


class Boxes(NamedTuple):
    corners: Any
    label: Any = "cat"


class NamedList(list[Any]):
    """A list that its constructor does not make from an iterable, and that has an attribute."""

    def __init__(self, name: str, *items: Any) -> None:
        super().__init__(items)
        self.name = name


class Point(tuple[Any, ...]):
    def __new__(cls, x: Any, y: Any) -> Self:
        return super().__new__(cls, (x, y))


class AttrDict(dict[str, Any]):
    """The well-known recipe whose items and attributes are one dict."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Encoding(UserDict[str, Any]):
    """Like Hugging Face's BatchEncoding: a mapping that is no dict, with more than its items."""

    def __init__(self, data: dict[str, Any], n_sequences: int = 1) -> None:
        super().__init__(data)
        self.n_sequences = n_sequences


@dataclass
class Sample:
    image: Any
    label: Any = None

    @cached_property
    def rows(self) -> int:
        return len(self.image)


@dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    value: Any
    extra: Any = ()


@dataclass
class Derived:
    """Its __post_init__ must not run twice: it would double the value again."""

    value: Any
    total: Any = field(init=False)
    unset: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.value = self.value + self.value
        self.total = self.value


class _ModelOutput(OrderedDict[str, Any]):
    """The protocol of Hugging Face's ModelOutput: fields that are not None are its items."""

    def __post_init__(self) -> None:
        for each in fields(self):  # type: ignore[arg-type]  # its subclasses are dataclasses
            if (value := getattr(self, each.name)) is not None:
                OrderedDict.__setitem__(self, each.name, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self and value is not None:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


@dataclass
class MaskedLMOutput(_ModelOutput):
    loss: Any = None
    logits: Any = None
    hidden_states: Any = None


class Stack:
    """An iterable that torch's `gather` can rebuild: its constructor takes its items."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._items = list(items)
        self.depth = len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)


class Graph:
    """Iterates over (name, value), and its constructor takes anything, as `Data` of PyG."""

    def __init__(self, x: Any = None, **more: Any) -> None:
        self.parts = {"x": x, **more}

    def __iter__(self) -> Iterator[Any]:
        return iter(self.parts.items())

    def to(self, device: Any) -> Self:
        """Moves itself in place, as PyG does."""
        self.parts = {name: value.to(device) for name, value in self.parts.items()}
        return self


class Lines:
    """Its constructor takes a number, a list, ..., and keeps it; it is not one of its items."""

    def __init__(self, given: Any) -> None:
        self.given = given

    def __iter__(self) -> Iterator[Any]:
        yield torch.ones(4)
        yield self.given


@dataclass
class Frames:
    """Like a `@tensorclass`: it has a batch size besides its fields, and is indexed by rows."""

    x: Any
    names: Any = ()

    def __post_init__(self) -> None:
        self.batch_size = len(self.x) if self.x.ndim else 0

    def __len__(self) -> int:
        return self.batch_size

    def __getitem__(self, rows: Any) -> Self:
        return type(self)(self.x[rows], self.names)


class MovingFrames(Frames):
    """Like tensordict's own class: its fields are kept elsewhere, and it moves itself."""

    def __init__(self, x: Any, names: Any = ()) -> None:
        self._kept = {"x": x, "names": names}
        self.__post_init__()

    def __getattr__(self, name: str) -> Any:
        try:
            return vars(self)["_kept"][name]
        except KeyError:
            raise AttributeError(name) from None

    def to(self, device: Any) -> Self:
        return type(self)(self.x.to(device), self.names)


@dataclass
class Named:
    """Has state of its own, and cannot be indexed."""

    x: Any

    def __post_init__(self) -> None:
        self.rows = len(self.x)


class CacheLayer:
    """Like the layers of transformers' caches: a window, and how many tokens were seen."""

    def __init__(self, window: int = 3) -> None:
        self.keys: Tensor | None = None
        self.seen = 0
        self.states: dict[int, Tensor | None] = {0: None}
        self.counted = {0: False}
        self.window = torch.tensor(window)
        self.count = torch.tensor(0)
        self.device: torch.device | None = None

    def update(self, keys: Tensor) -> Tensor:  # (batch, tokens)
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys], 1)
        self.keys = self.keys[:, -int(self.window) :]
        self.states[0] = keys.sum(1)
        self.counted[0] = True
        self.device = keys.device
        self.seen += keys.shape[1]
        self.count += keys.shape[1]
        return self.keys

    def reorder_cache(self, beams: Tensor) -> None:
        raise NotImplementedError


class Cache:
    """Like transformers' caches. Neither its iterator nor its constructor knows the tokens seen."""

    def __init__(self, items: Iterable[Any] = ()) -> None:
        assert not [*items], "this constructor loses state"
        self.layers = [CacheLayer(), CacheLayer()]

    def __iter__(self) -> Iterator[Any]:
        return ((layer.keys, None) for layer in self.layers)

    def reorder_cache(self, beams: Tensor) -> None:
        raise NotImplementedError


def equal(a: Any, b: Any) -> bool:
    """Same types, same shape of nesting, same values, to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
    if isinstance(a, dict | UserDict):
        factories = getattr(a, "default_factory", None), getattr(b, "default_factory", None)
        if list(a) != list(b) or factories[0] is not factories[1]:
            return False
        return all(equal(a[key], b[key]) for key in a)
    if is_dataclass(a):
        names = [each.name for each in fields(a)]
        return all(equal(getattr(a, n, None), getattr(b, n, None)) for n in names)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return bool(a == b)


def _default_dict(items: dict[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


CONTAINERS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"a": a, 2: b},
    "namedtuple": Pair,
    "NamedTuple": Boxes,
    "OrderedDict": lambda a, b: OrderedDict(z=a, a=b),
    "defaultdict": lambda a, b: _default_dict({"a": a, "b": b}),
    "list subclass": lambda a, b: NamedList("kept", a, b),
    "tuple subclass": Point,
    "dict subclass": lambda a, b: AttrDict(a=a, b=b),
    "UserDict": lambda a, b: Encoding({"a": a, "b": b}, n_sequences=3),
    "dataclass": Sample,
    "frozen dataclass": lambda a, b: Frozen(value=a, extra=b),
    "ModelOutput": lambda a, b: MaskedLMOutput(logits=a, hidden_states=b),
}
"""Every kind of container, made from two children."""

EMPTY: Sequence[Any] = ((), [], {}, OrderedDict(), defaultdict(int), NamedList("none"))

SHARED: Sequence[Any] = (None, True, 1, 0.5, "text", b"bytes", frozenset("ab"), torch.Size([2, 3]))
"""Values that are no tensors and hold none."""


@st.composite
def batches(draw: st.DrawFn, batch: int, dim: int) -> Tensor:
    """A tensor of 1 to 4 dimensions (`dim` is valid) whose size along `dim` is `batch`."""
    least = dim + 1 if dim >= 0 else -dim
    shape = draw(st.lists(st.integers(0, 3), min_size=least, max_size=4))
    shape[dim] = batch
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool, torch.complex64]))
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def trees(leaves: st.SearchStrategy[Any], shared: Sequence[Any] = SHARED) -> st.SearchStrategy[Any]:
    """Any nesting of containers around `leaves` and the `shared` values, which are no tensors."""
    values = st.one_of(leaves, st.sampled_from(shared), st.sampled_from(EMPTY))

    def nest(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.builds(
            lambda name, a, b: CONTAINERS[name](a, b),
            st.sampled_from(list(CONTAINERS)),
            inner,
            inner,
        )

    return st.recursive(values, nest, max_leaves=8)
