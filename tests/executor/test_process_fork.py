"""Forked processes. Each test starts its own programs."""

import os

import pytest

from tests.programs import run

_posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
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


@_posix
def test_fork_after_use() -> None:
    code, out, err = run(
        _FORK
        + """
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
    )
    assert (code, out.splitlines(), err) == (0, ["child works", "still there 3", "4"], "")


@_posix
def test_fork_while_a_worker_imports() -> None:
    code, out, err = run(
        """
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
    )
    assert (code, out, err) == (0, "[0, 1]\n" * 2, "")


@_posix
def test_fork_inside_a_worker() -> None:
    code, out, err = run(
        _FORK
        + """
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
    )
    assert (code, out, err) == (0, "0 1\n", "")


_HELD = """
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


@_posix
@pytest.mark.parametrize("kind", ["function", "coroutine", "pool"])
def test_fork_while_a_batch_runs(kind: str) -> None:
    code, out, err = run(
        _HELD
        + """
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
def test_fork_while_replicas_are_made() -> None:
    code, out, err = run(
        """
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
    )
    assert (code, out.splitlines(), err) == (0, ["True", "0"], "")


@_posix
def test_fork_inside_an_event_loop() -> None:
    code, out, err = run(
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
