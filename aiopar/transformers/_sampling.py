"""The choice of the next tokens."""

import math
from typing import NamedTuple

import torch

from ._request import Prompt
from ._row import Row


class Choice(NamedTuple):
    """The next token of a row, and the largest of its logits."""

    id: int
    peak: float
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] | None = None


def choose(ready: dict[Row, int], logits: torch.Tensor) -> dict[Row, Choice]:
    """Choose the next token of each row. `ready` has the index of the logits of each row."""
    scores = logits.float()
    if scores.device.type == "cpu":
        best = torch.from_numpy(scores.numpy().argmax(-1))  # torch's own takes ten times as long
    else:
        best = scores.argmax(-1)
    peaks = scores.gather(1, best[:, None])[:, 0].tolist()
    for row, i in ready.items():
        if row.prompt.temperature > 0 and math.isfinite(peaks[i]):
            best[i] = _draw(scores[i], row.prompt, row.draw())
    tokens = best.tolist()
    choices = {}
    for row, i in ready.items():
        logprob = top = None
        if row.prompt.logprobs is not None:
            logprobs = scores[i].log_softmax(-1)
            logprob = float(logprobs[tokens[i]])
            values, ids = logprobs.topk(min(row.prompt.logprobs, len(logprobs)))
            top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        choices[row] = Choice(tokens[i], peaks[i], logprob, top)
    return choices


def _draw(scores: torch.Tensor, prompt: Prompt, chance: float) -> torch.Tensor:
    """Draw a token: the first whose cumulative probability is above `chance`."""
    # Below this bound the division would overflow, and probabilities would hardly change.
    probabilities = ((scores - scores.max()) / max(prompt.temperature, 1e-6)).softmax(-1)
    order = None
    if prompt.top_k:
        probabilities, order = probabilities.topk(min(prompt.top_k, len(scores)))
        probabilities /= probabilities.sum()
    elif prompt.top_p < 1:
        # Together the tokens below this bound have less than 1 - top_p, so they are not sorted.
        order = (probabilities >= (1 - prompt.top_p) / len(scores)).nonzero()[:, 0]
        probabilities, by_size = probabilities[order].sort(descending=True)
        order = order[by_size]
    mass = probabilities.cumsum(-1)
    # The nucleus ends with the first token that brings the mass to top_p.
    enough = (mass < prompt.top_p).sum().clamp(max=len(mass) - 1) if prompt.top_p < 1 else -1
    whole = mass[enough]
    index = torch.searchsorted(mass, chance * whole, right=True)
    # If rounding makes the chance 1, the search ends behind the last token with a probability.
    index = torch.minimum(index, torch.searchsorted(mass, whole))
    return index if order is None else order[index]
