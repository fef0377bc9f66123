"""What blocks of code set for a thread, beside the state that travels with calls.

Dispatch modes (`FlopCounterMode`, `FakeTensorMode`, ...), disabled saved-tensor hooks, and whether
backward may use several threads. They go to no other thread, and no code of others is to be run in
them.
"""

from typing import Any

import torch
from torch.utils import _python_dispatch

_dispatch_stack_length = torch._C._len_torch_dispatch_stack
_hooks_disabled_message = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
_is_multithreading_enabled = torch._C._is_multithreading_enabled


class Modes:
    """Those that a thread was in: `put` makes the calling thread be in them, which is in none."""

    __slots__ = ("_dispatch", "_message", "_multithreading")

    def __init__(self) -> None:
        """Take all of them off the calling thread."""
        self._dispatch: Any = _python_dispatch._disable_current_modes()
        self._dispatch.__enter__()
        self._message = _hooks_disabled_message()
        if self._message is not None:
            torch._C._autograd._saved_tensors_hooks_enable()
        self._multithreading = _is_multithreading_enabled()
        torch._C._set_multithreading_enabled(True)

    def put(self) -> None:
        """Have the calling thread be in them; once."""
        torch._C._set_multithreading_enabled(self._multithreading)
        if self._message is not None:
            torch._C._autograd._saved_tensors_hooks_disable(self._message)
        self._dispatch.__exit__(None, None, None)


def in_modes() -> bool:
    """Whether the calling thread is in any."""
    return bool(
        _dispatch_stack_length()
        or _hooks_disabled_message() is not None
        or not _is_multithreading_enabled()
    )


def take_modes() -> Modes | None:
    """Have the calling thread be in none; those that it was in, None if there were none."""
    return Modes() if in_modes() else None
