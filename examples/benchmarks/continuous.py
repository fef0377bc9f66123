"""`ContinuousBatcher` against plain loops, other ways to batch, and what transformers has."""

import asyncio
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import aiopar
from aiopar.transformers import CausalLM, Prompt
from examples.benchmarks.generation import (
    CLIENTS,
    PREFILL_TOKENS,
    VOCABULARY,
    Rival,
    Sample,
    Stepper,
    beside_blocked_loop,
    call_per_token,
    continuous,
    full_batches,
    one_by_one,
    static_batches,
    transformers_manager,
    worker,
)
from examples.benchmarks.harness import (
    UNITS,
    Plan,
    Result,
    no_garbage_collection,
    quartiles,
    result_of,
)
from examples.benchmarks.heartbeat import p99
from examples.benchmarks.own_process import in_own_process
from examples.chat_service.app import dtype_for
from examples.chat_service.weights import smollm2

Samples: TypeAlias = Mapping[str, Sequence[Sample]]

FLAT_SECONDS = 0.01
BLOCKED = ", loop blocked for 40 % of the time"

OURS, FULL = "ContinuousBatcher", "a loop that always has a full batch"
PER_TOKEN, STATIC = "one Batcher call per token", "static batches, done rows dropped"
GENERATE, MANAGER = "run_sync(model.generate)", "transformers' continuous batching"


async def measure(plan: Plan) -> list[Result]:
    """Measure with quick steps: a small model, a flat cost, and no model."""
    return await in_own_process(measure_quick_steps, plan)


