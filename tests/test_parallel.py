"""`Parallel`: what runs when and where, who gets what, and how it ends."""

import asyncio
import contextlib
import contextvars
import copy
import ctypes
import inspect
import threading
import weakref
from collections.abc import Callable
from time import monotonic
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from anyio.abc import TaskGroup
from torch import Tensor, nn

import aiopar
from aiopar._worker import current_worker
from aiopar.testing import Gate, Sequencer
from tests import simdevice

from .caller_states import PLAIN, snapshot
from .freeing import survivors, without_gc
from .no_threads import NO_THREAD, no_more_threads

Devices = tuple[torch.device, ...]


def units(fn: Callable[[Any], Any]) -> Any:
    """Something that computes a unit by `fn(x)`."""
    return SimpleNamespace(forward_backward=fn)


def same(x: Any) -> Any:
    return x


async def fetched(parallel: aiopar.Parallel, count: int) -> list[Any]:
    return [await parallel.get() for _ in range(count)]


async def all_of(parallel: aiopar.Parallel) -> list[Any]:
    return [x async for x in parallel]


class Failure(Exception):
    """Can be weakly referenced, as builtin exceptions cannot."""


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


class TestErrors:
    @pytest.mark.anyio
    async def test_come_from_get_with_a_note_and_the_others_go_on(self) -> None:
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

    @pytest.mark.asyncio
    async def test_async_for_goes_on_after_one(self) -> None:
        async with aiopar.Parallel(1, units(lambda x: 6 // x)) as parallel:
            for n in range(3):
                await parallel.put(n)
            parallel.close()
            with pytest.raises(ZeroDivisionError):
                await all_of(parallel)
            assert [x async for x in parallel] == [6, 3]

    @pytest.mark.anyio
    @pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
    async def test_that_end_programs_reach_who_gets(self, kind: type[BaseException]) -> None:
        def fail(x: object) -> object:
            if x is None:
                raise kind
            return x

        async with aiopar.Parallel(1, units(fail)) as parallel:
            await parallel.put(None)
            with pytest.raises(kind):
                await parallel.get()
            await parallel.put(5)
            assert await parallel.get() == 5

    @pytest.mark.asyncio
    @pytest.mark.parametrize("kind", [StopIteration, StopAsyncIteration])
    async def test_that_would_end_a_coroutine_or_a_loop(self, kind: type[Exception]) -> None:
        def stop(x: object) -> None:
            raise kind

        async with aiopar.Parallel(1, units(stop)) as parallel:
            await parallel.put(1)
            with pytest.raises(RuntimeError, match=f"raised {kind.__name__}"):
                await all_of(parallel)


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


class TestMaxPending:
    @pytest.mark.anyio
    async def test_put_waits_while_that_many_are_unfetched(self) -> None:
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
    async def test_first_come_first_served(self) -> None:
        async with (
            aiopar.Parallel(1, units(same), max_pending=1) as parallel,
            anyio.create_task_group() as tasks,
        ):
            for n in range(5):
                tasks.start_soon(parallel.put, n)
                await anyio.wait_all_tasks_blocked()
            assert [await anext(parallel) for _ in range(5)] == list(range(5))

    @pytest.mark.anyio
    @pytest.mark.parametrize("room", [False, True])
    async def test_a_cancelled_put_is_not_queued_and_takes_no_room(self, room: bool) -> None:
        """Also (`room`) when it is cancelled just after it got room, before it could take it."""
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
    async def test_a_unit_that_no_thread_can_be_had_for_is_refused(self) -> None:
        async with aiopar.Parallel(1, units(same), max_pending=1) as parallel:
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                await parallel.put("refused")
            assert parallel.pending == 0
            await parallel.put("next")
            assert await parallel.get() == "next"

    @pytest.mark.anyio
    async def test_who_waits_for_room_is_turned_away_at_the_end(self) -> None:
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
    @pytest.mark.anyio
    async def test_loses_no_unit(self) -> None:
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate)) as parallel:
                await parallel.put("kept")
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(parallel.get)
                    await anyio.wait_all_tasks_blocked()
                    tasks.cancel_scope.cancel()
                gate.open()
                assert await parallel.get() == "kept"

    @pytest.mark.may_block("holds the loop until the result is on its way to the task")
    @pytest.mark.anyio
    @pytest.mark.parametrize("others", [0, 1])
    async def test_in_the_moment_when_the_result_comes(self, others: int) -> None:
        found = []
        with Gate() as gate:
            async with aiopar.Parallel(1, units(gate)) as parallel:
                for n in range(others + 1):
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
                    while len(parallel._results._getters) > others and monotonic() < deadline:
                        pass
                    scope.cancel()
                # The result went on to who waited next, or is there for who comes next.
                assert found == [0] * others
                gate.open()
                assert await parallel.get() == others
                assert parallel.pending == 0


