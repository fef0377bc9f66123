"""What a `Parallel` may be made of, and what it refuses before any work."""

import asyncio
import inspect
from typing import Any

import pytest

import aiopar
from tests.train.units import same, units


class TestArguments:
    def test_the_spelling_of_gluonnlp(self) -> None:
        aiopar.wait(aiopar.Parallel(1, parallizable=units(same)).aclose())
        both = {"parallelizable": units(same), "parallizable": units(same)}
        for number, wrong in (("none", {}), ("two", both)):
            with pytest.raises(TypeError, match=f"expected one parallelizable, got {number}"):
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
