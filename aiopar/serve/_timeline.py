"""`trace`: a timeline of workers, batches and items, in a file that Perfetto opens."""

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from threading import current_thread, get_ident
from time import monotonic
from typing import Any, Self, TextIO, TypeAlias

import anyio.to_thread

from .._base.arguments import check_int, name_of, unwrapped
from .._base.tracebacks import logger
from ..data._stages import WorkerStage
from ..executor._loop_tasks import Repeating
from ..executor._observer import CallInfo, ExecutorObserver, all_executors
from ..executor._worker import Worker, current_worker
from ..futures._waiting import cancel_scope
from ..futures._wakeup import Waker, waker_here
from ._observer import BatchInfo, BatchObserver, ItemInfo, all_batchers
from ._places import WorkerPart
from ._step_run import StepRun

_BEAT = 0.02  # seconds from one beat of an event loop to the next
_STALL = 0.005  # a beat that is so many seconds late is a stall
_TICK = 100  # the width of a tick, in nanoseconds
_STALLS = ": stalls"  # the suffix of a row of stalls; such rows come first


@dataclass(slots=True, eq=False)
class _Bar:
    """A call, a batch or a stall. Times are by `time.monotonic`."""

    row: Worker | str | None  # a worker, or the name of a row; None before a worker has the call
    name: str
    args: dict[str, Any]
    start: float  # of a call in a queue: when it was queued
    end: float = 0.0
    # Of a batch: when the items came that have waited for it, to find the batch of an item.
    arrivals: Sequence[float] = ()
    lane: int = 0  # the number of its lane in the file

    def finish(self, end: float, error: BaseException | None) -> None:
        self.end = end
        if error is not None:
            self.args["error"] = type(error).__qualname__


_Item: TypeAlias = tuple[str, int, float, float, str]
"""An item that has ended: its batcher, the thread of its loop, when the item came, when it ended,
and its outcome. A tuple, because there are many items.
"""


def trace(path: str | os.PathLike[str], *, max_events: int = 100_000) -> "Trace":
    """Record a timeline while the block runs, for https://ui.perfetto.dev or chrome://tracing.

    All executors and batchers of the process are recorded, also those that the block makes. A call
    to another process or to a Ray actor is in the row of the worker that sends the call. The file
    has:

    - a row for each worker, named by its host, device and replica (`cpu:0`, `process:0/cpu`,
      `cuda:0, replica 0`), with its calls and batches. Bars that overlap get a second row with the
      same name. On an accelerator a bar ends when its kernels are done;
    - the size of a batch in the batch's name; in its arguments, its key and how many items got an
      output or an error. Each step of a `ContinuousBatcher` is a batch; its arguments tell how many
      items joined. The arguments of a call tell how long it was queued;
    - a row for each event loop, with a tick when an item comes and a tick when its caller gets the
      outcome. Arrows lead from the first tick to the batch, or the step in which the item joined,
      and from there to the second tick;
    - a bar for each item's wait in a queue;
    - the time of the machine's clock at the start of the block, in the name of the process and as
      `start` in `otherData`. The times of the events count from there;
    - the stalls of each event loop that makes calls: a timer ran 5 ms or more too late. A stall is
      drawn up to 20 ms too short; a stall of 25 ms or more is always seen.

    What still runs at the end of the block is drawn up to the end, and marked `unfinished`. The
    latest `max_events` events (calls, batches, items and stalls) are kept in memory, about 200
    bytes each. The file is written at the end of the block: on a thread after `async with`, which
    suits an event loop; plain `with` blocks meanwhile (1 s for 100,000 items).

    Args:
        path: The file to write, in Chrome's JSON format. It is made when the block is entered.
        max_events: How many events to keep.

    Returns:
        A context manager, also asynchronous, for one use.

    Raises:
        TypeError: `path` is no path, or `max_events` is no int.
        ValueError: `max_events` is below 1.
        OSError: The file cannot be written, when the block is entered or left.

    Example:
        >>> import aiopar, json, pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp(), "trace.json")
        >>> with aiopar.trace(path):
        ...     aiopar.get_executor().submit(pow, 2, 3).result()
        8
        >>> events = json.loads(path.read_text())["traceEvents"]
        >>> [event["ph"] for event in events if event["name"] == "pow"]  # a bar
        ['X']
    """
    return Trace(os.fspath(path), check_int("max_events", max_events, at_least=1))


