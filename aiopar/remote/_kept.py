"""Kept values: what many calls use, and each host gets once: weights, functions."""

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch

T = TypeVar("T")


class Kept(Generic[T]):
    """Stands for a value in the arguments of calls: the host puts its own copy of it there.

    The value is packed when the first call uses it, or by `pack`; later changes are not seen. When
    this object is gone, the hosts forget their copies.

    Args:
        value: The value.
        device: Where a module is moved to on its host. None: it stays where it is.
        pack: Makes the form in which the value goes to hosts.
    """

    def __init__(
        self, value: T, device: torch.device | None, pack: Callable[[T], tuple[str, Any]]
    ) -> None:
        self.device = device
        self._pack: Callable[[T], tuple[str, Any]] | None = pack
        self._value: T | None = value
        self._packed: tuple[str, Any] = ("", None)
        self._lock = threading.RLock()  # the value's own code may use it

    def pack(self) -> tuple[str, Any]:
        """The key, and the form in which the value goes to hosts."""
        with self._lock:
            if self._pack is not None:
                self._packed = self._pack(self._value)  # type: ignore[arg-type]  # not packed yet
                self._pack = self._value = None
            return self._packed

    @property
    def key(self) -> str:
        """The key under which hosts keep the value."""
        return self.pack()[0]


def unique_key() -> str:
    """A key that no other value has, on any machine."""
    return uuid.uuid4().hex


# On the host.

_values: dict[str, Any] = {}


class _Failed:
    """In place of a value that could not be loaded."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def keep(key: str, load: Callable[[], Any], device: torch.device | None) -> None:
    """Load and keep a value; on a host. Its error is raised by the calls that use the value."""
    try:
        value = load()
        if device is not None and isinstance(value, torch.nn.Module):
            value = value.to(device)
    except Exception as error:  # noqa: BLE001  # raised by `kept_value`
        value = _Failed(error)
    _values[key] = value


def kept_value(key: str) -> Any:
    """A value that this host keeps."""
    value = _values[key]
    if isinstance(value, _Failed):
        raise value.error
    return value


def forget(keys: Iterable[str]) -> None:
    """Drop values; on a host."""
    for key in keys:
        _values.pop(key, None)
