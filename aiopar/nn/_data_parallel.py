"""Replication callbacks: a module is told that it was copied, and which copy it is."""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _torch_module

from .._base.arguments import as_int, as_kwargs, check_callable, returns_coroutine
from .._base.devices import Device, all_accelerators, parse_devices
from .._base.thread_state import CallerState
from .._base.tree import map_tensors
from ..executor._fork import wait
from ._callbacks import (
    defines_callbacks,
    exec_data_parallel_replication_callback,
    is_patched,
    patched,
)
from ._kept_replicas import KeptReplicas
from ._module_copy import all_tensors, check_module, check_placement, replicate_sync
from ._parallel_apply import parallel_apply
from ._scatter_gather import (
    check_scatter,
    gather,
    move,
    parse_output_device,
    run_near,
    scatter_kwargs,
    scatter_kwargs_sync,
)

# The wrapper whose `nn.Module.__call__`, hooks and all, runs in the calling worker.
_hooked: ContextVar["DataParallel | None"] = ContextVar("aiopar_hooked", default=None)
_CPU = torch.device("cpu")
_Arguments: TypeAlias = tuple[Sequence[Sequence[Any]], Sequence[dict[str, Any]]]
T = TypeVar("T")


class DataParallel(nn.Module):
    """Runs a module on several devices at once, each on a piece of the batch: `y = await dp(x)`.

    Mirrors `torch.nn.DataParallel`: scatter the inputs, replicate the module, run the replicas at
    the same time, gather the outputs. Gradients arrive in the wrapped module's `.grad`. The state
    of the caller (grad mode, autocast, ..., the current executor) is captured when `dp(x)` is
    called, not when it is awaited. Any number of tasks may await one `DataParallel` at once.

    In grad mode the module is replicated at each call. Otherwise replicas are *kept*, and renewed
    when the module has changed: parameters, buffers, `training`, `requires_grad`, submodules. Edits
    through `.data` alone leave no trace: call `refresh()` after them. What a forward sets as an
    attribute is not kept, as in torch. Pickle and deepcopy leave kept replicas out.

    The methods `scatter`, `replicate`, `parallel_apply`, `gather` and `forward` may be overridden,
    by plain functions (run on a worker) or coroutine functions. The inherited ones return
    coroutines: a plain override that needs their result says `aiopar.wait(super().gather(...))`.
    With one device, `scatter` is the only step, as in torch. Hooks registered on the wrapper run on
    a worker, and see tensors; where there are some, a plain override of `forward` gets the result
    itself from `super().forward(...)`. A submodule with a method
    `__data_parallel_replicate__(ctx, copy_id)` has it called on each of its copies, as in jactorch;
    see `exec_data_parallel_replication_callback`.

    Differences from torch: it is awaited; any devices, CPU included, and repeats
    (`device_ids=["cpu", "cpu"]`: two replicas, which share parameters), and `device_ids` holds
    `torch.device`s; `output_device` may be any device, `"cpu"` included, also with one device;
    autocast's dtype, inference mode and default device reach the replicas; replicas are kept when
    there is no gradient; inputs whose batch sizes disagree raise; an error keeps its type. Dropout
    on the CPU draws from the one shared generator, in unspecified order of the replicas.

    Args:
        module: The module; its parameters and buffers are on the first device (with one device,
            they are moved there now).
        device_ids: One replica an entry. None: every accelerator; where there is none, or for an
            empty list, one CPU replica.
        output_device: Where outputs are gathered; `-1` is the CPU; default: the first device.
        dim: The batch dimension.

    Raises:
        TypeError: `module` is not a module, or `dim` no int.
        ValueError: There is no such device.

    Example:
        >>> import asyncio, aiopar, torch
        >>> dp = aiopar.DataParallel(torch.nn.Linear(4, 2), device_ids=["cpu", "cpu"])
        >>> async def main():
        ...     with torch.inference_mode():
        ...         call = dp(torch.ones(8, 4))  # (batch=8, 4): state captured here
        ...     return await call  # (batch=8, 2)
        >>> asyncio.run(main()).shape
        torch.Size([8, 2])
    """

    def __init__(
        self,
        module: nn.Module,
        device_ids: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
    ) -> None:
        super().__init__()
        check_module(module)
        self.device_ids: list[torch.device] = _parse_device_ids(device_ids)
        self.output_device: torch.device = (
            self.device_ids[0] if output_device is None else parse_output_device(output_device)
        )
        self.src_device_obj: torch.device = self.device_ids[0]
        self.dim: int = as_int("dim", dim)
        self.module = module
        self._kept = KeptReplicas(module, self.device_ids, home=self.src_device_obj)
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)

    @returns_coroutine
    def __call__(self, *inputs: Any, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """The module's output on the whole batch; see the class.

        Raises, when awaited: what a replica raises, with a note that names replica and device.

        Raises:
            RuntimeError: The module is not on the first device (when awaited; torch's message).
            TypeError: An input cannot be split; when awaited: the module cannot be replicated, or
                its `forward` is a coroutine function.
            ValueError: Inputs disagree in size, or have no dimension `dim`. With hooks, an override
                of `scatter` or `forward`, or inputs of very many parts: when awaited.
        """
        state = CallerState()  # first: within a transform, where shapes are others, it raises
        if self._is_hooked():
            self._check_hookable()
            steps = self._call_with_hooks
        elif self._overrides("forward"):
            steps = self._call_forward
        else:
            steps = self._forward
            self._check_inputs(inputs, kwargs)
        call = state.drive(steps, inputs, kwargs)
        # What a warning that it was never awaited says.
        call.__qualname__ = "DataParallel.__call__"  # type: ignore[attr-defined]  # all have one
        return call

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """What `dp(...)` calls, past the hooks: a coroutine as well."""
        state = CallerState()
        self._check_inputs(inputs, kwargs)
        call = state.drive(self._forward, inputs, kwargs)
        if _hooked.get() is not self:
            return call
        # Inside `nn.Module.__call__` on a worker, which hands the result to its hooks.
        _hooked.set(None)
        return wait(call)

    def refresh(self) -> None:
        """Renew kept replicas at the next call: after edits that leave no trace (`.data`)."""
        self._kept.refresh()

    def _check_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._overrides("scatter"):
            check_scatter({"inputs": inputs, "kwargs": kwargs}, self.device_ids, self.dim)

    async def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.device_ids) == 1:
            return await self._forward_alone(inputs, kwargs)
        outputs = await self._outputs(inputs, kwargs)
        return await self._step("gather", outputs, self.output_device)

    async def _outputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, named = await self._scattered(inputs, kwargs)
        replicas = await self._step("replicate", self.module, self.device_ids[: len(args)])
        return await self._step("parallel_apply", replicas, args, named)

    async def _scattered(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        await self._on_source(self._check_placement)
        return _or_one_call(await self._step("scatter", inputs, kwargs, self.device_ids))

    async def _forward_alone(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_callable(self.module)  # as `parallel_apply` does with replicas
        # As in torch: of the four steps, only `scatter` has a part in it.
        given: _Arguments | None = None
        if self._overrides("scatter"):
            given = await self._scattered(inputs, kwargs)
        run = partial(self._run_alone, inputs, kwargs, given)
        [output] = await parallel_apply([run], [()], devices=[self.src_device_obj])
        return output

    def _run_alone(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], given: _Arguments | None
    ) -> Any:
        if given is None:
            self._check_placement()
            scattered = scatter_kwargs_sync(inputs, kwargs, self.device_ids, self.dim)
            given = _or_one_call(scattered)
        args, named = given
        output = self.module(*args[0], **named[0])
        return map_tensors(partial(move, device=self.output_device), output)

    def _check_placement(self) -> None:
        check_placement(all_tensors(self.module), self.src_device_obj)

    def _replicas(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        replicas = self._copies(module, devices)
        # A patched wrapper runs them itself, when its own `replicate` has returned.
        if defines_callbacks(replicas[0]) and not is_patched(self):
            exec_data_parallel_replication_callback(replicas)
        return replicas

    def _copies(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        # In forward-mode AD too: a copy that is kept has no tangent.
        if torch.is_grad_enabled() or forward_ad._current_level >= 0:
            replicas = replicate_sync(module, devices)
            self._kept.forward_runs(replicas[0])
            return replicas
        if self._kept.module is not module:
            if module is not self.module:  # an override replicates something else
                return replicate_sync(module, devices)
            self._kept = KeptReplicas(module, self.device_ids, home=self.src_device_obj)
        copies = self._kept.call_copies()
        self._kept.forward_runs(copies[0])
        return copies[: len(devices)]

    # The four steps, to be overridden.

    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[Device]
    ) -> Any:
        """The arguments of each replica: a tuple of tuples, and one of dicts."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> Any:
        """The replicas to run, one a device."""
        devices = parse_devices(device_ids)
        return self._on_source(lambda: self._replicas(module, devices))

    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> Any:
        """The outputs of the replicas."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """The outputs joined."""
        return gather(outputs, output_device, self.dim)

    async def _call_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._step("forward", *inputs, **kwargs)

    async def _step(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call one of the methods above or its override, sync or async."""
        method: Callable[..., Any] = getattr(self, name)
        if self._overrides(name) and not inspect.iscoroutinefunction(method):
            # On a worker: it may copy, launch and wait.
            result = await self._on_source(partial(method, *args, **kwargs))
        else:
            result = method(*args, **kwargs)
        return await result if inspect.isawaitable(result) else result

    def _on_source(self, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
        return run_near(self.src_device_obj, fn)

    def _overrides(self, name: str) -> bool:
        own = getattr(self, name)
        return getattr(own, "__func__", own) is not getattr(DataParallel, name)

    def _is_hooked(self) -> bool:
        return bool(
            self._forward_hooks
            or self._forward_pre_hooks
            or self._backward_hooks
            or self._backward_pre_hooks
            or _torch_module._global_forward_hooks
            or _torch_module._global_forward_pre_hooks
            or _torch_module._global_backward_hooks
            or _torch_module._global_backward_pre_hooks
        )

    def _check_hookable(self) -> None:
        if inspect.iscoroutinefunction(self.forward):
            raise TypeError(
                f"{type(self).__name__}.forward is a coroutine function: forward hooks would see "
                "a coroutine; register them on the wrapped module, or make forward a plain "
                "function that returns super().forward(...)"
            )

    async def _call_with_hooks(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call() -> Any:
            _hooked.set(self)
            return nn.Module.__call__(self, *inputs, **kwargs)

        return await self._on_source(call)


def _or_one_call(scattered: _Arguments) -> _Arguments:
    """Without arguments there is nothing to split: one call, as in torch."""
    args, named = scattered
    return args or ((),), named or ({},)


def _parse_device_ids(device_ids: Iterable[Device] | None) -> list[torch.device]:
    if device_ids is None:
        return list(all_accelerators()) or [_CPU]
    if isinstance(device_ids, Sized) and not len(device_ids):
        return [_CPU]
    return list(parse_devices(device_ids))


def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
) -> Coroutine[Any, Any, Any]:
    """Run `module` on `inputs` over several devices: `DataParallel` for one call.

    Mirrors `torch.nn.parallel.data_parallel`, with the differences of `DataParallel`.

    Args:
        module: The module.
        inputs: Its positional arguments; what is not a tuple is one argument.
        device_ids: One replica an entry; None or empty as for `DataParallel`.
        output_device: Where outputs are gathered; default: the first device.
        dim: The batch dimension.
        module_kwargs: Its keyword arguments.

    Raises:
        TypeError: `module` is not a module, `dim` no int, `module_kwargs` no dict, or an input
            cannot be split.
        ValueError: There is no such device, or the inputs disagree in size or have no such `dim`.
        RuntimeError: The module is not on the first device.

    Example:
        >>> import asyncio, aiopar, torch
        >>> call = aiopar.data_parallel(torch.nn.Linear(4, 2), torch.ones(8, 4), ["cpu", "cpu"])
        >>> asyncio.run(call).shape
        torch.Size([8, 2])
    """
    check_module(module)
    named = as_kwargs("module_kwargs", module_kwargs)
    devices = _parse_device_ids(device_ids)
    check_placement(all_tensors(module), devices[0])  # else the wrapper would move it there
    wrapper = DataParallel(module, devices, output_device, dim)
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    # Not called: a wrapper that nobody sees has no hooks, not even global ones.
    result: Coroutine[Any, Any, Any] = wrapper.forward(*inputs, **named)
    return result


class ReplicationCallbackDataParallel(DataParallel):
    """`DataParallel` under the name that it has in jactorch, for code that was written for that.

    Every `DataParallel` runs replication callbacks: this one does nothing else, and runs them once.

    Mirrors jactorch's class of this name (`DataParallelWithCallback` in
    Synchronized-BatchNorm-PyTorch). Differences from it are those of `DataParallel` from torch,
    and those of `exec_data_parallel_replication_callback`.

    Example:
        >>> import asyncio, torch
        >>> class Numbered(nn.Module):
        ...     def __data_parallel_replicate__(self, ctx, copy_id):
        ...         self.number = copy_id
        ...     def forward(self, x):
        ...         return x + self.number
        >>> dp = ReplicationCallbackDataParallel(Numbered(), device_ids=["cpu", "cpu"])
        >>> asyncio.run(dp(torch.zeros(4)))
        tensor([0., 0., 1., 1.])
    """


def patch_replication_callback(data_parallel: DataParallel | nn.DataParallel[Any]) -> None:
    """Run replication callbacks after the `replicate` of this wrapper, once, whoever wrote it.

    Mirrors jactorch's function of this name. It is for a `torch.nn.DataParallel`, and for a
    subclass of aiopar's whose own `replicate` does not call the inherited one; other wrappers of
    aiopar run them without it, and stay as they are. A patched wrapper runs them on what its
    `replicate` returned, and at no other time. It refers to itself: the garbage collector frees it.
    Patching again changes nothing.

    Differences from jactorch: a wrong argument is a `TypeError` (there an `AssertionError`);
    patching twice calls once; `replicate` may be a coroutine function; a patched wrapper can be
    pickled and deepcopied.

    Args:
        data_parallel: Its `replicate` is replaced, on the instance.

    Raises:
        TypeError: It is no `DataParallel`, neither of aiopar nor of torch.

    Example:
        >>> class Mine(DataParallel):
        ...     def replicate(self, module, device_ids):
        ...         return [module for _ in device_ids]
        >>> dp = Mine(nn.Linear(2, 1), device_ids=["cpu", "cpu"])
        >>> patch_replication_callback(dp)
    """
    if not isinstance(data_parallel, DataParallel | nn.DataParallel):
        raise TypeError(
            "expected an aiopar.DataParallel or a torch.nn.DataParallel, got "
            f"{type(data_parallel).__name__}"
        )
    if isinstance(data_parallel, DataParallel) and not data_parallel._overrides("replicate"):
        return  # the inherited one runs them
    if not is_patched(data_parallel):
        data_parallel.replicate = patched(data_parallel.replicate)  # type: ignore[method-assign]
