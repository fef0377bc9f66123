"""Subclasses of `DataParallel`, and hooks on it."""

import asyncio
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import aiopar

from .sample_modules import batch, make, under

CPUS = ["cpu", "cpu"]
MODES = pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad])


def on_worker() -> bool:
    return threading.current_thread() is not threading.main_thread()


class Noted(aiopar.DataParallel[Any]):
    """Notes which overrides ran on a worker."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.notes: list[tuple[str, bool]] = []

    def note(self, step: str) -> None:
        self.notes.append((step, on_worker()))


class Plain(Noted):
    """Overrides every step with a plain function; two of them need the inherited result."""

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.note("scatter")
        args, named = aiopar.wait(super().scatter(inputs, kwargs, device_ids))
        return [[x + 1 for x in one] for one in args], list(named)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        self.note("replicate")
        return super().replicate(module, device_ids)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.note("parallel_apply")
        return super().parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        self.note("gather")
        return aiopar.wait(super().gather(outputs, output_device)) * 2

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.note("forward")
        return super().forward(*inputs, **kwargs)


class Async(Noted):
    """Overrides every step with a coroutine function."""

    async def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        self.note("scatter")
        args, named = await super().scatter(inputs, kwargs, device_ids)
        return [[x + 1 for x in one] for one in args], list(named)

    async def replicate(self, module: Any, device_ids: Any) -> Any:
        self.note("replicate")
        return await super().replicate(module, device_ids)

    async def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        self.note("parallel_apply")
        return await super().parallel_apply(replicas, inputs, kwargs)

    async def gather(self, outputs: Any, output_device: Any) -> Any:
        self.note("gather")
        return await super().gather(outputs, output_device) * 2

    async def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        self.note("forward")
        return await super().forward(*inputs, **kwargs)


STEPS = ["forward", "scatter", "replicate", "parallel_apply", "gather"]


class TestOverrides:
    @pytest.mark.anyio
    @MODES
    @pytest.mark.parametrize("kind", [Plain, Async])
    async def test_every_step(self, kind: type[Noted], mode: Any) -> None:
        module, x = make("tied"), batch()
        dp = kind(module, CPUS)
        with mode():
            call, expected = dp(x), module(x + 1) * 2
        assert torch.allclose(await call, expected, atol=1e-6)
        # Plain functions, which may copy and launch, stay off the loop.
        assert dp.notes == [(step, kind is Plain) for step in STEPS]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [Plain, Async])
    async def test_with_one_device_scatter_has_a_part_as_in_torch(self, kind: type[Noted]) -> None:
        module, x = make("tied"), batch()
        dp = kind(module, ["cpu"])
        assert torch.allclose(await dp(x), module(x + 1), atol=1e-6)
        assert [step for step, _ in dp.notes] == ["forward", "scatter"]

    @pytest.mark.asyncio
    async def test_on_the_instance(self) -> None:
        module, x = make("tied"), batch()
        dp: Any = aiopar.DataParallel(module, CPUS)
        dp.gather = lambda outputs, _: [on_worker(), *outputs]
        dp.scatter = functools.partial(
            lambda inputs, kwargs, _, *, times: ((inputs,) * times, (kwargs,) * times), times=2
        )
        worker, *outputs = await dp(x)
        assert worker
        assert [torch.allclose(y, module(x)) for y in outputs] == [True, True]

    @pytest.mark.asyncio
    async def test_replicating_another_module(self) -> None:
        other = make("convolution")

        class Other(aiopar.DataParallel[Any]):
            def replicate(self, module: nn.Module, device_ids: Any) -> Any:
                return super().replicate(other, device_ids)

        dp, x = Other(make("tied"), CPUS), batch()
        for mode in torch.enable_grad, torch.no_grad:
            assert torch.allclose(await under(mode, dp, x), other(x), atol=1e-6)


class TestHooks:
    @pytest.mark.anyio
    @pytest.mark.parametrize("device_ids", [["cpu"], CPUS])
    async def test_they_see_tensors_and_may_change_them(self, device_ids: list[str]) -> None:
        module, x = make("tied"), batch()
        dp = aiopar.DataParallel(module, device_ids)
        seen: list[Any] = []

        def before(wrapper: nn.Module, args: Any, kwargs: Any) -> Any:
            seen.append((wrapper, [type(a) for a in args], dict(kwargs), on_worker()))
            return (args[0] + 1,), {}

        def after(wrapper: nn.Module, args: Any, output: Any) -> Any:
            seen.append((wrapper, [type(a) for a in args], type(output), on_worker()))
            return output * 2

        dp.register_forward_pre_hook(before, with_kwargs=True)
        dp.register_forward_hook(after)
        assert torch.allclose(await dp(x, unused=3), module(x + 1) * 2, atol=1e-6)
        assert seen == [
            (dp, [Tensor], {"unused": 3}, True),
            (dp, [Tensor], Tensor, True),
        ]

    @pytest.mark.asyncio
    async def test_they_may_run_the_wrapper_past_the_hooks(self) -> None:
        module, x = make("tied"), batch()
        dp = aiopar.DataParallel(module, CPUS)

        def twice(wrapper: nn.Module, args: Any, output: Tensor) -> Tensor:
            again: Tensor = aiopar.wait(wrapper.forward(*args))
            return output + again

        dp.register_forward_hook(twice)
        assert torch.allclose(await dp(x), 2 * module(x), atol=1e-6)

    def test_backward(self) -> None:
        module, x = nn.Linear(6, 3), batch().requires_grad_()
        dp = aiopar.DataParallel(module, CPUS)
        seen: list[Any] = []

        def before(wrapper: nn.Module, grad_output: Any) -> None:
            seen.append([g.shape for g in grad_output])

        def after(wrapper: nn.Module, grad_input: Any, grad_output: Any) -> Any:
            seen.append([g.shape for g in grad_input])
            return (grad_input[0] * 2,)

        dp.register_full_backward_pre_hook(before)
        dp.register_full_backward_hook(after)
        asyncio.run(dp(x)).sum().backward()  # type: ignore[no-untyped-call]
        assert seen == [[(8, 3)], [(8, 6)]]
        assert x.grad is not None
        assert torch.allclose(x.grad, 2 * module.weight.sum(0).expand(8, 6))

    @pytest.mark.asyncio
    async def test_of_every_module(self) -> None:
        seen: list[type] = []
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, _args, output: seen.append(type(module))
        )
        try:
            await aiopar.DataParallel(nn.Linear(6, 3), CPUS)(batch())
            await aiopar.data_parallel(nn.Linear(6, 3), batch(), CPUS)
        finally:
            handle.remove()
        # Global hooks do not see the wrapper that `data_parallel` makes.
        assert seen == [nn.Linear, nn.Linear, aiopar.DataParallel, nn.Linear, nn.Linear]

    @pytest.mark.asyncio
    async def test_with_overrides(self) -> None:
        module, x = make("tied"), batch()
        plain, asynchronous = Plain(module, CPUS), Async(module, CPUS)
        for dp in plain, asynchronous:
            dp.register_forward_hook(lambda _wrapper, _args, output: output + 1)
        assert torch.allclose(await plain(x), module(x + 1) * 2 + 1, atol=1e-6)
        with pytest.raises(TypeError, match=r"Async\.forward is a coroutine function"):
            await asynchronous(x)
        asynchronous.forward = super(Async, asynchronous).forward  # type: ignore[method-assign]
        assert torch.allclose(await asynchronous(x), module(x + 1) * 2 + 1, atol=1e-6)
