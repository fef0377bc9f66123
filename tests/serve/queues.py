"""A queue to test, and items with the attributes that it reads."""

from collections.abc import Hashable
from dataclasses import dataclass

from aiopar.serve._queue import RequestQueue


@dataclass(eq=False)
class Item:
    name: str = ""
    key: Hashable = None
    priority: int = 0
    cost: float = 1.0

    @property
    def group(self) -> Hashable:
        return self.key


Queue = RequestQueue[Item]
