"""Measure in a separate process with one torch thread."""

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
    """Run `measure` in a new process, where no other benchmark started threads or set torch up."""
    process = ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        # Before any other thread starts, because new threads inherit the number.
        initializer=torch.set_num_threads,
        initargs=(1,),
    )
    with process:
        return await asyncio.wrap_future(process.submit(_run, measure, plan))


def _run(measure: Measure[R], plan: Plan) -> R:
    return asyncio.run(measure(plan))