async def measure_quick_steps(plan: Plan) -> list[Result]:
    make = partial(CausalLM, small_model(), prefill_tokens=PREFILL_TOKENS)
    rivals = rivals_by_step(make)
    blocked = {
        f"{name}{BLOCKED}": partial(beside_blocked_loop, rivals[name]) for name in (OURS, PER_TOKEN)
    }
    flat: dict[str, Rival] = {
        OURS: partial(continuous, Flat),
        STATIC: partial(static_batches, partial(Flat, prefill_tokens=1 << 20)),
    }
    rounds = max(2, plan.pairs // 3)
    samples = await take_turns(rivals | blocked, rounds, plan)
    flat_samples = await take_turns(flat, rounds, plan)
    what = "20 ms steps"
    return [
        rate_row(samples, what, FULL, bound=0.90),
        rate_row(samples, what, PER_TOKEN, bound=1.0),
        rate_row(samples, what, PER_TOKEN, bound=1.2, where=BLOCKED),
        rate_row(flat_samples, f"{FLAT_SECONDS * 1e3:g} ms steps of any size", STATIC, bound=1.5),
        await measure_own_cpu(plan),
    ]


async def measure_language_model(plan: Plan) -> list[Result]:
    """Measure with a real language model."""
    return await in_own_process(measure_smollm2, plan)


async def measure_smollm2(plan: Plan) -> list[Result]:
    model = AutoModelForCausalLM.from_pretrained(smollm2(), dtype=dtype_for(["cpu"]))
    model.eval()  # type: ignore[no-untyped-call]
    model.generation_config.eos_token_id = None  # all rivals go on to the tokens asked for
    make = partial(CausalLM, model, prefill_tokens=PREFILL_TOKENS)
    rivals: dict[str, Rival] = {
        **rivals_by_step(make),
        STATIC: partial(static_batches, make),
        GENERATE: partial(one_by_one, model),
        MANAGER: partial(transformers_manager, model),
    }
    samples = await take_turns(rivals, max(2, plan.pairs // 5), plan)
    return [
        rate_row(samples, "SmolLM2", FULL, bound=0.95),
        rate_row(samples, "SmolLM2", PER_TOKEN, bound=1.0),
        rate_row(samples, "SmolLM2", STATIC, bound=1.15),
        cpu_row(samples, GENERATE, bound=4.0),
        cpu_row(samples, MANAGER, bound=1.2),
        first_token_row(samples, "p50", statistics.median, bound=0.1),
        first_token_row(samples, "p99", p99, bound=0.2),
        gap_row(samples),
    ]


def rivals_by_step(make: Callable[[], Stepper]) -> dict[str, Rival]:
    """Those that batch per step."""
    return {
        OURS: partial(continuous, make),
        FULL: partial(full_batches, make),
        PER_TOKEN: partial(call_per_token, make),
    }


async def take_turns(rivals: Mapping[str, Rival], rounds: int, plan: Plan) -> Samples:
    """Samples of all rivals in turn, in reverse order every other round."""
    samples: dict[str, list[Sample]] = {name: [] for name in rivals}
    for rival in rivals.values():
        await rival(Sample(0, 1, plan.tokens))  # warms up
    for index in range(rounds):
        for name in [*rivals][:: -1 if index % 2 else 1]:
            requests = plan.requests // 8 if name == GENERATE else plan.requests
            sample = Sample(index, requests, plan.tokens)
            with no_garbage_collection():
                await rivals[name](sample)
            samples[name].append(sample)
    return samples


# Rows of the table.


def rate_row(samples: Samples, what: str, against: str, *, bound: float, where: str = "") -> Result:
    ours, theirs = samples[OURS + where], samples[against + where]
    return result_of(
        [sample.rate for sample in ours],
        [sample.rate for sample in theirs],
        what=f"{OURS}, {what}{where}",
        against=against,
        unit="tokens/s",
        bound=bound,
        at_least=True,
    )


def cpu_row(samples: Samples, against: str, *, bound: float) -> Result:
    return result_of(
        [sample.cpu_rate for sample in samples[OURS]],
        [sample.cpu_rate for sample in samples[against]],
        what=f"{OURS}, SmolLM2, tokens per CPU second",
        against=against,
        unit="tokens/s",
        bound=bound,
        at_least=True,
    )


def first_token_row(
    samples: Samples, name: str, of: Callable[[list[float]], float], *, bound: float
) -> Result:
    return result_of(
        [of(sample.first_tokens) for sample in samples[OURS]],
        [of(sample.first_tokens) for sample in samples[STATIC]],
        what=f"{OURS}, SmolLM2, time to first token, {name}",
        against=STATIC,
        unit="ms",
        bound=bound,
    )


def gap_row(samples: Samples) -> Result:
    return result_of(
        [p99(sample.gaps) for sample in samples[OURS]],
        [p99(sample.prefill_steps) for sample in samples[FULL]],
        what=f"{OURS}, SmolLM2, time between tokens, p99",
        against="one step with a chunk of a prompt, p99",
        unit="ms",
        bound=1.0,
    )


async def measure_own_cpu(plan: Plan) -> Result:
    """The CPU time of the whole process per token, without that of the stepper."""
    ours, theirs = [], []
    for _ in range(plan.pairs + 1):
        with no_garbage_collection():
            ours.append(await cpu_per_token(plan.calls))
            theirs.append(cpu_of_stepper(plan.calls))
    own = [(a - b) / UNITS["us"] for a, b in zip(ours[1:], theirs[1:], strict=True)]
    low, middle, high = quartiles(own)
    return Result(
        what=f"{OURS}, own CPU time per token, {CLIENTS} streams",
        against="the stepper alone",
        ours=statistics.median(ours[1:]) / UNITS["us"],
        theirs=statistics.median(theirs[1:]) / UNITS["us"],
        unit="us",
        value=middle,
        low=low,
        high=high,
        value_unit="us",
        bound=6.0,
        samples=len(own),
    )


async def cpu_per_token(tokens: int) -> float:
    """CPU seconds per token; each stream has as many tokens as all streams of a model's sample."""
    async with worker(), aiopar.ContinuousBatcher(Count(), max_batch_size=CLIENTS) as batcher:

        async def read(count: int) -> None:
            async for _ in batcher.stream(count):
                pass

        await read(1)
        began = time.process_time()
        await asyncio.gather(*(read(tokens) for _ in range(CLIENTS)))
        return (time.process_time() - began) / (CLIENTS * tokens)


def cpu_of_stepper(tokens: int) -> float:
    stepper = Count()
    states = [stepper.start(tokens) for _ in range(CLIENTS)]
    began = time.process_time()
    for _ in range(tokens):
        stepper.step(states)
    return (time.process_time() - began) / (CLIENTS * tokens)


# Steppers.


class Count:
    """Counts, and computes nothing."""

    def start(self, item: int) -> list[int]:
        return [0, item]

    def step(self, states: list[list[int]]) -> list[int | aiopar.Done[None]]:
        parts: list[int | aiopar.Done[None]] = []
        for state in states:
            state[0] += 1
            parts.append(state[0] if state[0] < state[1] else aiopar.Done(None, state[0]))
        return parts


class Flat:
    """Steps that take the same time for any batch, as on a GPU that waits for its memory.

    Args:
        prefill_tokens: How many tokens of prompts a step computes.
    """

    def __init__(self, prefill_tokens: int = PREFILL_TOKENS) -> None:
        self._prefill_tokens = prefill_tokens

    def start(self, item: Prompt) -> list[int]:
        return [len(item.prompt), item.max_tokens]

    def step(self, states: list[list[int]]) -> list[int | aiopar.Done[None] | None]:
        time.sleep(FLAT_SECONDS)
        room = self._prefill_tokens
        parts: list[int | aiopar.Done[None] | None] = []
        for state in states:
            computed = min(room, state[0])
            room -= computed
            state[0] -= computed
            if state[0]:
                parts.append(None)
                continue
            state[1] -= 1
            parts.append(state[1] or aiopar.Done(None, 0))
        return parts

    def stop(self, state: list[int]) -> None:
        state.clear()


def small_model() -> LlamaForCausalLM:
    """A Llama of random weights, whose steps take about 20 ms."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=5,
        num_attention_heads=5,
        num_key_value_heads=5,
        vocab_size=VOCABULARY,
    )
    model = LlamaForCausalLM(config)
    model.eval()  # type: ignore[no-untyped-call]
    return model
