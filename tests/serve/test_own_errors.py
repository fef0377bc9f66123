"""One error for several callers: each raises an object of its own."""

import copy
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anyio
import pytest
import torch

import aiopar
from aiopar.serve import Batcher
from aiopar.serve._outcomes import own_error

from .batches import Bad, Callers, outcomes_of, together, until
from .streams import Readers, full
from .test_batcher_loops import RUNNERS


class Needy(Exception):
    def __init__(self, code: int, *, why: str) -> None:
        super().__init__(f"{why}: {code}")
        self.code = code


class Wordy(Exception):
    """Its constructor does not hand on what it is given."""

    def __init__(self, code: Any) -> None:
        super().__init__(f"failed with {code}")
        self.code = code


class Slotted(Exception):
    __slots__ = ("code",)

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Unreduced(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("never")


class Single(Exception):
    def __copy__(self) -> "Single":
        return self


class Changed(Exception):
    def __reduce__(self) -> Any:
        return ValueError, ("other",)


def fails(error: BaseException) -> Callable[[Any], Any]:
    def fn(items: list[Any]) -> list[Any]:
        raise error

    return fn


@pytest.mark.anyio
async def test_no_caller_sees_the_frames_or_the_context_of_another() -> None:
    caught: dict[int, ValueError] = {}

    async def alice(batcher: Batcher, item: int) -> None:
        try:
            try:
                raise LookupError("alice's secret")
            except LookupError:
                await batcher(item)
        except ValueError as error:
            caught[item] = error

    async def bob(batcher: Batcher, item: int) -> None:
        try:
            await batcher(item)
        except ValueError as error:
            caught[item] = error

    async with (
        Batcher(fails(ValueError("broken")), **full(16)) as batcher,
        anyio.create_task_group() as tasks,
    ):
        for item in range(16):
            tasks.start_soon((alice, bob)[item % 2], batcher, item)
    for item in range(16):  # when all have raised theirs
        report = "".join(traceback.format_exception(caught[item]))
        name, other = ("in alice", "in bob") if item % 2 == 0 else ("in bob", "in alice")
        assert name in report
        assert other not in report
        assert ("alice's secret" in report) == (name == "in alice")
        assert "in fn" in report, "where it was raised"


@pytest.mark.anyio
@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken"),
        Bad(),
        OSError(2, "no such file", "name"),
        Wordy(3),
        torch.OutOfMemoryError("CUDA out of memory"),
        ExceptionGroup("several", [ValueError(1)]),
        aiopar.Overloaded("full", estimated_wait=2.0),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_copy_is_like_the_error(error: Exception) -> None:
    error = copy.copy(error)  # for this test alone
    error.__cause__ = LookupError("why")
    error.add_note("a note")
    got = await together(fails(error), list(range(4)), collate_fn=list, concurrency=1)
    assert len({id(one) for one in got}) == 4
    for one in got:
        assert type(one) is type(error)
        assert (one.args, str(one), one.__cause__) == (error.args, str(error), error.__cause__)
        assert vars(one).keys() == vars(error).keys()
        assert one.__suppress_context__
        assert one.__notes__[0] == "a note"
    got[0].add_note("his own")
    assert all("his own" not in one.__notes__ for one in got[1:])


@pytest.mark.anyio
@pytest.mark.parametrize(
    "make",
    [lambda: Needy(1, why="no"), lambda: Slotted(1), Unreduced, Single, Changed],
    ids=["Needy", "Slotted", "Unreduced", "Single", "Changed"],
)
async def test_what_cannot_be_copied_is_delivered_all_the_same(
    make: Callable[[], Exception],
) -> None:
    error = make()  # anew: pytest keeps its parameters, and so what their tracebacks hold
    got = await together(fails(error), list(range(4)), collate_fn=list)
    assert {type(one) for one in got} == {type(error)}
    assert [one.args for one in got] == [error.args] * 4


@pytest.mark.anyio
async def test_for_one_caller_it_is_the_error_itself() -> None:
    error = Bad()
    async with Batcher(fails(error), collate_fn=list) as batcher:
        assert await outcomes_of(batcher, [1]) == [error]


@pytest.mark.anyio
async def test_who_has_gone_needs_no_copy() -> None:
    error = Bad()

    async def fn(items: list[Any]) -> list[Any]:
        await may_fail.wait()
        raise error

    may_fail = anyio.Event()
    async with Batcher(fn, **full(2)) as batcher, anyio.create_task_group() as tasks:
        callers = Callers(batcher, tasks)
        callers.call(1)
        callers.call(2)
        await until(lambda: batcher.stats().in_flight == 2)
        callers.cancel(1)
        await anyio.wait_all_tasks_blocked()
        may_fail.set()
    assert callers.outcomes == {2: error}


@pytest.mark.anyio
async def test_readers_of_a_stream(kind: str) -> None:
    def generate(items: list[Any]) -> Any:
        yield items
        raise ValueError("broken")

    async def generate_async(items: list[Any]) -> Any:
        yield items
        raise ValueError("broken")

    fn = generate if kind == "generator" else generate_async
    async with Batcher(fn, **full(3)) as batcher, anyio.create_task_group() as tasks:
        readers = Readers(batcher, tasks)
        readers.read(1, 2, 3)
    assert {type(error) for error in readers.ended.values()} == {ValueError}
    assert len({id(error) for error in readers.ended.values()}) == 3


def test_callers_in_several_loops() -> None:
    batcher = Batcher(fails(ValueError("broken")), **full(9))
    ready = threading.Barrier(3)

    def run(runner: str) -> list[Any]:
        async def main() -> list[Any]:
            return await outcomes_of(batcher, [1, 2, 3])

        ready.wait(30)
        return RUNNERS[runner](main)  # type: ignore[no-any-return]

    with ThreadPoolExecutor(3) as threads:
        got = [error for errors in threads.map(run, RUNNERS) for error in errors]
    assert {type(error) for error in got} == {ValueError}
    assert len({id(error) for error in got}) == 9


def test_a_copy_keeps_where_it_was_raised() -> None:
    def raises() -> None:
        try:
            raise LookupError
        except LookupError:
            raise ValueError(1)  # noqa: B904  # for its context

    with pytest.raises(ValueError, match="1") as caught:
        raises()
    error = caught.value
    copied = own_error(error, error.__traceback__)
    assert copied is not error
    assert copied.__traceback__ is error.__traceback__
    assert isinstance(copied.__context__, LookupError)
    assert not copied.__suppress_context__
