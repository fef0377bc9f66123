"""Clients of a model that works in steps, and the ways to serve them.

Each client sends its next request when it has its answer. A sample ends when as many tokens are out
as its first requests ask for. So no batch runs empty at the end, except static batches, which do.
"""

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import aiopar
from aiopar.transformers import Prompt

CLIENTS = 16
PREFILL_TOKENS = 128
VOCABULARY = 8192

Stepper: TypeAlias = aiopar.Stepper[Prompt, Any, Any]


def prompts(seed: int, longest: int) -> Iterator[Prompt]:
    """Prompts without end. If `longest` is 200: 20 to 300 tokens each, for 20 to 200 tokens."""
    draw = random.Random(seed)
    least = max(1, longest // 10)
    while True:
        length = draw.randint(least, 3 * longest // 2)
        ids = [draw.randrange(VOCABULARY) for _ in range(length)]
        yield Prompt(ids, max_tokens=draw.randint(least, longest), ignore_eos=True)


class Sample:
    """The requests of one sample, and when their tokens came.

    Args:
        seed: Makes the prompts.
        requests: The sample ends when as many tokens are out as these first requests ask for.
        longest: The most tokens that a request asks for.
    """

    def __init__(self, seed: int, requests: int, longest: int) -> None:
        first = prompts(seed, longest)
        self.wanted = sum(next(first).max_tokens for _ in range(requests))
        self.requests = requests
        self.tokens = 0
        self.seconds = self.cpu_seconds = 0.0
        self.first_tokens: list[float] = []
        """Seconds until the first token, of requests that came while others ran."""
        self.gaps: list[float] = []
        """Seconds between two tokens of a request."""
        self.prefill_steps: list[float] = []
        """Seconds of each step that computed a part of a prompt; of plain loops only."""
        self._prompts = prompts(seed, longest)
        self._sent = 0
        self._began = 0.0, 0.0

    @property
    def ended(self) -> bool:
        return self.tokens >= self.wanted

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.wanted / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Tokens per CPU second of the whole process."""
        return self.wanted / self.cpu_seconds

    def request(self) -> "Request":
        """The next request; the first one starts the clocks."""
        if not self._sent:
            self._began = time.perf_counter(), time.process_time()
        self._sent += 1
        return Request(self, next(self._prompts), self._sent > CLIENTS)

    def count(self, tokens: int) -> None:
        if self.ended:
            return
        self.tokens += tokens
        if self.ended:
            began, cpu_began = self._began
            self.seconds = time.perf_counter() - began
            self.cpu_seconds = time.process_time() - cpu_began


Rival: TypeAlias = Callable[[Sample], Awaitable[None]]


@dataclass(slots=True)
class Request:
    """A request of a client."""

    sample: Sample
    prompt: Prompt
    late: bool
    """Whether it came while others ran."""
    latest: float = field(default_factory=time.perf_counter)
    """When its latest token came; before the first, when the request came."""
    waits: bool = True
    """Whether it waits for its first token."""

    def token(self) -> None:
        """Note that a token has come."""
        now = time.perf_counter()
        if not self.sample.ended:
            if not self.waits:
                self.sample.gaps.append(now - self.latest)
            elif self.late:
                self.sample.first_tokens.append(now - self.latest)
        self.latest, self.waits = now, False
        self.sample.count(1)


@asynccontextmanager
async def worker() -> AsyncIterator[aiopar.DeviceExecutor]:
    """One CPU worker with one torch thread."""
    async with aiopar.DeviceExecutor(["cpu"], num_threads=1) as executor:
        with aiopar.use_executor(executor):
            yield executor


async def serve(sample: Sample, answer: Callable[[Request], Awaitable[None]]) -> None:
    """Run clients, each of which awaits one answer after the other, until the sample ends."""

    async def client() -> None:
        while not sample.ended:
            await answer(sample.request())

    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    ended, others = await asyncio.wait(clients, return_when=asyncio.FIRST_COMPLETED)
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    for task in ended:
        task.result()


# Batches of a stepper. Each sample has a new stepper, which keeps nothing of the one before.


async def continuous(make: Callable[[], Stepper], sample: Sample) -> None:
    """`ContinuousBatcher`: ours."""
    async with (
        worker(),
        aiopar.ContinuousBatcher(make(), max_batch_size=CLIENTS) as batcher,
    ):

        async def answer(request: Request) -> None:
            async for _ in batcher.stream(request.prompt):
                request.token()
                if sample.ended:
                    return

        await serve(sample, answer)


class Handle:
    """A request's state on the worker, which the client passes to each call."""

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.state: Any = None


async def call_per_token(make: Callable[[], Stepper], sample: Sample) -> None:
    """One call of a `Batcher` for each token."""
    stepper: Any = make()

    def step(handles: list[Handle]) -> list[Any]:
        for handle in handles:
            if handle.state is None:
                handle.state = stepper.start(handle.prompt)
        results = stepper.step([handle.state for handle in handles])
        for handle, result in zip(handles, results, strict=True):
            if isinstance(result, aiopar.Done):
                stepper.stop(handle.state)
        return list(results)

    async with (
        worker(),
        aiopar.Batcher(step, max_batch_size=CLIENTS, collate_fn=list) as batcher,
    ):

        async def answer(request: Request) -> None:
            handle, result = Handle(request.prompt), None
            while not (sample.ended or isinstance(result, aiopar.Done)):
                result = await batcher(handle)
                if result is not None:
                    request.token()

        await serve(sample, answer)


async def full_batches(make: Callable[[], Stepper], sample: Sample) -> None:
    """A synchronous loop that always has a full batch."""
    async with worker() as executor:
        await executor.run_sync(loop, make(), sample, True)


async def static_batches(make: Callable[[], Stepper], sample: Sample) -> None:
    """A synchronous loop over batches. Rows that are done are dropped, and nobody joins."""
    async with worker() as executor:
        await executor.run_sync(loop, make(), sample, False)


def loop(stepper: Any, sample: Sample, refill: bool) -> None:
    """Step until the sample ends. `refill`: free slots are filled at once, not after the batch."""
    waiting = [sample.request() for _ in range(CLIENTS)]
    running: list[tuple[Request, Any]] = []
    while not sample.ended:
        if refill or not running:
            running += [(request, stepper.start(request.prompt)) for request in waiting]
            waiting = []
        has_prompts = any(request.waits for request, _ in running)
        began = time.perf_counter()
        results = stepper.step([state for _, state in running])
        if has_prompts:
            sample.prefill_steps.append(time.perf_counter() - began)
        goes_on = []
        for (request, state), result in zip(running, results, strict=True):
            if result is not None:
                request.token()
            if isinstance(result, aiopar.Done):
                stepper.stop(state)
                waiting.append(sample.request())
            else:
                goes_on.append((request, state))
        running = goes_on


async def beside_blocked_loop(rival: Rival, sample: Sample) -> None:
    """Measure a rival while a task blocks the loop for 40 ms of each 100 ms."""

    async def keep_blocking() -> None:
        while True:
            time.sleep(0.04)  # noqa: ASYNC251  # like a library's call that releases the GIL
            await asyncio.sleep(0.06)

    task = asyncio.create_task(keep_blocking())
    try:
        await rival(sample)
    finally:
        task.cancel()


# What transformers has.


async def one_by_one(model: Any, sample: Sample) -> None:
    """`run_sync(model.generate)`, one request after the other."""
    async with worker() as executor:
        for _ in range(sample.requests):
            prompt = sample.request().prompt
            generate = partial(model.generate, max_new_tokens=prompt.max_tokens, do_sample=False)
            ids = torch.tensor([prompt.prompt])
            outputs = await executor.run_sync(generate, ids)
            sample.count(outputs.shape[1] - ids.shape[1])


async def transformers_manager(model: Any, sample: Sample) -> None:
    """transformers' own continuous batching, with the settings that were fastest here."""
    manager = model.init_continuous_batching(
        GenerationConfig(do_sample=False, eos_token_id=-1),  # type: ignore[no-untyped-call]
        ContinuousBatchingConfig(
            page_size=32,
            num_blocks=512,
            max_batch_tokens=CLIENTS + PREFILL_TOKENS,
            max_requests_per_batch=CLIENTS,
            allow_block_sharing=False,
            auto_switch_to_flash=False,
        ),
    )
    manager.warmup()
    manager.start()
    names = map(str, itertools.count())

    async def answer(request: Request) -> None:
        name, ended = next(names), asyncio.get_running_loop().create_future()

        def receive(output: Any) -> None:
            request.token()
            if not ended.done() and (output.is_finished() or sample.ended):
                ended.set_result(output.error)

        manager.register_result_handler(name, receive)
        most = request.prompt.max_tokens
        manager.add_request([*request.prompt.prompt], name, most, streaming=True)
        if error := await ended:
            raise RuntimeError(error)

    try:
        await serve(sample, answer)
    finally:
        manager.stop(hard_stop=True)
