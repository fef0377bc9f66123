"""What this process may use: its cores, and which devices are accelerators."""

import os

import pytest
import torch

from aiopar._devices import any_accelerator, core_count, default_devices


def test_cores_are_those_that_the_process_is_pinned_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 6, 7}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert core_count() == 3
    assert len(default_devices()) == 3


def test_without_an_affinity_mask_they_are_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    assert core_count() == 64
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert core_count() == 1
    assert len(default_devices()) == 2, "one core still gets two workers"


@pytest.mark.sim
def test_one_accelerator_among_devices_is_enough() -> None:
    cpu, sim = torch.device("cpu"), torch.device("sim:0")
    assert any_accelerator([cpu, sim])
    assert not any_accelerator([cpu, cpu])
