"""Kept values: what many calls use, and each host gets once: weights, functions."""

import threading
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Generic, NoReturn, TypeVar

import torch

T = TypeVar("T")


class Kept(Generic[T]):
    """Stands for a value in the arguments of calls: the host puts its own copy of it there.

    The value is packed when the first call uses it, or by `pack`; later changes are not seen. When
    this object is gone, the hosts forget their copies.

    Args:
        value: The value.
        replica: Whether a module is moved to the device of its host, and needs no gradients.
        pack: Makes the form in which the value goes to hosts.
    """

    def __init__(self, value: T, replica: bool, pack: Callable[[T], tuple[str, Any]]) -> None:
        self.replica = replica
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

    def again(self) -> "Kept[T]":
        """Stands for another copy of the packed value: hosts load it anew."""
        _, form = self.pack()
        again: Kept[T] = Kept(None, self.replica, lambda _: (unique_key(), form))  # type: ignore[arg-type]  # packed already
        return again

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Look callable to checks, as the value does; only its copies on hosts are called."""
        raise TypeError("a kept value can be called on its hosts only")

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

    def __init__(self, error: BaseException) -> None:
        self.error = error


def keep(key: str, load: Callable[[], Any], replica_on: torch.device | None) -> None:
    """Load and keep a value; on a host. Its error is raised by the calls that use the value.

    Args:
        key: Its key.
        load: Makes it.
        replica_on: Where a module runs as a replica. None: it is none.
    """
    try:
        value = load()
        if replica_on is not None and isinstance(value, torch.nn.Module):
            value = value.to(replica_on).requires_grad_(False)
    except BaseException as error:  # noqa: BLE001  # raised by `kept_value`
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
