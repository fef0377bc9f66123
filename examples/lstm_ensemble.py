"""The bidirectional LSTM ensemble of PyTorch's fork/wait tutorial, eager, on every core.

    python examples/lstm_ensemble.py            # T=50, B=50, C=1024, 4 models, as in the tutorial
    python examples/lstm_ensemble.py --channels 256 --rounds 9

https://docs.pytorch.org/tutorials/advanced/torch-script-parallelism.html shows how TorchScript
runs its branches in parallel. TorchScript is deprecated, and in eager mode `torch.jit.fork` runs
inline. `aiopar.fork` runs the same branches in parallel in eager mode, for every module. This
example forks the models of an ensemble and both directions of each model. The result equals that of
the sequential ensemble, to the last bit.
"""

import argparse
import asyncio
import statistics
import time
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from tqdm import tqdm

import aiopar


class BidirectionalRecurrentLSTM(nn.Module):
    """Two LSTMs over one sequence [time, batch, channels], one of them backwards."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.cell_f = nn.LSTM(channels, channels)
        self.cell_b = nn.LSTM(channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        output_f, _ = self.cell_f(x)
        output_b, _ = self.cell_b(x.flip(0))
        return torch.cat([output_f, output_b.flip(0)], dim=2)


class LSTMEnsemble(nn.Module):
    """The sum of the outputs of its models for one sequence."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([model(x) for model in self.models]).sum(dim=0)


class ForkedLSTM(BidirectionalRecurrentLSTM):
    """Runs its two directions in parallel."""

    def forward(self, x: Tensor) -> Tensor:
        future_f = aiopar.fork(self.cell_f, x)
        future_b = aiopar.fork(self.cell_b, x.flip(0))
        output_f, _ = aiopar.wait(future_f)
        output_b, _ = aiopar.wait(future_b)
        return torch.cat([output_f, output_b.flip(0)], dim=2)


class ForkedEnsemble(LSTMEnsemble):
    """Runs its models in parallel. They fork too: calls that wait for calls cannot deadlock."""

    def forward(self, x: Tensor) -> Tensor:
        futures = [aiopar.fork(model, x) for model in self.models]
        return torch.stack([aiopar.wait(future) for future in futures]).sum(dim=0)


class ScriptedLSTM(BidirectionalRecurrentLSTM):
    """The tutorial's version. It runs in parallel only if `torch.jit.script` compiles it."""

    # `type: ignore` because torch's `fork` and `wait` have no type annotations.

    def forward(self, x: Tensor) -> Tensor:
        future_f = torch.jit.fork(self.cell_f, x)  # type: ignore[no-untyped-call]
        future_b = torch.jit.fork(self.cell_b, x.flip(0))  # type: ignore[no-untyped-call]
        output_f, _ = torch.jit.wait(future_f)  # type: ignore[no-untyped-call]
        output_b, _ = torch.jit.wait(future_b)  # type: ignore[no-untyped-call]
        return torch.cat([output_f, output_b.flip(0)], dim=2)


class ScriptedEnsemble(LSTMEnsemble):
    """Runs its models in parallel, as in the tutorial."""

    def forward(self, x: Tensor) -> Tensor:
        futures = [torch.jit.fork(model, x) for model in self.models]  # type: ignore[no-untyped-call]
        return torch.stack([torch.jit.wait(future) for future in futures]).sum(dim=0)  # type: ignore[no-untyped-call]


def make_ensembles(models: int, channels: int) -> dict[str, nn.Module]:
    """Four versions of one ensemble, all with the same weights."""
    sequential = LSTMEnsemble(BidirectionalRecurrentLSTM(channels) for _ in range(models))
    with torch.device("meta"):  # without weights of their own: they share the sequential ensemble's
        forked = ForkedEnsemble(ForkedLSTM(channels) for _ in range(models))
        scripted = ScriptedEnsemble(ScriptedLSTM(channels) for _ in range(models))
    for ensemble in (forked, scripted):
        ensemble.load_state_dict(sequential.state_dict(), assign=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        return {
            "sequential": sequential,
            "TorchScript fork": torch.jit.script(scripted),
            "aiopar.fork": forked,
            # TorchScript cannot do this: eager code that forks compiled modules.
            "aiopar.fork, scripted models": ForkedEnsemble(
                torch.jit.script(model) for model in sequential.models
            ),
        }


async def run(ensemble: nn.Module, x: Tensor) -> Tensor:
    """Run an ensemble on a worker; the loop stays free."""
    with torch.inference_mode():
        future = aiopar.fork(ensemble, x)  # inference mode goes with the call ...
    output: Tensor = await future  # ... and does not leak into other tasks
    return output


async def measure(
    ensembles: dict[str, nn.Module], x: Tensor, rounds: int
) -> dict[str, list[float]]:
    """Seconds of each ensemble in each round. All outputs must equal the sequential one's.

    A forked LSTM has fewer threads, but `nn.LSTM` gives the same bits on any number of threads. If
    a kernel splits a sum among its threads, compare on workers of `DeviceExecutor(...,
    num_threads=1)`.
    """
    expected = await run(ensembles["sequential"], x)
    seconds: dict[str, list[float]] = {name: [] for name in ensembles}
    names = list(ensembles)
    for index in tqdm(range(-2, rounds), desc="2 rounds to warm up, then measured", leave=False):
        # Interleaved with rotating start, so that other load on the machine affects all alike.
        start = index % len(names)
        for name in names[start:] + names[:start]:
            began = time.perf_counter()
            output = await run(ensembles[name], x)
            if index >= 0:
                seconds[name].append(time.perf_counter() - began)
            if not await aiopar.run_sync(torch.equal, output, expected):
                raise RuntimeError(f"{name}: the output is not the sequential ensemble's")
    return seconds


def report(seconds: dict[str, list[float]]) -> None:
    """Print medians of seconds and of ratios per round. Ratios are robust on a noisy machine."""
    print("all outputs are equal, to the last bit\n")
    print(f"{'':30}{'seconds':>8}   time of aiopar.fork / its time: median (lowest to highest)")
    for name, own in seconds.items():
        ratios = [ours / its for ours, its in zip(seconds["aiopar.fork"], own, strict=True)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"{name:30}{statistics.median(own):8.3f}   {spread}")


async def main(args: argparse.Namespace) -> None:
    # One worker per torch thread, so one per core that this process may use.
    executor = aiopar.DeviceExecutor(["cpu"] * max(2, torch.get_num_threads()))
    async with executor:
        with aiopar.use_executor(executor):
            # Creating weights is work too: the loop's thread runs no kernel.
            ensembles = await aiopar.run_sync(make_ensembles, args.models, args.channels)
            x = await aiopar.run_sync(torch.randn, args.time, args.batch, args.channels)
            seconds = await measure(ensembles, x, args.rounds)
    print(
        f"T={args.time} B={args.batch} C={args.channels}, {args.models} models of 2 directions, "
        f"{len(executor.devices)} workers"
    )
    report(seconds)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--time", type=int, default=50, help="T, steps of the sequence")
    parser.add_argument("--batch", type=int, default=50, help="B, sequences")
    parser.add_argument("--channels", type=int, default=1024, help="C, size of input and state")
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5, help="repeats that are measured")
    args = parser.parse_args(argv)
    for name, number in vars(args).items():
        if number < 1:
            parser.error(f"argument --{name}: expected at least 1, got {number}")
    return args


if __name__ == "__main__":
    asyncio.run(main(parse()))
