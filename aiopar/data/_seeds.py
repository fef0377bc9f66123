"""Seeds: drawn as torch's own loader draws them, so that generators go on as they do there."""

import torch


def draw_seed(generator: torch.Generator | None) -> int:
    """A seed from `generator`; None: from torch's own."""
    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=generator).item())
