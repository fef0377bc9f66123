"""Notices optimizer steps, because some of them leave no trace on the weights.

Ordinary in-place operations raise a tensor's `_version`. The fused kernels
(`torch.optim.Adam(..., fused=True)`, and those of other packages) do not: measured on torch 2.13.
Copies of weights would be out of date without a sign. torch tells its global hooks of every step.
"""

import os
import threading
from collections.abc import Iterable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook


class _Steps:
    def __init__(self) -> None:
        self.latest = 0
        self._lock = threading.Lock()
        # By the parameter's id, and never forgotten: an optimizer may be gone when it is asked
        # whether it made a step. An id that is used again is one needless copy.
        self._last: dict[int, int] = {}

    def note(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        with self._lock:
            number = self.latest + 1
            for group in optimizer.param_groups:
                self._last.update(dict.fromkeys(map(id, group["params"]), number))
            self.latest = number

    def forget_after_fork(self) -> None:
        """In a child process: another thread of the parent may have been in `note`."""
        self._lock = threading.Lock()

    def last_of(self, tensors: Iterable[int]) -> int:
        return max((self._last.get(tensor, 0) for tensor in tensors), default=0)


_steps = _Steps()
# At import, once: torch iterates its hooks without a lock, so that adding one later could break a
# step that another thread is in.
register_optimizer_step_post_hook(_steps.note)

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_steps.forget_after_fork)


def latest_step() -> int:
    """The number of the last step of any optimizer in this process."""
    return _steps.latest


def stepped_since(number: int, tensors: Iterable[int]) -> bool:
    """Whether one of the tensors (by `id`) was in a step of an optimizer after step `number`."""
    return _steps.last_of(tensors) > number
