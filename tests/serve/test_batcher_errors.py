"""`Batcher`: an error reaches only the caller of the item that caused it."""

import asyncio
import concurrent.futures
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import AsyncExitStack, suppress
from typing import Any
from weakref import ref

import anyio
import pytest
import torch
from torch import Tensor, nn

import aiopar
from aiopar.serve import Batcher, ReplicaPool
from tests import simdevice
from tests.freeing import collect_without_gil
from tests.home import AtHome
from tests.workers import Workers

from .batches import (
    LONG,
    Bad,
    busy,
    coroutine,
    current_executor,
    on_asyncio,
    open_batcher,
    outcomes_in,
    outcomes_of,
    together,
)
from .streams import full

pytestmark = pytest.mark.anyio


def checked(item: Any) -> str:
    """Fails for negative numbers."""
    if item != "first" and item < 0:
        raise Bad(item)
    return str(item)


async def test_one_bad_item_fails_alone(workers: Workers) -> None:
    async with busy(checked, workers=workers) as callers:
        await callers.queue(0, 1, -2, 3, 4)
    error = callers.outcomes.pop(-2)
    assert callers.outcomes == {"first": "first", 0: "0", 1: "1", 3: "3", 4: "4"}
    assert type(error) is Bad
    assert error.args == (-2,)
    *_, note = error.__notes__
    assert note == "raised by one item of a batch of 5; item: int; batch: 5 x int"
    assert callers.runs == [[0, 1, -2, 3, 4], [0, 1, -2], [0, 1], [-2], [3, 4]]
    stats = callers.batcher.stats()
    assert (stats.answered, stats.failed) == (5, 1)
    assert callers.batcher.stats().batch_sizes == {1: 1, 5: 1}


class Missing(KeyError):
    """A built-in exception takes no weak reference."""


class Speechless(Exception):
    def __str__(self) -> str:
        raise NotImplementedError


async def test_invalid_input_is_a_refusal_and_no_failure(workers: Workers) -> None:
    def check(item: Any) -> Any:
        if item == "bad":
            raise aiopar.InvalidInput("not this")
        return item

    async with busy(check, workers=workers) as callers:
        await callers.queue("good", "bad")
    assert type(callers.outcomes["bad"]) is aiopar.InvalidInput
    stats = callers.batcher.stats()
    assert (stats.answered, stats.failed, stats.refused) == (2, 0, {"invalid_input": 1})
    assert stats.errors == ()


@on_asyncio
@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Bad("bad input\nand more"), "Bad: bad input"),
        (lambda: Bad("\n\n  bad: input\nand more"), "Bad: bad: input"),
        (lambda: Missing("key"), "Missing: 'key'"),
        (lambda: Bad("x" * 1000), f"Bad: {'x' * 195}"),
        (Speechless, "Speechless"),
    ],
    ids=["two lines", "empty lines first", "key", "long", "without a message"],
)
async def test_an_error_is_kept_in_words(make: Callable[[], Exception], text: str) -> None:
    def fail(items: list[str]) -> list[str]:
        if items == ["item"]:
            error = make()
            errors.append(ref(error))
            try:
                raise error
            finally:
                del error  # its traceback holds this frame
        return items

    errors: list[ref[Exception]] = []
    async with open_batcher(None, fail) as batcher:
        with pytest.raises(aiopar.DeadlineExceeded):
            await batcher("late", timeout=0.0)
        assert batcher.stats().errors == (), "no failure"
        before = time.time()
        with suppress(Bad, Missing, Speechless):
            await batcher("item")
        (last,) = batcher.stats().errors
        assert (last.text, last.count) == (text, 1)
        assert before <= last.time <= time.time()
        assert await batcher("good") == "good"
        assert batcher.stats().errors == (last,), "an answer does not take it away"
        collect_without_gil()
        assert errors[0]() is None, "only its words are kept"


