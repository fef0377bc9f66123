"""`Parallel`: results, errors, units that run at the same time, waiting, closing."""

import asyncio
import contextvars
import copy
import threading
import weakref
from contextlib import suppress
from time import monotonic
from typing import Any

import anyio
import pytest
import torch
from anyio.abc import TaskGroup
from torch import Tensor, nn

import aiopar
from aiopar.testing import Gate
from tests.caller_states import PLAIN, snapshot
from tests.freeing import survivors, without_gc
from tests.interruptions import at_every_point
from tests.no_threads import NO_THREAD, no_more_threads
from tests.train.units import Failure, all_of, fetched, same, units

Devices = tuple[torch.device, ...]


class Regression(aiopar.Parallelizable):
    """Adds up gradients in the parameters of one model."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2).double().to(device)

    def forward_backward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.model(x).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


class TestResults:
    @pytest.mark.anyio
    @pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
    async def test_get_returns_what_forward_backward_returns(self, num_workers: int) -> None:
        async with aiopar.Parallel(num_workers, units(lambda x: x * 2)) as parallel:
            for n in range(10):
                await parallel.put(n)
            assert parallel.pending == 10
            assert sorted(await fetched(parallel, 10)) == list(range(0, 20, 2))
            assert parallel.pending == 0

    @pytest.mark.anyio
    async def test_gradients_and_losses_equal_those_of_a_serial_run(self, devices: Devices) -> None:
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
    async def test_results_come_in_the_order_of_completion(self) -> None:
        with Gate() as gate:
            held = units(lambda x: gate(x) if x == "held" else x)
            async with aiopar.Parallel(2, held, serial_init=False) as parallel:
                await parallel.put("held")
                await parallel.put("next")
                assert await parallel.get() == "next"
                gate.open()
                assert await parallel.get() == "held"

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
                await anyio.wait_all_tasks_blocked()  # the readers come first, and wait
                async with anyio.create_task_group() as producers:
                    for start in range(0, 40, 10):
                        producers.start_soon(produce, start)
                parallel.close()
            assert [x async for x in parallel] == []
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


class TestSerialInit:
    @pytest.mark.anyio
    async def test_serial_init_runs_the_first_units_alone(self) -> None:
        with Gate() as gate:
            async with aiopar.Parallel(3, units(gate)) as parallel:
                for n in range(6):
                    await parallel.put(n)
                for alone in range(1, 4):
                    await gate.entered(alone)
                    await anyio.wait_all_tasks_blocked()
                    assert (gate.count, gate.held) == (alone, 1)
                    gate.let_on()
                await gate.entered(6)  # three at once
                assert gate.held == 3
                gate.open()
                assert sorted(await fetched(parallel, 6)) == list(range(6))

    @pytest.mark.anyio
    @pytest.mark.parametrize(("num_workers", "at_once"), [(3, 3), (0, 1)])
    async def test_without_serial_init_as_many_units_run_as_there_are_workers(
        self, num_workers: int, at_once: int
    ) -> None:
        seen: list[threading.Thread] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(threading.current_thread())
                return gate(x)

            async with aiopar.Parallel(num_workers, units(enter), False) as parallel:
                for n in range(5):
                    await parallel.put(n)
                await gate.entered(at_once)
                for ended in range(5 - at_once):
                    await anyio.wait_all_tasks_blocked()
                    assert (len(seen), gate.held) == (ended + at_once, at_once)
                    gate.let_on()
                    await gate.entered(ended + 1 + at_once)
                gate.open()
                assert sorted(await fetched(parallel, 5)) == list(range(5))
        assert threading.current_thread() not in seen

    @pytest.mark.anyio
    async def test_a_failed_unit_counts_as_run(self) -> None:
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
    async def test_put_captures_it_when_it_is_called(self) -> None:
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


class TestErrors:
    @pytest.mark.anyio
    async def test_get_raises_it_with_a_note_and_other_units_go_on(self) -> None:
        def fail_when_odd(x: int) -> int:
            if x % 2:
                raise Failure(x)
            return x

        found: list[int] = []
        failed: dict[int, list[str]] = {}
        async with aiopar.Parallel(2, units(fail_when_odd)) as parallel:
            for n in range(20):  # many more failures than workers
                await parallel.put(n)
            for _ in range(20):
                try:
                    found.append(await parallel.get())
                except Failure as error:
                    failed[error.args[0]] = error.__notes__
        assert sorted(found) == list(range(0, 20, 2))
        assert failed == {n: [f"in unit {n} on device cpu"] for n in range(1, 20, 2)}

    @pytest.mark.anyio
    @pytest.mark.parametrize("read", [aiopar.Parallel.get, all_of])
    @pytest.mark.parametrize("kind", [ValueError, SystemExit, KeyboardInterrupt])
    async def test_reading_goes_on_after_one(self, read: Any, kind: type[BaseException]) -> None:
        def fail(x: object) -> object:
            if x is None:
                raise kind
            return x

        async with aiopar.Parallel(1, units(fail)) as parallel:
            for x in None, 6, 3:
                await parallel.put(x)
            parallel.close()
            with pytest.raises(kind):
                await read(parallel)
            assert [x async for x in parallel] == [6, 3]

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
    async def test_stop_iteration_becomes_a_runtime_error(self, kind: type[Exception]) -> None:
        def stop(x: object) -> None:
            raise kind

        async with aiopar.Parallel(1, units(stop)) as parallel:
            await parallel.put(1)
            with pytest.raises(RuntimeError, match=f"raised {kind.__name__}"):
                await all_of(parallel)


class TestMaxPending:
    @pytest.mark.anyio
    async def test_put_waits_while_so_many_units_are_pending(self) -> None:
        done = anyio.Semaphore(0)
        async with aiopar.Parallel(2, units(same), max_pending=2) as parallel:

            async def produce() -> None:
                for n in range(5):
                    await parallel.put(n)
                    done.release()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(produce)
                await done.acquire()
                for _ in range(3):
                    await done.acquire()
                    await anyio.wait_all_tasks_blocked()
                    assert (done.value, parallel.pending) == (0, 2)
                    await parallel.get()
            assert len(await fetched(parallel, 2)) == 2

    @pytest.mark.anyio
    @pytest.mark.parametrize("room", [False, True])
    async def test_a_cancelled_put_is_not_queued_and_takes_no_room(self, room: bool) -> None:
        """`room`: it is cancelled just after it got room."""
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            await parallel.put("first")
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(parallel.put, "cancelled")
                await anyio.wait_all_tasks_blocked()
                if room:
                    assert await parallel.get() == "first"
                tasks.cancel_scope.cancel()
            if not room:
                assert await parallel.get() == "first"
            assert parallel.pending == 0
            await parallel.put("next")
            assert await parallel.get() == "next"

    @pytest.mark.anyio
    async def test_get_raises_that_no_thread_can_start(self) -> None:
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            with no_more_threads():
                await parallel.put("refused")
            with pytest.raises(RuntimeError, match=NO_THREAD):
                await parallel.get()
            assert parallel.pending == 0
            await parallel.put("next")
            assert await parallel.get() == "next"

    @pytest.mark.anyio
    async def test_close_ends_the_wait_of_put_with_an_error(self) -> None:
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            await parallel.put("first")

            async def put() -> None:
                with pytest.raises(aiopar.ExecutorShutdown, match="after close"):
                    await parallel.put("too late")

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(put)
                tasks.start_soon(put)
                await anyio.wait_all_tasks_blocked()
                parallel.close()
            assert parallel.pending == 1
            assert [x async for x in parallel] == ["first"]


class TestCancelledGet:
    @pytest.mark.may_block("holds the loop until the result is on its way to the task")
    @pytest.mark.anyio
    @pytest.mark.parametrize("others", [0, 1])
    async def test_when_the_result_comes_at_the_same_moment(self, others: int) -> None:
        found = []
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate), serial_init=False) as parallel:
                for n in range(others + 2):
                    await parallel.put(n)

                async def get(scope: anyio.CancelScope) -> None:
                    with scope:
                        found.append(await parallel.get())

                scope = anyio.CancelScope()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(get, scope)
                    await anyio.wait_all_tasks_blocked()
                    for _ in range(others):
                        tasks.start_soon(get, anyio.CancelScope())
                    await anyio.wait_all_tasks_blocked()
                    gate.let_on()
                    deadline = monotonic() + 30
                    # When the only worker runs the next unit, the first unit has ended.
                    while gate.count < 2 and monotonic() < deadline:
                        pass
                    scope.cancel()
                # The next waiting task has the result, or the next `get` finds it.
                assert found == [0] * others
                gate.open()
                assert await fetched(parallel, 2) == [others, others + 1]
                assert parallel.pending == 0


class TestEnd:
    @pytest.mark.anyio
    async def test_leaving_waits_for_all_units_and_results_can_be_fetched_later(self) -> None:
        with Gate() as gate:
            async with (
                anyio.create_task_group() as tasks,
                aiopar.Parallel(2, units(gate)) as parallel,
            ):
                for n in range(5):
                    await parallel.put(n)
                await gate.entered()
                tasks.start_soon(_open, gate)
            assert gate.count == 5
        assert parallel.pending == 5
        assert sorted([await parallel.get(), *[x async for x in parallel]]) == list(range(5))

    @pytest.mark.anyio
    @pytest.mark.parametrize("serial_init", [False, True])
    async def test_an_error_drops_queued_units_and_waits_for_running_units(
        self, serial_init: bool
    ) -> None:
        released: list[str] = []
        with Gate() as gate:

            async def get() -> None:
                with pytest.raises(RuntimeError, match="dropped"):
                    await fetched(parallel, 2)
                released.append("get")

            async def read() -> None:
                assert await all_of(parallel) == []  # the reader comes last
                released.append("async for")

            async def leave(tasks: TaskGroup) -> None:
                async with parallel:
                    for n in range(5):
                        await parallel.put(n)
                    await gate.entered()
                    for waiting in get, get, get, read:
                        tasks.start_soon(waiting)
                        await anyio.wait_all_tasks_blocked()
                    tasks.start_soon(_open, gate)
                    raise Failure

            parallel = aiopar.Parallel(1, units(gate), serial_init)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(Failure):
                    await leave(tasks)
                assert gate.count == 1
        assert sorted(released) == ["async for", "get", "get", "get"]
        assert parallel.pending == 0
        with pytest.raises(aiopar.ExecutorShutdown):
            await parallel.put(1)

    @pytest.mark.anyio
    @pytest.mark.parametrize("inside", [False, True])
    async def test_a_cancellation_inside_or_at_the_end_drops_queued_units(
        self, inside: bool
    ) -> None:
        with Gate() as gate:
            parallel = aiopar.Parallel(2, units(gate), serial_init=False)
            scope = anyio.CancelScope()

            async def hold() -> None:
                with scope:
                    async with parallel:
                        for n in range(6):
                            await parallel.put(n)
                        if inside:
                            await anyio.sleep_forever()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(hold)
                await gate.entered(2)
                await anyio.wait_all_tasks_blocked()
                scope.cancel()
                await anyio.wait_all_tasks_blocked()  # what is queued is dropped
                gate.open()
            assert scope.cancelled_caught
        assert gate.count == 2
        assert sorted([x async for x in parallel]) == [0, 1]

    @pytest.mark.asyncio
    async def test_put_after_close_which_may_be_called_more_than_once(self) -> None:
        async with aiopar.Parallel(1, units(same)) as parallel:
            begun = parallel.put(1)
            for _ in range(2):
                parallel.close()
                await parallel.aclose()
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                parallel.put(2)  # type: ignore[unused-coroutine]  # it raises
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                await begun
        assert parallel.pending == 0

    @pytest.mark.asyncio
    async def test_collected_without_close_its_units_run_and_its_threads_end(self) -> None:
        ran: list[int] = []
        threads: set[threading.Thread] = set()
        with Gate() as gate:

            def note(x: int) -> None:
                threads.add(threading.current_thread())
                gate()
                ran.append(x)

            parallel = aiopar.Parallel(2, units(note))
            for n in range(4):
                await parallel.put(n)
            await gate.entered()
            del parallel
            gate.open()
            await gate.entered(4)
        for thread in threads:
            await anyio.to_thread.run_sync(thread.join, 30)
            assert not thread.is_alive()
        assert sorted(ran) == [0, 1, 2, 3]


async def _open(gate: Gate) -> None:
    await anyio.wait_all_tasks_blocked()
    gate.open()


class Thing:
    """An object that can be weakly referenced."""


class TestReferences:
    @pytest.mark.anyio
    @pytest.mark.parametrize("fails", [False, True])
    async def test_nothing_of_a_fetched_unit(self, fails: bool) -> None:
        def run(x: Thing) -> Thing:
            if fails:
                raise Failure(x)
            return Thing()

        async with aiopar.Parallel(1, units(run)) as parallel:
            with without_gc():
                x = Thing()
                alive: list[weakref.ref[Any]] = [weakref.ref(x)]
                await parallel.put(x)
                del x
                try:
                    alive.append(weakref.ref(await parallel.get()))
                except Failure as error:
                    alive.append(weakref.ref(error))
                assert len(alive) == 2
                assert await survivors(alive) == []

    @pytest.mark.anyio
    async def test_nothing_of_a_dropped_unit(self) -> None:
        alive: list[weakref.ref[Any]] = []
        with without_gc(), Gate() as gate:

            async def leave() -> None:
                async with aiopar.Parallel(1, units(lambda _: gate())) as parallel:
                    await parallel.put("runs")
                    await gate.entered()
                    x = Thing()
                    alive.append(weakref.ref(x))
                    await parallel.put(x)
                    del x
                    gate.open()
                    raise Failure

            with pytest.raises(Failure):
                await leave()
            assert await survivors(alive) == []

    @pytest.mark.anyio
    async def test_a_parallel_with_unfetched_results_is_freed(self) -> None:
        with without_gc():
            async with aiopar.Parallel(1, units(lambda _: Thing())) as parallel:
                await parallel.put(None)
            alive = [weakref.ref(parallel)]
            del parallel
            assert await survivors(alive) == []


class TestArguments:
    def test_the_spelling_of_gluonnlp(self) -> None:
        aiopar.wait(aiopar.Parallel(1, parallizable=units(same)).aclose())
        both = {"parallelizable": units(same), "parallizable": units(same)}
        for number, wrong in (("none", {}), ("two", both)):
            with pytest.raises(TypeError, match=f"expected one parallelizable, got {number}"):
                aiopar.Parallel(1, **wrong)

    @pytest.mark.parametrize(
        ("args", "kwargs", "error", "message"),
        [
            ((1.0, units(same)), {}, TypeError, "num_workers must be an int, not float"),
            ((True, units(same)), {}, TypeError, "num_workers must be an int, not bool"),
            ((-1, units(same)), {}, ValueError, "num_workers must be at least 0, got -1"),
            ((1, units(same)), {"max_pending": 0}, ValueError, "max_pending must be at least 1"),
            ((1, units(same)), {"max_pending": 1.5}, TypeError, "max_pending must be an int"),
            ((1, 3), {}, TypeError, r"expected an object with forward_backward\(x\), got 3"),
            ((1, units(3)), {}, TypeError, "expected a callable, got 3"),  # type: ignore[arg-type]
            ((1, units(asyncio.sleep)), {}, TypeError, "coroutine function"),
            ((1, units(same)), {"devices": "cpu"}, TypeError, "sequence of devices"),
            ((1, units(same)), {"devices": []}, ValueError, "devices is empty"),
            ((1, units(same)), {"devices": ["nowhere"]}, ValueError, "unknown device"),
            (
                (1, units(same)),
                {"devices": ["cpu", "meta"]},
                ValueError,
                "1 workers cannot be on 2 devices: cpu, meta",
            ),
        ],
    )
    def test_bad_arguments(
        self, args: Any, kwargs: Any, error: type[Exception], message: str
    ) -> None:
        with pytest.raises(error, match=message):
            aiopar.Parallel(*args, **kwargs)

    def test_a_parallelizable_without_the_method(self) -> None:
        class Unfinished(aiopar.Parallelizable):
            pass

        with pytest.raises(TypeError, match="forward_backward"):
            Unfinished()  # type: ignore[abstract]  # tested here


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", ["put", "close"])
async def test_a_task_that_waits_in_get_may_be_collected_at_any_point(verb: str) -> None:
    for interruption in at_every_point():
        async with aiopar.Parallel(1, units(lambda gate: gate())) as parallel:
            with Gate() as gate:
                await parallel.put(gate)
                get = parallel.get()
                get.send(None)
                step = parallel.put(str) if verb == "put" else None
                with interruption.by(get.close), suppress(StopIteration):
                    parallel.close() if step is None else step.send(None)
                get.close()
            for _ in range(1 + (verb == "put")):
                await parallel.get()
            assert parallel.pending == 0
