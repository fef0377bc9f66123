"""Replicas that are kept from call to call (what `DataParallel` runs outside grad mode)."""

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Generic

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from .._base.forking import Registry, after_fork_in_child
from ._module_copy import M, ModuleTree, Target, TensorCopies, TensorMap, check_placement


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

after_fork_in_child(_steps.forget_after_fork)


def latest_step() -> int:
    """The number of the last step of any optimizer in this process."""
    return _steps.latest


def stepped_since(number: int, tensors: Iterable[int]) -> bool:
    """Whether one of the tensors (by `id`) was in a step of an optimizer after step `number`."""
    return _steps.last_of(tensors) > number


class KeptReplicas(Generic[M]):
    """The replicas of one module on some devices, their weights copied once.

    As `replicate_sync(module, devices)` each time, but weights and buffers are copied only when
    they have changed. Each call gets shallow copies of its own, made from the module as it is
    now: plain attributes (`dropout.p`), `training`, hooks, and the tensors that replicas share
    with the module are never out of date, and what `forward` sets on `self` is gone after the
    call and unseen by others.

    Seen, and copied anew: an optimizer's step (fused ones too), `load_state_dict`, in-place
    edits, `requires_grad_`, `.to(dtype)`, replaced, added and deleted tensors and submodules, and
    writes to the copies themselves. Not seen, and for `refresh`: writes that go past the version
    counter (`.data`, NumPy, custom kernels), and in-place edits of tensors that were made in
    inference mode. When only buffers have changed, only buffers are copied. Calls that are
    running keep the tensors that they started with.

    Copies are leaves with the `requires_grad` of their originals, and no inference tensors in
    whichever mode they are asked for. Any thread may call any method. Deepcopy and pickle keep
    module and devices, no replicas.

    Args:
        module: The module. It is kept alive.
        devices: One entry a replica.
        home: Where the module has to be, if given: looked at whenever something has changed.

    Attributes:
        rebuilds: How often weights were copied, or the module tree was found changed.
        buffer_refreshes: How often buffers alone were copied.

    Example:
        >>> cpu = torch.device("cpu")
        >>> kept = KeptReplicas(torch.nn.Linear(2, 1), [cpu, cpu])
        >>> _ = kept.call_copies()
        >>> first, second = kept.call_copies()
        >>> first.weight is second.weight, kept.rebuilds
        (True, 1)
    """

    __slots__ = (
        "__weakref__",
        "_buffers",
        "_devices",
        "_home",
        "_lock",
        "_module",
        "_parameters",
        "_slots",
        "_step",
        "_tree",
        "_writers",
        "_written",
        "buffer_refreshes",
        "rebuilds",
    )

    def __init__(
        self, module: M, devices: Sequence[torch.device], *, home: torch.device | None = None
    ) -> None:
        self._module = module
        self._devices = tuple(devices)
        self._home = home
        self._lock = threading.Lock()
        self._written = False
        self._writers: list[weakref.ref[nn.Module]] = []
        self.rebuilds = 0
        self.buffer_refreshes = 0
        self._drop()
        _kept.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), home=self._home), (self._module, self._devices)

    @property
    def module(self) -> M:
        """The original."""
        return self._module

    def call_copies(self) -> list[M]:
        """One replica a device, for one call.

        Copies that are made are complete on their devices when this returns. Hold on to the
        replicas until what they compute is complete too: the memory of copies that are replaced
        meanwhile goes back to the stream they were made on.

        Raises:
            TypeError, ValueError: The module cannot be replicated, as in `replicate_sync`.
            RuntimeError: It is not at home.
        """
        with self._lock:
            tree, slots = self._freshen(), self._slots
        return [tree.copy(tensors) for tensors in slots]

    def forward_runs(self, replica: nn.Module) -> None:
        """A forward is about to run that has the original's own buffers, as replica 0.

        In training it may write to them without a trace, as `F.batch_norm` does where there is no
        `nn.BatchNorm` that counts its batches: calls copy them anew, until one that begins when it
        has ended, and `replica` is gone.
        """
        tree = self._tree
        if tree is None or not self._buffers.copied():
            return
        if any(module.training for module in tree.modules):
            with self._lock:
                self._written = True
                self._writers.append(weakref.ref(replica))

    def refresh(self) -> None:
        """Forget all copies: the next call makes them anew."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        self._tree: ModuleTree[M] | None = None
        self._slots: Sequence[TensorMap] = ()
        self._step = 0
        # Parameters: one copy a device, none where the original is. Buffers: one copy a replica,
        # but replica 0 has the module's own, so that what its forward writes to them persists.
        devices = dict.fromkeys(self._devices)
        self._parameters = TensorCopies([Target(device, shares=True) for device in devices])
        self._buffers = TensorCopies(
            [Target(device, shares=index == 0) for index, device in enumerate(self._devices)]
        )

    def _freshen(self) -> ModuleTree[M]:
        """Renew what is stale."""
        step = latest_step()  # asked before weights are read: a step meanwhile is for a later call
        stepped = step != self._step and stepped_since(self._step, self._parameters.copied())
        self._writers = [writer for writer in self._writers if writer() is not None]
        # What runs may write again.
        written, self._written = self._written, bool(self._writers)
        tree = self._tree
        if tree is None or not tree.unchanged():
            tree = self._tree = self._at_home(ModuleTree(self._module))
            self._renew(tree, everything=stepped)
        elif stepped or not self._parameters.hold():
            self._renew(self._at_home(tree), everything=stepped)
        elif written or not self._buffers.hold():
            self.buffer_refreshes += 1
            self._renew_buffers(self._at_home(tree))
        self._step = step
        return tree

    def forget_after_fork(self) -> None:
        """In a child process: another thread of the parent may have been in the midst of it."""
        self._writers = []  # kept alive by the frames of threads that are not here
        if self._lock.locked():
            self._lock = threading.Lock()
            self._drop()

    def _at_home(self, tree: ModuleTree[M]) -> ModuleTree[M]:
        # Once it was found there it stays: what is moved or replaced does not hold.
        if self._home is not None:
            check_placement(tree.parameters, self._home)
            check_placement(tree.buffers, self._home)
        return tree

    def _renew(self, tree: ModuleTree[M], *, everything: bool) -> None:
        self.rebuilds += 1
        # Only calls that are running hold on to what is replaced.
        self._slots = ()
        with torch.inference_mode(False), torch.no_grad():
            self._parameters.renew(tree.parameters, everything=everything)
            for copies in self._parameters.maps:
                tree.flatten_rnns(copies)
        self._parameters.settle()
        self._renew_buffers(tree)

    def _renew_buffers(self, tree: ModuleTree[M]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            # All of them: BatchNorm's kernels update running statistics without raising their
            # version (measured, torch 2.13); only its count of batches, or a step of an optimizer,
            # tells.
            self._buffers.renew(tree.buffers, everything=True)
        self._buffers.settle()
        parameters = dict(zip(dict.fromkeys(self._devices), self._parameters.maps, strict=True))
        self._slots = [
            {**parameters[device], **buffers}
            for device, buffers in zip(self._devices, self._buffers.maps, strict=True)
        ]


_kept: Registry[KeptReplicas[Any]] = Registry(KeptReplicas.forget_after_fork)