@on_asyncio
async def test_the_latest_five_kinds_of_errors_are_kept() -> None:
    def fail(items: list[str]) -> list[str]:
        raise Bad(items[0])

    async with open_batcher(None, fail) as batcher:
        for kind in "abacdaefb":
            with pytest.raises(Bad):
                await batcher(kind)
        errors = batcher.stats().errors
    # "b" was forgotten when "f" came, and begins again.
    shown = [(error.text, error.count) for error in errors]
    assert shown == [("Bad: b", 1), ("Bad: f", 1), ("Bad: e", 1), ("Bad: a", 3), ("Bad: d", 1)]
    times = [error.time for error in errors]
    assert times == sorted(times, reverse=True)


_NOT_OF_THE_CALLER = [
    (aiopar.DeadlineExceeded, aiopar.DeadlineExceeded),
    (concurrent.futures.CancelledError, concurrent.futures.CancelledError),
    (asyncio.CancelledError, RuntimeError),
    (GeneratorExit, RuntimeError),
]
"""What a function may raise, and what its caller gets: never what looks like its own end."""


@on_asyncio
@pytest.mark.parametrize(("raised", "got"), _NOT_OF_THE_CALLER)
@pytest.mark.parametrize("way", ["function", "coroutine function", "generator"])
async def test_an_item_has_failed_whatever_its_function_raises(
    raised: type[BaseException], got: type[Exception], way: str
) -> None:
    def fail(items: list[str]) -> list[str]:
        if items == ["bad"]:
            raise raised("the function's own")
        return items

    def generate(items: list[str]) -> Generator[list[str], None, None]:
        yield fail(items)

    ways = {"function": fail, "coroutine function": coroutine(fail), "generator": generate}

    async def ask(item: str) -> Any:
        if way != "generator":
            return await batcher(item)
        [part] = [part async for part in batcher.stream(item)]
        return part

    async with Batcher(ways[way], collate_fn=list) as batcher:
        task = asyncio.ensure_future(ask("bad"))
        await asyncio.wait([task])
        assert not task.cancelled()
        error = task.exception()
        assert type(error) is got
        assert error is not None
        assert raised in (type(error), type(error.__cause__))
        assert outcomes_in(batcher.stats()) == {"failed": 1}
        (last,) = batcher.stats().errors
        assert last.text.startswith(f"{got.__name__}: the function")
        assert await ask("good") == "good"


async def raise_a_cancellation() -> None:
    task = asyncio.ensure_future(asyncio.sleep(0))
    task.cancel()
    await task


async def test_an_item_whose_own_loop_raises_a_cancellation_fails_alone(workers: Workers) -> None:
    def fn(items: list[int]) -> list[int]:
        if 1 in items:
            asyncio.run(raise_a_cancellation())
        return items

    async with open_batcher(workers, fn, **full(3)) as batcher:
        good, bad, fine = await outcomes_of(batcher, range(3))
    assert (good, fine) == (0, 2)
    assert isinstance(bad.__cause__, asyncio.CancelledError)
    assert outcomes_in(batcher.stats()) == {"answered": 2, "failed": 1}


def scored(batch: Tensor) -> Tensor:
    return batch @ torch.ones(4, 2)


async def scored_on_the_loop(batch: Tensor) -> Tensor:
    return scored(batch)


@pytest.mark.parametrize(
    ("fn", "in_pool"),
    [
        pytest.param(scored, False, id="function"),
        pytest.param(scored_on_the_loop, False, id="async function"),
        pytest.param(nn.Linear(4, 2), False, id="module"),
        pytest.param(nn.Linear(4, 2), True, id="pool"),
    ],
)
async def test_an_error_names_the_shapes_of_the_item_and_the_batch(
    workers: Workers, fn: Any, in_pool: bool
) -> None:
    items = [torch.ones(n) for n in (4, 4, 3, 4)]
    async with AsyncExitStack() as stack:
        if in_pool:
            fn = await stack.enter_async_context(ReplicaPool(fn, ["cpu"], executor=workers))
        outcomes = await together(fn, items, workers=workers)
    assert [isinstance(one, Tensor) for one in outcomes] == [True, True, False, True]
    first, *_, last = outcomes[2].__notes__
    assert first == "called with Tensor float32 [1, 3]"
    start = "raised by one item of a batch of 4; item: Tensor float32 [3]; batch: "
    assert last.startswith(start)
    kinds = {"3 x Tensor float32 [4]", "Tensor float32 [3]"}  # trio's tasks begin in any order
    assert set(last.removeprefix(start).split(", ")) == kinds


