"""Errors of calls in processes: type, arguments, notes, causes; nothing that breaks a process."""

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import Any, Never

import pytest
import torch

import aiopar
from aiopar import ProcessExecutor


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    """One process, which no error may end."""
    with ProcessExecutor(["cpu"]) as executor:
        executor.submit(abs, -1).result()
        before = executor.stats().workers[0].host
        yield executor
        executor.submit(abs, -1).result()
        assert executor.stats().workers[0].host == before


class WithCode(Exception):
    """Its arguments are not those of its `__init__`."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"error {code} ({hint})")
        self.code = code
        self.hint = hint


class Prefixed(Exception):
    """A second `__init__` would change its text."""

    def __init__(self, text: str) -> None:
        super().__init__(f"prefixed: {text}")


class WithState(Exception):
    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__("with a tensor", tensor)
        self.tensor = tensor


@dataclass(frozen=True)
class Frozen(Exception):
    number: int


class Ended(BaseException):
    pass


def _fail(error: Callable[[], BaseException], *notes: str) -> Never:
    raised = error()
    for note in notes:
        raised.add_note(note)
    raise raised


def _fields(error: BaseException) -> dict[str, Any]:
    return {key: value for key, value in vars(error).items() if key != "__notes__"}


ERRORS: list[Callable[[], BaseException]] = [
    partial(ValueError, "text", 3),
    partial(KeyError, "key"),
    partial(OSError, 2, "no such thing", "a file"),
    partial(UnicodeDecodeError, "utf-8", b"x", 0, 1, "reason"),
    partial(WithCode, 7, hint="look there"),
    partial(Prefixed, "text"),
    partial(Ended, 1, 2),
    partial(SystemExit, 3),
    partial(KeyboardInterrupt),
    partial(GeneratorExit),
    partial(StopAsyncIteration, 5),
    partial(CancelledError),
    partial(TimeoutError, "late"),
    partial(torch.OutOfMemoryError, "out of memory"),
    partial(aiopar.WorkerLost, "of a call", may_have_run=False),
    partial(aiopar.Overloaded, "full", estimated_wait=1.5),
    partial(AssertionError, [1, {"a": 2}]),
]


@pytest.mark.asyncio
@pytest.mark.parametrize("make", ERRORS)
async def test_errors_keep_type_arguments_attributes_and_notes(
    executor: ProcessExecutor, make: Callable[[], BaseException]
) -> None:
    expected = make()
    with pytest.raises(type(expected)) as caught:
        await executor.submit(_fail, make, "first note", "second note")
    error = caught.value
    assert type(error) is type(expected)
    assert error.args == expected.args
    assert str(error) == str(expected)
    assert _fields(error) == _fields(expected)
    assert error.__notes__[:2] == ["first note", "second note"]


@pytest.mark.asyncio
async def test_errors_without_a_plain_pickle(executor: ProcessExecutor) -> None:
    with pytest.raises(Frozen) as frozen:
        await executor.submit(_fail, partial(Frozen, 3))
    assert frozen.value == Frozen(3)
    with pytest.raises(WithState) as stateful:
        await executor.submit(_fail, partial(WithState, torch.arange(10**5)))
    assert stateful.value.tensor.sum() == sum(range(10**5))
    assert len(stateful.value.args) == 2


def _fail_with_causes() -> Never:
    try:
        try:
            raise WithCode(7, hint="innermost")
        except WithCode as error:
            error.add_note("of the innermost")
            raise KeyError("in between") from error
    except KeyError as error:
        raise ValueError("outermost") from error


@pytest.mark.asyncio
async def test_causes_and_the_traceback(executor: ProcessExecutor) -> None:
    with pytest.raises(ValueError, match="outermost") as caught:
        await executor.run_sync(_fail_with_causes)
    between = caught.value.__cause__
    assert isinstance(between, KeyError)
    innermost = between.__cause__
    assert isinstance(innermost, WithCode)
    assert (innermost.code, innermost.__notes__) == (7, ["of the innermost"])
    text = "".join(traceback.format_exception(caught.value))
    assert text.count('raise KeyError("in between") from error') == 1, "of the process"
    assert "in _fail_with_causes" in text
    assert text.endswith("ValueError: outermost\n")


_STORED = ValueError("always the same")


def _fail_again() -> Never:
    raise _STORED


@pytest.mark.asyncio
async def test_the_traceback_of_an_error_that_is_raised_again_does_not_grow(
    executor: ProcessExecutor,
) -> None:
    texts: set[str] = set()
    for _ in range(3):
        with pytest.raises(ValueError, match="always") as caught:
            await executor.submit(_fail_again)
        texts.add(str(caught.value.__cause__))
    [text] = texts
    assert "in _fail_again" in text


class Group(ExceptionGroup[Exception]):
    pass


def _fail_in_a_group(kind: type[BaseExceptionGroup[Any]], *members: BaseException) -> Never:
    members[0].add_note("of a member")
    group = kind("of a group", [*members, WithCode(1, hint="x"), _local()])
    group.add_note("of the group")
    raise group


def _local() -> Exception:
    class Local(Exception):
        pass

    error = Local("local", 3)
    error.add_note("of the local one")
    return error


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", [ExceptionGroup, BaseExceptionGroup, Group])
async def test_groups(executor: ProcessExecutor, kind: type[BaseExceptionGroup[Any]]) -> None:
    nested = ExceptionGroup("inner", [ValueError(1)])
    with pytest.raises(kind) as caught:
        await executor.run_sync(_fail_in_a_group, kind, KeyError("first"), nested)
    group = caught.value
    assert type(group) is (ExceptionGroup if kind is BaseExceptionGroup else kind)
    assert (group.message, group.__notes__) == ("of a group", ["of the group"])
    first, inner, coded, local = group.exceptions
    assert (repr(first), first.__notes__) == ("KeyError('first')", ["of a member"])
    assert repr(inner) == "ExceptionGroup('inner', [ValueError(1)])"
    assert isinstance(coded, WithCode)
    assert coded.code == 1
    assert (type(local).__name__, local.args) == ("Local", ("local", 3)), "a class by value"
    assert local.__notes__ == ["of the local one"]


class WithLock(Exception):
    def __init__(self, text: str) -> None:
        self.lock = threading.Lock()
        self.number = 3
        super().__init__(text, self.lock)


class Stubborn(Exception):
    def __reduce__(self) -> Never:
        raise RuntimeError("not to be pickled")

    def __new__(cls, *args: Any) -> "Stubborn":
        if not args:
            raise TypeError("not to be made anew")
        return super().__new__(cls, *args)


def _fail_locally() -> Never:
    raise _local() from WithLock("cause")


def _fail_stubbornly() -> Never:
    error = Stubborn(threading.Lock())
    error.add_note("kept")
    raise error


@pytest.mark.asyncio
async def test_unpicklable_errors(executor: ProcessExecutor) -> None:
    with pytest.raises(WithLock) as locked:
        await executor.submit(_fail, partial(WithLock, "text"), "kept")
    assert (locked.value.args, _fields(locked.value)) == (("text",), {"number": 3})
    assert locked.value.__notes__ == ["kept"]
    with pytest.raises(Exception, match=r"^\('local', 3\)") as local:
        await executor.run_sync(_fail_locally)
    assert type(local.value).__name__ == "Local"
    assert local.value.__notes__ == ["of the local one"]
    assert isinstance(local.value.__cause__, WithLock)
    with pytest.raises(RuntimeError, match=r"^Stubborn: <unlocked _thread.lock") as stubborn:
        await executor.run_sync(_fail_stubbornly)
    assert stubborn.value.__notes__ == ["kept"]


# Errors of pickling and unpickling.


class Loads:
    """Calls a function when it is unpickled; fails when pickled a second time, if asked to."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self._reduced = fn, args

    def __reduce__(self) -> Any:
        return self._reduced


