"""Replicas that `DataParallel` keeps between calls outside grad mode."""

import operator
import threading
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._base.forking import Registry
from ._module_copy import M, ModuleTree, TensorMap, check_placement, copied, like, synchronize


class KeptReplicas(Generic[M]):
    """Replicas of one module on several devices; weights are copied only when they have changed.

    `call_copies` gives each call shallow copies of its own, made from the module as it is at that
    moment. So plain attributes, `training` and hooks are always up to date. Attributes that
    `forward` sets are gone after the call, and other calls do not see these attributes.

    These changes are detected: an optimizer step (fused ones too), `load_state_dict`, in-place
    edits, `requires_grad_`, `.to(dtype)`, replaced, added and deleted tensors and submodules, and
    writes to the copies themselves. Call `refresh` after writes that leave no trace: through
    `.data`, NumPy or a custom kernel, and in-place edits of tensors that were made in inference
    mode. Running calls keep the tensors that they started with.

    Buffers with at most one dimension (running statistics, counters, observers) are not kept: each
    call copies them, as in torch. `F.batch_norm` writes to them without a trace.

    Copied tensors are leaves with the `requires_grad` of their originals, and never inference
    tensors. All methods are thread-safe. Deepcopy and pickle keep module and devices only.
    """

    def __init__(self, module: M, devices: Sequence[torch.device]) -> None:
        self.module = module
        self._devices = tuple(devices)
        self._lock = threading.Lock()
        self._buffers_written = False  # whether a forward may have written since the copy
        self._forget_copies()
        _all_kept.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, self._devices)

    def call_copies(self, count: int) -> list[M]:
        """Make the replicas of one call, for the first `count` devices; raise as `replicate`.

        All tensors are complete on their devices. Keep the replicas until the call's kernels have
        run: the memory of a replaced copy goes back to the stream that made the copy.
        """
        with self._lock:
            tree, tensor_maps = self._refresh_stale(), self._tensor_maps[:count]
        return [
            tree.copy({**tensors, **self._unkept_buffers(tree, tensors, index)})
            for index, tensors in enumerate(tensor_maps)
        ]

    def forward_starts(self) -> None:
        """Note that a replica that shares the module's own buffers is about to run."""
        # In training it may write to these buffers without a trace (a codebook, through `.data`).
        tree = self._tree
        if tree is not None and any(module.training for module in tree.modules):
            self._buffers_written = True

    def refresh(self) -> None:
        """Drop all copies: the next call makes new ones. Never blocks."""
        self._stepped = True  # if a copy is being made: by another thread, or below a destructor
        if self._lock.acquire(blocking=False):
            try:
                self._forget_copies()
            finally:
                self._lock.release()

    def note_step(self, stepped: set[int]) -> None:
        """Note an optimizer step on the parameters with the ids `stepped`."""
        # This takes no lock: a thread may hold the lock for long while it copies.
        if not stepped.isdisjoint(self._parameters.copied_ids):
            self._stepped = True

    def forget_after_fork(self) -> None:
        """Start anew in a forked child, if a thread of the parent held the lock."""
        if self._lock.locked():
            self._lock = threading.Lock()
            self._forget_copies()

    def _forget_copies(self) -> None:
        self._tree: ModuleTree[M] | None = None
        self._tensor_maps: list[TensorMap] = []
        self._stepped = False
        # Parameters have one copy per device, but none on the module's own device. Buffers have one
        # copy per replica, but replica 0 uses the module's buffers: what its forward writes there
        # persists.
        devices = dict.fromkeys(self._devices)
        self._parameters = _TensorCopies([_Target(device, shares=True) for device in devices])
        self._buffers = _TensorCopies(
            [_Target(device, shares=index == 0) for index, device in enumerate(self._devices)]
        )

    def _refresh_stale(self) -> ModuleTree[M]:
        tree = self._tree
        if tree is None or not tree.unchanged():
            tree = ModuleTree(self.module)
            self._copy_all(tree)
            self._tree = tree  # last: if a copy fails, the next call starts anew
        elif self._stepped or not self._parameters.are_current():
            self._copy_all(tree)
        elif self._buffers_written or not self._buffers.are_current():
            self._copy_buffers(tree)
        return tree

    def _copy_all(self, tree: ModuleTree[M]) -> None:
        check_placement([*tree.parameters, *tree.buffers], self._devices[0])
        _register_step_hook()
        # Unset before weights are read: a step that ends later sets the flag again.
        self._stepped = False
        self._tensor_maps = []  # from here on only running calls hold the old copies
        with torch.inference_mode(False), torch.no_grad():
            self._parameters.renew(tree.parameters)
            for copies in self._parameters.maps:
                tree.flatten_rnns(copies)
        self._parameters.mark_current()
        self._copy_buffers(tree)

    def _copy_buffers(self, tree: ModuleTree[M]) -> None:
        self._buffers_written = False  # before buffers are read, as in `_copy_all`
        check_placement(tree.buffers, self._devices[0])
        with torch.inference_mode(False), torch.no_grad():
            self._buffers.renew([buffer for buffer in tree.buffers if buffer.dim() > 1])
        self._buffers.mark_current()
        parameters = dict(zip(dict.fromkeys(self._devices), self._parameters.maps, strict=True))
        self._tensor_maps = [
            {**parameters[device], **buffers}
            for device, buffers in zip(self._devices, self._buffers.maps, strict=True)
        ]

    def _unkept_buffers(self, tree: ModuleTree[M], kept: TensorMap, index: int) -> TensorMap:
        """Copy the buffers that are not in `kept`; replica 0 uses the module's own."""
        if index == 0:
            return {}
        unkept = [buffer for buffer in tree.buffers if id(buffer) not in kept]
        check_placement(unkept, self._devices[0])
        with torch.inference_mode(False), torch.no_grad():
            copies = {id(buffer): _leaf(buffer, self._devices[index]) for buffer in unkept}
        synchronize(copies.values())
        return copies