@pytest.mark.parametrize("kind", [ConnectionError, torch.OutOfMemoryError])
@pytest.mark.parametrize("where", ["worker", "loop"])
async def test_frames_in_which_callers_handle_a_stored_error_stay(
    kind: type[Exception], where: str
) -> None:
    """The traceback of the error also has the suspended frames of those that handle it."""
    stored = kind("always the same")
    answered: list[int] = []
    closed: list[str] = []

    def fail(_: list[int]) -> list[int]:
        raise stored

    async def fail_on_loop(items: list[int]) -> list[int]:
        return fail(items)

    def handle() -> Generator[None]:
        try:
            raise stored
        except kind:
            try:
                yield
            finally:
                closed.append("early")

    async def call(batcher: Batcher[Any, Any], item: int, times: int) -> None:
        try:
            await batcher(item)
        except kind:
            if times > 1:
                await call(batcher, item, times - 1)
        else:
            pytest.fail("it did not fail")
        answered.append(item)

    bystander = handle()
    next(bystander)
    fn = fail if where == "worker" else fail_on_loop
    async with Batcher(fn, **full(4)) as batcher, anyio.create_task_group() as tasks:
        for item in range(4):
            tasks.start_soon(call, batcher, item, 3)
    assert sorted(answered) == [item for item in range(4) for _ in range(3)]
    assert not closed
    notes = [note for note in stored.__notes__ if "one item" in note]
    assert notes == ["raised by one item of a batch of 4; item: int; batch: 4 x int"]
    bystander.close()


async def test_no_caller_sees_the_frames_of_another() -> None:
    def fn(items: list[int]) -> list[int]:
        raise aiopar.OutputMismatch("shared")

    caught: list[BaseException] = []

    async def call(batcher: Batcher[Any, Any], item: int) -> None:
        try:
            await batcher(item)
        except aiopar.OutputMismatch as error:
            names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            assert names.count("call") == 1
            assert names[-1] == "fn"
            caught.append(error)

    async with Batcher(fn, **full(3)) as batcher, anyio.create_task_group() as tasks:
        for item in range(3):
            tasks.start_soon(call, batcher, item)
    assert len(caught) == 3


async def test_an_item_that_leaves_before_its_part_runs_is_not_computed(workers: Workers) -> None:
    """Nor is an expired item."""
    async with busy(checked, workers=workers, always=True) as callers:
        await callers.queue(-1, 2, 3, 4)
        callers.gate.let_on()
        await callers.gate.entered(2)
        callers.cancel(3)
        await anyio.wait_all_tasks_blocked()
    assert callers.runs == [[-1, 2, 3, 4], [-1, 2], [-1], [2], [4]]


# Items that cannot be made a batch.


def increment(batch: Tensor) -> Tensor:
    return batch + 1


def same(batch: Tensor) -> Tensor:
    return batch


async def test_an_item_that_cannot_be_collated(workers: Workers) -> None:
    items: list[Any] = [torch.full((1 + n % 2,), float(n)) for n in range(5)]
    items[2] = "text"
    outcomes = await together(increment, items, workers=workers)
    assert isinstance(outcomes.pop(2), TypeError), "fails alone, in the function"
    assert [outcome.tolist() for outcome in outcomes] == [[1], [2, 2], [4, 4], [5]]


# Outputs that do not match.


