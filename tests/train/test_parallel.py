"""`Parallel`: what each unit gives, what runs at the same time, and under which state."""

import contextvars
import copy
import threading

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.testing import Gate
from tests.caller_states import PLAIN, snapshot
from tests.train.units import Failure, fetched, same, units

Devices = tuple[torch.device, ...]


class Regression(aiopar.Parallelizable):
    """Adds up gradients in the parameters of one model."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double().to(device)

    def forward_backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        return loss

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


class TestResults:
    @pytest.mark.anyio
    @pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
    async def test_are_those_of_forward_backward(self, num_workers: int) -> None:
        async with aiopar.Parallel(num_workers, units(lambda x: x * 2)) as parallel:
            for n in range(10):
                await parallel.put(n)
            assert parallel.pending == 10
            assert sorted(await fetched(parallel, 10)) == list(range(0, 20, 2))
            assert parallel.pending == 0

    @pytest.mark.anyio
    async def test_gradients_and_losses_are_those_of_one_after_the_other(
        self, devices: Devices
    ) -> None:
        net = Regression(devices[0])
        expected = copy.deepcopy(net)
        inputs = torch.randn(20, 4, 3, dtype=torch.float64).to(devices[0])
        losses = [expected.forward_backward(x).item() for x in inputs]
        async with aiopar.Parallel(2, net, devices=[devices[0]]) as parallel:
            for x in inputs:
                await parallel.put(x)
            found = [loss.item() for loss in await fetched(parallel, len(inputs))]
        assert sorted(found) == pytest.approx(sorted(losses), abs=1e-10)
        for ours, theirs in zip(net.gradients(), expected.gradients(), strict=True):
            assert torch.allclose(ours, theirs, atol=1e-10)

    @pytest.mark.anyio
    async def test_come_in_the_order_of_completion(self) -> None:
        with Gate() as gate:
            held = units(lambda x: gate(x) if x == "held" else x)
            async with aiopar.Parallel(2, held, serial_init=False) as parallel:
                await parallel.put("held")
                await parallel.put("next")
                assert await parallel.get() == "next"
                gate.open()
                assert await parallel.get() == "held"

    @pytest.mark.anyio
    async def test_async_for_ends_when_it_is_closed_and_drained(self) -> None:
        async with aiopar.Parallel(2, units(same)) as parallel:

            async def produce() -> None:
                for n in range(20):
                    await parallel.put(n)
                parallel.close()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(produce)  # the reader comes first, and waits
                assert sorted([x async for x in parallel]) == list(range(20))
            assert [x async for x in parallel] == []

    @pytest.mark.anyio
    async def test_many_tasks_put_and_many_read(self) -> None:
        found: list[int] = []
        async with aiopar.Parallel(2, units(same)) as parallel:

            async def produce(start: int) -> None:
                for n in range(start, start + 10):
                    await parallel.put(n)

            async def read() -> None:
                found.extend([x async for x in parallel])

            async with anyio.create_task_group() as readers:
                for _ in range(3):
                    readers.start_soon(read)
                async with anyio.create_task_group() as producers:
                    for start in range(0, 40, 10):
                        producers.start_soon(produce, start)
                parallel.close()
        assert sorted(found) == list(range(40))

    def test_in_a_program_without_a_loop(self) -> None:
        parallel = aiopar.Parallel(2, units(same))
        aiopar.wait(parallel.put(3))
        assert aiopar.wait(parallel.get()) == 3
        aiopar.wait(parallel.aclose())

    @pytest.mark.anyio
    async def test_nothing_to_get(self) -> None:
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate)) as parallel:
                with pytest.raises(RuntimeError, match="nothing to wait for"):
                    await parallel.get()
                await parallel.put("only")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(parallel.get)
                    await anyio.wait_all_tasks_blocked()
                    with pytest.raises(RuntimeError, match="nothing to wait for"):
                        await parallel.get()
                    gate.open()


class TestOneAfterTheOther:
    @pytest.mark.anyio
    async def test_the_first_units_of_serial_init(self) -> None:
        seen: list[int] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(x)
                return gate(x)

            async with aiopar.Parallel(3, units(enter)) as parallel:
                for n in range(6):
                    await parallel.put(n)
                for alone in range(1, 4):
                    await gate.entered(alone)
                    await anyio.wait_all_tasks_blocked()
                    assert (seen, gate.held) == (list(range(alone)), 1)
                    gate.let_on()
                await gate.entered(6)  # three at once
                assert gate.held == 3
                gate.open()
                assert sorted(await fetched(parallel, 6)) == list(range(6))

    @pytest.mark.anyio
    async def test_not_without_serial_init(self) -> None:
        with Gate() as gate:
            async with aiopar.Parallel(3, units(gate), False) as parallel:
                for n in range(3):
                    await parallel.put(n)
                await gate.entered(3)
                assert gate.held == 3
                gate.open()

    @pytest.mark.anyio
    async def test_every_unit_of_no_workers_and_the_loop_is_free(self) -> None:
        seen: list[int] = []
        with Gate() as gate:

            def enter(x: int) -> threading.Thread:
                seen.append(x)
                gate()
                return threading.current_thread()

            async with aiopar.Parallel(0, units(enter), serial_init=False) as parallel:
                for n in range(5):
                    await parallel.put(n)
                for alone in range(1, 6):
                    await gate.entered(alone)
                    assert (seen, gate.held) == (list(range(alone)), 1)
                    gate.let_on()
                threads = await fetched(parallel, 5)
        assert threading.current_thread() not in threads

    @pytest.mark.anyio
    async def test_a_failed_one_counts(self) -> None:
        with Gate() as gate:

            def fail_first(x: int) -> int:
                if x < 2:
                    raise Failure
                return gate(x)

            async with aiopar.Parallel(2, units(fail_first)) as parallel:
                for n in range(4):
                    await parallel.put(n)
                await gate.entered(2)
                assert gate.held == 2
                gate.open()
                for _ in range(2):
                    with pytest.raises(Failure):
                        await parallel.get()


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class TestCallerState:
    @pytest.mark.anyio
    async def test_is_that_of_the_moment_when_put_is_called(self) -> None:
        async with aiopar.Parallel(2, units(lambda x: (x, snapshot(), variable.get()))) as parallel:
            token = variable.set("the caller's")
            with torch.no_grad(), torch.autocast("cpu", torch.float16):
                inside = parallel.put("inside")
                expected = snapshot()
            variable.reset(token)
            outside = parallel.put("outside")
            with torch.inference_mode():
                await outside
            await inside
            seen = {x: rest for x, *rest in await fetched(parallel, 2)}
            assert seen == {"inside": [expected, "the caller's"], "outside": [PLAIN, "unset"]}
            await parallel.put("after")
            assert await parallel.get() == ("after", PLAIN, "unset")