class Trace:
    """The result of `trace`: it records between entering and leaving."""

    def __init__(self, path: str, max_events: int) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._process = 0
        self._began = 0.0
        self._start = ""  # the same moment, by the clock of the machine
        self._recording = False
        self.events: deque[_Bar | _Item] = deque(maxlen=max_events)  # the latest ones
        self.running: dict[CallInfo | BatchInfo, _Bar] = {}  # what has not ended
        self.loops: dict[int, str] = {}  # the name of the event loop of each thread
        self._heartbeats: dict[Waker | None, Repeating] = {}
        self._makers = partial(_Calls, self), partial(_Batches, self)

    def __enter__(self) -> Self:
        self._open()
        self._begin()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._write(self._end())

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self._open)
        self._begin()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        unfinished = self._end()
        with cancel_scope(shield=True):
            await anyio.to_thread.run_sync(self._write, unfinished)

    def _open(self) -> None:
        if self._process:
            raise RuntimeError("a trace can be entered once: call aiopar.trace() again")
        self._file = open(self._path, "w", encoding="utf-8")  # noqa: SIM115  # `_write` closes it
        self._process = os.getpid()

    def _begin(self) -> None:
        self._began = monotonic()
        self._start = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._recording = True
        self.see_loop()
        make_calls, make_batches = self._makers
        all_executors.add(make_calls)
        all_batchers.add(make_batches)

    def _end(self) -> list[_Bar]:
        """Stop recording, and return the bars of what still runs."""
        self._recording = False
        make_calls, make_batches = self._makers
        all_executors.remove(make_calls)
        all_batchers.remove(make_batches)
        self._look_for_stall(waker_here())  # the heartbeats of other threads end at their next beat
        now = monotonic()
        return [
            # Copies, because the calls and batches may still end.
            _Bar(bar.row, bar.name, {**bar.args, "unfinished": True}, bar.start, now, bar.arrivals)
            for bar in self.running.copy().values()
            if bar.row is not None and not bar.end
        ]

    def _write(self, unfinished: list[_Bar]) -> None:
        file, events, most = self._file, self.events, self.events.maxlen
        if file is None or os.getpid() != self._process:
            return  # a forked child leaves the file to its parent
        if len(events) == most:
            logger.warning("%s has only the latest %d events: see max_events", self._path, most)
        bars, items = list[_Bar](), list[_Item]()
        while events:  # not by iteration, because late events may still come
            event = events.popleft()
            if isinstance(event, _Bar):
                bars.append(event)
            else:
                items.append(event)
        with file:
            lines = _JsonEvents(self._began, self._start).events(
                self.loops, bars + unfinished, items
            )
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n' + next(lines))
            file.writelines(f",\n{line}" for line in lines)
            file.write(f'\n],"otherData":{{"start":"{self._start}"}}}}\n')

    # For the observers.

    def see_loop(self) -> None:
        """Watch the event loop of this thread, if there is one."""
        waker = waker_here() if self._recording and current_worker() is None else None
        if waker is not None and waker not in self._heartbeats:
            self.loops[get_ident()] = f"event loop in {current_thread().name}"
            self._heartbeats[waker] = Repeating(_BEAT, partial(self._look_for_stall, waker))

    def _look_for_stall(self, waker: Waker | None) -> None:
        """Record a stall if the heartbeat of `waker`, this thread's loop, is late."""
        heartbeat = self._heartbeats.get(waker)
        if heartbeat is None:
            return
        if (late := heartbeat.late) >= _STALL:
            row, now = self.loops[get_ident()] + _STALLS, monotonic()
            self.events.append(_Bar(row, "stall", {}, now - late, now))
        if not self._recording:  # the block has ended
            heartbeat.cancel()


