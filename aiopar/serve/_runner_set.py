"""The runners of a `Batcher`: which of them are idle, and which are busy."""

from collections.abc import Iterable

from ._schedule import Runner


class RunnerSet:
    """Runners, each idle, busy or out of service.

    It has no lock: its owner lets one thread in at a time.
    """

    __slots__ = ("_all", "busy", "idle", "in_service", "started")

    def __init__(self) -> None:
        self._all: list[Runner] = []
        self.idle: list[Runner] = []  # the last to come is the first to go: it is warm
        self.busy: set[Runner] = set()
        self.started = 0
        """How many of the busy ones have been started, and have not taken their batch yet."""
        self.in_service = 0
        """How many there are, idle or busy."""

    def add(self, runners: Iterable[Runner]) -> None:
        """Have these too; `update` must follow."""
        self._all += runners

    def update(self) -> None:
        """Replicas have come or gone."""
        serving = [runner for runner in self._all if runner.in_service]
        self.in_service = len(serving)
        self.idle = [runner for runner in serving if runner not in self.busy]

    def start(self, count: int) -> list[Runner]:
        """Up to so many idle ones, which are busy now: the caller starts them."""
        chosen: list[Runner] = []
        while self.idle and len(chosen) < count:
            runner = self.idle.pop()
            self.busy.add(runner)
            chosen.append(runner)
        self.started += len(chosen)
        return chosen

    def release(self, runner: Runner) -> None:
        """`runner` has no batch any more."""
        self.busy.discard(runner)
        if runner.in_service:
            self.idle.append(runner)

    def replace(self, runner: Runner, successor: Runner) -> None:
        """Have this one instead of another, which was busy and is in service."""
        self._all[self._all.index(runner)] = successor
        self.busy.discard(runner)
        self.idle.append(successor)

    def release_all(self) -> None:
        """What they ran has gone."""
        self.busy.clear()
        self.started = 0
        self.update()
