"""The attributes that an `AsyncDataLoader` has in common with torch's `DataLoader`."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader

from ._loader_settings import Settings


class TorchAttributes:
    """What torch's loader tells of itself, by the same names; read only.

    Args:
        settings: Of the loader.
        torch_loader: Made of the same arguments.
        dataset: That was given.
    """

    def __init__(self, settings: Settings, torch_loader: "DataLoader[Any]", dataset: Any) -> None:
        self._settings = settings
        self._torch_loader = torch_loader
        self._dataset = dataset

    @property
    def dataset(self) -> Any:
        """What it reads from."""
        return self._dataset

    @property
    def batch_size(self) -> int | None:
        """Samples a batch; None without batching, or with a batch sampler."""
        return self._torch_loader.batch_size

    @property
    def sampler(self) -> Any:
        """What yields indices."""
        return self._torch_loader.sampler

    @property
    def batch_sampler(self) -> Any:
        """What yields lists of indices; None without batching."""
        return self._torch_loader.batch_sampler

    @property
    def generator(self) -> torch.Generator | None:
        """What the order is drawn from."""
        generator: torch.Generator | None = self._torch_loader.generator
        return generator

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out."""
        return self._torch_loader.drop_last

    @property
    def collate_fn(self) -> Callable[[Any], Any]:
        """What makes a batch of samples."""
        return self._torch_loader.collate_fn

    @property
    def num_workers(self) -> int:
        """How many fetches there are at once."""
        return self._settings.fetching.num_workers

    @property
    def prefetch_factor(self) -> int:
        """Batches ahead for each worker."""
        return self._settings.fetching.prefetch_factor

    @property
    def worker_init_fn(self) -> Callable[[int], object] | None:
        """What is called in each worker before it fetches."""
        return self._settings.workers.worker_init_fn

    @property
    def persistent_workers(self) -> bool:
        """Whether workers live on after an epoch."""
        return self._settings.workers.persistent

    @property
    def multiprocessing_context(self) -> Any:
        """What starts worker processes; None: what multiprocessing starts others by."""
        return self._torch_loader.multiprocessing_context

    @property
    def pin_memory(self) -> bool:
        """Whether batches are to come in pinned memory."""
        return self._settings.arrival.pin_memory

    @property
    def timeout(self) -> float:
        """The most seconds to wait for one batch; 0: for ever."""
        return self._settings.fetching.timeout

    @property
    def in_order(self) -> bool:
        """Whether batches come in their order."""
        return self._settings.fetching.in_order

    def __len__(self) -> int:
        """How many batches an epoch has; of an iterable, what its own `len` makes one expect.

        Raises:
            TypeError: The sampler, or the iterable, has no length.
        """
        return len(self._torch_loader)