@pytest.mark.asyncio
async def test_an_argument_that_cannot_be_unpickled(executor: ProcessExecutor) -> None:
    with pytest.raises(WithCode, match="error 7") as caught:
        await executor.run_sync(
            print, torch.rand(10**5), Loads(_fail, partial(WithCode, 7, hint="x"))
        )
    assert caught.value.__notes__[0].startswith("the call cannot be unpickled in its process")
    for fatal in (SystemExit, KeyboardInterrupt):
        with pytest.raises(fatal):
            await executor.submit(print, Loads(_fail, fatal))


@pytest.mark.asyncio
async def test_a_result_that_cannot_be_unpickled(executor: ProcessExecutor) -> None:
    result = partial(Loads, _fail, partial(WithCode, 7, hint="x"))
    with pytest.raises(WithCode, match="error 7") as caught:
        await executor.run_sync(result)
    name = "process:0/cpu"
    assert caught.value.__notes__ == [f"the result came from {name}, and cannot be unpickled"]


@pytest.mark.asyncio
async def test_an_argument_whose_pickling_fails(executor: ProcessExecutor) -> None:
    class Fails:
        def __reduce__(self) -> Never:
            raise WithCode(7, hint="x")

    with pytest.raises(WithCode, match="error 7") as caught:
        await executor.run_sync(print, torch.rand(10**5), [Fails()])
    [note] = caught.value.__notes__
    assert note.startswith("argument 2[0] (Fails) cannot be pickled: ")


@pytest.mark.asyncio
async def test_the_lost_worker_of_a_nested_executor(executor: ProcessExecutor) -> None:
    """It is not this executor's: the call neither runs again, nor is its process replaced."""
    lost = partial(aiopar.WorkerLost, "of a nested executor", may_have_run=False)
    with pytest.raises(aiopar.WorkerLost, match="of a nested executor"):
        await executor.run_sync(_fail, lost)
    with pytest.raises(aiopar.WorkerLost, match="of a nested executor"):
        await executor.run_sync(_fail, partial(aiopar.WorkerLost, "of a nested executor"))
