"""FastAPI with `Batcher` over HTTP, against FastAPI without a model and against LitServe."""

from functools import partial

import torch

from examples.benchmarks.harness import Plan, Rivals, Row, compare
from examples.benchmarks.load import post
from examples.benchmarks.server import Server, program, start
from examples.benchmarks.small_model import SmallModel

# Name, program with arguments, and the smallest allowed ratio of requests per second. LitServe's
# arguments: seconds that a batch waits to fill, number of API server processes.
RIVALS = (
    ("FastAPI without a model", ("echo",), 0.45),
    ("LitServe", ("litserve_small", "0", "1"), 3.0),  # LitServe's defaults
    ("LitServe, 20 ms to fill, 2 API servers", ("litserve_small", "0.02", "2"), None),
)


async def measure(plan: Plan) -> list[Row]:
    """Run the clients in this process and each server in its own."""
    model = SmallModel()
    requests = [post("/predict", item.numpy().tobytes()) for item in model.items]
    many = requests * max(1, plan.calls // (2 * len(requests)))
    rows: list[Row] = []
    async with start(program("batcher"), requests[0]) as ours:
        await check(ours, model, requests[:3])
        rate = partial(ours.requests_per_second, many, plan.clients)
        for against, (name, *arguments), bound in RIVALS if plan.all_rivals else RIVALS[:2]:
            async with start(program(name, *arguments), requests[0]) as theirs:
                if name != "echo":
                    await check(theirs, model, requests[:3])
                rivals = Rivals(
                    what=f"FastAPI and Batcher over HTTP, {plan.clients} clients",
                    ours=rate,
                    against=against,
                    theirs=partial(theirs.requests_per_second, many, plan.clients),
                    bound=bound,
                    unit="requests/s",
                    at_least=True,
                )
                rows.append(await compare(rivals, plan.pairs))
    return rows


async def check(server: Server, model: SmallModel, requests: list[bytes]) -> None:
    """Check that a server's answers are the outputs of the model."""
    answers = await server.send(requests)
    found = [torch.frombuffer(bytearray(answer), dtype=torch.float32) for answer in answers]
    expected = model.predict(torch.stack(model.items[: len(requests)]))
    torch.testing.assert_close(torch.stack(found), expected.clone())
