"""A queue to test, and items with the attributes that it reads."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiopar.serve._queue import RequestGroup, RequestQueue


@dataclass(eq=False)
class Item:
    name: str = ""
    key: Hashable = None
    priority: int = 0
    cost: float = 1.0
    group: RequestGroup = field(init=False)


class Queue(RequestQueue[Item]):
    """Gives its items the group of their key."""

    def __init__(
        self, *, max_batch_size: int, limits: Mapping[Any, int] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.size = max_batch_size
        self.groups = {
            key: RequestGroup(min(limit, max_batch_size)) for key, limit in (limits or {}).items()
        }

    def push(self, item: Item) -> None:
        item.group = self.group_of(item)
        super().push(item)

    def group_of(self, item: Item) -> RequestGroup:
        return self.groups.setdefault(item.key, RequestGroup(self.size, item.key))

    def batches_before(self, item: Item) -> int:
        item.group = self.group_of(item)
        return super().batches_before(item)