class TestEnd:
    @pytest.mark.anyio
    async def test_leaving_waits_for_what_was_put_and_it_can_be_fetched_later(self) -> None:
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
    async def test_left_by_an_error_drops_what_is_queued_and_waits_for_what_runs(
        self, serial_init: bool
    ) -> None:
        seen: list[int] = []
        released: list[str] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(x)
                return gate(x)

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

            parallel = aiopar.Parallel(1, units(enter), serial_init)
            async with anyio.create_task_group() as tasks:
                with pytest.raises(Failure):
                    await leave(tasks)
                assert seen == [0]
        assert sorted(released) == ["async for", "get", "get", "get"]
        assert parallel.pending == 0
        with pytest.raises(aiopar.ExecutorShutdown):
            await parallel.put(1)

    @pytest.mark.anyio
    @pytest.mark.parametrize("inside", [False, True])
    async def test_cancelled_inside_or_while_it_waits_for_what_was_put(self, inside: bool) -> None:
        seen: list[int] = []
        with Gate() as gate:

            def enter(x: int) -> int:
                seen.append(x)
                return gate(x)

            parallel = aiopar.Parallel(2, units(enter), serial_init=False)
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
        assert sorted(seen) == [0, 1]
        assert sorted([x async for x in parallel]) == [0, 1]

    def test_the_threads_end(self) -> None:
        async def main() -> list[threading.Thread]:
            async with aiopar.Parallel(2, units(lambda _: threading.current_thread())) as parallel:
                for _ in range(4):
                    await parallel.put(None)
                return await fetched(parallel, 4)

        for thread in asyncio.run(main()):
            assert thread.name.startswith("aiopar-parallel-cpu-")
            thread.join(30)
            assert not thread.is_alive()

    @pytest.mark.asyncio
    async def test_more_than_once(self) -> None:
        async with aiopar.Parallel(1, units(same)) as parallel:
            await parallel.put(1)
            parallel.close()
            parallel.close()
            await parallel.aclose()
            await parallel.aclose()
        assert await parallel.get() == 1

    @pytest.mark.asyncio
    async def test_put_after_it(self) -> None:
        async with aiopar.Parallel(1, units(same)) as parallel:
            begun = parallel.put(1)
            parallel.close()
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                parallel.put(2)  # type: ignore[unused-coroutine]  # there is none
            with pytest.raises(aiopar.ExecutorShutdown, match="cannot put after close"):
                await begun
        assert parallel.pending == 0

    @pytest.mark.asyncio
    async def test_dropped_unclosed_its_units_run_and_its_threads_end(self) -> None:
        ran: list[int] = []
        with Gate() as gate:

            def note(x: int) -> None:
                gate()
                ran.append(x)

            parallel = aiopar.Parallel(2, units(note))
            for n in range(4):
                await parallel.put(n)
            await gate.entered()
            workers = parallel._executor._workers
            del parallel
        for worker in workers:
            await worker.ended
        assert sorted(ran) == [0, 1, 2, 3]


async def _open(gate: Gate) -> None:
    await anyio.wait_all_tasks_blocked()
    gate.open()


def where(_: object) -> str:
    worker = current_worker()
    assert worker is not None
    return str(worker.device)


