"""How many items fit into memory: the batch sizes that a batcher has learned."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_MOST_KEYS = 1024
_FIRST_TRIAL = 32
_LAST_TRIAL = 4096


@dataclass(slots=True)
class _LearnedSize:
    limit: int
    """The most items in a batch."""
    good: int = 0
    """The most items that have fitted since the last failure."""
    successes: int = 0
    """How many batches of `limit` items have fitted since the limit was set."""
    trial: int = _FIRST_TRIAL
    """After how many such batches a larger one is tried."""


class LearnedSizes:
    """The most items in a batch, for each key whose batches have run out of memory.

    A batch that does not fit halves the limit. After 32 batches that fit, the limit grows by an
    eighth. If that was too much, the limit falls back to what fitted, and the next trial comes
    after twice as many batches. When `max_batch_size` items have fitted again the key is forgotten.
    The owner serializes the calls.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        # There may be any number of keys: the one that failed longest ago is forgotten.
        self._sizes: OrderedDict[Hashable, _LearnedSize] = OrderedDict()

    def limit(self, key: Hashable) -> int:
        """The most items in a batch of `key`."""
        size = self._sizes.get(key)
        return self._max_batch_size if size is None else size.limit

    def out_of_memory(self, key: Hashable, count: int) -> None:
        """A batch of `count` items did not fit."""
        size = self._sizes.setdefault(key, _LearnedSize(count))
        self._sizes.move_to_end(key)
        if len(self._sizes) > _MOST_KEYS:
            self._sizes.popitem(last=False)
        if count > size.limit:
            return
        grew = size.good > 0 and count // 2 <= size.good < count
        size.limit = size.good if grew else max(1, count // 2)
        size.trial = min(size.trial * 2, _LAST_TRIAL) if grew else _FIRST_TRIAL
        size.good = min(size.good, size.limit)
        size.successes = 0

    def succeeded(self, key: Hashable, count: int) -> None:
        """A batch of `count` items fitted."""
        size = self._sizes.get(key)
        if size is None:
            return
        size.good = max(size.good, count)
        if count < size.limit:  # says nothing of a larger one
            return
        size.successes += 1
        if size.successes >= size.trial:
            size.successes = 0
            if size.limit >= self._max_batch_size:
                del self._sizes[key]
            size.limit = min(size.limit + max(1, size.limit // 8), self._max_batch_size)
