"""Replication callbacks: a method of each copy of a module is called with the id of the copy."""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .._base.arguments import is_async
from .._base.devices import Device, parse_device
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from ._module_copy import check_module, walk
from ._scatter_gather import run_near

CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """A namespace that the copies of one module share. Callbacks may set any attribute there.

    Mirrors jactorch's `CallbackContext`: a plain object without attributes. All copies of a
    submodule get the same context. Each submodule has its own, anew for each replication.

    Example:
        >>> ctx = CallbackContext()
        >>> ctx.copies = ["the first"]
        >>> ctx.copies
        ['the first']
    """

    _path = ""  # of the submodule in the replicated module, for messages

    if TYPE_CHECKING:  # any attribute may be set

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def exec_data_parallel_replication_callback(modules: Iterable[nn.Module]) -> None:
    """Call `__data_parallel_replicate__(ctx, copy_id)` on every submodule that defines it.

    Mirrors jactorch's function of this name. `DataParallel` calls it at each replication. Call it
    yourself for replicas that you made. All callbacks of copy 0 run before any of copy 1, in the
    order of `modules()`. The i-th submodule of all copies gets the same new `CallbackContext`. A
    submodule that appears twice is called once per copy.

    Differences from jactorch: callbacks may add and replace submodules, because the submodules are
    listed before the first callback. Modules that are not copies of each other raise. An error has
    a note that names submodule and copy. A callback is looked for on the class and in the
    `__dict__` of a submodule, but not through its `__getattr__`.

    Args:
        modules: The replicas, in order.

    Raises:
        TypeError: An entry is not a module.
        ValueError: The entries have different numbers of submodules.

    Example:
        >>> class Numbered(nn.Module):
        ...     def __data_parallel_replicate__(self, ctx, copy_id):
        ...         self.number = copy_id
        >>> replicas = [nn.Sequential(Numbered()) for _ in range(2)]
        >>> exec_data_parallel_replication_callback(replicas)
        >>> [replica[0].number for replica in replicas]
        [0, 1]
    """
    copies = []
    for module in modules:
        check_module(module)
        copies.append(list(module.named_modules()))
    counts = [len(named) for named in copies]
    if len(set(counts)) > 1:
        raise ValueError(f"expected copies of one module, got modules with {counts} submodules")
    contexts = [CallbackContext() for _ in range(max(counts, default=0))]
    for ctx, (path, _) in zip(contexts, copies[0] if copies else (), strict=True):
        ctx._path = path
    for copy_id, named in enumerate(copies):
        for ctx, (path, module) in zip(contexts, named, strict=True):
            if not _defines_callback(module):
                continue
            try:
                getattr(module, CALLBACK)(ctx, copy_id)
            except BaseException as error:
                where = f"module {path!r}" if path else "the module"
                where = f"{where} ({type(module).__name__}), copy {copy_id}"
                add_note_once(error, f"in the replication callback of {where}")
                raise


def _defines_callback(module: nn.Module) -> bool:
    return hasattr(type(module), CALLBACK) or CALLBACK in module.__dict__


def any_defines_callback(root: nn.Module) -> bool:
    """Whether any module in `root` defines a callback."""
    return any(map(_defines_callback, walk(root)))


def patched(replicate: Callable[..., Any]) -> Callable[..., Any]:
    """`replicate` of a wrapper, followed by the callbacks; a coroutine function if it is one."""
    # Partials of module-level functions can be pickled and deepcopied.
    return partial(_replicate_async if is_async(replicate) else _replicate, replicate)


def is_patched(wrapper: nn.Module) -> bool:
    """Whether `patched` replaced the `replicate` of this wrapper."""
    function = getattr(wrapper.__dict__.get("replicate"), "func", None)
    return function is _replicate or function is _replicate_async


def _replicate(
    replicate: Callable[..., Any], module: nn.Module, device_ids: Sequence[Device]
) -> Any:
    replicas = replicate(module, device_ids)
    if inspect.isawaitable(replicas):
        return CallerState().drive(_call_back_when_made, replicas, device_ids)
    exec_data_parallel_replication_callback(replicas)
    return replicas


async def _replicate_async(
    replicate: Callable[..., Any], module: nn.Module, device_ids: Sequence[Device]
) -> Any:
    return await _call_back_when_made(replicate(module, device_ids), device_ids)


async def _call_back_when_made(
    made: Awaitable[Sequence[nn.Module]], device_ids: Sequence[Device]
) -> Any:
    replicas = await made
    run_all = partial(exec_data_parallel_replication_callback, replicas)
    await run_near(parse_device(device_ids[0]), run_all)
    return replicas
