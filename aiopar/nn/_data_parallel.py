"""`DataParallel` and `data_parallel`: one module on several devices."""

import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence, Sized
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as _torch_module

from .._base.arguments import (
    NOT_BEGUN,
    as_int,
    as_kwargs,
    is_async,
    not_begun,
    returns_coroutine,
    shown_as,
)
from .._base.devices import Device, all_accelerators, parse_devices
from .._base.thread_state import CallerState
from .._base.tree import map_tensors
from ..executor._fork import wait
from ._callbacks import (
    any_defines_callback,
    exec_data_parallel_replication_callback,
    is_patched,
    patched,
)
from ._kept_replicas import KeptReplicas
from ._module_copy import Forward, all_tensors, check_module, check_placement, replicate_sync
from ._parallel_apply import parallel_apply
from ._scatter_gather import (
    MOST_CHECKED_ON_LOOP,
    Dims,
    check_output_dims,
    gather,
    move,
    parse_output_device,
    piece_sizes,
    run_near,
    scatter_kwargs,
    scatter_kwargs_sync,
)

# The wrapper whose `nn.Module.__call__` runs, with its hooks, in this context on a worker.
_hooked: ContextVar["DataParallel[Any] | None"] = ContextVar("aiopar_hooked", default=None)
_CPU = torch.device("cpu")
_Arguments: TypeAlias = tuple[Sequence[Sequence[Any]], Sequence[dict[str, Any]]]
T = TypeVar("T")
Out_co = TypeVar("Out_co", covariant=True)
TensorsT = TypeVar("TensorsT", bound=Tensor | Mapping[str, Tensor] | Sequence[Tensor])


