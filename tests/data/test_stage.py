"""One stage by itself: where outcomes go when several threads fill it."""

import threading
from typing import Any

from aiopar.data._outcome import END, PENDING, Failure
from aiopar.data._stages import Stage


class _Numbers(Stage):
    """Its pumps are whoever calls `claim` and `leave`."""

    def __init__(self) -> None:
        super().__init__("numbers", concurrency=2, bound=9, in_order=True)
        self._left = iter(range(9))

    def _next(self) -> Any:
        return next(self._left, END)

    def _start(self) -> None:
        pass


class _Held(int):
    """A count: the thread that is to be held waits in the middle of counting on."""

    def __new__(cls, value: int, thread: threading.Thread) -> "_Held":
        self = super().__new__(cls, value)
        self.thread = thread
        self.counting, self.go_on = threading.Event(), threading.Event()
        return self

    thread: threading.Thread
    counting: threading.Event
    go_on: threading.Event

    def __add__(self, other: int) -> int:
        if threading.current_thread() is self.thread:
            self.counting.set()
            assert self.go_on.wait(30)
        return int(self) + other


class _Announcing:
    """A lock that says so when a certain thread comes to it."""

    def __init__(self, thread: threading.Thread, came: threading.Event) -> None:
        self._lock = threading.Lock()
        self._thread, self._came = thread, came

    def __enter__(self) -> None:
        if threading.current_thread() is self._thread:
            self._came.set()
        self._lock.acquire()

    def __exit__(self, *exc_info: object) -> None:
        self._lock.release()


def test_a_failure_and_an_item_that_is_claimed_meanwhile_have_a_place_each() -> None:
    stage, claimed, came = _Numbers(), list[Any](), threading.Event()

    def fail() -> None:
        stage.fail(LookupError("mine"))
        came.set()

    claiming = threading.Thread(target=lambda: claimed.append(stage.claim()))
    failing = threading.Thread(target=fail)
    stage.claimed = count = _Held(0, claiming)
    stage._lock = _Announcing(failing, came)  # type: ignore[assignment]
    claiming.start()
    assert count.counting.wait(30)
    failing.start()
    # Either it waits for its turn, or it has jumped the queue.
    assert came.wait(30)
    count.go_on.set()
    claiming.join(30)
    failing.join(30)

    [(cell, item, position)] = claimed
    assert (item, position, stage.claimed) == (0, 0, 2)
    assert stage.pull() is PENDING, "the failure is behind the item"
    stage.leave(cell, item)
    assert stage.pull() == 0
    failed = stage.pull()
    assert type(failed) is Failure
    assert (failed.position, failed.fatal) == (1, True)
    assert stage.pull() is END
