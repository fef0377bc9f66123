"""Processes that exit, fork or are interrupted while workers run, as programs of their own."""

import os
import signal
import sys
import textwrap

import pytest

from tests.gil import needs_gil
from tests.programs import run, start

_posix = pytest.mark.skipif(os.name != "posix", reason="needs signals")


_TIMER = """
# A signal may come after CPython's last check and before the main thread sleeps. CPython sees it
# when the thread wakes up. The timer wakes it, because the calls wait for the signal.
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
"""

_EXECUTORS = ["aiopar.get_executor()", "aiopar.DeviceExecutor(['cpu'] * 2)"]

_HELD = """
gate = Gate()

def write(text):
    os.write(1, f"{text}\\n".encode())  # one write: another call may write at the same time

def at_exit(fn):
    # The main thread ends before the exit handlers run.
    threading.Thread(target=lambda: (threading.main_thread().join(), fn()), daemon=True).start()

def hold_workers():
    for worker in range(len(executor.devices)):
        executor.on(worker=worker).submit(lambda: (gate(), write("ended")))
    gate.wait_entered(len(executor.devices))
"""


@pytest.mark.parametrize("executor", _EXECUTORS)
@pytest.mark.parametrize("end", ["", "executor.shutdown(wait=False)"])
def test_exit_runs_queued_calls(executor: str, end: str) -> None:
    program = f"""
executor = {executor}
hold_workers()
queued = [executor.submit(lambda: write(multiply(0.1))) for _ in range(5)]
at_exit(gate.open)
{end}
    """
    code, out, err = run(_HELD + program)
    assert (code, out.splitlines().count("multiplied"), err) == (0, 5, "")


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="CPython 3.12 starts no thread at exit")
@pytest.mark.parametrize("executor", _EXECUTORS)
def test_calls_that_run_at_exit_may_make_other_calls(executor: str) -> None:
    program = f"""
executor = {executor}

def fork(depth):
    return 1 + aiopar.wait(aiopar.fork(fork, depth - 1)) if depth else 0

def apply():
    # With workers of the default executor, which may not exist before the exit.
    return aiopar.wait(aiopar.parallel_apply([abs, abs], [-1, -2]))

hold_workers()
executor.submit_all([lambda: aiopar.current_replica().barrier()] * 2)
queued = [executor.submit(lambda fn, *x: write(fn(*x)), *fn) for fn in ((fork, 9), (apply,))]
at_exit(gate.open)
    """
    code, out, err = run(_HELD + program)
    assert (code, {*out.splitlines()}, err) == (0, {"ended", "9", "[1, 2]"}, "")


# Without a GIL many objects live until the interpreter sets the globals of modules to None.
@pytest.mark.parametrize("late", ["", "sys.keep = [*sys.modules.values()]"], ids=["", "late"])
def test_exit_with_everything_open(late: str) -> None:
    """Nothing that was left open hangs the end of the program; generators are closed."""
    program = f"""
    def batches(batch):
        while True:
            yield batch

    def numbers():
        try:
            yield from range(2)
        finally:
            print("closed", flush=True)

    async def main():
        global batcher, stream, parts, items, loader, units, iteration
        batcher = aiopar.Batcher(lambda batch: batch + 1)
        stream = aiopar.Batcher(batches)
        parts = stream.stream(torch.ones(1))
        items = aiter(aiopar.data.Pipeline(range(10**9)).map(abs, concurrency=2))
        loader = aiter(aiopar.data.AsyncDataLoader(range(10**9), num_workers=2))
        units = aiopar.Parallel(2, type("Unit", (), dict(forward_backward=staticmethod(abs)))())
        await units.put(-1)
        iteration = aiopar.get_executor().iterate(numbers, buffer=0)
        aiopar.DeviceExecutor(["cpu"] * 2).submit(multiply, 0.1)  # nobody holds its executor
        print(await batcher(torch.ones(())), await anext(parts))
        print(await anext(items), await anext(loader), await anext(iteration), flush=True)

    asyncio.run(main())
    {late}
    """
    assert run(program) == (0, "tensor(2.) tensor([1.])\n0 tensor([0]) 0\nclosed\n", "")


