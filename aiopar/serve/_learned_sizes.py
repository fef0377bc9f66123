"""How many items fit into memory: the batch size that is learned for the requests of one key."""

_FIRST_TRIAL = 32
_LAST_TRIAL = 4096


class RequestGroup:
    """The requests with equal keys, which may share a batch, and the most that fit into one.

    A batch that does not fit halves the limit. After 32 batches that fit, the limit grows by an
    eighth. If that was too much, the limit falls back to what fitted, and the next trial comes
    after twice as many batches. When `max_batch_size` items have fitted again, all is forgotten.
    The owner serializes the calls.

    Args:
        max_batch_size: The most items in a batch, whatever fits.
    """

    __slots__ = ("_good", "_max_batch_size", "_successes", "_trial", "limit")

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        self.limit = max_batch_size
        """The most items in a batch."""
        self._good = 0
        """The most items that have fitted since the last failure."""
        self._successes = 0
        """How many batches of `limit` items have fitted since the limit was set."""
        self._trial = 0
        """After how many such batches a larger one is tried; 0: no batch has failed."""

    def out_of_memory(self, count: int) -> None:
        """A batch of `count` items did not fit."""
        if count > self.limit:
            return
        grew = self._good > 0 and count // 2 <= self._good < count
        self.limit = self._good if grew else max(1, count // 2)
        self._trial = min(self._trial * 2, _LAST_TRIAL) if grew else _FIRST_TRIAL
        self._good = min(self._good, self.limit)
        self._successes = 0

    def succeeded(self, count: int) -> None:
        """A batch of `count` items fitted."""
        if not self._trial:
            return
        self._good = max(self._good, count)
        if count < self.limit:  # says nothing of a larger one
            return
        self._successes += 1
        if self._successes >= self._trial:
            self._successes = 0
            if self.limit == self._max_batch_size:
                self._good = self._trial = 0
            self.limit = min(self.limit + max(1, self.limit // 8), self._max_batch_size)
