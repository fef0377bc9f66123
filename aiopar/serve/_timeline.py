"""`trace`: a timeline of workers, batches and items, in a file that Perfetto opens."""

import json
import os
from collections import Counter, defaultdict, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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
from ..executor._worker import current_worker
from ..futures._waiting import cancel_scope
from ..futures._wakeup import Waker, waker_here
from ._observer import BatchInfo, BatchObserver, ItemInfo, all_batchers, outcome_of
from ._places import WorkerPart

_BEAT = 0.02
"""A loop is asked to run a timer every so many seconds."""
_STALL = 0.005
"""A loop that runs the timer so many seconds late has stalled."""
_TICK = 100
"""The width of a tick, in nanoseconds."""


@dataclass(slots=True, eq=False)
class _Row:
    """A row of the timeline."""

    name: str
    of_loop: bool = False
    """Whether it shows the stalls of an event loop: drawn above the workers."""
    replicas: set[int] = field(default_factory=set)
    """The replicas whose batches it shows."""

    @property
    def title(self) -> str:
        """Its name, with the replica if there is only one."""
        if len(self.replicas) != 1:
            return self.name
        return f"{self.name}, replica {min(self.replicas)}"


@dataclass(slots=True, eq=False)
class _Bar:
    """A call, a batch or a stall. Times are by `time.monotonic`."""

    row: _Row | None
    """None before a worker has begun the call."""
    name: str
    args: dict[str, Any]
    start: float
    """For a call that has not begun: when it was queued."""
    end: float = 0.0
    arrivals: Sequence[float] = ()
    """For a batch: when its items came. By this time an item finds its batch."""
    lane: int = 0
    """The number of its lane in the file."""

    def may_contain(self, other: "_Bar") -> bool:
        """Whether `other`, which begins later, may be drawn inside this bar."""
        return other.end <= self.end and not (self.arrivals and other.arrivals)


_Item: TypeAlias = tuple[str, int, float, float, str]
"""An item that has ended: its batcher, the thread of its loop, when it came, when it ended, its
outcome. It is a tuple because there are many."""


