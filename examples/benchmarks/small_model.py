"""The model of the serving benchmarks, small enough to show the overhead around it."""

import torch
from torch import Tensor, nn

FEATURES = 256
BATCH = 32
COUNT = 8 * BATCH


class SmallModel:
    """An MLP and input vectors, the same in every process."""

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
        """Outputs [batch, feature], or [feature] for a single item."""
        outputs: Tensor = self.network(batch)
        return outputs

    def predict_list(self, items: list[Tensor]) -> list[Tensor]:
        """Predict for batchers that pass a list."""
        return list(self.predict(torch.stack(items)).unbind())

    @torch.inference_mode()
    def predict_all(self, count: int) -> int:
        """Stack, compute and unbind batch after batch: the limit of one thread."""
        done = 0
        while done < count:
            start = done % COUNT
            batch = torch.stack(self.items[start : start + BATCH])
            done += len(self.network(batch).unbind())
        return done
