"""Who keeps what: nothing of a unit outlives it, and nothing waits for the garbage collector."""

import weakref
from typing import Any

import pytest

import aiopar
from aiopar.testing import Gate
from tests.freeing import survivors, without_gc
from tests.train.units import Failure, units


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
