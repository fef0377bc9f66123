"""`aiopar.trace`: its files keep the rules of Chrome's format, and show what has run."""

import asyncio
import json
import logging
import os
import threading
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import anyio.to_thread
import pytest
import torch

import aiopar
from aiopar.serve import Batcher
from aiopar.testing import Gate
from tests.programs import run

from .batches import Bad, Held, busy, current_executor, on_asyncio, until
from .replicas import Scale, answers_of_all, held, open_pool
from .steppers import Counting, Item

pytestmark = pytest.mark.anyio


Event: TypeAlias = dict[str, Any]


class Timeline:
    """A file that was read, and found to keep the rules of the format."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.events: list[Event] = content["traceEvents"]
        self.start: str = content["otherData"]["start"]
        for event in self.events:
            # Perfetto counts whole nanoseconds.
            event["ts"], event["end"] = (
                round(1e3 * time) for time in (event["ts"], event["ts"] + event.get("dur", 0.0))
            )
        self.lanes = {event["tid"]: event["args"]["name"] for event in self._named("thread_name")}
        self._check_lanes()
        self._check_flows()
        self._check_waits()

    def _named(self, name: str) -> list[Event]:
        return [event for event in self.events if event["ph"] == "M" and event["name"] == name]

    def _of_kind(self, *kinds: str) -> list[Event]:
        return [event for event in self.events if event["ph"] in kinds]

    def _check_lanes(self) -> None:
        """Each lane has its own name and place; its bars are nested or disjoint."""
        assert {event["pid"] for event in self.events} == {os.getpid()}
        assert [event["args"]["name"] for event in self._named("process_name")] == [
            f"aiopar, process {os.getpid()}, from {self.start}"
        ]
        assert len(set(self.lanes.values())) == len(self.lanes) == len(self._named("thread_name"))
        places = [event["args"]["sort_index"] for event in self._named("thread_sort_index")]
        assert sorted(places) == sorted(self.lanes)
        bars = defaultdict(list)
        for bar in self._of_kind("X"):
            assert 0 <= bar["ts"] <= bar["end"]
            bars[bar["tid"]].append(bar)
        assert bars.keys() == self.lanes.keys()
        for of_lane in bars.values():
            opened: list[Event] = []
            for bar in sorted(of_lane, key=lambda bar: (bar["ts"], -bar["end"])):
                while opened and opened[-1]["end"] <= bar["ts"]:
                    opened.pop()
                assert not opened or bar["end"] <= opened[-1]["end"], (bar, opened[-1])
                opened.append(bar)

    def _check_flows(self) -> None:
        """Each arrow begins, perhaps passes a batch, and ends; each point is in a bar above it."""
        flows = defaultdict(list)
        for index, event in enumerate(self.events):
            if event["ph"] in "stf":
                flows[event["id"]].append(event)
                [bar] = [
                    bar
                    for bar in self.events[:index]
                    if bar["ph"] == "X"
                    and bar["tid"] == event["tid"]
                    and bar["ts"] == event["ts"] < bar["end"]
                ]
                event["bar"] = bar
        for flow in flows.values():
            assert [event["ph"] for event in flow] in (["s", "t", "f"], ["s", "f"])
            assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
            assert len({(event["cat"], event["name"]) for event in flow}) == 1
        self.items = [
            [(self.lanes[event["tid"]], event["bar"]["name"]) for event in flow]
            for flow in flows.values()
        ]
        """For each item: the rows and the names of the bars on its way."""

    def _check_waits(self) -> None:
        """Each wait begins, then ends; its item begins at the same time."""
        begun = {event["id"]: event for event in self._of_kind("s")}
        batched = {event["id"]: event for event in self._of_kind("t")}
        left = {event["id"]: event for event in self._of_kind("f")}
        waits = self._of_kind("b", "e")
        assert [event["ph"] for event in waits] == ["b", "e"] * len(begun)
        for begin, end in zip(waits[::2], waits[1::2], strict=True):
            item = begin["id"]
            assert all(begin[key] == end[key] for key in ("id", "cat", "name"))
            assert begin["ts"] == begun[item]["ts"] <= end["ts"]
            assert end["ts"] == (batched.get(item) or left[item])["ts"]

    def bars(self, row: str) -> list[Event]:
        """The bars of one row, by their starts."""
        bars = [bar for bar in self._of_kind("X") if self.lanes[bar["tid"]] == row]
        return sorted(bars, key=lambda bar: bar["ts"])

    def names(self, row: str) -> list[str]:
        """The names of the bars of one row, by their starts."""
        return [bar["name"] for bar in self.bars(row)]

    @property
    def rows(self) -> list[str]:
        """The names of the rows without those of stalls, from top to bottom."""
        return [name for _, name in sorted(self.lanes.items()) if "stalls" not in name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


LOOP = "event loop in MainThread"


async def read(path: Path) -> Timeline:
    """Read a file on a thread, as a program on an event loop does."""
    return await anyio.to_thread.run_sync(Timeline, path)


async def test_items_lead_to_their_batch_and_back(path: Path) -> None:
    async with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        aiopar.trace(path),
        busy(workers=executor, name="fn", batch_key=type) as callers,
    ):
        await callers.queue("a", 1, "b")
        callers.gate.open()
        await until(lambda: len(callers.outcomes) == 4)
    timeline = await read(path)
    assert timeline.rows == [LOOP, "cpu:0"]
    assert timeline.names("cpu:0") == ["fn x 1", "fn x 2", "fn x 1"]
    assert [bar["args"] for bar in timeline.bars("cpu:0")] == [
        {"batcher": "fn", "size": size, "key": repr(key), "outputs": size, "errors": 0}
        for size, key in [(1, str), (2, str), (1, int)]
    ]
    begin, end = (LOOP, "fn"), (LOOP, "fn: answered")
    ways = [[begin, ("cpu:0", f"fn x {size}"), end] for size in (1, 2, 2, 1)]
    assert sorted(timeline.items) == sorted(ways)


async def test_each_step_is_a_batch_and_items_lead_to_the_step_in_which_they_join(
    path: Path,
) -> None:
    gate = Gate()
    async with (
        current_executor(["cpu"]),
        aiopar.ContinuousBatcher(Counting(lambda _: gate()), name="fn") as batcher,
        aiopar.trace(path),
        held(gate) as tasks,
    ):
        tasks.start_soon(batcher, Item("a", 3))
        await gate.entered()
        tasks.start_soon(batcher, Item("b", 2))
        await until(lambda: batcher.stats().queued == 1)
    timeline = await read(path)
    assert timeline.names("cpu:0") == ["fn x 1", "fn x 2", "fn x 2"]
    assert [bar["args"] for bar in timeline.bars("cpu:0")] == [
        {"batcher": "fn", "size": size, "joined": joined, "outputs": outputs, "errors": 0}
        for size, joined, outputs in [(1, 1, 0), (2, 1, 0), (2, 0, 2)]
    ]
    begin, end = (LOOP, "fn"), (LOOP, "fn: answered")
    ways = [[begin, ("cpu:0", f"fn x {size}"), end] for size in (1, 2)]
    assert sorted(timeline.items) == ways


async def test_a_call_has_a_bar_in_the_row_of_its_worker(
    path: Path, devices: tuple[torch.device, ...]
) -> None:
    async with aiopar.DeviceExecutor(devices) as executor, aiopar.trace(path):
        for index in range(len(devices)):
            await executor.on(worker=index).run_sync(abs, -1)
    rows = [
        str(device) if device.index is not None else f"cpu:{index}"
        for index, device in enumerate(devices)
    ]
    if len(set(rows)) < len(rows):  # two workers of one device
        rows = [rows[0], f"{rows[0]} (2)"]
    timeline = await read(path)
    assert timeline.rows == rows
    for row in rows:
        [bar] = timeline.bars(row)
        assert bar["name"] == "abs"
        assert bar["args"].keys() == {"queued_ms"}


def test_it_says_when_it_began_by_the_clock_of_the_machine(path: Path) -> None:
    before = datetime.now(UTC)
    with aiopar.trace(path):
        pass
    start, now = datetime.fromisoformat(Timeline(path).start), datetime.now(UTC)
    assert before.replace(microsecond=before.microsecond // 1000 * 1000) <= start <= now


def test_a_call_inside_a_call_is_inside_its_bar_and_says_that_it_has_failed(path: Path) -> None:
    def outer() -> None:
        with pytest.raises(ValueError, match="invalid literal"):
            aiopar.wait(aiopar.fork(int, "x"))

    with (
        aiopar.DeviceExecutor(["cpu"]) as executor,
        aiopar.use_executor(executor),
        aiopar.trace(path),
    ):
        executor.submit(outer).result()
    timeline = Timeline(path)
    outside, inside = timeline.bars("cpu:0")
    assert [outside["name"], inside["name"]] == ["outer", "int"]
    assert [bar["args"].get("error") for bar in (outside, inside)] == [None, "ValueError"]
    assert inside["end"] <= outside["end"]


async def test_a_worker_process_is_named_by_its_host(path: Path) -> None:
    async with aiopar.ProcessExecutor(["cpu"]) as executor, aiopar.trace(path):
        assert await executor.run_sync(abs, -1) == 1
    assert "abs" in (await read(path)).names("process:0/cpu")


async def test_calls_and_batches_of_a_pool_are_in_the_rows_of_its_replicas(path: Path) -> None:
    module = Scale(2.0)
    async with open_pool(module) as pool, Batcher(pool) as batcher, aiopar.trace(path):
        await answers_of_all(pool, module, torch.ones(1))
        await batcher(torch.ones(1))
    timeline = await read(path)
    [row] = [name for name in timeline.rows if "replica" in name]
    call, batch = timeline.bars(row)
    assert call["name"] == "answer"
    assert row == f"cpu:{batch['args']['replica']}, replica {batch['args']['replica']}"
    assert sum(timeline.names(name) == ["answer"] for name in timeline.rows) == 1


async def test_batches_on_event_loops_that_overlap_have_two_rows(path: Path) -> None:
    held = Held()
    async with (
        Batcher(held, collate_fn=list, concurrency=2, max_batch_size=1, name="fn") as batcher,
        aiopar.trace(path),
        anyio.create_task_group() as tasks,
    ):
        tasks.start_soon(batcher, "a")
        tasks.start_soon(batcher, "b")
        await until(lambda: len(held.runs) == 2)
        held.let_on()
    timeline = await read(path)
    for row in ("fn on event loops", "fn on event loops (2)"):
        assert timeline.names(row) == ["fn x 1"]


async def test_outcomes_of_items_without_an_output(path: Path) -> None:
    def fail(item: str) -> str:
        if item == "bad":
            raise Bad
        return item

    async with aiopar.trace(path), busy(fail, name="fn", max_pending=2) as callers:
        await callers.queue("late", timeout=0.001)
        await until(lambda: "late" in callers.outcomes)
        await callers.queue("left", "bad")
        callers.call("refused")
        await until(lambda: "refused" in callers.outcomes)
        callers.cancel("left")
        await until(lambda: callers.batcher.stats().queued == 1)
        callers.gate.open()
        await until(lambda: "bad" in callers.outcomes)
    timeline = await read(path)
    ways = sorted([name for _, name in item[1:]] for item in timeline.items)
    assert ways == [
        ["fn x 1", "fn: answered"],
        ["fn x 1", "fn: failed"],
        ["fn: cancelled"],
        ["fn: expired"],
        ["fn: refused"],
    ]
    errors = [bar["args"]["errors"] for row in timeline.rows[1:] for bar in timeline.bars(row)]
    assert errors == [0, 1]


@on_asyncio
async def test_calls_of_a_map_have_its_name(path: Path) -> None:
    async with current_executor(["cpu"]), aiopar.trace(path):
        assert [number async for number in aiopar.map(abs, [-1])] == [1]
    timeline = await read(path)
    # The workers of the stream have one queue: any of them takes the call.
    assert any("map(abs)" in timeline.names(row) for row in timeline.rows)


@pytest.mark.may_block("stalls are what it looks for")
async def test_a_stall_of_the_loop_is_drawn(path: Path) -> None:
    async with aiopar.trace(path):
        time.sleep(0.05)  # noqa: ASYNC251
    bars = (await read(path)).bars(f"{LOOP}: stalls")
    assert bars[-1]["name"] == "stall"
    assert bars[-1]["end"] - bars[-1]["ts"] >= 29e6, "nanoseconds; seen up to 20 ms late"


def test_each_loop_has_a_row(path: Path) -> None:
    async def ask(batcher: Batcher[torch.Tensor, torch.Tensor]) -> None:
        await batcher(torch.ones(1))

    def serve() -> None:
        asyncio.run(ask(Batcher(torch.neg, name="fn")))

    other = threading.Thread(target=serve, name="other")
    with aiopar.trace(path):
        serve()
        other.start()
        other.join()
    timeline = Timeline(path)
    assert {LOOP, "event loop in other"} < set(timeline.rows)
    assert timeline.names("event loop in other") == ["fn", "fn: answered"]


@on_asyncio
async def test_a_loop_is_not_watched_after_the_block(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block runs in another thread, and the loop has its first event when it has ended."""
    timers = []
    loop = asyncio.get_running_loop()

    def call_later(delay: float, *args: Any, **kwargs: Any) -> asyncio.TimerHandle:
        timers.append(delay)
        return loop.call_at(loop.time() + delay, *args, **kwargs)

    trace = aiopar.trace(path)
    async with busy() as callers:
        await anyio.to_thread.run_sync(trace.__enter__)
        callers.call("second")
        await until(lambda: callers.batcher.stats().queued == 1)
        await anyio.to_thread.run_sync(trace.__exit__)
        monkeypatch.setattr(loop, "call_later", call_later)
    assert callers.outcomes["second"] == "second"
    assert [delay for delay in timers if delay < 1] == []


