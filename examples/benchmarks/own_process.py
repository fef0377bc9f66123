"""Rows that are measured in a process of their own, with one thread of torch."""

import asyncio
import multiprocessing
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from typing import Any, TypeVar

import torch

from examples.benchmarks.harness import Plan

R = TypeVar("R")
Measure = Callable[[Plan], Coroutine[Any, Any, R]]


async def in_own_process(measure: Measure[R], plan: Plan) -> R:
    """What `measure` measures where no other row has started threads or set how many torch has."""
    process = ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        # Before there is any thread: each that starts later takes it over.
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    with process:
        return await asyncio.wrap_future(process.submit(_run, measure, plan))


def _run(measure: Measure[R], plan: Plan) -> R:
    return asyncio.run(measure(plan))
