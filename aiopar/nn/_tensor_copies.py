"""Copies of tensors for other replicas, and the evidence that they still equal their originals."""

import operator
import weakref
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._devices import current_stream, is_accelerator

_device = operator.attrgetter("device")
_traits = operator.attrgetter("_version", "requires_grad")


class Target(NamedTuple):
    """Where copies go: a device; `shares`: a tensor that is there already is used as it is."""

    device: torch.device
    shares: bool

    def needs_copy(self, tensor: Tensor) -> bool:
        return not self.shares or tensor.device != self.device


class TensorCopies:
    """For each target, the copies of some tensors, by the `id` of the original.

    A copy holds while nothing has written to it or to its original: `_version`, address, storage
    and `requires_grad` of both are as they were. A write that leaves no such trace is not seen:
    one through `.data`, NumPy or a custom kernel, and any to a tensor that was made in inference
    mode (it has no version).

    Not thread-safe: its owner has a lock.
    """

    __slots__ = (
        "_homes",
        "_marks",
        "_owners",
        "_storages",
        "_targets",
        "_tensors",
        "_watched",
        "maps",
    )

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets
        self._tensors: Sequence[Tensor] = ()
        self.maps: list[dict[int, Tensor]] = [{} for _ in targets]
        self._forget()

    def _forget(self) -> None:
        # Parallel lists, for speed: the originals that have copies, then the copies; whose each
        # is (the id of the original); and what each looked like when it was known to hold.
        self._watched: list[Tensor] = []
        self._owners: list[int] = []
        self._marks: list[object] = []
        self._storages: list[weakref.ref[torch.UntypedStorage] | None] = []
        self._homes: list[torch.device] | None = None

    def copied(self) -> set[int]:
        """The ids of the originals that have a copy."""
        return set(self._owners)

    def hold(self) -> bool:
        """Whether all copies hold, and all tensors are on the devices they were on."""
        return (
            list(map(_device, self._tensors)) == self._homes
            and _marks(self._watched) == self._marks
            and all(map(_is_alive, self._storages))
        )

    def renew(self, tensors: Sequence[Tensor], *, everything: bool = False) -> None:
        """Copy `tensors` where there is no copy that holds; `settle` must follow.

        No copy is written to: a call may be computing with it. Those that do not hold are let go
        one by one, so that two sets of weights are never needed at once.
        """
        holding = set() if everything else self._holding()
        self._forget()  # a copy may fail (out of memory): until `settle`, nothing holds
        self._tensors = tensors
        # Looked at before they are read: what is written meanwhile is seen by the next call.
        originals = [t for t in tensors if any(to.needs_copy(t) for to in self._targets)]
        self._watch(originals, map(id, originals))
        for index, target in enumerate(self._targets):
            old = self.maps[index]
            made = self.maps[index] = dict[int, Tensor]()
            for tensor in filter(target.needs_copy, tensors):
                copy = old.pop(id(tensor), None)
                if id(tensor) not in holding:
                    copy = None
                made[id(tensor)] = _leaf(tensor, target.device) if copy is None else copy

    def settle(self) -> None:
        """From here on the copies, too, must stay as they are.

        Blocks until they are complete: the next call finds that they hold, and computes with them
        on other streams, at once.
        """
        for made in self.maps:
            synchronize(made.values())
            self._watch(made.values(), made)
        self._homes = list(map(_device, self._tensors))

    def _watch(self, tensors: Iterable[Tensor], owners: Iterable[int]) -> None:
        self._owners += owners
        found = list(tensors)
        self._watched += found
        self._marks += _marks(found)
        self._storages += map(_storage, found)

    def _holding(self) -> set[int]:
        """The ids of the originals that have not changed, nor any of their copies."""
        if self._homes is None:
            return set()
        now = _marks(self._watched)
        changed = {
            owner
            for owner, old, new, storage in zip(
                self._owners, self._marks, now, self._storages, strict=True
            )
            if old != new or not _is_alive(storage)
        }
        return self.copied() - changed


def synchronize(tensors: Iterable[Tensor]) -> None:
    """Block until what this thread has launched on the devices of `tensors` is done."""
    for device in filter(is_accelerator, {tensor.device for tensor in tensors}):
        current_stream(device).synchronize()


def copied(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on `device`, in memory of its own."""
    # In its place by `clone`: `to(copy=True)` cannot copy what is in MKLDNN's layout.
    return tensor.clone() if tensor.device == device else tensor.to(device, copy=True)


def _leaf(original: Tensor, device: torch.device) -> Tensor:
    """A copy that is to autograd what the original is: a leaf, asking for gradients or not."""
    copy = copied(original.detach(), device)
    if isinstance(original, nn.Parameter):
        return nn.Parameter(copy, original.requires_grad)
    return copy.requires_grad_(original.requires_grad)


def _marks(tensors: Sequence[Tensor]) -> list[object]:
    try:
        return list(zip(map(_traits, tensors), map(Tensor.data_ptr, tensors), strict=True))
    except RuntimeError:
        return [_mark(tensor) for tensor in tensors]


def _mark(tensor: Tensor) -> object:
    # No version: made in inference mode. No address: sparse, and others without one storage.
    version = None if tensor.is_inference() else tensor._version
    storage = _storage(tensor)
    return (version, tensor.requires_grad), None if storage is None else tensor.data_ptr()


def _storage(tensor: Tensor) -> "weakref.ref[torch.UntypedStorage] | None":
    """Dead when the storage is freed: after that its address may be that of another one.

    `module.half()` and `.float()` between two calls: same version, often the same address, other
    weights.
    """
    try:
        return weakref.ref(tensor.untyped_storage())
    except RuntimeError:  # sparse, and others without a storage
        return None


def _is_alive(storage: "weakref.ref[torch.UntypedStorage] | None") -> bool:
    return storage is None or storage() is not None
