"""Kinds of workers that tests run on, and which worker runs test code."""

import re
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

import aiopar

Workers: TypeAlias = aiopar.DeviceExecutor
MakeWorkers: TypeAlias = Callable[..., aiopar.DeviceExecutor]
"""Takes a number of workers, and the options of the executor."""


def _threads(count: int, **options: Any) -> Workers:
    return aiopar.DeviceExecutor(["cpu"] * count, **options)


def _processes(count: int, **options: Any) -> Workers:
    return aiopar.ProcessExecutor(["cpu"] * count, **options)


def on_ray(count: int, **options: Any) -> Workers:
    """Actors of the fixture `cluster`."""
    import aiopar.ray  # loads Ray, which takes a second

    return aiopar.ray.RayExecutor(count, in_flight=1, **options)


KINDS = [
    pytest.param(_threads, id="threads"),
    pytest.param(_processes, id="processes"),
]
"""Parameters of fixtures: how the executors of each kind are made."""
RAY = pytest.param(on_ray, id="ray", marks=pytest.mark.ray)
"""The kind that only the modules with `ON_RAY` run on: each call takes milliseconds."""

_NAME = re.compile(r"-([a-z]+(?::\d+)?)-\d+$")


def worker_device() -> str | None:
    """The device of the worker that runs this; None outside workers."""
    found = _NAME.search(threading.current_thread().name)
    return None if found is None else found[1]