@_posix
@pytest.mark.parametrize("executor", _EXECUTORS)
def test_ctrl_c_at_exit_drops_queued_calls_and_waits_for_running_calls(executor: str) -> None:
    code, out, err = run(
        _TIMER
        + _HELD
        + f"""
executor = {executor}
hold_workers()
queued = [executor.on(worker=0).submit(print, "never")]
queued += [executor.submit(print, "never") for _ in range(100)]
# The gate opens when all queued calls are cancelled, which only Ctrl-C does.
aiopar.collect_all(queued).add_done_callback(
    lambda _: (signal.setitimer(signal.ITIMER_REAL, 0), gate.open())
)

def interrupt():
    try:
        while True:
            executor.submit(int)
    except aiopar.ExecutorShutdown:  # the exit waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

at_exit(interrupt)
    """
    )
    assert (code, {*out.splitlines()}) == (0, {"ended"})
    assert err.endswith("KeyboardInterrupt: \n")


@pytest.mark.parametrize("how", ["", "sys.exit(0)", "asyncio.run(asyncio.sleep(0))"])
def test_exit_inside_an_operator(how: str) -> None:
    """A thread inside an operator would abort the process when the interpreter ends."""
    processes = [
        start(
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
            assert process.end() == (0, "", "")


def test_exit_after_backwards_that_failed() -> None:
    """Autograd's thread-local queues hold hooks; freed too late, they would abort the process."""
    program = """
    from contextlib import suppress

    def fail(_):
        raise LookupError

    def backward():
        x = torch.ones(2, requires_grad=True)
        for _ in range(300):
            x = x.sin()
            x.register_hook(lambda _: None)
        newest = torch.ones(2, requires_grad=True) * 1  # the backward begins with it
        newest.register_hook(fail)
        with suppress(LookupError):
            (x + newest).sum().backward()

    executor = aiopar.DeviceExecutor(["cpu"] * 16)
    aiopar.wait_all(executor.on(worker=worker).submit(backward) for worker in range(16))
    """
    for _ in range(3):  # one after the other: an idle core ends the interpreter at once
        assert run(program) == (0, "", "")


@needs_gil("else CPython destroys the object when the globals of modules are gone")
@pytest.mark.parametrize("used", ["", "aiopar.fork(abs, -1).wait()"])
def test_a_destructor_at_exit_cannot_submit(used: str) -> None:
    program = f"""
    class Late:
        fork, own, Refused = aiopar.fork, aiopar.DeviceExecutor, aiopar.ExecutorShutdown

        def __del__(self):
            for late in (lambda: Late.fork(abs, -1), lambda: Late.own(["cpu"]).submit(abs, -1)):
                try:
                    late()
                except Late.Refused:
                    print("refused")

    {used}
    late = Late()
    """
    assert run(program) == (0, "refused\n" * 2, "")


_INTERRUPTED = {
    "run_sync": "await aiopar.run_sync(work)",
    "fork": "await aiopar.fork(work)",
    "gather": "await asyncio.gather(*(aiopar.run_sync(work) for _ in range(20)))",
    "parallel_apply": "await aiopar.parallel_apply([lambda x: work()] * 2, [1, 2])",
}

_WORK = """
    calls = []
    def work():
        calls.append(threading.get_ident())
        os.write(1, b"running\\n")
        # Run until Ctrl-C has come, and a little longer.
        while not (task.cancelling() or task.done()):
            multiply(0.01)
        multiply(0.3)
"""


@_posix
@pytest.mark.parametrize("what", _INTERRUPTED)
def test_ctrl_c(what: str) -> None:
    """The process ends after the running operators; no queued call starts."""
    with start(
        textwrap.indent(_TIMER, "    ")
        + _WORK
        + f"""
    async def main():
        global task
        task = asyncio.current_task()
        try:
            {_INTERRUPTED[what]}
        finally:
            os.write(1, b"cleaned up\\n")  # one write: a call may write at the same time

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
        started = len(calls)
        import atexit
        # aiopar's exit handler among them.
        atexit._run_exitfuncs()
        assert len(calls) == started, "queued work ran"
        print("interrupted", flush=True)
    """
    ) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        code, out, err = process.end()
    lines = [line for line in out.splitlines() if line != "running"]
    assert (code, lines, err) == (0, ["cleaned up", "interrupted"], "")


@needs_gil("else CPython may see Ctrl-C only when the wait ends, if it comes just before the wait")
@_posix
def test_ctrl_c_while_blocked() -> None:
    with start(
        """
    gate = Gate()
    future = aiopar.fork(gate)
    gate.wait_entered()
    try:
        # In the block, because the signal may come before the wait begins.
        print("running", flush=True)
        future.wait()
    except KeyboardInterrupt:
        gate.open()
        print(future.result(), aiopar.fork(abs, -1).wait(), flush=True)
    """
    ) as process:
        assert process.stdout.readline() == "running\n"
        process.send_signal(signal.SIGINT)
        assert process.end() == (0, "None 1\n", "")


# Forked processes.

_forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
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
            # A normal exit: the exit handlers run in the child too.
            sys.exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""


@_forks
def test_fork_after_use() -> None:
    program = """
    x = torch.rand(300, 300)
    assert asyncio.run(aiopar.run_sync(torch.matmul, x, x)).shape == (300, 300)
    default = aiopar.get_executor()
    # Not `with gate`, which the child would leave too: to open a gate takes its lock, which the
    # worker that enters the gate may hold at the fork.
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
    code, out, err = run(_FORK + program)
    assert (code, out.splitlines(), err) == (0, ["child works", "still there 3", "4"], "")


@_forks
def test_fork_while_a_worker_imports() -> None:
    program = """
    class Slow:
        reached, forking = threading.Event(), threading.Event()

        def find_spec(self, name, *_):
            if name == "threadpoolctl":
                self.reached.set()
                self.forking.wait()
                time.sleep(0.3)  # a slow disk

    def meet():
        # Workers share the cores only if two of them run.
        together = threading.Barrier(2)
        return [aiopar.fork(together.wait, 30) for _ in range(2)]

    sys.meta_path.insert(0, Slow())
    os.register_at_fork(before=Slow.forking.set)
    futures = meet()
    assert Slow.reached.wait(30)
    if (pid := os.fork()) == 0:
        print(sorted(future.result(30) for future in meet()), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(sorted(future.result() for future in futures))
    """
    assert run(program) == (0, "[0, 1]\n" * 2, "")


@_forks
def test_fork_inside_a_worker() -> None:
    program = """
    def forking(executor):
        pid = os.fork()
        if not pid:
            # The thread of the worker is the only thread of the child. It serves no worker any
            # more, so it does not run the call that it waits for.
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
    assert run(_FORK + program) == (0, "0 1\n", "")


_BATCH_HELD = """
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
"""

_BATCHED = {
    "function": "Held().forward",
    "coroutine": "held",
    "pool": "aiopar.ReplicaPool(Held(), ['cpu'])",
}


@_forks
@pytest.mark.parametrize("kind", ["function", "coroutine", "pool"])
def test_fork_while_a_batch_runs(kind: str) -> None:
    program = f"""
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

    batcher = aiopar.Batcher({_BATCHED[kind]})
    asyncio.run(main())
    """
    code, out, err = run(_BATCH_HELD + program)
    assert (code, out.splitlines(), err) == (0, ["-1.0", "1.0 1.0"], "")


@_forks
def test_fork_while_replicas_are_made() -> None:
    program = """
    class Held(torch.nn.Linear):
        def _replicate_for_data_parallel(self):
            gate()
            return super()._replicate_for_data_parallel()

    gate, module = Gate(), Held(3, 2)
    dp = aiopar.DataParallel(module, ["cpu", "cpu"])
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    module(torch.ones(1, 3)).sum().backward()

    def output():
        with torch.no_grad():
            return aiopar.wait(dp(torch.ones(2, 3)))

    replicating = threading.Thread(target=output)
    replicating.start()
    gate.wait_entered()
    if (pid := os.fork()) == 0:
        gate.open()
        optimizer.step()
        first, second = output()
        print(torch.equal(first, second), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    gate.open()
    replicating.join()
    """
    code, out, err = run(program)
    assert (code, out.splitlines(), err) == (0, ["True", "0"], "")


@_forks
def test_fork_inside_an_event_loop() -> None:
    program = """
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
    assert run(program) == (0, "4950\n", "")
