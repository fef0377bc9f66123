"""Batches: many items to one nested tensor for a function, and its outputs back to one an item."""

from ._collate import collate as collate
from ._pad_collate import pad_collate as pad_collate
from ._unbatch import check_batched as check_batched, unbatch as unbatch
