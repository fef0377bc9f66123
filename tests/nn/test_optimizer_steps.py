"""Optimizer steps are noticed, whoever makes them and however long ago."""

from typing import Any

import pytest
import torch
from torch import nn

from aiopar.nn._kept_replicas import latest_step, stepped_since


def _step(module: nn.Module, **options: Any) -> None:
    optimizer = torch.optim.SGD(module.parameters(), 0.1, **options)
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()


def test_fused_steps_do_not_raise_the_version() -> None:
    """Why this module exists; where it fails, the module may go."""
    module = nn.Linear(2, 2)
    before, version = module.weight.clone(), module.weight._version
    _step(module, fused=True)
    assert not torch.equal(module.weight, before)
    assert module.weight._version == version


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}])
def test_a_step_of_an_optimizer_that_is_gone(options: dict[str, Any]) -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    before = latest_step()
    _step(module, **options)
    assert stepped_since(before, [id(module.bias)])
    assert not stepped_since(before, [id(other.bias)])
    assert not stepped_since(before, [])
    assert not stepped_since(latest_step(), [id(module.bias)])
