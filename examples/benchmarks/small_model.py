"""The model of the serving benchmarks: so small that what surrounds it can be seen."""

import torch
from torch import Tensor, nn

FEATURES = 256
BATCH = 32
COUNT = 8 * BATCH


class SmallModel:
    """An MLP, and vectors for it; the same ones in every process."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        layers = [nn.Linear(FEATURES, 1024), nn.Linear(1024, 1024), nn.Linear(1024, FEATURES)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=layer.in_features**-0.5, generator=generator)
            nn.init.zeros_(layer.bias)
        first, second, third = layers
        self.network = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), third).eval()
        self.items = list(torch.randn(COUNT, FEATURES, generator=generator).unbind())

    @torch.inference_mode()
    def predict(self, batch: Tensor) -> Tensor:
        """Outputs [batch, feature], or [feature] of one item."""
        outputs: Tensor = self.network(batch)
        return outputs

    def predict_list(self, items: list[Tensor]) -> list[Tensor]:
        """For batchers that hand over a list."""
        return list(self.predict(torch.stack(items)).unbind())

    @torch.inference_mode()
    def predict_all(self, count: int) -> int:
        """The most that one thread can do: batch after batch, stacked and unbound."""
        done = 0
        while done < count:
            start = done % COUNT
            batch = torch.stack(self.items[start : start + BATCH])
            done += len(self.network(batch).unbind())
        return done
