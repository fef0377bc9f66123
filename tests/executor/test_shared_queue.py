"""Workers that share a queue: no call is lost, and no call waits while a worker is idle."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest

import aiopar
from aiopar.testing import Gate
from tests.home import AtHome
from tests.no_threads import NO_THREAD, no_more_threads
from tests.workers import MakeWorkers, worker_device


def test_a_call_for_one_worker_does_not_delay_a_shared_call() -> None:
    with aiopar.DeviceExecutor(["cpu"] * 2) as executor, Gate() as first, Gate() as gate:
        handed_in: Future[list[aiopar.Future[Any]]] = Future()

        def hand_in(_: object) -> None:
            # Runs in the worker's thread, which is registered as idle by now. It finds the hint,
            # and behind it the call for this worker.
            shared = executor.submit(abs, -1)
            handed_in.set_result([shared, executor.on(worker=0).submit(gate)])

        future = executor.on(worker=0).submit(first)
        first.wait_entered()
        future.add_done_callback(hand_in)
        first.open()
        shared, pinned = handed_in.result(30)
        gate.wait_entered()
        assert shared.result(30) == 1
        gate.open()
        pinned.result(30)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_shared_call_does_not_wait_behind_a_call_for_one_worker(
    make_workers: MakeWorkers, workers: int
) -> None:
    with make_workers(workers) as executor:
        for round_number in range(200):
            with Gate() as gate:
                # The worker may be on its way to sleep, asleep, or woken for the other call.
                pinned = executor.on(worker=round_number % workers).submit(AtHome(gate))
                assert executor.submit(abs, -round_number).result(30) == round_number
                gate.open()
                pinned.result(30)


def test_threads_that_submit_at_once_lose_no_call(make_workers: MakeWorkers) -> None:
    with make_workers(3) as executor:
        results: list[list[int]] = []

        def hand_in(start: int) -> None:
            futures = [executor.submit(abs, -n) for n in range(start, start + 300)]
            pinned = [executor.on(worker=n % 3).submit(abs, -n) for n in range(30)]
            results.append([future.result(60) for future in futures])
            assert [future.result(60) for future in pinned] == list(range(30))

        threads = [threading.Thread(target=hand_in, args=(start,)) for start in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == [list(range(start, start + 300)) for start in range(8)]
        assert sum(worker.completed for worker in executor.stats().workers) == 8 * 330


def test_workers_of_different_devices_share_no_queue() -> None:
    with aiopar.DeviceExecutor(["meta", "cpu", "meta"]) as executor:

        def thread_name(_: int) -> str:
            return threading.current_thread().name

        for device in ("meta", "cpu"):
            names = set(executor.on(device).map(thread_name, range(200)))
            assert all(name.startswith(f"aiopar-{device}-") for name in names)
        assert len(list(executor.map(thread_name, range(200)))) == 200


def test_a_call_for_which_no_thread_starts_is_no_load() -> None:
    with aiopar.DeviceExecutor(["cpu", "cpu", "meta"]) as executor:
        for _ in range(4):
            with no_more_threads(), pytest.raises(RuntimeError, match=NO_THREAD):
                executor.on("cpu").submit(int)
        assert executor.submit(worker_device).result() == "cpu"