class TestDevices:
    @pytest.mark.asyncio
    async def test_units_run_where_their_first_tensor_is(self) -> None:
        here, there = torch.ones(1), torch.ones(1, device="meta")
        async with aiopar.Parallel(2, units(where), devices=["meta", "cpu"]) as parallel:
            for x in here, {"a": [there, here]}, (1, here, there), there:
                await parallel.put(x)
                expected = "meta" if x is there or isinstance(x, dict) else "cpu"
                assert await parallel.get() == expected

    @pytest.mark.asyncio
    async def test_else_on_each_in_turn(self) -> None:
        async with aiopar.Parallel(2, units(where), devices=["meta", "cpu"]) as parallel:
            seen = []
            for _ in range(6):
                await parallel.put("no tensor")
                seen.append(await parallel.get())
        assert seen == ["meta", "cpu"] * 3

    @pytest.mark.asyncio
    async def test_what_is_on_the_cpu_where_no_worker_is(self) -> None:
        async with aiopar.Parallel(1, units(where), devices=["meta"]) as parallel:
            await parallel.put(torch.ones(1))
            assert await parallel.get() == "meta"

    @pytest.mark.asyncio
    async def test_no_workers_are_one_on_each(self) -> None:
        async with aiopar.Parallel(0, units(where), devices=["meta", "cpu", "cpu"]) as parallel:
            for _ in range(3):
                await parallel.put(None)
            assert await fetched(parallel, 3) == ["meta", "cpu", "meta"]

    @pytest.mark.asyncio
    async def test_the_note_of_an_error_names_it(self) -> None:
        def fail(_: object) -> None:
            raise Failure

        async with aiopar.Parallel(1, units(fail), devices=["meta"]) as parallel:
            await parallel.put(None)
            with pytest.raises(Failure) as caught:
                await parallel.get()
        assert caught.value.__notes__ == ["in unit 0 on device meta"]


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


variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="unset")