class DataParallel(nn.Module, Generic[Out_co]):
    """Runs a module on several devices at once, each on a piece of the batch: `y = await dp(x)`.

    Mirrors `torch.nn.DataParallel`. Each call scatters the inputs, replicates the module, runs the
    replicas at the same time and gathers the outputs. Gradients arrive in the `.grad` of the
    wrapped module. The caller's state (grad mode, autocast, the current executor, ...) is captured
    when `dp(x)` is called, not when it is awaited. Many tasks may await one `DataParallel` at once.

    **Kept replicas.** In grad mode each call replicates the module. Outside grad mode replicas are
    kept between calls, and refreshed when the module has changed: parameters, buffers, `training`,
    `requires_grad`, submodules. Edits through `.data` leave no trace: call `refresh()` after such
    edits. Attributes that a forward sets do not persist, as in torch. Pickle and deepcopy leave
    kept replicas out.

    **Overrides.** Subclasses may override `scatter`, `replicate`, `parallel_apply`, `gather` and
    `forward`, each with a plain function (a worker runs it) or a coroutine function. The inherited
    methods return coroutines, so a plain override calls `aiopar.wait(super().gather(...))` to get
    the result. With one device only `scatter` is called, as in torch.

    **Hooks and callbacks.** Hooks on the wrapper run on a worker and see tensors. If there are
    hooks, `super().forward(...)` returns the result itself to a plain override of `forward`. A
    submodule with a method `__data_parallel_replicate__(ctx, copy_id)` has it called on each of its
    copies, as in jactorch; see `exec_data_parallel_replication_callback`.

    Differences from torch:

    - It is awaited.
    - Any device, the CPU included. Devices may repeat: `device_ids=["cpu", "cpu"]` gives two
      replicas that share parameters. The attribute `device_ids` holds `torch.device` objects.
    - `output_device` may be any device, `"cpu"` included, also with one device.
    - Autocast's dtype, inference mode and the default device apply in the replicas.
    - Replicas are kept outside grad mode.
    - Inputs whose batch sizes differ raise `ValueError`. So do inputs of which nothing can be split
      over several replicas, unless all are `Replicated`. An error keeps its type.
    - Inputs and outputs may have other batch dimensions: `Split`, `output_dims`. Outputs that are
      no tensors are joined as by `gather`. With one device the output is what the module returns.
    - On the CPU, dropout in all replicas draws from the one shared generator, in no fixed order.

    Args:
        module: The module. Its parameters and buffers must be on the first device. (With one
            device they are moved there.)
        device_ids: One entry per replica. None means every accelerator. Without an accelerator,
            and for an empty list, it is one CPU replica.
        output_device: Where outputs are gathered; `-1` is the CPU. Default: the first device.
        dim: The batch dimension.
        output_dims: The batch dimensions of the outputs, if they differ: an int, or ints nested as
            the output is. `(0, (1, 1))` fits `nn.LSTM(batch_first=True)`. See `gather`.

    Raises:
        TypeError: `module` is not a module, `dim` is not an int, or `output_dims` does not consist
            of ints.
        ValueError: A device does not exist.

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

    @overload
    def __init__(
        self: "DataParallel[TensorsT]",
        module: Forward[TensorsT],
        device_ids: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        output_dims: Dims = None,
    ) -> None: ...

    @overload  # `gather` may make lists of other outputs
    def __init__(
        self: "DataParallel[Any]",
        module: nn.Module,
        device_ids: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        output_dims: Dims = None,
    ) -> None: ...

    def __init__(
        self,
        module: Forward[Any],
        device_ids: Iterable[Device] | None = None,
        output_device: Device | None = None,
        dim: int = 0,
        *,
        output_dims: Dims = None,
    ) -> None:
        super().__init__()
        checked = check_module(module)
        self.device_ids: list[torch.device] = _parse_device_ids(device_ids)
        self.src_device_obj: torch.device = self.device_ids[0]
        output = self.src_device_obj if output_device is None else output_device
        self.output_device: torch.device = parse_output_device(output)
        self.dim: int = as_int("dim", dim)
        check_output_dims(output_dims)
        self.output_dims: Dims = output_dims
        self.module: nn.Module = checked
        self._kept = KeptReplicas(checked, self.device_ids)
        if len(self.device_ids) == 1:
            self.module.to(self.src_device_obj)

    @returns_coroutine
    def __call__(self, *inputs: Any, **kwargs: Any) -> Coroutine[Any, Any, Out_co]:
        """The output of the module on the whole batch; see the class.

        When awaited, it raises the error of a replica, with a note that names replica and device.
        Inputs are checked when awaited if there are hooks, if `scatter` or `forward` is overridden,
        or if the inputs have very many parts.

        Raises:
            RuntimeError: The module is not on the first device (when awaited; torch's message).
            TypeError: An input cannot be split. When awaited: the module cannot be replicated, or
                its `forward` is a coroutine function, or returns a coroutine or a generator.
            ValueError: Inputs differ in size, have no dimension `dim`, or none can be split.
        """
        state = CallerState()  # first, because it refuses a `torch.func` transform
        if self._is_hooked():
            if inspect.iscoroutinefunction(self.forward):
                raise TypeError(
                    f"{type(self).__name__}.forward is a coroutine function: forward hooks would "
                    "see a coroutine; register them on the wrapped module, or make forward a plain "
                    "function that returns super().forward(...)"
                )
            steps = self._call_with_hooks
        elif self._overrides("forward"):
            steps = self._call_forward
        else:
            steps = self._forward
            self._check_inputs(inputs, kwargs)
        return shown_as(state.drive(steps, inputs, kwargs), "DataParallel.__call__")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The output of the module on the whole batch, without the wrapper's hooks."""
        state = CallerState()
        self._check_inputs(inputs, kwargs)
        call = shown_as(state.drive(self._forward, inputs, kwargs), "DataParallel.forward")
        if _hooked.get() is not self:
            return call
        # `nn.Module.__call__` runs on a worker, and passes the result to the hooks.
        _hooked.set(None)
        return wait(call)

    def refresh(self) -> None:
        """Renew kept replicas at the next call. Use it after edits without a trace (`.data`)."""
        self._kept.refresh()

    # The four steps, which subclasses may override.

    @returns_coroutine
    def scatter(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any], device_ids: Sequence[Device]
    ) -> Any:
        """The arguments of each replica: a tuple of tuples and a tuple of dicts."""
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    @returns_coroutine
    def replicate(self, module: nn.Module, device_ids: Sequence[Device]) -> Any:
        """The replicas, one per device."""
        devices = parse_devices(device_ids)
        return shown_as(self._on_source(lambda: self._replicas(module, devices)), "replicate")

    @returns_coroutine
    def parallel_apply(
        self, replicas: Sequence[nn.Module], inputs: Sequence[Any], kwargs: Sequence[Any]
    ) -> Any:
        """The outputs of the replicas."""
        return parallel_apply(replicas, inputs, kwargs, self.device_ids[: len(replicas)])

    @returns_coroutine
    def gather(self, outputs: Sequence[Any], output_device: Device) -> Any:
        """The joined outputs."""
        return gather(outputs, output_device, self.dim, output_dims=self.output_dims)

    async def _forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if len(self.device_ids) == 1:
            return await self._forward_on_one_device(inputs, kwargs)
        outputs = await self._outputs(inputs, kwargs)  # and free replicas and pieces
        return await self._step("gather", outputs, self.output_device)

    async def _outputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, named = _or_one_call(await self._step("scatter", inputs, kwargs, self.device_ids))
        replicas = await self._step("replicate", self.module, self.device_ids[: len(args)])
        return await self._step("parallel_apply", replicas, args, named)

    async def _forward_on_one_device(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._overrides("scatter"):
            scattered = await self._step("scatter", inputs, kwargs, self.device_ids)
        else:
            scattered = await self._on_source(partial(self._check_and_scatter, inputs, kwargs))
        args, named = _or_one_call(scattered)
        [output] = await parallel_apply([self.module], args, named, [self.src_device_obj])
        if self.output_device == self.src_device_obj:
            return output
        to_output = partial(move, device=self.output_device)
        return await self._on_source(partial(map_tensors, to_output, output))

    def _check_and_scatter(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
        check_placement(all_tensors(self.module), self.src_device_obj)
        return scatter_kwargs_sync(inputs, kwargs, self.device_ids, self.dim)

    async def _step(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method that may be overridden by a plain or a coroutine function."""
        method: Callable[..., Any] = getattr(self, name)
        if self._overrides(name) and not is_async(method):
            # A worker runs the override, which may copy, launch and wait. In a tuple, because an
            # override may return the inherited method's coroutine, which no call may return.
            (result,) = await self._on_source(lambda: (method(*args, **kwargs),))
        else:
            result = method(*args, **kwargs)
        if inspect.isawaitable(result):
            return await result
        if type(result) in NOT_BEGUN:
            raise not_begun(result, on_worker=True)
        return result

    def _on_source(self, fn: Callable[[], T]) -> Coroutine[Any, Any, T]:
        return run_near(self.src_device_obj, fn)

    def _overrides(self, name: str) -> bool:
        own = getattr(self, name)
        return getattr(own, "__func__", own) is not getattr(DataParallel, name)

    def _check_inputs(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._overrides("scatter"):
            roots = {"inputs": inputs, "kwargs": kwargs}
            piece_sizes(roots, len(self.device_ids), self.dim, limit=MOST_CHECKED_ON_LOOP)

    def _replicas(self, module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
        is_own = module is self.module  # an override may replicate another module
        if is_own and self._kept.module is not module:
            self._kept = KeptReplicas(module, self.device_ids)
        # In forward-mode AD too: a kept copy has no tangent.
        if not is_own or torch.is_grad_enabled() or forward_ad._current_level >= 0:
            if is_own:
                check_placement(all_tensors(module), self.src_device_obj)
            replicas = replicate_sync(module, devices)
        else:
            replicas = self._kept.call_copies(len(devices))
        if is_own:
            self._kept.forward_starts()
        # A patched wrapper runs the callbacks itself, after its own `replicate`.
        if any_defines_callback(replicas[0]) and not is_patched(self):
            exec_data_parallel_replication_callback(replicas)
        return replicas

    def _is_hooked(self) -> bool:
        return any(
            getattr(self, f"_{kind}_hooks") or getattr(_torch_module, f"_global_{kind}_hooks")
            for kind in ("forward", "forward_pre", "backward", "backward_pre")
        )

    async def _call_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await self._step("forward", *inputs, **kwargs)

    async def _call_with_hooks(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call() -> Any:
            _hooked.set(self)
            return nn.Module.__call__(self, *inputs, **kwargs)

        return await self._on_source(call)


def _or_one_call(scattered: _Arguments) -> _Arguments:
    """A call without arguments cannot be split: it becomes one call, as in torch."""
    args, named = scattered
    return args or ((),), named or ({},)


def _parse_device_ids(device_ids: Iterable[Device] | None) -> list[torch.device]:
    if device_ids is None:
        device_ids = all_accelerators()
    is_empty = isinstance(device_ids, Sized) and not len(device_ids)
    return [_CPU] if is_empty else list(parse_devices(device_ids))


@returns_coroutine
def data_parallel(
    module: nn.Module,
    inputs: Any,
    device_ids: Iterable[Device] | None = None,
    output_device: Device | None = None,
    dim: int = 0,
    module_kwargs: Mapping[str, Any] | None = None,
    *,
    output_dims: Dims = None,
) -> Coroutine[Any, Any, Any]:
    """Run `module` on `inputs` over several devices: a `DataParallel` for one call.

    Mirrors `torch.nn.parallel.data_parallel`, with the differences of `DataParallel` from torch.

    Args:
        module: The module.
        inputs: Its positional arguments. A value that is not a tuple is a single argument.
        device_ids: One entry per replica. None and empty mean the same as for `DataParallel`.
        output_device: Where outputs are gathered. Default: the first device.
        dim: The batch dimension.
        module_kwargs: The keyword arguments of the module.
        output_dims: The batch dimensions of the outputs, if they differ.

    Raises:
        TypeError: `module` is not a module, `dim` not an int, `module_kwargs` not a dict,
            `output_dims` contains something other than ints, or an input cannot be split.
        ValueError: A device does not exist, inputs differ in size or have no dimension `dim`, or
            none can be split.
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
    check_placement(all_tensors(module), devices[0])  # a wrapper of one device would move it
    wrapper = DataParallel(module, devices, output_device, dim, output_dims=output_dims)
    if not isinstance(inputs, tuple):
        inputs = () if inputs is None else (inputs,)
    # Not `wrapper(...)`: global hooks must not see this wrapper.
    call: Coroutine[Any, Any, Any] = wrapper.forward(*inputs, **named)
    return shown_as(call, "data_parallel")


class ReplicationCallbackDataParallel(DataParallel[Out_co]):
    """`DataParallel` under jactorch's name, for code that was written for jactorch.

    Every `DataParallel` runs replication callbacks once per replication, and so does this one.

    Mirrors jactorch's class of this name (`DataParallelWithCallback` in
    Synchronized-BatchNorm-PyTorch), with the differences of `DataParallel` from torch and of
    `exec_data_parallel_replication_callback` from jactorch.

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


def patch_replication_callback(data_parallel: DataParallel[Any] | nn.DataParallel[Any]) -> None:
    """Make this wrapper run replication callbacks once, after its own `replicate`.

    Mirrors jactorch's function of this name. Use it for a `torch.nn.DataParallel`, and for a
    subclass of aiopar's `DataParallel` whose `replicate` does not call the inherited one. Other
    wrappers of aiopar run the callbacks anyway; these and patched wrappers are left unchanged. A
    patched wrapper refers to itself, so the garbage collector frees it.

    Differences from jactorch: a wrong argument raises `TypeError` (there `AssertionError`);
    patching twice runs the callbacks once; `replicate` may be a coroutine function; a patched
    wrapper can be pickled and deepcopied.

    Args:
        data_parallel: The wrapper. Its `replicate` is replaced on the instance.

    Raises:
        TypeError: It is a `DataParallel` neither of aiopar nor of torch.

    Example:
        >>> class Mine(DataParallel):
        ...     def replicate(self, module, device_ids):
        ...         return [module for _ in device_ids]
        >>> dp = Mine(nn.Linear(2, 1), device_ids=["cpu", "cpu"])
        >>> patch_replication_callback(dp)
    """
    if not isinstance(data_parallel, DataParallel | nn.DataParallel):
        got = type(data_parallel).__name__
        raise TypeError(f"expected an aiopar.DataParallel or a torch.nn.DataParallel, got {got}")
    own = isinstance(data_parallel, DataParallel) and not data_parallel._overrides("replicate")
    if not own and not is_patched(data_parallel):
        data_parallel.replicate = patched(data_parallel.replicate)  # type: ignore[method-assign]
