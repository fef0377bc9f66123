"""`aiopar.map`: a module or function over a stream of batches."""

import contextvars
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch
from torch import nn

import aiopar
from aiopar.data import Pipeline
from aiopar.testing import Gate
from tests.data.streams import Source, collect, double, double_async, left_since, running, until
from tests.home import AtHome, elsewhere, place, places
from tests.workers import Workers

_VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)
ON_RAY = True


class Network(nn.Module):
    """A layer that notes the thread of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.threads: list[str] = []  # shared by all replicas

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.threads.append(threading.current_thread().name)
        y: torch.Tensor = self.linear(x) * scale
        return y


async def _later(batches: list[Any]) -> AsyncIterator[Any]:
    for batch in batches:
        await anyio.lowlevel.checkpoint()
        yield batch


@pytest.mark.asyncio
@pytest.mark.parametrize("wrap", [aiopar.DataParallel, aiopar.ReplicaPool, aiopar.Batcher])
async def test_objects_with_an_async_call_are_awaited(
    workers: Workers, wrap: Callable[[Any], Any]
) -> None:
    network, batches = Network(), [torch.randn(4, 3) for _ in range(5)]
    with torch.no_grad():
        expected = [network(batch) for batch in batches]
        with aiopar.use_executor(workers):
            called = wrap(network)
            outputs = aiopar.map(called, batches)
            pipeline = Pipeline(batches).map(called)
            found = [y async for y in outputs]
            piped = [y async for y in pipeline]
    for got in (found, piped):
        assert len(got) == len(expected)
        assert all(map(torch.allclose, got, expected))
    if not isinstance(called, aiopar.DataParallel):
        await called.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("asynchronous", [False, True], ids=["iter", "aiter"])
@pytest.mark.parametrize("in_order", [True, False])
async def test_a_module_runs_on_all_replicas(
    devices: tuple[torch.device, ...], asynchronous: bool, in_order: bool
) -> None:
    network = Network().to(devices[0])
    batches = [torch.randn(4, 3) for _ in range(20)]
    with torch.no_grad():
        expected = [network(batch.to(devices[0])).cpu() for batch in batches]
    network.threads.clear()
    source = _later(batches) if asynchronous else batches
    async with aiopar.DeviceExecutor(devices, thread_name_prefix="mine") as executor:
        with aiopar.use_executor(executor), torch.inference_mode():
            outputs = aiopar.map(network, source, devices=devices, in_order=in_order)
        got = [output async for output in outputs]
    assert {output.device for output in got} <= {torch.empty(0, device=d).device for d in devices}
    assert all(output.is_inference() for output in got)
    got = [output.cpu() for output in got]
    if not in_order:
        got.sort(key=lambda output: float(output.sum()))
        expected.sort(key=lambda output: float(output.sum()))
    assert all(map(torch.allclose, got, expected))
    assert len(network.threads) == 20
    assert all(name.startswith("mine-") for name in network.threads)


class Calling(nn.Module):
    """Calls a function of the test with its input, and returns the input."""

    def __init__(self, fn: Callable[..., object]) -> None:
        super().__init__()
        self.fn = AtHome(fn)

    def forward(self, x: Any) -> Any:
        self.fn(x)
        return x


@pytest.mark.anyio
async def test_replicas_run_at_the_same_time(workers: Workers) -> None:
    barrier = threading.Barrier(2, timeout=200)
    module = Calling(lambda _: barrier.wait())
    with aiopar.use_executor(workers):
        outputs = aiopar.map(module, torch.arange(2), devices=["cpu", "cpu"])
    assert [int(x) async for x in outputs] == [0, 1]


@pytest.mark.anyio
async def test_no_more_batches_in_flight_than_asked_for(workers: Workers) -> None:
    gate = Gate()
    source = Source()
    with aiopar.use_executor(workers):
        outputs = aiopar.map(Calling(gate), source, devices=["cpu", "cpu"], concurrency=3)
    async with anyio.create_task_group() as tasks, outputs:
        with gate:
            tasks.start_soon(collect, outputs, [])
            await gate.entered(2)
            assert [stage.bound for stage in outputs.stats().stages] == [6, 6]
            assert source.taken <= 12
    assert source.closed.is_set()


class Add(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


@pytest.mark.anyio
async def test_a_batch_that_is_a_tuple_is_the_modules_arguments(workers: Workers) -> None:
    pairs = [(torch.tensor(n), torch.tensor(1)) for n in range(3)]
    with aiopar.use_executor(workers):
        of_tuples = aiopar.map(Add(), pairs)
        of_lists = aiopar.map(Add(), [list(pair) for pair in pairs])
        of_function = aiopar.map(len, pairs, devices=["cpu"])
    assert [int(x) async for x in of_tuples] == [1, 2, 3]
    assert [int(x) async for x in of_lists] == [1, 2, 3]
    assert [x async for x in of_function] == [2, 2, 2], "a function gets it as it is"


class Placed:
    """Notes the devices that it was moved to."""

    def __init__(self, *devices: str) -> None:
        self.devices = devices

    def to(self, device: torch.device) -> "Placed":
        return Placed(*self.devices, device.type)


@pytest.mark.asyncio
async def test_a_batch_that_moves_itself_is_moved() -> None:
    module: Any = nn.Identity()
    outputs = aiopar.map(module, [Placed()], devices=["cpu"])
    assert [placed.devices async for placed in outputs] == [("cpu",)]
    async with aiopar.serve.ReplicaPool(module, ["cpu"]) as pool:
        assert (await pool(Placed())).devices == ("cpu",)


@pytest.mark.anyio
@pytest.mark.parametrize("fn", [double, double_async], ids=["sync", "async"])
@pytest.mark.parametrize("concurrency", [None, 1, 5])
async def test_functions(
    workers: Workers, fn: Callable[[int], Any], concurrency: int | None
) -> None:
    before = running()
    source = Source(50)
    with aiopar.use_executor(workers):
        outputs = aiopar.map(fn, source, concurrency=concurrency)
    assert [n async for n in outputs] == [2 * n for n in range(50)]
    assert source.closed.is_set()
    await until(lambda: not left_since(before))


@pytest.mark.asyncio
async def test_a_plain_function_runs_once_for_each_core_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    async with aiopar.map(double, range(9)) as outputs:
        assert await anext(outputs) == 0
        assert [stage.bound for stage in outputs.stats().stages] == [6], "3 run, 3 are ready"


def place_of(_: int) -> tuple[int, str]:
    return place()


@pytest.mark.anyio
async def test_a_function_on_devices_runs_on_the_executors_workers(workers: Workers) -> None:
    with aiopar.use_executor(workers):
        outputs = aiopar.map(place_of, range(20), devices=["cpu", "cpu"])
    assert {seen async for seen in outputs} <= await places(workers)


@pytest.mark.anyio
async def test_a_function_on_two_devices_runs_on_two_workers() -> None:
    async with aiopar.DeviceExecutor(["cpu"] * 3, thread_name_prefix="mine") as executor:
        with aiopar.use_executor(executor):
            outputs = aiopar.map(place_of, range(20), devices=["cpu", "cpu"])
        assert {name async for _, name in outputs} == {"mine-cpu-0", "mine-cpu-1"}


class Where(nn.Module):
    def forward(self, _: torch.Tensor) -> tuple[int, str]:
        return place()


@pytest.mark.asyncio
@pytest.mark.parametrize("piped", [False, True], ids=["of a list", "of a pipeline"])
@pytest.mark.parametrize("called", [place_of, Where()], ids=["function", "module"])
async def test_the_given_executor_calls_the_function_and_nothing_else(
    workers: Workers, called: Callable[[Any], Any], piped: bool
) -> None:
    read: list[tuple[int, str]] = []

    def item(number: int) -> int:
        read.append(place())
        return number

    source = Pipeline(range(20)).map(item) if piped else range(20)
    outputs = aiopar.map(called, source, executor=workers)
    at = await places(workers)
    assert {seen async for seen in outputs} <= at
    assert bool(read) == piped
    assert not {*read} & at
    with pytest.raises(ValueError, match="3 calls at once on cpu need 3 workers"):
        aiopar.map(called, source, executor=workers, devices=["cpu"] * 3)


def state(_: int) -> tuple[bool, bool, int]:
    return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), _VARIABLE.get()


@pytest.mark.anyio
@pytest.mark.parametrize("devices", [None, ["cpu"]])
async def test_the_callers_state_is_captured_by_the_call(
    workers: Workers, devices: list[str] | None
) -> None:
    token = _VARIABLE.set(7)
    with torch.autocast("cpu"), torch.no_grad(), aiopar.use_executor(workers):
        outputs = aiopar.map(state, range(3), devices=devices)
    _VARIABLE.reset(token)
    variable = 0 if devices and elsewhere(workers) else 7
    assert [seen async for seen in outputs] == [(False, True, variable)] * 3


@pytest.mark.anyio
async def test_an_error_names_the_replica_and_the_batch(workers: Workers) -> None:
    network = Network()
    batches = [torch.ones(1, 3), torch.ones(1, 3), torch.ones(1, 4)]
    got: list[Any] = []
    with aiopar.use_executor(workers):
        outputs = aiopar.map(network, batches, devices=["cpu"])
    with pytest.raises(RuntimeError, match="shapes") as caught:
        await collect(outputs, got)
    assert [output.requires_grad for output in got] == [False, False]
    notes = [
        "called with Tensor float32 [1, 4]",
        # Each process has a replica, and any of them may run the batch.
        *(() if elsewhere(workers) else ("in replica 0 on device cpu",)),
        "in stage 'map(Network)' of the stream, item 2: Tensor float32 [1, 4]",
    ]
    assert caught.value.__notes__ == notes


@pytest.mark.parametrize(
    ("fn", "source", "options", "error", "message"),
    [
        (3, [], {}, TypeError, "expected a callable"),
        (abs, 3, {}, TypeError, "expected an iterable"),
        (abs, [], {"concurrency": 0}, ValueError, "concurrency must be at least 1"),
        (abs, [], {"concurrency": True}, TypeError, "concurrency must be an int"),
        (nn.Identity(), [], {"devices": ["nowhere"]}, ValueError, "unknown device"),
        (nn.Identity(), [], {"devices": ["cpu"] * 2}, ValueError, "2 calls at once on cpu need 2"),
        (nn.Identity(), [], {"executor": 2}, TypeError, "executor must be a DeviceExecutor"),
        (abs, [], {"total": -1}, ValueError, "total must be at least 0"),
        (double_async, [], {"devices": ["cpu"]}, TypeError, "takes no devices"),
        (double_async, [], {"executor": aiopar.get_executor()}, TypeError, "takes no executor"),
        (nn.LazyLinear(2), [], {}, ValueError, "has uninitialized parameters"),
    ],
)
def test_arguments_are_checked_when_it_is_called(
    fn: Any, source: Any, options: Any, error: type[Exception], message: str
) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.use_executor(executor):
        refused = pytest.raises(error, match=message)
        with refused:
            aiopar.map(fn, source, **options)


# Progress.


class Lengthless(list[int]):
    """Its length is not known: many streams of datasets say it so."""

    def __len__(self) -> int:
        raise NotImplementedError


@pytest.mark.may_block("a bar is written to the terminal")
@pytest.mark.anyio
async def test_a_bar_shows_how_many_of_how_many(capsys: pytest.CaptureFixture[str]) -> None:
    threads = threading.active_count()
    outputs = aiopar.map(double, range(30), concurrency=1, progress=True)
    assert len([n async for n in outputs]) == 30
    assert "30/30" in capsys.readouterr().err
    await until(lambda: threading.active_count() == threads)

    batches = aiopar.data.Pipeline([*range(30)]).map(double).shuffle(4).batch(4)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (batches, {}, "8/8"),
        (batches.map(len, in_order=False), {"in_order": False}, "8/8"),
        (Pipeline(batches).batch(3, drop_last=True), {}, "2/2"),
        (batches.filter(len), {}, "8batch"),
        (batches.filter(len), {"total": 8}, "8/8"),
        (_later([1, 2]), {"total": 2}, "2/2"),
        (Pipeline(Lengthless([1, 2, 3])).progress(), {"progress": False}, "3item"),
        (batches.progress(), {"progress": False}, "8/8"),
        (batches.filter(len).progress(), {"progress": False}, "8batch"),
        (batches.flat_map(list).progress(), {"progress": False}, "30item"),
    ]
    for source, options, expected in cases:
        strings = aiopar.map(str, source, **{"progress": True, **options})
        assert [one async for one in strings]
        assert expected in capsys.readouterr().err

    pipeline = aiopar.data.Pipeline(range(10)).map(double).progress(20)
    async with pipeline as stream:
        assert [await anext(stream) for _ in range(4)] == [0, 2, 4, 6]
    pipeline.load_state_dict(pipeline.state_dict())
    assert "4/20" in capsys.readouterr().err
    assert [n async for n in pipeline] == list(range(8, 20, 2))
    shown = capsys.readouterr().err
    assert "4/20" in shown, "the bar continues where it was"
    assert "10/20" in shown


@pytest.mark.may_block("a bar is written to the terminal")
@pytest.mark.anyio
async def test_a_loader_has_a_bar_for_each_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    loader = aiopar.data.AsyncDataLoader(range(10), batch_size=2, progress=True)
    async with loader as stream:
        assert [(await anext(stream)).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    assert "2/5" in capsys.readouterr().err
    loader.load_state_dict(loader.state_dict())
    for first in ("2/5", "0/5"):
        async for _ in loader:
            pass
        shown = capsys.readouterr().err
        assert first in shown
        assert "5/5" in shown
    theirs: Any = torch.utils.data.DataLoader(torch.arange(10), batch_size=2)  # type: ignore[arg-type]
    async for _ in aiopar.data.AsyncDataLoader.from_dataloader(theirs, progress=True):
        pass
    assert "5/5" in capsys.readouterr().err


@pytest.mark.anyio
async def test_the_length_need_not_be_known(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = aiopar.map(double, Source(7), progress=True)
    assert len([n async for n in outputs]) == 7
    assert "7batch" in capsys.readouterr().err


@pytest.mark.anyio
async def test_without_tqdm_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match=r"pip install 'aiopar\[progress\]'"):
        await anext(aiopar.map(double, range(3), progress=True))


class TestOfAPipeline:
    """The steps of the pipeline and the call are the stages of one stream."""

    @pytest.mark.anyio
    @pytest.mark.parametrize("cut", [1, 10, 30])
    @pytest.mark.parametrize("fn", [double, double_async])
    async def test_it_resumes_after_the_last_output(
        self, fn: Callable[[int], Any], cut: int
    ) -> None:
        def made() -> Pipeline[int]:
            return Pipeline(range(30)).map(double, concurrency=2)

        first, got = made(), list[int]()
        async with aiopar.map(fn, first, concurrency=4) as outputs:
            while len(got) < cut:
                got.append(await anext(outputs))
            # The stream runs ahead of the reader.
            await until(lambda: cut == 30 or any(s.buffered for s in outputs.stats().stages))
            state = first.state_dict()
        assert state["delivered"] == cut
        second = made()
        second.load_state_dict(state)
        async with aiopar.map(fn, second, concurrency=4) as outputs:
            got += [output async for output in outputs]
        assert got == [4 * n for n in range(30)]

    @pytest.mark.anyio
    async def test_skipped_failures_are_recorded(self) -> None:
        pipeline = Pipeline(range(6), max_failures=4).map(lambda n: 6 // (n % 3))

        def inverse(x: int) -> float:
            return 1 / (x - 3)

        async with aiopar.map(inverse, pipeline) as outputs:
            assert [output async for output in outputs] == [1 / 3] * 2
            places = [(failed.stage.split("(")[0], failed.position) for failed in outputs.failures]
        assert sorted(places) == [("map", 0), ("map", 2), ("map", 3), ("map", 5)]

    @pytest.mark.anyio
    async def test_out_of_order_the_pipeline_is_a_plain_source(self) -> None:
        pipeline = Pipeline(range(6))
        state = pipeline.state_dict() | {"delivered": 3, "ended": False}
        pipeline.load_state_dict(state)
        async with aiopar.map(double, pipeline, in_order=False) as outputs:
            assert sorted([output async for output in outputs]) == [6, 8, 10]
        assert pipeline.state_dict()["ended"]