def trace(path: str | os.PathLike[str], *, max_events: int = 100_000) -> "Trace":
    """Record a timeline while the block runs, for https://ui.perfetto.dev or chrome://tracing.

    All executors and batchers of the process are recorded, also those that the block makes; calls
    of other processes and of Ray actors in the row of the worker that sends them. The file has:

    - a row for each worker, named by its host, device and replica (`cpu:0`, `process:0/cpu`,
      `cuda:0, replica 0`), with its calls and batches. Bars that overlap get a second row with the
      same name. On an accelerator a bar ends when its kernels are done;
    - in the name of a batch its size, and in its arguments its key and how many of its items got an
      output or an error. A call has in its arguments how long it was queued;
    - a row for each event loop, with a tick when an item comes and a tick when its caller gets the
      outcome. Arrows lead from the first tick to the batch and from the batch to the second tick;
    - a bar for each item's wait in a queue;
    - the stalls of each event loop that makes calls: a timer ran 5 ms or more too late. A stall is
      drawn up to 20 ms too short; a stall of 25 ms or more is always seen.

    What still runs at the end of the block is drawn up to there, and marked `unfinished`. Events
    are kept in memory, the latest `max_events` of them (calls, batches, items and stalls; about
    200 bytes each), and written at the end of the block. Use `async with` on an event loop: the
    file is then written on a thread. Plain `with` blocks while it writes (1 s for 100,000 items).

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
    """The result of `trace`: it records between entering and leaving.

    Args:
        path: The file.
        max_events: How many events are kept.
    """

    def __init__(self, path: str, max_events: int) -> None:
        self._path = path
        self._file: TextIO | None = None
        self._process = 0
        self._began = 0.0
        self._recording = False
        self._events: deque[_Bar | _Item] = deque(maxlen=max_events)
        self.record = self._events.append
        """Keeps an event; the oldest event is dropped if there are too many."""
        self.running: dict[CallInfo | BatchInfo, _Bar] = {}
        """The calls and batches that have not ended."""
        self.loops: dict[int, _Row] = {}
        """The row of the event loop of each thread."""
        self._rows: dict[Any, _Row] = {}
        self._heartbeats: dict[Waker, Repeating] = {}
        self._makers = partial(_Calls, self), partial(_Batches, self)

    # Entering and leaving.

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
            # Copies, because the events of their ends may still come.
            _Bar(bar.row, bar.name, {**bar.args, "unfinished": True}, bar.start, now, bar.arrivals)
            for bar in self.running.copy().values()
            if bar.row is not None and not bar.end
        ]

    def _write(self, unfinished: list[_Bar]) -> None:
        file = self._file
        if file is None or os.getpid() != self._process:
            return  # in a forked child the file is the parent's
        events = self._events
        if len(events) == events.maxlen:
            logger.warning(
                "%s has only the latest %d events: see max_events", self._path, events.maxlen
            )
        bars, items = list[_Bar](), list[_Item]()
        while events:  # not by iteration, because late events may still come
            event = events.popleft()
            if isinstance(event, _Bar):
                bars.append(event)
            else:
                items.append(event)
        with file:
            lines = _JsonEvents(self._began).events(self.loops, bars + unfinished, items)
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n' + next(lines))
            file.writelines(f",\n{line}" for line in lines)
            file.write("\n]}\n")

    # For the observers.

    def see_loop(self) -> None:
        """Watch the event loop of this thread, if there is one."""
        waker = waker_here() if self._recording and current_worker() is None else None
        if waker is not None and waker not in self._heartbeats:
            thread = current_thread()
            name = f"event loop in {thread.name}"
            self.loops.setdefault(get_ident(), _Row(name))
            row = _Row(f"{name}: stalls", of_loop=True)
            self._rows.setdefault(("stalls", thread), row)
            self._heartbeats[waker] = Repeating(_BEAT, partial(self._look_for_stall, waker))

    def _look_for_stall(self, waker: Waker | None) -> None:
        """Record a stall if the heartbeat of `waker`, this thread's loop, is late."""
        if waker is None or waker not in self._heartbeats:
            return
        heartbeat = self._heartbeats[waker]
        if (late := heartbeat.late) >= _STALL:
            row, now = self._rows["stalls", current_thread()], monotonic()
            self.record(_Bar(row, "stall", {}, now - late, now))
        if not self._recording:  # the block has ended
            heartbeat.cancel()

    def row_here(self, batcher: str = "") -> _Row:
        """The row of the worker that this thread serves.

        On an event loop: the row of the batches of `batcher`.
        """
        worker = current_worker()
        if worker is None:
            return self._rows.setdefault(batcher, _Row(f"{batcher} on event loops"))
        if worker not in self._rows:
            name, numbered = worker.label, worker.device.index is not None
            # `process:0/cpu`, `cuda:0`; `cpu:1` for the worker with index 1
            name = name if numbered or "/" in name else f"{name}:{worker.index}"
            self._rows.setdefault(worker, _Row(name))
        return self._rows[worker]


class _Calls(ExecutorObserver):
    """Records the calls of one executor.

    Args:
        trace: Keeps them.
        name: Of no use: executors have no names.
    """

    def __init__(self, trace: Trace, name: str) -> None:
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
            bar.row = self._trace.row_here()

    def completed(self, call: CallInfo, error: BaseException | None) -> None:
        bar = self._trace.running.pop(call, None)
        if bar is not None and bar.row is not None:
            _finish(bar, monotonic(), error)
            self._trace.record(bar)


def _name_of_call(fn: Any) -> str | None:
    """The name of a call's bar; None for a call that takes a batch, because the batch is drawn."""
    function = unwrapped(fn)
    if getattr(function, "__func__", None) is WorkerPart._first_step:
        return None
    owner = getattr(function, "__self__", None)
    return owner.name if isinstance(owner, WorkerStage) else name_of(function).strip("_")


def _finish(bar: _Bar, end: float, error: BaseException | None) -> None:
    if error is not None:
        bar.args["error"] = type(error).__qualname__
    bar.end = end


class _Batches(BatchObserver):
    """Records the batches and items of one batcher.

    Args:
        trace: Keeps them.
        name: The name of the batcher.
    """

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace = trace
        self._name = name
        self._record, self._loops = trace.record, trace.loops

    def start(self, batch: BatchInfo) -> None:
        row, items = self._trace.row_here(self._name), batch.items
        args: dict[str, Any] = {"batcher": self._name, "size": len(items)}
        if items[0].key is not None:
            args["key"] = repr(items[0].key)[:100]
        if batch.replica is not None:
            args["replica"] = batch.replica
            row.replicas.add(batch.replica)
        name = f"{self._name} x {len(items)}"
        arrivals = [item.arrived for item in items]
        self._trace.running[batch] = _Bar(row, name, args, batch.began, arrivals=arrivals)

    def ended(self, batch: BatchInfo, error: BaseException | None) -> None:
        bar = self._trace.running.pop(batch, None)
        if bar is not None:
            bar.args.update(outputs=batch.outputs, errors=batch.errors)
            _finish(bar, batch.began + batch.seconds, error)
            self._trace.record(bar)

    def completed(self, item: ItemInfo, error: BaseException | None) -> None:
        thread = get_ident()
        if thread not in self._loops:
            self._trace.see_loop()
        outcome = "completed" if error is None else outcome_of(item, error)
        self._record((self._name, thread, item.arrived, monotonic(), outcome))


