"""Processes: forked, left while workers run, interrupted. Each test runs programs of its own."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork and signals")
_ROOT = Path(__file__).parents[1]
_NO_FORK_WARNING = "ignore:This process:DeprecationWarning"
_HEAD = """
import asyncio, os, signal, sys, threading, time
# Started in the background of a shell, the suite ignores Ctrl-C, and so would its children.
signal.signal(signal.SIGINT, signal.default_int_handler)
import torch, aiopar
from aiopar.testing import Gate

def multiply(seconds):
    # Operators that use OpenMP, for a while.
    x, end = torch.rand(400, 400), time.monotonic() + seconds
    while time.monotonic() < end:
        x = torch.tanh(x @ x)
    return "multiplied"
"""


def _start(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        # CPython warns of any fork of a process with threads, since 3.12.
        [sys.executable, "-W", _NO_FORK_WARNING, "-c", _HEAD + textwrap.dedent(program)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _run(program: str) -> tuple[int, str, str]:
    with _start(program) as process:
        return _end(process)


def _end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the program hangs; it wrote {process.communicate()}")
    return process.returncode, out, err


_FORK = """
    def child(executor, view, future):
        for closed in (executor, view):
            for hand_in in (closed.submit, closed.run_sync):
                try:
                    coroutine = hand_in(abs, -1)
                    asyncio.run(coroutine)
                except aiopar.ExecutorShutdown:
                    continue
                raise AssertionError("no ExecutorShutdown")
        executor.shutdown()
        x = torch.rand(300, 300)
        product = asyncio.run(aiopar.run_sync(torch.matmul, x, x))
        assert torch.equal(product, aiopar.fork(torch.matmul, x, x).wait())
        layers = [torch.nn.Linear(300, 3)] * 2
        assert asyncio.run(aiopar.parallel_apply(layers, [x, x]))[1].shape == (300, 3)
        print("child works", flush=True)

    def fork(*args):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            try:
                child(*args)
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            # The interpreter's own way out: its exit handlers run in the child too.
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@_posix
def test_fork_after_use() -> None:
    code, out, err = _run(
        _FORK
        + """
    x = torch.rand(300, 300)
    assert asyncio.run(aiopar.run_sync(torch.matmul, x, x)).shape == (300, 300)
    default = aiopar.get_executor()
    # Not in its `with`, which the child leaves too: opening it takes a lock that the worker, on its
    # way to wait in the gate, may hold at the fork.
    gate = Gate()
    with aiopar.DeviceExecutor(["cpu"]) as executor:
        running = executor.submit(gate, "still there")
        queued = executor.submit(abs, -3)
        gate.wait_entered()
        assert fork(executor, executor.on("cpu"), running) == 0
        gate.open()
        print(running.result(), queued.result())
    assert aiopar.get_executor() is default
    print(aiopar.fork(abs, -4).wait())
    """
    )
    assert (code, out.splitlines(), err) == (0, ["child works", "still there 3", "4"], "")


@_posix
def test_fork_inside_of_a_worker() -> None:
    code, out, err = _run(
        _FORK
        + """
    def forking(executor):
        pid = os.fork()
        if not pid:
            # The thread of the worker is the child's only one, and no worker any more: what it
            # waits for is not run in it, also if nobody has started it.
            with Gate() as gate:
                cpu = aiopar.get_executor().on("cpu")
                held = [cpu.submit(gate) for _ in cpu.devices]
                gate.wait_entered(len(held))
                future = aiopar.fork(threading.current_thread)
                threading.Timer(0.1, gate.open).start()
                os._exit(int(future.wait() is threading.current_thread()))
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    with aiopar.DeviceExecutor(["cpu"]) as executor:
        print(executor.submit(forking, executor).result(), executor.submit(abs, -1).result())
    """
    )
    assert (code, out, err) == (0, "0 1\n", "")


_BATCHED = {
    "function": "Held().forward",
    "coroutine": "held",
    "pool": "aiopar.ReplicaPool(Held(), ['cpu'])",
}


@_posix
@pytest.mark.parametrize("kind", ["function", "coroutine", "pool"])
def test_fork_while_a_batch_runs(kind: str) -> None:
    code, out, err = _run(
        """
    gate = Gate()

    class Held(torch.nn.Module):
        def forward(self, x):
            gate()
            return x

    async def held(x):
        await aiopar.run_sync(gate)
        return x

    def child():
        async def call():
            try:
                await batcher(torch.ones(1))
            except aiopar.ExecutorShutdown:
                stats = batcher.stats()
                assert (stats.queued, stats.in_flight) == (0, 0)
            await batcher.aclose()
            async with aiopar.Batcher(torch.neg) as fresh:
                print((await fresh(torch.ones(1))).item(), flush=True)

        asyncio.run(asyncio.wait_for(call(), 30))

    async def main():
        with gate:
            running = asyncio.create_task(batcher(torch.ones(1)))
            await gate.entered()
            queued = asyncio.create_task(batcher(torch.ones(1)))
            while not batcher.stats().queued:
                await asyncio.sleep(0)
            pid = os.fork()
            if not pid:
                # A thread, for the main one still runs the parent's loop.
                thread = threading.Thread(target=child)
                thread.start()
                thread.join()
                os._exit(0)
            os.waitpid(pid, 0)
            gate.open()
            print((await running).item(), (await queued).item())
    """
        + f"""
    batcher = aiopar.Batcher({_BATCHED[kind]})
    asyncio.run(main())
    """
    )
    assert (code, out.splitlines(), err) == (0, ["-1.0", "1.0 1.0"], "")


