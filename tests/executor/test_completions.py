"""Calls of accelerator workers end when their kernels have run."""

import logging
import threading
from collections.abc import Iterator

import pytest
import torch

import aiopar
from aiopar.testing import Gate
from tests import simdevice

pytestmark = pytest.mark.sim


@pytest.fixture
def executor() -> Iterator[aiopar.DeviceExecutor]:
    with aiopar.DeviceExecutor(["sim:0"]) as executor:
        yield executor
        [stats] = executor.stats().workers
        assert (stats.queued, stats.running) == (0, 0)


def double(x: float) -> torch.Tensor:
    return torch.full((2,), x, device="sim:0") * 2


def test_without_a_completion_thread_the_worker_waits_for_kernels(
    executor: aiopar.DeviceExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = Gate()
    start = threading.Thread.start

    def start_the_workers_only(thread: threading.Thread) -> None:
        if thread.name.endswith("completions"):
            tried()
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched, simdevice.paused():
        patched.setattr("threading.Thread.start", start_the_workers_only)
        future = executor.submit(double, 1.0)
        tried.wait_entered()
        tried.open()
        assert not future.done(), "its kernels have not run"
    assert future.result(10).tolist() == [2.0, 2.0]
    assert executor.submit(double, 2.0).result(10).tolist() == [4.0, 4.0]


@pytest.mark.parametrize("synchronize", [True, False])
@pytest.mark.parametrize("step", ["bind_thread", "order_after", "result_events"])
def test_an_error_of_the_device_reaches_the_awaiter(
    step: str, synchronize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("device-side assert triggered")

    with aiopar.DeviceExecutor(["sim:0"], synchronize=synchronize) as executor:
        with monkeypatch.context() as patched:
            patched.setattr(f"aiopar.executor._streams.{step}", fail)
            with pytest.raises(RuntimeError, match="device-side assert triggered"):
                executor.submit(double, 1.0).result(10)
        assert executor.submit(double, 1.0).result(10).tolist() == [2.0, 2.0]


def test_a_call_whose_future_was_completed_by_hand(
    executor: aiopar.DeviceExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    def held() -> torch.Tensor:
        return gate(double(1.0))

    with caplog.at_level(logging.ERROR, "aiopar"):
        with Gate() as gate:
            future = executor.submit(held)
            gate.wait_entered()
            future.set_result(torch.zeros(2))
        assert executor.submit(double, 2.0).result(10).tolist() == [4.0, 4.0]
    assert future.result().tolist() == [0.0, 0.0]
    assert "already finished" in caplog.text
