"""`Pace`: whether the replicas of a module run at once or take turns."""

import math
from collections.abc import Iterable
from typing import Self

from ..executor._turns import Report, Turns

# Of so many calls, the first few find out what is faster; inputs change.
_PERIOD = 256
_SAMPLES = 5
# Run at once, they computed in so many threads at a time, on average. About one: turns may be
# faster. In less they waited for something, in more it was worth while.
_FEWEST_THREADS, _MOST_THREADS = 0.75, 1.5
# Turns have to be faster by so much, as nothing is gained in turn where the cores are shared with
# another program: there, what has computed at once seemed to have computed one at a time.
_GAIN = 0.9
# A replica waits no longer for its turn than so many times what all have taken at once, and no
# longer than so many seconds: another may wait for it in a way that nobody sees.
_PATIENCE = 2
_LONGEST_WAIT = 0.25


class Pace:
    """Finds out, from call to call of one module, whether its replicas are faster in turn.

    The interpreter runs one thread at a time. Replicas that spend their time in it (a forward of
    many small operators) hand it to each other at every operator, which takes longer than the
    operators do. Those that compute within operators are faster at once.

    So the first calls of each period run at once and are measured. If they have computed in about
    one thread at a time, the next ones are in turn; the others go the way that was faster. Any
    thread may ask and report at any time: a sample that is lost or late does no harm.
    """

    def __init__(self) -> None:
        self._number = -_SAMPLES  # the first calls of all set up what others find: not measured
        self._forget()

    def _forget(self) -> None:
        self._at_once: list[tuple[float, float]] = []
        self._in_turn: list[tuple[float, float]] = []
        self._trials = 0

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()  # a copy, on another machine perhaps, finds out for itself

    def turns(self, count: int) -> Turns | None:
        """Those of the next call, of `count` replicas; None: they run at once."""
        number = self._number
        self._number = number + 1 if number + 1 < _PERIOD else 0
        if number < 0:
            return None
        if number == 0:
            self._forget()
        if len(self._at_once) < _SAMPLES:
            # It may take more calls than that: some are cancelled, and of others a replica has
            # returned before the next one's worker was free.
            return Turns(count, report=_into(self._at_once))
        seconds, threads = map(_typical, zip(*self._at_once, strict=True))
        if not _FEWEST_THREADS <= threads <= _MOST_THREADS:
            return None
        limit = min(_PATIENCE * seconds, _LONGEST_WAIT)
        if self._trials < _SAMPLES:
            self._trials += 1
            return Turns(count, limit=limit, report=_into(self._in_turn))
        in_turn = _typical(taken for taken, _ in tuple(self._in_turn))
        return Turns(count, limit=limit) if in_turn < _GAIN * seconds else None


def _into(samples: list[tuple[float, float]]) -> Report:
    # Of this period: those of a call that ends in the next one go nowhere.
    return lambda seconds, threads: samples.append((seconds, threads))


def _typical(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.inf