@_posix
def test_fork_inside_of_a_loop() -> None:
    code, out, err = _run(
        """
    async def main():
        assert await aiopar.run_sync(abs, -1) == 1
        pid = os.fork()
        if not pid:
            # A thread, for the main one still runs the parent's loop.
            seen = []
            def run():
                seen.append(asyncio.run(aiopar.run_sync(abs, -2)))
            thread = threading.Thread(target=run)
            thread.start()
            thread.join()
            os._exit(seen[0])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
        # No wake-up went to the child.
        print(sum(await asyncio.gather(*(aiopar.fork(abs, -n) for n in range(100)))))

    asyncio.run(main())
    """
    )
    assert (code, out, err) == (0, "4950\n", "")


@pytest.mark.parametrize("executor", ["aiopar.get_executor()", "aiopar.DeviceExecutor(['cpu'])"])
def test_exit_with_queued_and_running_work(executor: str) -> None:
    code, out, err = _run(
        f"""
    executor, gate = {executor}.on(worker=0), Gate()
    running = executor.submit(lambda: (gate(), print("it ended", flush=True)))
    queued = [executor.submit(print, "never") for _ in range(100)]
    # Once all of them are cancelled, which only the exit does.
    aiopar.collect_all(queued).add_done_callback(lambda _: gate.open())
    gate.wait_entered()
    """
    )
    assert (code, out, err) == (0, "it ended\n", "")


@pytest.mark.parametrize("how", ["", "sys.exit(0)", "asyncio.run(asyncio.sleep(0))"])
def test_exit_inside_of_an_operator(how: str) -> None:
    """A thread inside of torch when the interpreter goes down would abort the process."""
    processes = [
        _start(
            f"""
    started = threading.Event()
    for _ in range(2):
        aiopar.fork(lambda: (started.set(), multiply(0.3)))
    started.wait()
    {how}
    """
        )
        for _ in range(2)
    ]
    for process in processes:
        with process:
            assert _end(process) == (0, "", "")


def test_exit_with_an_executor_that_nobody_closed() -> None:
    code, out, err = _run(
        """
    def forget():
        executor = aiopar.DeviceExecutor(["cpu"] * 2)
        return executor.submit(multiply, 0.1)
    print(forget().result())
    forget()
    """
    )
    assert (code, out, err) == (0, "multiplied\n", "")


def test_sys_exit_in_a_worker_reaches_who_waits() -> None:
    code, out, err = _run(
        """
    async def main():
        try:
            await aiopar.run_sync(sys.exit, 3)
        except SystemExit as error:
            print("caught", error.code, await aiopar.run_sync(abs, -1), flush=True)
        await aiopar.fork(sys.exit, 4)

    asyncio.run(main())
    """
    )
    assert (code, out, err) == (4, "caught 3 1\n", "")


_INTERRUPTED = {
    "run_sync": "await aiopar.run_sync(work)",
    "fork": "await aiopar.fork(work)",
    "gather": "await asyncio.gather(*(aiopar.run_sync(work) for _ in range(20)))",
    "parallel_apply": "await aiopar.parallel_apply([lambda x: work()] * 2, [1, 2])",
}


@_posix
@pytest.mark.parametrize("what", _INTERRUPTED)
def test_ctrl_c(what: str) -> None:
    """It ends with the operators that run: none of those queued starts, and nothing hangs."""
    with _start(
        f"""
    calls = []
    def work():
        calls.append(threading.get_ident())
        os.write(1, b"running\\n")
        # Until Ctrl-C has come, however long that takes, and a while after it.
        while not (task.cancelling() or task.done()):
            multiply(0.01)
        multiply(0.3)

    async def main():
        global task
        task = asyncio.current_task()
        try:
            {_INTERRUPTED[what]}
        finally:
            print("cleaned up", flush=True)

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        started = len(calls)
        import atexit
        # Runs after aiopar's own.
        atexit._run_exitfuncs()
        assert len(calls) == started, "queued work ran"
        print("interrupted", flush=True)
    """
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        code, out, err = _end(process)
    lines = [line for line in out.splitlines() if line != "running"]
    assert (code, lines, err) == (0, ["cleaned up", "interrupted"], "")


@_posix
def test_ctrl_c_while_blocked() -> None:
    with _start(
        """
    gate = Gate()
    future = aiopar.fork(gate)
    gate.wait_entered()
    try:
        # Within the block: the signal follows at once, and may come before the wait is reached.
        print("running", flush=True)
        future.wait()
    except KeyboardInterrupt:
        gate.open()
        print(future.result(), aiopar.fork(abs, -1).wait(), flush=True)
    """
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert _end(process) == (0, "None 1\n", "")