class _Calls(ExecutorObserver):
    """Records the calls of one executor. The second argument, a name, is not used."""

    def __init__(self, trace: Trace, _: str) -> None:
        self._trace = trace

    def enqueue(self, call: CallInfo) -> None:
        self._trace.see_loop()
        name = _name_of_call(call.fn)
        if name is not None:
            self._trace.running[call] = _Bar(None, name, {}, monotonic())

    def start(self, call: CallInfo) -> None:
        bar = self._trace.running.get(call)
        if bar is not None:
            queued, bar.start = bar.start, monotonic()
            bar.args["queued_ms"] = round((bar.start - queued) * 1e3, 3)
            bar.row = current_worker()

    def completed(self, call: CallInfo, error: BaseException | None) -> None:
        bar = self._trace.running.pop(call, None)
        if bar is not None and bar.row is not None:
            bar.finish(monotonic(), error)
            self._trace.events.append(bar)


def _name_of_call(fn: Any) -> str | None:
    """The name of a call's bar; None for a call that takes a batch, because the batch is drawn."""
    function = unwrapped(fn)
    if getattr(function, "__func__", None) in (WorkerPart._first_step, StepRun.tick):
        return None
    owner = getattr(function, "__self__", None)
    return owner.step.name if isinstance(owner, WorkerStage) else name_of(function).strip("_")


