"""A model whose replicas are kept, devices of all kinds, and the look for what is stale."""

import copy
from typing import Any

import torch
from torch import nn

from aiopar.nn._kept_replicas import KeptReplicas
from tests.nn.sample_modules import CPU, ELSEWHERE, batch

MIXED = (CPU, *ELSEWHERE, CPU)


def model() -> Any:  # a Sequential; mypy knows of its modules' attributes too little
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.0), nn.Linear(4, 2))


def assert_fresh(kept: KeptReplicas[Any], module: nn.Module) -> None:
    """Every replica computes what the module computes now."""
    for replica in kept.call_copies():
        expected = copy.deepcopy(module)(batch())
        torch.testing.assert_close(copy.deepcopy(replica)(batch()), expected, rtol=0, atol=0)
