"""`fork` and `wait`: the device of a call, nesting without deadlock, and what `wait` takes."""

import asyncio
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import aiopar
from tests.workers import worker_device


@pytest.fixture(params=[1, 2], ids=["1 worker", "2 workers"])
def executor(request: pytest.FixtureRequest) -> Iterator[aiopar.DeviceExecutor]:
    with (
        aiopar.DeviceExecutor(["cpu"] * request.param) as executor,
        aiopar.use_executor(executor),
    ):
        yield executor


@pytest.fixture
def mixed() -> Iterator[aiopar.DeviceExecutor]:
    """A CPU worker and a worker of the meta device, which every machine has."""
    with aiopar.DeviceExecutor(["cpu", "meta"]) as executor, aiopar.use_executor(executor):
        yield executor


def where(*_: object, **__: object) -> str:
    return worker_device() or "not in a worker"


class Where(nn.Module):
    """A module that returns the device it runs on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, **kwargs))

    def forward(self, *_: object) -> str:
        return where()

    def method(self) -> str:
        return where()


class TestFork:
    def test_function_with_keywords(self, executor: aiopar.DeviceExecutor) -> None:
        assert torch.equal(
            aiopar.wait(aiopar.fork(torch.full, (2,), fill_value=3)), torch.full((2,), 3)
        )

    def test_module_and_method(self, executor: aiopar.DeviceExecutor) -> None:
        assert aiopar.wait(aiopar.fork(Where())) == "cpu"
        assert aiopar.wait(aiopar.fork(Where().method)) == "cpu"

    def test_script_function_and_module(self, executor: aiopar.DeviceExecutor) -> None:
        def double(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        linear, x = nn.Linear(2, 3), torch.ones(4, 2)
        function = torch.jit.script(double)
        assert torch.equal(aiopar.wait(aiopar.fork(function, x)), x * 2)
        for module in torch.jit.script(linear), torch.jit.trace(linear, x):  # type: ignore[no-untyped-call]
            assert torch.equal(aiopar.wait(aiopar.fork(module, x)), linear(x))

    def test_gradients(self, executor: aiopar.DeviceExecutor) -> None:
        weight = torch.ones(2, requires_grad=True)
        loss = aiopar.wait(aiopar.fork(torch.dot, weight, weight))
        torch.autograd.backward([loss])
        assert weight.grad is not None
        assert weight.grad.tolist() == [2.0, 2.0]

    def test_bad_arguments(self, executor: aiopar.DeviceExecutor) -> None:
        with pytest.raises(TypeError, match="expected a callable"):
            aiopar.fork(3)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"coroutine function.*anyio\.run"):
            aiopar.fork(asyncio.sleep, 0)
        # A plain function, but it returns a coroutine.
        data_parallel = aiopar.DataParallel(torch.nn.Linear(2, 2), ["cpu"])
        with pytest.raises(TypeError, match=r"^DataParallel is .*`await dp\(x\)`$"):
            aiopar.fork(data_parallel, torch.ones(2, 2))


class TestDevice:
    @pytest.mark.parametrize(
        "call",
        [
            lambda: aiopar.fork(Where(device="meta")),
            lambda: aiopar.fork(Where(device="meta"), torch.ones(1)),
            lambda: aiopar.fork(Where(device="meta").method),
            lambda: aiopar.fork(where, torch.ones(1, device="meta"), torch.ones(1)),
            lambda: aiopar.fork(where, 1, [{"a": (torch.ones(1, device="meta"),)}]),
            lambda: aiopar.fork(where, x=torch.ones(1, device="meta")),
            lambda: aiopar.fork(where, Where(device="meta")),
            lambda: aiopar.fork(where, nn.BatchNorm1d(1, affine=False, device="meta")),
            lambda: aiopar.fork(functools.partial(where, Where(device="meta"))),
            lambda: aiopar.fork(functools.partial(Where(device="meta"))),
            lambda: aiopar.get_executor().on("meta").submit(lambda: aiopar.fork(where).wait()),
        ],
    )
    def test_is_that_of_the_first_module_or_tensor_or_of_the_calling_worker(
        self, mixed: aiopar.DeviceExecutor, call: Callable[[], aiopar.Future[str]]
    ) -> None:
        assert aiopar.wait(call()) == "meta"

    def test_of_an_argument_that_contains_itself(self, executor: aiopar.DeviceExecutor) -> None:
        known: list[Any] = [1, 2]
        known.append(known)
        assert aiopar.wait(aiopar.fork(len, known)) == 3
        assert aiopar.wait(aiopar.fork(known.index, 2)) == 1

    def test_cpu_by_default(self, mixed: aiopar.DeviceExecutor) -> None:
        assert aiopar.wait(aiopar.fork(where)) == "cpu"

    def test_without_a_worker_of_the_executor(self, executor: aiopar.DeviceExecutor) -> None:
        with pytest.raises(ValueError, match="on meta"):
            aiopar.fork(torch.neg, torch.ones(1, device="meta"))

    def test_a_worker_of_another_device_does_not_help(self, mixed: aiopar.DeviceExecutor) -> None:
        def outer() -> list[str]:
            return [aiopar.wait(aiopar.fork(Where(device="meta"))) for _ in range(10)]

        assert mixed.on("cpu").submit(outer).result() == ["meta"] * 10


class TestNesting:
    def test_waited_for_in_reverse(self, executor: aiopar.DeviceExecutor) -> None:
        def tree(level: int) -> int:
            if not level:
                return 1
            children = [aiopar.fork(tree, level - 1) for _ in range(3)]
            return sum(aiopar.wait(child) for child in reversed(children))

        assert aiopar.wait(aiopar.fork(tree, 5)) == 3**5

    def test_a_chain_of_three_thousand(self, executor: aiopar.DeviceExecutor) -> None:
        before = set(threading.enumerate())

        def chain(length: int) -> int:
            return 1 + aiopar.wait(aiopar.fork(chain, length - 1)) if length else 0

        assert aiopar.wait(aiopar.fork(chain, 3000)) == 3000
        executor.shutdown()
        for thread in set(threading.enumerate()) - before:
            thread.join(30)
            assert not thread.is_alive()

    def test_an_error_passes_through_a_hundred_waits(self, executor: aiopar.DeviceExecutor) -> None:
        def chain(length: int) -> int:
            return aiopar.wait(aiopar.fork(chain, length - 1)) if length else 1 // 0

        with pytest.raises(ZeroDivisionError):
            aiopar.wait(aiopar.fork(chain, 100))


async def sum_of_two() -> int:
    return await aiopar.run_sync(abs, -1) + await aiopar.fork(abs, -2)


class TestWait:
    @pytest.mark.parametrize(
        ("make", "expected"),
        [
            (lambda: aiopar.run_sync(pow, 2, 3), 8),
            (lambda: aiopar.parallel_apply([abs], [-1], devices=["cpu"]), [1]),
            (lambda: aiopar.DataParallel(nn.Identity(), ["cpu"])(torch.tensor(7)), 7),
            (sum_of_two, 3),
        ],
    )
    @pytest.mark.parametrize("in_worker", [False, True])
    def test_coroutines_of_aiopar(
        self,
        executor: aiopar.DeviceExecutor,
        make: Callable[[], Coroutine[Any, Any, Any]],
        expected: object,
        in_worker: bool,
    ) -> None:
        def outer() -> object:
            return aiopar.wait(make())

        assert (executor.submit(outer).result() if in_worker else outer()) == expected

    def test_a_coroutine_that_needs_an_event_loop(self, executor: aiopar.DeviceExecutor) -> None:
        left = []

        async def foreign() -> None:
            try:
                await asyncio.sleep(0)
            finally:
                left.append(True)

        with pytest.raises(RuntimeError, match="needs an event loop"):
            executor.submit(lambda: aiopar.wait(foreign())).result()
        assert left

    @pytest.mark.parametrize("given", [3, None, abs, torch.futures.Future()], ids=type)
    def test_bad_arguments_of_wait(self, given: Any) -> None:
        with pytest.raises(TypeError, match=r"expected an aiopar\.Future or a coroutine"):
            aiopar.wait(given)

    @pytest.mark.anyio
    async def test_in_the_thread_of_an_event_loop(self) -> None:
        future = aiopar.fork(abs, -1)
        assert await future == 1
        assert aiopar.wait(future) == 1  # done: nothing to wait for
        pending: aiopar.Future[int] = aiopar.Future()
        with pytest.raises(RuntimeError, match="use `await"):
            aiopar.wait(pending)
        # `wait` closes the coroutine: it would warn that it was never awaited.
        for coroutine in (
            aiopar.run_sync(abs, -1),
            aiopar.parallel_apply([abs], [1]),
            aiopar.DataParallel(nn.Identity())(torch.ones(1)),
        ):
            with pytest.raises(aiopar.BlockingWaitError, match="use `await"):
                aiopar.wait(coroutine)


@pytest.mark.sim
def test_a_lazy_module() -> None:
    x = torch.ones(3, 4, device="sim:1")
    module = torch.nn.LazyLinear(2, device="sim:1")
    assert aiopar.fork(module, x).wait().shape == (3, 2)
    assert module.weight.shape == (2, 4)
