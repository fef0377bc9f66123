"""Batches: many items to one nested tensor for a function, and its outputs back to one an item."""

from ._collate import collate
from ._pad_collate import pad_collate
from ._unbatch import check_batched, unbatch

__all__ = ["check_batched", "collate", "pad_collate", "unbatch"]
