"""The multiprocess mode of prometheus-client: one scrape shows the metrics of all processes.

An environment variable names a folder. Each process writes its metrics to files in that folder, one
file per kind of metric. The process that is scraped reads all files.
"""

import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._base.forking import Registry, held_across_fork
from .._base.tracebacks import logger

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Sample

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_INTERVAL = 1.0
_REQUESTS = "batcher_requests"
_writing = held_across_fork()


def shared_folder() -> Path | None:
    """The folder of the files, which must exist; None without the multiprocess mode."""
    folder = os.environ.get(_FOLDER)
    if folder and not Path(folder).is_dir():
        raise ValueError(
            f"{_FOLDER} must name a folder, got {folder!r}: create it, empty, before the start"
        )
    return Path(folder) if folder else None


def _stored(family: "Metric") -> Iterator["Sample"]:
    """The samples of a metric as the files have them: a bucket has only its own count."""
    below = 0.0
    for sample in family.samples:
        if family.type != "histogram" or sample.name.endswith("_sum"):
            yield sample
        elif sample.name.endswith("_bucket"):
            yield sample._replace(value=sample.value - below)
            below = 0.0 if sample.labels["le"] == "+Inf" else sample.value


def _mode_of(gauge: str) -> str:
    """How the values of all processes become one; those of a process that has ended are left out.

    Ratios have no sum. Of durations, the longest counts.
    """
    if gauge.endswith("_ratio"):
        return "liveall"
    return "livemax" if gauge.endswith("_seconds") else "livesum"


class SharedValues:
    """The metrics of a collector in the files of this process. A thread keeps them up to date."""

    def __init__(self, collector: "Collector") -> None:
        self._collector = collector
        self._values: dict[tuple[str, ...], Any] = {}
        self._gauges: set[tuple[str, ...]] = set()
        self._process: int | None = None
        self._closed = False
        self.start()
        _all_shared_values.add(self)

    def start(self) -> None:
        """Write soon, and every second from now on, unless this process does so already.

        A forked child starts with its first request, or when it is scraped. A child without
        requests and scrapes never writes: its memory has the parent's counts, which must not be
        added again.
        """
        if self._closed or self._process == os.getpid():  # the usual case takes no lock
            return
        with _writing:
            if self._process == os.getpid():
                return
            self._process = os.getpid()
            self._ended = threading.Event()
            # A daemon, so that the process can end. This thread runs no operators.
            threading.Thread(target=self._run, name="aiopar-metrics", daemon=True).start()
            # Not `atexit`, which the processes of multiprocessing, and so of uvicorn, do not run.
            self._at_exit = Finalize(None, self.write, exitpriority=0)

    def _run(self) -> None:
        ended = self._ended
        while True:
            try:
                self.write()
            except Exception:  # noqa: BLE001  # the disk is full, ...: the thread tries again
                logger.exception("metrics could not be written to %s", os.environ.get(_FOLDER))
            if ended.wait(_INTERVAL):
                return

    def write(self) -> None:
        """Write the present values."""
        from prometheus_client.values import ValueClass

        with _writing:
            removed = self._gauges.copy()
            for family in self._collector.collect():
                mode = _mode_of(family.name)
                for sample in _stored(family):
                    names, labels = [*sample.labels], [*sample.labels.values()]
                    key = (sample.name, *labels)
                    if key not in self._values:
                        metric = family.type, family.name, sample.name
                        self._values[key] = ValueClass(
                            *metric, names, labels, family.documentation, multiprocess_mode=mode
                        )
                    self._values[key].set(sample.value)
                    if family.type == "gauge":
                        self._gauges.add(key)
                        removed.discard(key)
            for key in removed:  # no value can be deleted from a file
                self._values[key].set(0.0)

    def close(self) -> None:
        """Write the last values."""
        self._closed = True
        if self._process == os.getpid():
            self._ended.set()
            self._at_exit.cancel()
            self.write()


_all_shared_values: Registry[SharedValues] = Registry()


def registry_of_all_processes(folder: Path) -> "CollectorRegistry":
    """A registry with the metrics of all processes, of this process as they are now."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector

    collector: Any = MultiProcessCollector(None, str(folder))  # type: ignore[no-untyped-call]
    # The collector's own `collect` reads all files, and fails if a file is empty.
    metrics = _merged(folder, "*.db")
    collector.collect = lambda: metrics
    # With `auto_describe` the registry knows the names of its metrics, and can be restricted to
    # some.
    registry = CollectorRegistry(auto_describe=True)
    registry.register(collector)
    return registry


def requests_of_all_processes() -> dict[str, float] | None:
    """How many processes run, and the requests of their batchers by outcome.

    Requests of processes that have ended count too. None if this process shares no metrics.
    """
    folder = shared_folder()
    if folder is None or not any(True for _ in _all_shared_values):
        return None
    # A user's namespace is part of the name.
    families = [one for one in _merged(folder, "counter_*.db") if one.name.endswith(_REQUESTS)]
    found: dict[str, float] = {}
    for sample in families[0].samples if families else ():
        outcome = sample.labels["outcome"]
        found[outcome] = found.get(outcome, 0.0) + sample.value
    running = {file.stem.split("_")[-1] for file in folder.glob("counter_*.db")}
    return {"processes": sum(map(_runs, running)), **found}


def _merged(folder: Path, pattern: str) -> Iterable["Metric"]:
    """The metrics in these files, of all processes."""
    from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

    for shared in _all_shared_values:
        shared.start()
        shared.write()
    written: list[str] = []
    for file in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process has just removed the file
            # gunicorn has a hook for the end of a worker; uvicorn has none.
            if file.name.startswith("gauge_live") and not _runs(pid := file.stem.split("_")[-1]):
                mark_process_dead(pid, str(folder))  # type: ignore[no-untyped-call]
            elif file.stat().st_size:  # 0 while a new process makes the file
                written.append(str(file))
    merged: Iterable[Metric] = MultiProcessCollector.merge(written)  # type: ignore[no-untyped-call]
    return merged


def _runs(pid: str) -> bool:
    try:
        if os.name == "posix":  # elsewhere signal 0 would end the process
            os.kill(int(pid), 0)
    except OSError as error:  # the process may belong to another user
        return not isinstance(error, ProcessLookupError)
    return True
