"""What cannot be pickled: the note on the error, in processes and actors; threads run the call."""

import contextlib
import multiprocessing
import os
import pickle
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import aiopar
from tests.home import elsewhere
from tests.workers import Workers

ON_RAY = True
FAILURES = (TypeError, AttributeError, RuntimeError, ValueError, LookupError, pickle.PicklingError)

NAME = "give the name of the file, and open the file in the worker"
MAKE = "make it in the worker, when it is first used"
MANAGER = "use the Lock, Event or Queue of a multiprocessing.Manager()"


class Holder:
    """A class of a module, with an attribute that a test gives it."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)

    def method(self, *_: object) -> None:
        pass


class Partly(Holder):
    """It leaves its lock at home, but not its file."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None}


@dataclass(slots=True)
class Slotted:
    lock: Any = field(default_factory=threading.Lock)


class Hostile(dict[str, Any]):
    """Its `items`, of a user's class, fails while the part is searched."""

    def items(self) -> Any:
        raise LookupError


class Counted:
    """Counts how often it is pickled."""

    count = 0

    def __getstate__(self) -> None:
        Counted.count += 1


def take(*_: object, **__: object) -> None:
    pass


def numbers() -> Iterator[int]:
    yield 1


def locked(lock: Any) -> Callable[..., None]:
    def work(*_: object) -> None:
        with lock:
            pass

    return work


def hooked(hook: Callable[..., None]) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU()).requires_grad_(False)
    module[1].register_forward_hook(hook)
    return module


LOCK = threading.Lock()


@pytest.fixture
def file() -> Iterator[Any]:
    with open(os.devnull, "wb") as file:
        yield file


def calls(file: Any, connection: Any) -> list[tuple[Callable[..., Any], tuple[Any, ...], str, str]]:
    """Functions and arguments, what is named, and what to do instead."""
    return [
        (take, (1, [2, {"key": LOCK}]), "argument 2[1]['key'] (lock)", MAKE),
        (take, ({"4111 1111": LOCK},), "argument 1[a str] (lock)", MAKE),  # not the private key
        (take, (Holder(inner=Holder(local=LOCK)),), "argument 1.inner.local (lock)", MAKE),
        (take, (Partly(lock=LOCK, file=file),), "argument 1.file (BufferedWriter)", NAME),
        (take, (Slotted(),), "argument 1.lock (lock)", MAKE),
        (take, (sys.__stdout__,), "argument 1 (TextIOWrapper)", NAME),
        (take, (connection,), "argument 1 (socket)", MAKE),
        (take, (numbers(),), "argument 1 (generator)", "give a list of its items"),
        (take, (aiopar.Future(),), "argument 1 (Future)", "await it, and give the result"),
        (take, (multiprocessing.Pipe()[0],), "argument 1 (Connection)", MANAGER),
        (take, (multiprocessing.Lock(),), "argument 1 (Lock)", MANAGER),
        (take, (Holder(lock=LOCK).method,), "argument 1.__self__.lock (lock)", MAKE),
        (take, ([locked(LOCK)],), "argument 1[0], variable lock (lock)", MAKE),
        (locked(LOCK), (), "the function work, variable lock (lock)", MAKE),
        (Holder(lock=LOCK).method, (), "the function method.__self__.lock (lock)", MAKE),
        (partial(take, {"a": LOCK}), (), "the function take.args[0]['a'] (lock)", MAKE),
    ]


@pytest.mark.asyncio
async def test_the_part_its_type_and_what_to_do_instead(workers: Workers, file: Any) -> None:
    worker = workers.on(worker=0)
    await worker.run_sync(abs, -1)
    before = worker.stats().workers[0].host
    with socket.socket() as connection:
        for fn, args, part, instead in calls(file, connection):
            expected = f"{part} cannot be pickled: {instead}; or run the call on a thread "
            with _refused(workers, expected):
                await worker.run_sync(fn, *args)
            if args:
                keyword = expected.replace(f"argument {len(args)}", "keyword x")
                with _refused(workers, keyword):
                    await worker.submit(fn, x=args[-1])
    assert worker.stats().workers[0].host == before


@contextlib.contextmanager
def _refused(workers: Workers, note: str) -> Iterator[None]:
    """Expect an error with one such note, unless the workers are threads."""
    if not elsewhere(workers):
        yield
        return
    with pytest.raises(FAILURES) as caught:
        yield
    first, *rest = caught.value.__notes__
    assert first.startswith(note)
    assert not any("cannot be pickled" in other for other in rest)


def give(make: Callable[[], Any]) -> dict[str, Any]:
    return {"a": make()}


@pytest.mark.asyncio
async def test_results_modules_and_items(workers: Workers) -> None:
    with _refused(workers, f"the result['a'] (lock) cannot be pickled: {MAKE}"):
        await workers.run_sync(give, threading.Lock)
    graph = torch.ones(2, requires_grad=True) * 2
    with _refused(workers, "argument 1['h'] (Tensor) cannot be pickled"):
        await workers.run_sync(take, {"h": graph})

    module = hooked(locked(LOCK))
    with _refused(workers, "the module Sequential[1]._forward_hooks["), torch.no_grad():
        await workers.run_sync(module, torch.ones(2))
    with _refused(workers, "the module Sequential[1]._forward_hooks["):
        await _first(aiopar.map(module, torch.ones(1, 2), executor=workers))
    async with aiopar.ReplicaPool(nn.Identity(), executor=workers) as pool:
        with _refused(workers, "the input[0]['f'] (lock) cannot be pickled"):
            await pool({"f": LOCK})
    with _refused(workers, "argument 1['f'] (lock) cannot be pickled"):
        await _first(aiopar.map(take, [{"f": LOCK}], executor=workers))


@pytest.mark.asyncio
async def test_the_search_is_bounded_and_hides_no_error(workers: Workers) -> None:
    worker = workers.on(worker=0)
    tail: list[Any] = [LOCK]
    for _ in range(100):
        tail = [Counted(), tail]
    Counted.count = 0
    with _refused(workers, "argument 1[1][1]"):
        await worker.run_sync(take, tail)
    assert Counted.count < 50 * 100
    with _refused(workers, "argument 1 (list) cannot be pickled: make it"):
        await worker.run_sync(take, [*([[] for _ in range(20_000)]), LOCK])
    for _ in range(50_000):
        tail = [tail]
    with _refused(workers, "argument 1 (list) cannot be pickled: it is nested too deeply"):
        await worker.run_sync(take, tail)
    with _refused(workers, "argument 1['a'] (Hostile) cannot be pickled"):
        await worker.run_sync(take, {"a": Hostile(b=LOCK)})


async def _first(stream: Any) -> Any:
    async with stream:
        return await anext(stream)