class TestArguments:
    def test_the_spelling_of_gluonnlp(self) -> None:
        aiopar.wait(aiopar.Parallel(1, parallizable=units(same)).aclose())
        for wrong in ({}, {"parallelizable": units(same), "parallizable": units(same)}):
            with pytest.raises(TypeError, match="expected a parallelizable, once"):
                aiopar.Parallel(1, **wrong)

    def test_the_order_of_gluonnlp(self) -> None:
        names = list(inspect.signature(aiopar.Parallel).parameters)
        assert names[:3] == ["num_workers", "parallelizable", "serial_init"]

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
    def test_bad_ones(self, args: Any, kwargs: Any, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            aiopar.Parallel(*args, **kwargs)

    def test_a_parallelizable_without_the_method(self) -> None:
        class Unfinished(aiopar.Parallelizable):
            pass

        with pytest.raises(TypeError, match="forward_backward"):
            Unfinished()  # type: ignore[abstract]  # that is what is tested


class Thing:
    """Can be weakly referenced."""


class TestReferences:
    @pytest.mark.anyio
    async def test_nothing_of_a_fetched_unit_is_kept(self) -> None:
        async with aiopar.Parallel(1, units(lambda _: Thing())) as parallel:
            with without_gc():
                x = Thing()
                alive = [weakref.ref(x)]
                await parallel.put(x)
                del x
                result = await parallel.get()
                alive.append(weakref.ref(result))
                del result
                assert await survivors(alive) == []

    @pytest.mark.anyio
    async def test_nothing_of_one_that_failed(self) -> None:
        def fail(x: Thing) -> None:
            raise Failure(x)

        async with aiopar.Parallel(1, units(fail)) as parallel:
            with without_gc():
                x = Thing()
                alive: list[weakref.ref[Any]] = [weakref.ref(x)]
                await parallel.put(x)
                del x
                try:
                    await parallel.get()
                except Failure as error:
                    alive.append(weakref.ref(error))
                assert len(alive) == 2
                assert await survivors(alive) == []

    @pytest.mark.anyio
    async def test_nothing_of_one_that_was_dropped(self) -> None:
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
    async def test_a_parallel_with_results_that_nobody_fetches(self) -> None:
        with without_gc():
            async with aiopar.Parallel(1, units(lambda _: Thing())) as parallel:
                await parallel.put(None)
            alive = [weakref.ref(parallel)]
            del parallel
            assert await survivors(alive) == []


def _memory(tensor: Tensor) -> list[float]:
    """What is written in the (simulated) device's memory now; `tolist` would wait for it."""
    return list((ctypes.c_float * tensor.numel()).from_address(tensor.data_ptr()))


@pytest.mark.sim
class TestAccelerators:
    @pytest.mark.asyncio
    async def test_units_run_where_their_first_tensor_is(self) -> None:
        async with aiopar.Parallel(2, units(where)) as parallel:
            for device in ("sim:1", "sim:0", "sim:1"):
                await parallel.put(torch.ones(1, device=device))
                assert await parallel.get() == device
            for device in ("sim:0", "sim:1", "sim:0"):
                await parallel.put(torch.ones(1))
                assert await parallel.get() == device

    @pytest.mark.asyncio
    async def test_a_tensor_where_no_worker_is(self) -> None:
        async with aiopar.Parallel(1, units(where)) as parallel:
            with pytest.raises(ValueError, match="is on sim:1, but the workers are on sim:0"):
                parallel.put(torch.ones(1, device="sim:1"))  # type: ignore[unused-coroutine]  # there is none
        async with aiopar.Parallel(0, units(where)) as parallel:
            await parallel.put(torch.ones(1, device="sim:1"))
            assert await parallel.get() == "sim:1"

    @pytest.mark.asyncio
    @pytest.mark.parametrize("num_workers", [1, 2])
    async def test_results_are_complete_when_get_returns(self, num_workers: int) -> None:
        x = torch.ones(4, device="sim:0")
        simdevice.set_kernel_latency(0.02)
        async with aiopar.Parallel(
            num_workers, units(lambda x: x * 2 + 1), devices=[0]
        ) as parallel:
            for _ in range(4):
                await parallel.put(x)
            for _ in range(4):
                assert _memory(await parallel.get()) == [3.0] * 4

    @pytest.mark.asyncio
    async def test_first_units_end_on_the_device_before_the_next_starts(self) -> None:
        seen: list[list[float]] = []
        results: list[Tensor] = []

        def look_and_launch(x: Tensor) -> None:
            seen.extend(map(_memory, results))
            results.append(x * 2)

        x = torch.ones(1, device="sim:0")
        simdevice.set_kernel_latency(0.02)
        async with aiopar.Parallel(3, units(look_and_launch), devices=[0]) as parallel:
            for _ in range(3):
                await parallel.put(x)
        assert seen == [[2.0]] * 3

    @pytest.mark.asyncio
    async def test_inputs_that_autograd_saves_stay_until_a_later_backward_has_read_them(
        self,
    ) -> None:
        weight = torch.ones(3, device="sim:0", requires_grad=True)
        net = units(lambda x: (weight * x).sum())
        async with aiopar.Parallel(2, net, devices=[0]) as parallel:
            await parallel.put(torch.full((3,), 7.0, device="sim:0"))
            loss = await parallel.get()
        simdevice.set_kernel_latency(0.02)
        await aiopar.backward(loss)
        assert weight.grad is not None
        assert weight.grad.tolist() == [7.0] * 3

    @pytest.mark.asyncio
    async def test_gradients_of_units_on_several_workers_are_added_in_order(self) -> None:
        weight = torch.ones(3, device="sim:0", requires_grad=True)
        together, sequence, launched = Gate(), Sequencer(), Gate()

        def forward_backward(number: int) -> None:
            together()  # so that each has a worker of its own
            with sequence(number):
                if number == 0:
                    held.enter_context(simdevice.paused(torch.accelerator.current_stream()))
                loss = (weight * 10.0**number).sum()
                loss.backward()  # type: ignore[no-untyped-call]  # torch's own
                # The graph is freed: the second adds to a gradient that is not written yet.
                del loss
            launched()

        async with aiopar.Parallel(2, units(forward_backward), False, devices=[0]) as parallel:
            with contextlib.ExitStack() as held, launched, together:
                for number in range(2):
                    await parallel.put(number)
                await together.entered(2)
                together.open()
                await launched.entered(2)
        assert weight.grad is not None
        assert weight.grad.tolist() == [11.0] * 3
