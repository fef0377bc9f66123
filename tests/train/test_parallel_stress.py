"""`Parallel` under random failures and cancellations: every unit is fetched or dropped once."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import torch

import aiopar

STEPS = 200


class Failed(Exception):
    """The error of a unit that must fail."""


class Left(Exception):
    """The error that ends the block."""


class Account(aiopar.Parallelizable):
    """What happened to the units, which are numbers; units in `to_fail` must fail."""

    def __init__(self, choices: random.Random) -> None:
        self.choices = choices
        self.numbers = 0
        self.to_fail: set[int] = set()
        self.put: list[int] = []
        self.ran: list[int] = []  # by workers
        self.fetched: list[int] = []
        self.on = threading.Event()  # while it is not set, units wait on the workers
        self.on.set()

    def forward_backward(self, x: int) -> int:
        self.ran.append(x)
        self.on.wait()
        torch.ones(8).sum().item()  # lets the GIL go
        if x in self.to_fail:
            raise Failed(x)
        return x

    async def produce(self, parallel: aiopar.Parallel, count: int) -> None:
        for _ in range(count):
            self.numbers += 1
            number = self.numbers
            if self.choices.random() < 0.3:
                self.to_fail.add(number)
            await parallel.put(number)
            self.put.append(number)

    async def consume(self, parallel: aiopar.Parallel, count: int) -> None:
        """Call `get` up to `count` times."""
        for _ in range(count):
            try:
                await self._fetch(parallel.get)
            except RuntimeError as error:
                assert "nothing to wait for" in str(error)  # noqa: PT017  # one of two outcomes
                return

    async def read(self, parallel: aiopar.Parallel) -> None:
        """Read until it is closed and drained."""
        try:
            while True:
                await self._fetch(parallel.__anext__)
        except StopAsyncIteration:
            pass

    async def _fetch(self, fetch: Callable[[], Coroutine[Any, Any, int]]) -> None:
        failed = False
        try:
            number = await fetch()
        except Failed as error:
            [number] = error.args
            failed = True
        self.fetched.append(number)
        assert failed == (number in self.to_fail)


async def cancel_sometime(choices: random.Random, scope: anyio.CancelScope) -> None:
    for _ in range(choices.randrange(20)):
        await anyio.lowlevel.checkpoint()
    scope.cancel()


async def go_on_sometime(account: Account) -> None:
    """Hold the workers until the block has probably ended."""
    account.on.clear()
    try:
        for _ in range(40):
            await anyio.lowlevel.checkpoint()
    finally:
        account.on.set()


async def doomed(choices: random.Random, work: Callable[..., Any], *args: Any) -> None:
    """Run `work`, which is cancelled at a random moment."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(cancel_sometime, choices, scope)
            await work(*args)


def parallel_of(account: Account) -> aiopar.Parallel:
    choose = account.choices.choice
    return aiopar.Parallel(
        choose([0, 1, 2, 3]),
        account,
        serial_init=choose([False, True]),
        max_pending=choose([None, 2, 5]),
    )


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(3))
async def test_every_unit_is_fetched_once(seed: int) -> None:
    choices = random.Random(seed)
    account = Account(choices)
    async with parallel_of(account) as parallel:
        for _ in range(STEPS):
            async with anyio.create_task_group() as tasks:
                for _ in range(choices.randrange(1, 6)):
                    work = choices.choice([account.produce, account.produce, account.consume])
                    tasks.start_soon(doomed, choices, work, parallel, choices.randrange(4))
                if choices.random() < 0.2:
                    tasks.start_soon(doomed, choices, account.read, parallel)
            assert parallel.pending == len(account.put) - len(account.fetched)
            if choices.random() < 0.5:
                await account.consume(parallel, parallel.pending)
                assert parallel.pending == 0
        parallel.close()
        await account.read(parallel)
    assert account.to_fail & set(account.fetched)
    assert sorted(account.fetched) == sorted(account.ran) == sorted(account.put)


@pytest.mark.anyio
@pytest.mark.parametrize("seed", range(3))
async def test_after_an_error_or_a_cancellation_each_result_is_fetched_once(
    seed: int,
) -> None:
    choices = random.Random(seed)
    dropped = 0
    for _ in range(STEPS):
        account = Account(choices)
        parallel = parallel_of(account)
        way = choices.choice(["to the end", "error", "cancelled"])
        await _left(parallel, account, way)
        await account.read(parallel)  # results that no task waited for
        assert parallel.pending == 0
        assert sorted(account.fetched) == sorted(account.ran)
        assert Counter(account.ran) <= Counter(account.put)
        assert way != "to the end" or len(account.ran) == len(account.put)
        dropped += len(account.put) - len(account.ran)
    assert dropped


async def _left(parallel: aiopar.Parallel, account: Account, way: str) -> None:
    """Leave the block of `parallel`, while tasks put, get and read."""
    choices = account.choices

    async def block() -> None:
        async with parallel, anyio.create_task_group() as tasks:
            for _ in range(choices.randrange(1, 4)):
                tasks.start_soon(account.produce, parallel, choices.randrange(6))
            if way == "error":
                await anyio.lowlevel.checkpoint()
                raise Left

    scope = anyio.CancelScope()
    async with anyio.create_task_group() as others:
        if choices.random() < 0.2:
            others.start_soon(go_on_sometime, account)
        others.start_soon(account.read, parallel)
        others.start_soon(doomed, choices, account.consume, parallel, choices.randrange(6))
        if way == "cancelled":
            others.start_soon(cancel_sometime, choices, scope)
        with scope:
            try:
                await block()
            except* Left:
                pass