class _JsonEvents:
    """Makes the JSON of the events of a file, in Chrome's "Trace Event Format".

    A bar is a complete event (X) on a thread of the format, here a lane, where bars are disjoint or
    nested. The arrows of an item are flow events (s, t, f) with its number; each belongs to the bar
    that begins at its time. The wait of an item is a pair of asynchronous events (b, e).

    Args:
        began: The time 0 of the file, by `time.monotonic`.
    """

    def __init__(self, began: float) -> None:
        self._began = began
        self._process = os.getpid()
        self._lanes = 0
        self._titles: Counter[str] = Counter()

    def events(
        self, loops: Mapping[int, _Row], bars: Iterable[_Bar], items: Sequence[_Item]
    ) -> Iterator[str]:
        """The events. Each bar comes before the arrows that belong to it.

        Args:
            loops: The row of the event loop of each thread.
            bars: The bars.
            items: The items that have ended.
        """
        yield self._metadata("process_name", 0, name=f"aiopar, process {self._process}")
        lanes: dict[int, int] = {}
        for thread in dict.fromkeys(item[1] for item in items):
            # None: its items were left behind by a loop that was closed.
            loop = loops.get(thread)
            lanes[thread] = yield from self._new_lane("event loop" if loop is None else loop.name)
        by_row: defaultdict[_Row | None, list[_Bar]] = defaultdict(list)
        for bar in bars:
            by_row[bar.row].append(bar)
        rows = [row for row in by_row if row is not None]
        for row in sorted(rows, key=lambda row: (not row.of_loop, row.title)):
            yield from self._row(row.title, by_row[row])
        # An item that was in several batches gets an arrow to the last one.
        batches = {arrived: bar for bar in bars for arrived in bar.arrivals}
        for number, item in enumerate(items, start=1):
            yield from self._item(number, item, lanes[item[1]], batches.get(item[2]))

    def _row(self, title: str, bars: list[_Bar]) -> Iterator[str]:
        """The bars of one row, in as few lanes as hold them."""
        lanes: list[tuple[int, list[_Bar]]] = []
        """The number of each lane, and the bars that are open in it, the innermost last."""
        for bar in sorted(bars, key=lambda bar: (bar.start, -bar.end)):
            for bar.lane, outer in lanes:
                while outer and outer[-1].end <= bar.start:
                    outer.pop()
                if not outer or outer[-1].may_contain(bar):
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
        """The events that name a new lane; returns its number."""
        self._lanes += 1
        self._titles[title] += 1
        count = self._titles[title]
        name = title if count == 1 else f"{title} ({count})"
        yield self._metadata("thread_name", self._lanes, name=name)
        yield self._metadata("thread_sort_index", self._lanes, sort_index=self._lanes)
        return self._lanes

    def _item(self, number: int, item: _Item, lane: int, batch: _Bar | None) -> Iterator[str]:
        """The ticks, the arrows and the wait of one item, whose loop has this lane."""
        batcher, _, arrived, ended, outcome = item
        name, came, left = json.dumps(batcher), self._nanoseconds(arrived), self._nanoseconds(ended)
        tick = f',"dur":{_TICK / 1e3:.3f},"args":{{"item":{number}}}'
        yield self._event("X", name, lane, came, tick)
        yield self._event("X", json.dumps(f"{batcher}: {outcome}"), lane, left, tick)
        number_ = f',"cat":"item","id":{number}'
        yield self._event("s", name, lane, came, number_)
        if batch is not None:
            start = self._nanoseconds(batch.start)
            yield self._event("t", name, batch.lane, start, number_ + ',"bp":"e"')
        yield self._event("f", name, lane, left, number_ + ',"bp":"e"')
        wait = json.dumps(f"{batcher}: queue")
        waited = left if batch is None else self._nanoseconds(batch.start)
        yield self._event("b", wait, lane, came, number_)
        yield self._event("e", wait, lane, waited, number_)

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
