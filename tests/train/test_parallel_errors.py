"""`Parallel`: an error comes from the `get` of its unit, and the others go on."""

import pytest

import aiopar
from tests.train.units import Failure, all_of, units


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
