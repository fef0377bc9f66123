"""The wire between processes, from inside: what is sent arrives equal, and apart."""

import gc
import socket
import threading
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import example, given
from torch import Tensor, nn

from aiopar.remote import _wire
from aiopar.remote._channel import Arena, Channel, Pickled, shared_file
from aiopar.remote._wire import Encoder, decode

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")

_SIZE = 256 << 20
_BIG = _wire._INLINE  # bytes: more do not fit into the pickle

Point = namedtuple("Point", "x y")


class Subclass(Tensor):
    pass


def encode(obj: Any) -> Pickled:
    return Encoder().encode(obj)


class Wire:
    """Both ends of a connection; what is sent at one of them is received at the other."""

    def __init__(self) -> None:
        ends = socket.socketpair()
        files = [shared_file(_SIZE), shared_file(_SIZE)]
        first, second = (
            Channel(end, *(Arena(file) for file in order))
            for end, order in zip(ends, (files, files[::-1]), strict=True)
        )
        self.here, self.there = first, second
        self.ends = ends
        self.written = self.here._writes

    def __call__(self, obj: Any) -> Any:
        failed: list[BaseException] = []

        def send() -> None:
            try:
                self.here.send(encode(obj))
            except BaseException as error:  # noqa: BLE001  # raised below
                failed.append(error)
                self.here.send(encode(None))

        sender = threading.Thread(target=send)  # a long message waits for its reader
        sender.start()
        arrived = decode(*self.there.receive())
        sender.join()
        if failed:
            raise failed[0]
        return arrived


@pytest.fixture(scope="module")
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    assert wire.written.sweep() == 0
    for end in wire.ends:
        end.close()