@pytest.mark.parametrize(
    ("fn", "unbatch_fn", "words"),
    [
        (lambda batch: batch[1:], None, "returned 2 outputs for a batch of 3 items"),
        (lambda batch: batch.sum(), None, "returned no batch for a batch of 3 items"),
        (lambda batch: [1], None, "returned 1 output for a batch of 3 items"),
        (lambda batch: {"x": batch, "y": [1, 2]}, None, r"output\['y'\]"),
        (lambda batch: None, None, "returned no batch"),
        (same, lambda _: [1], "unbatch_fn returned 1 outputs for a batch of 3"),
        (same, lambda _: range(4), "unbatch_fn returned 4 outputs for a batch of 3"),
        (same, lambda _: torch.zeros(4), "unbatch_fn returned 4 outputs for a batch of 3"),
    ],
)
async def test_a_wrong_number_of_outputs_is_everybodys_error(
    workers: Workers, fn: Callable[[Any], Any], unbatch_fn: Any, words: str
) -> None:
    runs: list[int] = []

    def counted(batch: Tensor) -> Any:
        runs.append(len(batch))
        return fn(batch)

    unbatch_fn = unbatch_fn and AtHome(unbatch_fn)
    options = {"workers": workers, "unbatch_fn": unbatch_fn}
    outcomes = await together(AtHome(counted), [*torch.arange(3)], **options)
    for outcome in outcomes:
        with pytest.raises(aiopar.OutputMismatch, match=words):
            raise outcome
    assert runs == [3], "it is not split"


def each(batch: list[int]) -> Iterator[int]:
    yield from batch


async def test_unbatch_fn_may_return_any_iterable(workers: Workers) -> None:
    items = [torch.tensor(n) for n in range(3)]
    for unbatch_fn in (iter, each, dict.fromkeys):
        outcomes = await together(Tensor.tolist, items, workers=workers, unbatch_fn=unbatch_fn)
        assert outcomes == [0, 1, 2]


