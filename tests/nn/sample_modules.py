"""Modules of the kinds that are hard to replicate, each with an input of eight rows."""

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from itertools import chain
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

T = TypeVar("T")


class Tied(nn.Module):
    """Weights tied between two layers, a layer used under two names, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.decode = nn.Linear(6, 6)
        self.decode.weight = self.embed.weight
        self.twin = self.embed
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.absent: nn.Module | None
        self.register_module("absent", None)
        self.register_parameter("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decode(torch.tanh(self.twin(self.frozen(self.embed(x)))))
        return result


class Containers(nn.Module):
    """ParameterList, ParameterDict, ModuleList, ModuleDict, and a complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.shifts = nn.ParameterDict({"a": torch.randn(6), "b": torch.randn(6)})
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.ReLU()])
        self.heads = nn.ModuleDict({"left": nn.Linear(6, 2)})
        self.spectrum = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        for scale, shift in zip(self.scales, self.shifts.values(), strict=True):
            x = x * scale + shift
        x = torch.fft.irfft(torch.fft.rfft(x) * self.spectrum, n=6)
        for layer in self.layers:
            x = layer(x)
        left: Tensor = self.heads["left"](x)
        return left


class Buffers(nn.Module):
    """A buffer with a gradient, one without, one that is tied, one that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))
        self.register_buffer("learned", torch.randn(6, requires_grad=True))
        self.register_buffer("offset", torch.randn(6))
        self.register_buffer("same", self.offset, persistent=False)
        self.register_buffer("nothing", None)

    learned: Tensor
    offset: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.learned + self.offset


class Recurrent(nn.Module):
    """An RNN computes with a list of its weights, not with its parameters."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor) -> Tensor:
        self.rnn.flatten_parameters()  # as models that were written for DataParallel do
        out: Tensor = self.rnn(x.unsqueeze(-1))[0]
        return out


class AsksItself(nn.Module):
    """Asks for its own dtype. In torch's replicas `parameters()` is empty, so it fails there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        own = next(self.parameters())
        result: Tensor = self.layer(x.to(own.dtype).to(own.device))
        return result


def _old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # deprecated, and still in old models
        normed: nn.Module = nn.utils.weight_norm(nn.Linear(6, 3))
    return normed


def _encoder_layer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), layer)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1)
        result: Tensor = self.attention(x, x, x)[0]
        return result


def _traced() -> Any:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(6, 3), nn.ReLU()))


FACTORIES: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "containers": Containers,
    "buffers": Buffers,
    "lstm": lambda: Recurrent(nn.LSTM(1, 4, 2, bidirectional=True)),
    "gru": lambda: Recurrent(nn.GRU(1, 4)),
    "asks-itself": AsksItself,
    "weight-norm": lambda: parametrizations.weight_norm(nn.Linear(6, 3)),
    "weight-norm-lstm": lambda: Recurrent(
        parametrizations.weight_norm(nn.LSTM(1, 4), "weight_hh_l0")
    ),
    "spectral-norm": lambda: parametrizations.spectral_norm(nn.Linear(6, 3)).eval(),
    "old-weight-norm": _old_weight_norm,
    "encoder-layer": _encoder_layer,
    "attention": Attention,
    "batch-norm": lambda: nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)),
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.Flatten()),
    "fx": _traced,
}


def make(name: str) -> nn.Module:
    """A module of this kind, with the same weights each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FACTORIES[name]()


def batch() -> Tensor:
    """An input for each of these modules."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


CPU = "cpu"
ELSEWHERE = ("sim:0", "sim:1")
PLACEMENTS = [
    pytest.param((CPU,), id="cpu"),
    pytest.param((CPU, CPU), id="cpu,cpu"),
    pytest.param(ELSEWHERE, id="elsewhere", marks=pytest.mark.sim),
    pytest.param((CPU, *ELSEWHERE, ELSEWHERE[0]), id="mixed", marks=pytest.mark.sim),
]


class OwnParameter(nn.Parameter):
    """A parameter of a user's class, whose constructor has other arguments."""

    def __new__(cls, value: float, grad: bool) -> "OwnParameter":
        made: OwnParameter = Tensor._make_subclass(cls, torch.full((2,), value), grad)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> "OwnParameter":
        return OwnParameter(float(self.detach()[0]), self.requires_grad)


class WithAttributes(nn.Module):
    """Its tensors have attributes, as those of quantized models. Returns what it finds."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight: Any = nn.Parameter(torch.ones(2))
        self.tied = self.weight
        self.own: Any = OwnParameter(1.0, grad=True)
        self.frozen: Any = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("offset", torch.zeros(2))
        tensors: list[Any] = [self.weight, self.own, self.frozen, self.offset]
        for tensor in tensors:
            tensor.scale = torch.full((2,), 3.0)
            tensor.bits = 4

    def forward(self) -> list[bool]:
        tensors: list[Any] = [self.weight, self.own, self.frozen, self.offset]
        for tensor in tensors:
            assert tensor.scale.device == tensor.device
            assert (tensor * tensor.scale).tolist() in ([3.0, 3.0], [0.0, 0.0])
            assert tensor.bits == 4
        assert self.tied is self.weight
        return [isinstance(tensor, nn.Parameter) for tensor in tensors]


each_placement = pytest.mark.parametrize("placement", PLACEMENTS)
each_kind = pytest.mark.parametrize("kind", FACTORIES)


def _saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


each_duplicate = pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module)), _saved_and_loaded],
    ids=["deepcopy", "pickle", "torch.save"],
)


def under(mode: Callable[[], Any], fn: Callable[..., T], *args: Any) -> T:
    """`fn(*args)` in a mode of torch. A call keeps the mode when it is awaited outside."""
    with mode():
        return fn(*args)


def run(module: nn.Module, x: Tensor) -> Tensor:
    """The output on the CPU, wherever the module is."""
    tensor = next(chain(module.parameters(), module.buffers()))
    output: Tensor = module(x.to(tensor.device))
    return output.cpu()
