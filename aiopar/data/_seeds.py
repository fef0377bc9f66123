"""Seeds: drawn as torch's own loader draws them, so that generators go on as they do there."""

import torch
from torch.utils.data import IterDataPipe, graph_settings


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`; None: from torch's own."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())


def seed_pipes(dataset: object, generator: torch.Generator | None) -> None:
    """Seed what draws in an `IterDataPipe` (`shuffle`) for its next epoch; nothing else is."""
    if isinstance(dataset, IterDataPipe):
        seed = draw_seed(generator)
        graph_settings.apply_random_seed(dataset, torch.Generator().manual_seed(seed))