def ten_by(outputs: Tensor) -> list[int]:
    return [10 // n for n in outputs.tolist()]


async def test_unbatch_fn_that_fails_for_an_item(workers: Workers) -> None:
    items = [torch.tensor(n) for n in (1, 0, 5)]
    outcomes = await together(same, items, workers=workers, unbatch_fn=ten_by)
    assert outcomes[::2] == [10, 2]
    assert isinstance(outcomes[1], ZeroDivisionError)


class Unwilling(Tensor):
    """Cannot be taken apart."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.unbind:
            raise Bad("unbind")
        return Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})  # type: ignore[attr-defined]


def unwilling(batch: Tensor) -> Tensor:
    return batch.as_subclass(Unwilling)


async def test_outputs_that_cannot_be_taken_apart(workers: Workers) -> None:
    items = [torch.tensor(n) for n in range(3)]
    outcomes = await together(unwilling, items, workers=workers)
    assert {type(outcome) for outcome in outcomes} == {Bad}
    [note] = outcomes[0].__notes__
    assert "Unwilling" in note
    assert "taken apart" in note


# Errors that no item has caused.


class Stop(BaseException):
    """Stands for `SystemExit`, which would end the loop of a caller that does not catch it."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Stop])
async def test_a_base_exception_does_not_split_the_batch(
    workers: Workers, kind: type[BaseException]
) -> None:
    runs: list[int] = []
    caught: list[BaseException] = []

    def fn(items: list[int]) -> list[int]:
        runs.append(len(items))
        if 1 in items:
            raise kind("stop")
        return items

    async def call(batcher: Batcher[Any, Any], item: int) -> None:
        try:
            await batcher(item)
        except kind as error:
            caught.append(error)

    async with open_batcher(workers, fn, **full(3)) as batcher:
        for items in (range(3), range(4, 7)):
            async with anyio.create_task_group() as tasks:
                for item in items:
                    tasks.start_soon(call, batcher, item)
            assert [type(error) for error in caught] == [kind] * 3
    assert runs == [3, 3], "the worker goes on"


class Exits(nn.Module):
    """Raises SystemExit for a batch with the item 1."""

    def forward(self, batch: Tensor) -> Tensor:
        if 1 in batch:
            sys.exit("bad")
        return batch


def collate_or_exit(items: list[Tensor]) -> Tensor:
    return Exits()(torch.stack(items))  # type: ignore[no-any-return]


async def exits_on_the_loop(batch: Tensor) -> Tensor:
    return Exits()(batch)  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", ["function", "collate_fn", "pool", "pool's collate_fn", "loop"])
async def test_an_item_that_exits_fails_alone(workers: Workers, at: str) -> None:
    outcomes: list[Any] = [None] * 4

    async def call(batcher: Batcher[Any, Any], item: int) -> None:
        try:
            outcomes[item] = (await batcher(torch.tensor(item))).item()
        except SystemExit as error:  # it would end the loop
            outcomes[item] = error

    module = nn.Identity() if "collate_fn" in at else Exits()
    pool = ReplicaPool(module, executor=workers, warmup=torch.zeros(1))
    fn = pool if "pool" in at else exits_on_the_loop if at == "loop" else module
    options: dict[str, Any] = {"max_batch_size": 4, "max_queue_delay": LONG}
    if "collate_fn" in at:
        options["collate_fn"] = collate_or_exit
    with aiopar.use_executor(workers):
        async with pool, Batcher(fn, **options) as batcher, anyio.create_task_group() as tasks:
            for item in range(4):
                tasks.start_soon(call, batcher, item)
    (error,) = (one for one in outcomes if isinstance(one, SystemExit))
    assert outcomes == [0, error, 2, 3]
    assert error.code == "bad"
    assert any(note.startswith("raised by one item of a batch of 4") for note in error.__notes__)


def stop(_: object) -> None:
    raise StopIteration


async def test_stop_iteration_does_not_end_the_callers_loop(workers: Workers) -> None:
    with aiopar.use_executor(workers):
        async with Batcher(stop, collate_fn=list) as batcher:
            with pytest.raises(RuntimeError, match="StopIteration") as caught:
                await batcher(1)
    assert isinstance(caught.value.__cause__, StopIteration)


@pytest.mark.parametrize("on_loop", [False, True])
async def test_an_accelerators_error_is_not_split(on_loop: bool) -> None:
    runs: list[int] = []

    def fn(batch: Tensor) -> Tensor:
        runs.append(len(batch))
        raise torch.AcceleratorError("the device is lost")

    async def coroutine(batch: Tensor) -> Tensor:
        return fn(batch)

    outcomes = await together(coroutine if on_loop else fn, [torch.tensor(n) for n in range(3)])
    assert {type(outcome) for outcome in outcomes} == {torch.AcceleratorError}
    assert runs == [3]


@pytest.mark.sim
async def test_a_kernel_that_fails_late_fails_its_batch() -> None:
    def fn(batch: Tensor) -> Tensor:
        result = batch + 1
        if batch[0].item() == 0:
            simdevice.fail_next_sync("broken kernel")
        return result

    async with current_executor(["sim:0"]):
        items = [torch.tensor([0.0], device="sim:0")] * 3
        outcomes = await together(fn, items)
        for outcome in outcomes:
            with pytest.raises(RuntimeError, match="broken kernel"):
                raise outcome
        outcomes = await together(fn, [item + 1 for item in items])
        assert [outcome.item() for outcome in outcomes] == [2, 2, 2]


def fail_in_a_circle(_: list[Any]) -> list[Any]:
    try:
        raise Bad(1)
    except Bad as first:
        try:
            raise Bad(2) from first
        except Bad as second:
            raise first from second


async def test_errors_that_came_of_each_other(workers: Workers) -> None:
    outcomes = await together(fail_in_a_circle, [1, 2], workers=workers, collate_fn=list)
    assert [outcome.args for outcome in outcomes] == [(1,), (1,)]
    assert outcomes[0].__cause__.args == (2,)