_all_kept: Registry[KeptReplicas[Any]] = Registry(KeptReplicas.forget_after_fork)


@cache
def _register_step_hook() -> None:
    # Fused optimizers do not raise the version of the parameters that they write to.
    register_optimizer_step_post_hook(_note_step)


def _note_step(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    if every_kept := list(_all_kept):
        stepped = {id(tensor) for group in optimizer.param_groups for tensor in group["params"]}
        for kept in every_kept:
            kept.note_step(stepped)


class _Target(NamedTuple):
    device: torch.device
    shares: bool  # whether an original on `device` is used itself, without a copy

    def needs_copy(self, tensor: Tensor) -> bool:
        return not self.shares or tensor.device != self.device


class _TensorCopies:
    """Copies of some tensors for several targets, and whether the copies are still current.

    A copy is current while `_version`, address, storage and `requires_grad` of both the copy and
    its original stay the same. Not thread-safe: the owner holds a lock.
    """

    def __init__(self, targets: Sequence[_Target]) -> None:
        self._targets = targets
        self._originals: Sequence[Tensor] = ()
        self.maps: list[dict[int, Tensor]] = [{} for _ in targets]  # by the id of the original
        self.copied_ids: set[int] = set()  # of all originals that have a copy
        self._forget_marks()

    def _forget_marks(self) -> None:
        # The copies and their originals; the mark and storage of each tensor when the copies were
        # current.
        self._watched: list[Tensor] = []
        self._marks: list[object] = []
        self._storages: list[weakref.ref[torch.UntypedStorage]] = []
        self._devices: list[torch.device] | None = None  # of all originals

    def are_current(self) -> bool:
        return (
            list(map(_device, self._originals)) == self._devices
            and _marks(self._watched) == self._marks
            and all(storage() is not None for storage in self._storages)
        )

    def renew(self, originals: Sequence[Tensor]) -> None:
        """Copy all `originals`; call `mark_current` afterwards.

        Existing copies are not written to, because a call may be computing with them. They are
        dropped one by one, so that two sets of weights are never in memory.
        """
        self._forget_marks()  # a copy may fail (out of memory): then none is current
        self._originals = originals
        sources = [t for t in originals if any(to.needs_copy(t) for to in self._targets)]
        # Watched before the copies are made: a write that comes meanwhile makes them stale.
        self.copied_ids = set(map(id, sources))
        self._watch(sources)
        for index, target in enumerate(self._targets):
            old, self.maps[index] = self.maps[index], {}
            for tensor in filter(target.needs_copy, originals):
                old.pop(id(tensor), None)
                self.maps[index][id(tensor)] = _leaf(tensor, target.device)

    def mark_current(self) -> None:
        """Wait until the copies are complete, and watch them for changes from now on."""
        for made in self.maps:
            # Later calls use the copies on other streams without waiting.
            synchronize(made.values())
            self._watch(list(made.values()))
        self._devices = list(map(_device, self._originals))

    def _watch(self, tensors: list[Tensor]) -> None:
        self._watched += tensors
        self._marks += _marks(tensors)
        self._storages += filter(None, map(_storage, tensors))


_device = operator.attrgetter("device")
_version_and_grad = operator.attrgetter("_version", "requires_grad")


def _leaf(original: Tensor, device: torch.device) -> Tensor:
    """Make a copy that is a leaf of autograd, with the `requires_grad` of the original."""
    made = copied(original.detach(), device)
    return like(original, made, requires_grad=original.requires_grad)


def _marks(tensors: list[Tensor]) -> list[object]:
    try:
        return list(
            zip(map(_version_and_grad, tensors), map(Tensor.data_ptr, tensors), strict=True)
        )
    except RuntimeError:
        return [_mark(tensor) for tensor in tensors]


def _mark(tensor: Tensor) -> object:
    # An inference tensor has no version; a sparse tensor has no storage and no address.
    version = None if tensor.is_inference() else tensor._version
    address = None if _storage(tensor) is None else tensor.data_ptr()
    return (version, tensor.requires_grad), address


def _storage(tensor: Tensor) -> "weakref.ref[torch.UntypedStorage] | None":
    """Return a reference that dies with the storage.

    After `module.half().float()` a new storage often has the same address and version.
    """
    try:
        return weakref.ref(tensor.untyped_storage())
    except RuntimeError:  # sparse tensors have none
        return None
