"""How large a batch fits into memory, learned from those that did not."""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

_MOST_KEYS = 1024
_FIRST_TRIAL = 32
_LAST_TRIAL = 4096


@dataclass(slots=True)
class _Size:
    limit: int
    """The most items that a batch may have."""
    good: int = 0
    """The most that have fitted since the last that did not."""
    successes: int = 0
    """Batches as large as the limit that fitted, since it was set."""
    trial: int = _FIRST_TRIAL
    """After how many of them a larger batch is tried."""


class LearnedSizes:
    """The most items of a batch, for each key that has run out of memory.

    Halved when a batch does not fit. It grows by an eighth after 32 batches that did; if that was
    too much, it falls back to what fitted, and the next trial comes after twice as many. When as
    many of `max_batch_size` have fitted again, the key is forgotten. Its owner holds a lock around
    each call.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size
        # As many as there are shapes, adapters, ...: the one that failed longest ago is forgotten.
        self._sizes: OrderedDict[Hashable, _Size] = OrderedDict()

    def limit(self, key: Hashable) -> int:
        """The most items that a batch of `key` may have."""
        size = self._sizes.get(key)
        return self._max_batch_size if size is None else size.limit

    def out_of_memory(self, key: Hashable, count: int) -> None:
        """A batch of `count` items did not fit."""
        size = self._sizes.setdefault(key, _Size(count))
        self._sizes.move_to_end(key)
        if len(self._sizes) > _MOST_KEYS:
            self._sizes.popitem(last=False)
        if count <= size.limit:
            grew = count // 2 <= size.good < count
            size.limit = size.good if grew and size.good else max(1, count // 2)
            size.trial = min(size.trial * 2, _LAST_TRIAL) if grew and size.good else _FIRST_TRIAL
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