def test_only_what_the_block_runs_is_recorded(path: Path) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        executor.submit(abs, -1).result()
        with aiopar.trace(path):
            executor.submit(min, 1, 2).result()
            with aiopar.DeviceExecutor(["cpu"]) as later:
                later.submit(max, 1, 2).result()
        executor.submit(abs, -1).result()
    timeline = Timeline(path)
    assert timeline.rows == ["cpu:0", "cpu:0 (2)"]
    assert sorted(timeline.names("cpu:0") + timeline.names("cpu:0 (2)")) == ["max", "min"]


def test_traces_may_overlap(path: Path) -> None:
    other = path.with_name("other.json")
    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.trace(path):
        executor.submit(abs, -1).result()
        with aiopar.trace(other):
            executor.submit(min, 1, 2).result()
    assert Timeline(path).names("cpu:0") == ["abs", "min"]
    assert Timeline(other).names("cpu:0") == ["min"]


def test_what_runs_at_the_end_is_drawn_up_to_there(path: Path) -> None:
    gate = Gate()
    with gate, aiopar.DeviceExecutor(["cpu"]) as executor:
        with aiopar.trace(path):
            held, queued = executor.submit(gate), executor.submit(abs, -1)
            gate.wait_entered()
        gate.open()
        held.result()
        queued.result()
    [bar] = Timeline(path).bars("cpu:0")
    assert bar["args"]["unfinished"] is True