class _Batches(BatchObserver):
    """Records the batches and items of the batcher `name`."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def start(self, batch: BatchInfo) -> None:
        items, row = batch.items, current_worker() or f"{self._name} on event loops"
        args: dict[str, Any] = {"batcher": self._name, "size": len(items)}
        if items[0].key is not None:
            args["key"] = repr(items[0].key)[:100]
        if batch.replica is not None:
            args["replica"] = batch.replica
        if batch.joined is not items:  # a step
            args["joined"] = len(batch.joined)
        name = f"{self._name} x {len(items)}"
        arrivals = [item.arrived for item in batch.joined]
        self._trace.running[batch] = _Bar(row, name, args, batch.began, arrivals=arrivals)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        bar = self._trace.running.pop(batch, None)
        if bar is not None:
            bar.args.update(outputs=batch.outputs, errors=batch.errors)
            bar.finish(batch.began + batch.seconds, error)
            self._trace.events.append(bar)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        thread = get_ident()
        if thread not in self._trace.loops:
            self._trace.see_loop()
        self._trace.events.append((self._name, thread, item.arrived, monotonic(), item.outcome))


def _title(row: Worker | str | None, bars: Iterable[_Bar]) -> str:
    """The name of a row; with the replica if the row shows batches of one replica only."""
    if row is None or isinstance(row, str):
        return str(row)
    # `process:0/cpu`, `cuda:0`; `cpu:1` for the worker with index 1
    named = row.device.index is not None or "/" in row.label
    name = row.label if named else f"{row.label}:{row.index}"
    replicas = {bar.args["replica"] for bar in bars if "replica" in bar.args}
    return f"{name}, replica {replicas.pop()}" if len(replicas) == 1 else name


class _JsonEvents:
    """Makes the JSON of the events of a file, in Chrome's "Trace Event Format".

    A bar is a complete event (X) on a thread of the format. Here such a thread is called a lane;
    its bars are disjoint or nested. The arrows of an item are flow events (s, t, f) with the number
    of the item. A flow event belongs to the bar that begins at the same time. The wait of an item
    is a pair of asynchronous events (b, e). The time 0 of the file is `began`, or `start` by the
    clock of the machine.
    """

    def __init__(self, began: float, start: str) -> None:
        self._began = began
        self._start = start
        self._process = os.getpid()
        self._titles: Counter[str] = Counter()  # how many lanes have each title

    def events(
        self, loops: Mapping[int, str], bars: Iterable[_Bar], items: Sequence[_Item]
    ) -> Iterator[str]:
        """The events; `loops` names the event loop of each thread.

        Each bar comes before the arrows that belong to the bar.
        """
        process = f"aiopar, process {self._process}, from {self._start}"
        yield self._metadata("process_name", 0, name=process)
        lanes: dict[int, int] = {}
        for thread in dict.fromkeys(item[1] for item in items):
            # A closed loop without a name has left items behind.
            lanes[thread] = yield from self._new_lane(loops.get(thread, "event loop"))
        by_row: defaultdict[Worker | str | None, list[_Bar]] = defaultdict(list)
        for bar in bars:
            by_row[bar.row].append(bar)
        rows = [(_title(row, of_row), of_row) for row, of_row in by_row.items()]
        for title, of_row in sorted(rows, key=lambda row: (not row[0].endswith(_STALLS), row[0])):
            yield from self._row(title, of_row)
        # An item that was in several batches gets an arrow to the last one.
        batches = {arrived: bar for bar in bars for arrived in bar.arrivals}
        for number, item in enumerate(items, start=1):
            yield from self._item(number, item, lanes[item[1]], batches.get(item[2]))

    def _row(self, title: str, bars: list[_Bar]) -> Iterator[str]:
        """The bars of one row, in as few lanes as hold them."""
        # The number of each lane, and the bars that are open in the lane, the innermost last.
        lanes: list[tuple[int, list[_Bar]]] = []
        for bar in sorted(bars, key=lambda bar: (bar.start, -bar.end)):
            for bar.lane, outer in lanes:
                while outer and outer[-1].end <= bar.start:
                    outer.pop()
                # A bar may be inside another one, but a batch may not be inside a batch.
                two_batches = outer and bar.arrivals and outer[-1].arrivals
                if not outer or (bar.end <= outer[-1].end and not two_batches):
                    outer.append(bar)
                    break
            else:
                bar.lane = yield from self._new_lane(title)
                lanes.append((bar.lane, [bar]))
            start = self._nanoseconds(bar.start)
            length = self._nanoseconds(bar.end) - start
            rest = f',"dur":{length / 1e3:.3f},"args":{json.dumps(bar.args)}'
            yield self._event("X", json.dumps(bar.name), bar.lane, start, rest)

    def _new_lane(self, title: str) -> Generator[str, None, int]:
        """Make the events that name a new lane, and return the number of the lane."""
        self._titles[title] += 1
        number, count = self._titles.total(), self._titles[title]
        name = title if count == 1 else f"{title} ({count})"
        yield self._metadata("thread_name", number, name=name)
        yield self._metadata("thread_sort_index", number, sort_index=number)
        return number

    def _item(self, number: int, item: _Item, lane: int, batch: _Bar | None) -> Iterator[str]:
        """The ticks, the arrows and the wait of one item, whose loop has this lane."""
        batcher, _, arrived, ended, outcome = item
        name, came, left = json.dumps(batcher), self._nanoseconds(arrived), self._nanoseconds(ended)
        taken = left if batch is None else self._nanoseconds(batch.start)
        tick = f',"dur":{_TICK / 1e3:.3f},"args":{{"item":{number}}}'
        yield self._event("X", name, lane, came, tick)
        yield self._event("X", json.dumps(f"{batcher}: {outcome}"), lane, left, tick)
        flow = f',"cat":"item","id":{number}'
        yield self._event("s", name, lane, came, flow)
        if batch is not None:
            yield self._event("t", name, batch.lane, taken, flow + ',"bp":"e"')
        yield self._event("f", name, lane, left, flow + ',"bp":"e"')
        wait = json.dumps(f"{batcher}: queue")
        yield self._event("b", wait, lane, came, flow)
        yield self._event("e", wait, lane, taken, flow)

    def _nanoseconds(self, time: float) -> int:
        return max(0, round((time - self._began) * 1e9))

    def _event(self, kind: str, name: str, lane: int, time: int, rest: str) -> str:
        """One event at `time` nanoseconds; `name` and `rest` are JSON."""
        return (
            f'{{"ph":"{kind}","pid":{self._process},"tid":{lane},"ts":{time / 1e3:.3f},'
            f'"name":{name}{rest}}}'
        )

    def _metadata(self, event: str, lane: int, **args: str | int) -> str:
        return self._event("M", json.dumps(event), lane, 0, f',"args":{json.dumps(args)}')
