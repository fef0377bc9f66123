"""Runs replication callbacks: what `DataParallel` itself needs of them.

`_callbacks` has the rest, which needs `DataParallel`.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from .._base.devices import Device, parse_device
from .._base.thread_state import CallerState
from .._base.tracebacks import add_note_once
from ._module_copy import check_module, walk
from ._scatter_gather import run_near

CALLBACK = "__data_parallel_replicate__"


class CallbackContext:
    """What the copies of one module share: callbacks set on it whatever they like.

    Mirrors jactorch's `CallbackContext`: a plain object without attributes. All copies of a module
    get the same one; every module, and every replication, has its own.

    Example:
        >>> ctx = CallbackContext()
        >>> ctx.copies = ["the first"]
        >>> ctx.copies
        ['the first']
    """

    if TYPE_CHECKING:  # any attribute may be set

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...


def exec_data_parallel_replication_callback(modules: Iterable[nn.Module]) -> None:
    """Call `__data_parallel_replicate__(ctx, copy_id)` on every submodule that defines it.

    Mirrors jactorch's function of this name. `DataParallel` does it at each replication; call it
    for replicas that you made yourself. `ctx` is a fresh `CallbackContext` for each position, the
    i-th of `modules()`, shared by its copies. A submodule that appears twice has one position. All
    callbacks of copy 0 are called before any of copy 1, in the order of `modules()`.

    Differences from jactorch: callbacks may add and replace submodules (positions are those from
    before the first callback); modules that are no copies of each other raise; an error has a note
    that names module and copy; a callback is looked for on the class and in the `__dict__` of a
    module, not through its `__getattr__`.

    Args:
        modules: The replicas, in order.

    Raises:
        TypeError: One of them is not a module.
        ValueError: They differ in the number of submodules.

    Example:
        >>> class Numbered(nn.Module):
        ...     def __data_parallel_replicate__(self, ctx, copy_id):
        ...         self.number = copy_id
        >>> replicas = [nn.Sequential(Numbered()) for _ in range(2)]
        >>> exec_data_parallel_replication_callback(replicas)
        >>> [replica[0].number for replica in replicas]
        [0, 1]
    """
    # As a list: a callback may change the tree, and the positions must be the same in all copies.
    copies = [_named_modules(module) for module in modules]
    counts = [len(named) for named in copies]
    if len(set(counts)) > 1:
        raise ValueError(f"expected copies of one module, got modules with {counts} submodules")
    contexts = [CallbackContext() for _ in range(max(counts, default=0))]
    for copy_id, named in enumerate(copies):
        for ctx, (path, module) in zip(contexts, named, strict=True):
            if _defines_callback(module):
                _call_back(module, ctx, copy_id, path)


def _named_modules(module: nn.Module) -> list[tuple[str, nn.Module]]:
    check_module(module)
    return list(module.named_modules())


def _defines_callback(module: nn.Module) -> bool:
    # Not `hasattr(module, ...)`: where it is missing, `nn.Module.__getattr__` takes a microsecond.
    return hasattr(type(module), CALLBACK) or CALLBACK in module.__dict__


def _call_back(module: nn.Module, ctx: CallbackContext, copy_id: int, path: str) -> None:
    callback: Callable[[CallbackContext, int], object] = getattr(module, CALLBACK)
    try:
        callback(ctx, copy_id)
    except BaseException as error:
        where = f"module {path!r}" if path else "the module"
        name = type(module).__name__
        add_note_once(error, f"in the replication callback of {where} ({name}), copy {copy_id}")
        raise


def defines_callbacks(root: nn.Module) -> bool:
    """Whether any module in `root` defines a callback now; cheap enough to ask at each call."""
    modules = walk(root)
    # Classes are few, modules many.
    return any(hasattr(kind, CALLBACK) for kind in set(map(type, modules))) or any(
        CALLBACK in module.__dict__ for module in modules
    )


def patched(replicate: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper's own `replicate` with the callbacks after it, as sync or async as that is.

    A partial of a module's function, because that can be pickled and deepcopied with its wrapper.
    """
    is_async = inspect.iscoroutinefunction(replicate)
    return partial(_replicate_async if is_async else _replicate, replicate)


def is_patched(wrapper: nn.Module) -> bool:
    """Whether `patched` is in the place of its `replicate`, and runs the callbacks."""
    function = getattr(wrapper.__dict__.get("replicate"), "func", None)
    return function is _replicate or function is _replicate_async


def _replicate(
    replicate: Callable[..., Any], module: nn.Module, device_ids: Sequence[Device]
) -> Any:
    replicas = replicate(module, device_ids)
    if inspect.isawaitable(replicas):
        return CallerState().drive(_when_made, replicas, device_ids)
    exec_data_parallel_replication_callback(replicas)
    return replicas


async def _replicate_async(
    replicate: Callable[..., Any], module: nn.Module, device_ids: Sequence[Device]
) -> Any:
    return await _when_made(replicate(module, device_ids), device_ids)


async def _when_made(made: Awaitable[Sequence[nn.Module]], device_ids: Sequence[Device]) -> Any:
    replicas = await made
    run_all = partial(exec_data_parallel_replication_callback, replicas)
    await run_near(parse_device(device_ids[0]), run_all)
    return replicas
