"""Train a network on handwritten digits, on two replicas, from an event loop that stays free.

    python examples/train_digits.py
    python examples/train_digits.py --epochs 30 --plot curves.png

It trains one small convolutional network on scikit-learn's 1,797 digits three times, from the same
seed: on one device with plain BatchNorm; with `DataParallel` and `aiopar.backward`; and with
`Parallel`, whose worker waits for a `DataParallel`. The last two use two replicas with synchronized
BatchNorm, so all three curves are the same.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeVar, TypeVarTuple

import torch
from matplotlib import pyplot
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import aiopar

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

BATCH = 256
SEED = 7
EPOCHS = 20
ACCURACY = 0.97
"""The smallest accuracy on the test images after `EPOCHS` epochs."""
TOLERANCE = 1e-3
"""The largest difference of a loss from the loss on one device: the order of sums differs."""

Step = Callable[[Tensor, Tensor], Awaitable[float]]
"""Runs forward and backward on a batch of images and labels, and returns the loss."""


class Way(Protocol):
    """A way to train."""

    __name__: str

    def __call__(
        self, network: nn.Module, devices: Sequence[torch.device]
    ) -> AbstractAsyncContextManager[Step]: ...


@dataclass(frozen=True, slots=True)
class Digits:
    """Images [count, 1, 8, 8] from 0 to 1, with labels [count]."""

    images: Tensor
    labels: Tensor


@dataclass(slots=True)
class Curve:
    """Losses per step, accuracies per epoch and the duration of one training."""

    losses: list[float] = field(default_factory=list)
    accuracies: list[float] = field(default_factory=list)
    seconds: float = 0.0


def read_digits(device: torch.device) -> tuple[Digits, Digits]:
    """The training and the test images."""
    from sklearn.datasets import load_digits  # takes seconds
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.2, stratify=labels, random_state=SEED)
    tensors = [torch.as_tensor(part, device=device) for part in split]
    train, test = ((part / 16).float().view(-1, 1, 8, 8) for part in tensors[:2])
    return Digits(train, tensors[2]), Digits(test, tensors[3])


def shuffled_batches(digits: Digits, order: torch.Generator) -> list[tuple[Tensor, Tensor]]:
    indices = torch.randperm(len(digits.labels), generator=order).to(digits.labels.device)
    return [(digits.images[batch], digits.labels[batch]) for batch in torch.split(indices, BATCH)]


def make_network(device: torch.device) -> nn.Sequential:
    torch.manual_seed(SEED)
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    ).to(device)


def loss_and_gradients(outputs: Tensor, labels: Tensor) -> float:
    loss = cross_entropy(outputs, labels)
    torch.autograd.backward(loss)
    return loss.item()


class Unit(aiopar.Parallelizable):
    """Forward and backward of a batch, on a worker."""

    def __init__(self, dp: aiopar.DataParallel[Tensor]) -> None:
        self.dp = dp

    def forward_backward(self, x: tuple[Tensor, Tensor]) -> float:
        images, labels = x
        return loss_and_gradients(aiopar.wait(self.dp(images)), labels)


@asynccontextmanager
async def one_device(network: nn.Module, devices: Sequence[torch.device]) -> AsyncIterator[Step]:
    """The reference: no replicas, plain BatchNorm."""

    def forward_backward(images: Tensor, labels: Tensor) -> float:
        return loss_and_gradients(network(images), labels)

    async def step(images: Tensor, labels: Tensor) -> float:
        return await aiopar.run_sync(forward_backward, images, labels, device=devices[0])

    yield step


@asynccontextmanager
async def data_parallel(network: nn.Module, devices: Sequence[torch.device]) -> AsyncIterator[Step]:
    """Run a chunk of the batch on each replica, and one backward through all of them."""
    dp = aiopar.DataParallel(aiopar.convert_sync_batchnorm(network), devices)

    async def step(images: Tensor, labels: Tensor) -> float:
        outputs = await dp(images)
        loss = await aiopar.run_sync(cross_entropy, outputs, labels, device=devices[0])
        await aiopar.backward(loss)
        return loss.item()  # the loss is complete on its device, so this does not wait

    yield step


@asynccontextmanager
async def parallel(network: nn.Module, devices: Sequence[torch.device]) -> AsyncIterator[Step]:
    """Run forward and backward as one unit, a function on a worker."""
    dp = aiopar.DataParallel(aiopar.convert_sync_batchnorm(network), devices)
    async with aiopar.Parallel(1, Unit(dp), devices=devices[:1]) as units:

        async def step(images: Tensor, labels: Tensor) -> float:
            await units.put((images, labels))
            loss: float = await units.get()
            return loss

        yield step


WAYS: Sequence[Way] = (one_device, data_parallel, parallel)


@torch.inference_mode()
def accuracy(network: nn.Module, test: Digits) -> float:
    network.eval()
    try:
        right: Tensor = network(test.images).argmax(1) == test.labels
        return right.float().mean().item()
    finally:
        network.train()


def update(optimizer: torch.optim.Optimizer) -> None:
    """Clip the gradients and step. This is device work too, so it runs on a worker."""
    [group] = optimizer.param_groups
    nn.utils.clip_grad_norm_(group["params"], max_norm=5.0)
    optimizer.step()
    optimizer.zero_grad()


async def train(way: Way, devices: Sequence[torch.device], epochs: int) -> Curve:
    async def on_device(fn: Callable[[*Ts], T], *args: *Ts) -> T:
        return await aiopar.run_sync(fn, *args, device=devices[0])

    train, test = await on_device(read_digits, devices[0])
    network = await on_device(make_network, devices[0])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    order = torch.Generator().manual_seed(SEED)
    curve, began = Curve(), time.perf_counter()
    async with way(network, devices) as step:
        with tqdm(total=epochs, desc=way.__name__, unit="epoch") as bar:
            for _ in range(epochs):
                for images, labels in await on_device(shuffled_batches, train, order):
                    curve.losses.append(await step(images, labels))
                    await on_device(update, optimizer)
                    bar.set_postfix(loss=f"{curve.losses[-1]:.4f}")
                curve.accuracies.append(await on_device(accuracy, network, test))
                bar.update()
    curve.seconds = time.perf_counter() - began
    return curve


def largest_difference(curve: Curve, reference: Curve) -> float:
    return max(abs(a - b) for a, b in zip(curve.losses, reference.losses, strict=True))


def plot(curves: dict[str, Curve], path: Path) -> None:
    figure, (losses, accuracies) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for (name, curve), style in zip(curves.items(), ("-", "--", ":"), strict=True):
        losses.plot(curve.losses, style, label=name)
        epochs = range(1, len(curve.accuracies) + 1)
        accuracies.plot(epochs, [100 * accuracy for accuracy in curve.accuracies], style)
    losses.set(title="Training loss", xlabel="step", yscale="log")
    losses.legend(loc="upper right")
    accuracies.set(title="Test accuracy, %", xlabel="epoch", ylim=(70, 100))
    figure.savefig(path)
    pyplot.close(figure)


async def train_all(devices: Sequence[torch.device], epochs: int) -> dict[str, Curve]:
    return {way.__name__: await train(way, devices, epochs) for way in WAYS}


def two_replicas() -> list[torch.device]:
    """Every accelerator (a single one twice), or two CPU replicas if there is none."""
    accelerator, count = torch.accelerator.current_accelerator(), torch.accelerator.device_count()
    if accelerator is None or not count:
        return [torch.device("cpu")] * 2
    devices = [torch.device(accelerator.type, index) for index in range(count)]
    return devices if count > 1 else devices * 2


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--plot", type=Path, default=Path("train_digits.png"))
    args = parser.parse_args(argv)
    if args.epochs < 1:
        parser.error(f"argument --epochs: expected at least 1, got {args.epochs}")

    devices = two_replicas()
    print(f"digits on {', '.join(map(str, devices))}, batches of {BATCH}")
    curves = asyncio.run(train_all(devices, args.epochs))
    plot(curves, args.plot)

    print(f"\n{'':16}{'seconds':>8}{'loss':>10}{'accuracy':>10}   largest difference of a loss")
    for name, curve in curves.items():
        difference = largest_difference(curve, curves["one_device"])
        print(
            f"{name:16}{curve.seconds:8.1f}{curve.losses[-1]:10.4f}"
            f"{curve.accuracies[-1]:10.1%}{difference:31.1e}"
        )
        if difference > TOLERANCE:
            raise RuntimeError(f"{name}: a loss differs from that of one device by {difference}")
        if args.epochs >= EPOCHS and curve.accuracies[-1] < ACCURACY:
            raise RuntimeError(f"{name}: the accuracy is too low: {curve.accuracies[-1]:.1%}")
    print(f"\nThe curves are in {args.plot}.")


if __name__ == "__main__":
    main()