def test_the_latest_events_are_kept(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with aiopar.DeviceExecutor(["cpu"]) as executor, aiopar.trace(path, max_events=3):
        for fn in (abs, float, int, bool, str):
            executor.submit(fn, 1).result()
    assert Timeline(path).names("cpu:0") == ["int", "bool", "str"]
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "only the latest 3 events" in record.getMessage()


def test_the_file_is_opened_before_the_block_runs(path: Path) -> None:
    with pytest.raises(FileNotFoundError), aiopar.trace(path / "missing"):
        pytest.fail("the block runs")


def test_wrong_arguments(path: Path) -> None:
    with pytest.raises(TypeError, match="PathLike"):
        aiopar.trace(1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="max_events"):
        aiopar.trace(path, max_events="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_events"):
        aiopar.trace(path, max_events=0)


def test_a_trace_is_entered_once(path: Path) -> None:
    with aiopar.trace(path) as trace, pytest.raises(RuntimeError, match="once"), trace:
        pytest.fail("the block runs")
    Timeline(path)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_leaves_the_file_alone(path: Path) -> None:
    code, out, err = run(f"""
        with aiopar.trace({str(path)!r}):
            aiopar.run_sync  # the executor is made in both processes
            if (child := os.fork()):
                os.waitpid(child, 0)
            aiopar.get_executor().submit(pow, 2, 3).result()
        if not child:
            os._exit(0)
        print(os.getpid(), len([*open({str(path)!r})]) > 3)
    """)
    assert code == 0, err
    pid, complete = out.split()
    assert complete == "True"
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {int(pid)}
