"""Generators for `DeviceExecutor.iterate`, and the thread state that they may leave behind."""

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import torch

VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("variable", default=0)


def autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def torch_state() -> tuple[Any, ...]:
    """The torch state of this thread; the autocast nesting comes last."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.empty(0).device.type,
        autocast_nesting(),
    )


def thread_state() -> tuple[Any, ...]:
    """The torch state of this thread and a context variable."""
    return (*torch_state(), VARIABLE.get())


class Recorder:
    """A generator function that records the steps and the end of its generator."""

    def __init__(self, items: int = 3) -> None:
        self.items = items
        self.begun = 0
        self.closed_in: str | None = None
        self.closed = threading.Event()

    def __call__(self) -> Iterator[int]:
        try:
            for n in range(self.items):
                self.begun += 1
                yield n
        finally:
            self.closed_in = threading.current_thread().name
            self.closed.set()