def _bits(x: Tensor) -> Tensor:
    x = x.detach().resolve_conj().resolve_neg().contiguous()
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def same(a: Any, b: Any) -> bool:
    """Whether `b` is equal to `a`, in types, strides and bits too."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        meta = ("shape", "dtype", "layout", "requires_grad", "is_quantized", "device", "__dict__")
        if any(getattr(a, name) != getattr(b, name) for name in meta):
            return False
        if a.layout is not torch.strided:
            return same(a.detach().to_dense(), b.detach().to_dense())
        if a.is_quantized:
            return bool((a.int_repr() == b.int_repr()).all() and a.q_scale() == b.q_scale())
        return torch.equal(_bits(a), _bits(b))
    if isinstance(a, np.ndarray):
        flags = [a.flags.writeable == b.flags.writeable]
        if a.flags.forc:  # else it becomes contiguous
            flags += [a.flags.c_contiguous == b.flags.c_contiguous, a.flags.fnc == b.flags.fnc]
        return a.dtype == b.dtype and all(flags) and np.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.complex64, torch.complex128, torch.complex32),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    *(torch.uint16, torch.uint32, torch.uint64),
]


@st.composite
def plain_tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from(_DTYPES))
    if draw(st.booleans()):  # too big for the pickle
        shape.append(_BIG // 8 + 1)
    size = torch.Size(shape).numel()
    filled = torch.arange(size * dtype.itemsize, dtype=torch.int64).to(torch.uint8)
    if dtype is torch.bool:
        filled %= 2
    return filled.view(dtype).reshape(shape)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    """Tensors with any strides."""
    x = draw(plain_tensors())
    for _ in range(draw(st.integers(0, 3))):
        how = draw(st.sampled_from(["transpose", "slice", "expand", "select", "conj", "gap"]))
        if how == "conj":
            x = x.conj()
        elif how == "expand":
            x = x.unsqueeze(0).expand(3, *x.shape)
        elif x.ndim and how == "transpose":
            x = x.transpose(0, -1)
        elif x.ndim and how == "slice":
            x = x[1:]
        elif x.ndim and how == "gap":
            x = x[::2]
        elif x.ndim and x.shape[0] and how == "select":
            x = x[0]
    return x


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    x = draw(views())
    kind = draw(st.sampled_from(["tensor", "leaf", "parameter", "frozen", "attribute"]))
    differentiable = x.is_floating_point() or x.is_complex()
    if kind == "parameter" and differentiable:
        return nn.Parameter(x)
    if kind == "leaf" and differentiable:
        return x.clone().requires_grad_()
    if kind == "frozen":
        return nn.Parameter(x, requires_grad=False)
    if kind == "attribute":
        x.mark = ("of", draw(st.integers()))  # type: ignore[attr-defined]
    return x


def arrays() -> st.SearchStrategy[Any]:
    big = np.arange(_BIG, dtype=np.int32).reshape(2, -1)
    frozen = np.arange(_BIG)
    frozen.flags.writeable = False
    structured = np.zeros(7, dtype=[("a", "<i4"), ("b", "U5", (2,))])
    structured["a"] = range(7)
    return st.sampled_from(
        [
            *(big, big.T, np.asfortranarray(big), big[:, ::3], big[::-1], frozen, structured),
            *(np.float64(1.5), np.array(3), np.empty((0, 4)), np.array(["a", None], dtype=object)),
            *(big.astype(">i2"), big.astype("M8[s]"), frozen[3:]),
        ]
    )


_leaves = st.one_of(
    tensors(),
    arrays(),
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    st.binary(),
    st.sampled_from([b"x" * (3 << 20), bytearray(100), torch.float32, torch.device("cpu")]),
)
_nested = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.builds(OrderedDict, st.dictionaries(st.integers(), inner, max_size=2)),
        st.builds(Point, inner, inner),
    ),
    max_leaves=8,
)


@given(sent=_nested)
@example(sent=torch.tensor(3.0))
@example(sent=[torch.empty(0), torch.empty(2, 0, 3), torch.ones(1).expand(10**5)])
@example(sent=torch.randn(2, 3, 40, 50).to(memory_format=torch.channels_last))
@example(sent=torch.randn(2, 3, 4, 5, 60).to(memory_format=torch.channels_last_3d))
@example(sent=torch.randn(3000, 3, dtype=torch.complex64).conj().T)
@example(sent=torch.randn(3, dtype=torch.complex64).conj().imag)  # with torch's bit for negation
@example(sent=torch.rand(9000).as_subclass(Subclass))
@example(sent=torch.ones(7, 1).as_strided((7, 1), (1, 100)))
@example(sent=[np.arange(10**6), b"x" * 10**6, torch.rand(10**6)] * 2)
def test_what_is_sent_arrives_equal(wire: Wire, sent: Any) -> None:
    assert same(sent, wire(sent))


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_rare_kinds_of_tensors(wire: Wire) -> None:
    for sent in (
        torch.quantize_per_tensor(torch.rand(50), 0.1, 3, torch.quint8),
        torch.eye(3).to_sparse_csr(),
        torch.eye(300).to_sparse(),
    ):
        assert same(sent, wire(sent))
    meta = wire(torch.ones(5, 6, device="meta"))
    assert (meta.shape, meta.device.type) == ((5, 6), "meta")


def test_dense_strides_stay(wire: Wire) -> None:
    channels_last = torch.randn(9, 8, 7, 6).to(memory_format=torch.channels_last)
    turned = torch.randn(90, 80).T, torch.randn(4, 5, 600).permute(2, 0, 1), torch.randn(3, 4).T
    for x in (channels_last, *turned):
        assert wire(x).stride() == x.stride()


@pytest.mark.parametrize("size", [10, 10**5])
def test_one_tensor_in_two_places_stays_one(wire: Wire, size: int) -> None:
    weight = nn.Parameter(torch.rand(size))
    first, second = wire([weight, {"tied": weight}])
    assert second["tied"] is first
    tied = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))
    tied[1].weight = tied[0].weight
    arrived = wire(tied)
    assert arrived[1].weight is arrived[0].weight
    assert arrived[1].bias is not arrived[0].bias


def test_a_part_of_a_tensor_does_not_send_the_whole(wire: Wire) -> None:
    x = torch.zeros(1000, 1000)
    data, buffers = encode([x[0], x[:, 0], x[:6]])
    assert len(data) + sum(buffer.nbytes for buffer in buffers) < 50_000


def test_tensors_made_in_inference_mode_arrive_as_normal_ones(wire: Wire) -> None:
    with torch.inference_mode():
        x = torch.ones(3) * 2
    arrived = wire(x)
    assert not arrived.is_inference()
    assert arrived.tolist() == [2.0] * 3


@pytest.mark.parametrize("kind", [Tensor, Subclass])
@pytest.mark.parametrize("size", [3, 10**5])
def test_a_tensor_with_a_graph_is_refused(wire: Wire, kind: type[Tensor], size: int) -> None:
    x = (torch.ones(size, requires_grad=True) * 2).as_subclass(kind)
    with pytest.raises(ValueError, match=r"has a graph.*tensor\.detach\(\)"):
        wire([torch.rand(10**5), x])
    assert wire(x.detach()).sum() == 2 * size


def test_a_message_that_comes_in_pieces(wire: Wire) -> None:
    sent = {"text": "x" * 10**6, "tensors": [torch.rand(10**5)] * 2}
    message = bytearray()

    class Recorder:
        sendall = staticmethod(message.extend)

    connection: Any = Recorder()
    Channel(connection, wire.here._writes, wire.here._reads).send(encode(sent))

    def trickle() -> None:
        for position in range(300):  # the header comes byte by byte
            wire.ends[0].sendall(message[position : position + 1])
        wire.ends[0].sendall(message[300:])

    sender = threading.Thread(target=trickle)
    sender.start()
    assert same(sent, decode(*wire.there.receive()))
    sender.join()


def test_the_garbage_collector_may_free_a_message_and_its_encoder() -> None:
    encoder = Encoder()
    garbage = [encoder, encoder.encode([1])]
    garbage.append(garbage)
    del encoder, garbage
    gc.collect()  # a warning would be an error


def test_buffers_that_do_not_fit_leave_nothing_behind() -> None:
    wire = Wire()
    big = torch.zeros(_SIZE - (1 << 20), dtype=torch.uint8)
    with pytest.raises(MemoryError, match="no room for"):
        wire.here.send(encode([torch.rand(10**6), big]))
    assert wire.written.sweep() == 0
    assert wire([1, torch.ones(10**6)])[1].sum() == 10**6
    for end in wire.ends:
        end.close()
