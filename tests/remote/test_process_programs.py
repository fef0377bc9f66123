"""Programs with worker processes: how they start, fork, are interrupted, are killed, and end."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import psutil
import pytest

import aiopar
from tests.programs import Program, run, start

_ROOT = Path(__file__).parents[2]

_HEAD = """
import asyncio, os, signal, sys
import torch, aiopar
from tests.remote import busy
"""


@contextmanager
def program(text: str) -> Iterator[Program]:
    """A program in a process group of its own, as a terminal starts it."""
    with start(text, head=_HEAD, new_session=True) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGKILL)


def lines(process: Program, *expected: str) -> list[str]:
    """Read as many lines as are expected, in any order; those that begin with a word of them."""
    read = [process.stdout.readline().strip() for _ in expected]
    assert sorted(line.split(":")[0] for line in read) == sorted(expected), process.end()
    return read


def started_by(process: Program) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone_within(seconds: float, processes: list[psutil.Process]) -> bool:
    give_up = monotonic() + seconds
    while any(map(_runs, processes)):
        if monotonic() > give_up:
            return False
        sleep(0.01)
    return True


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_worker_processes_end_with_a_killed_parent() -> None:
    with program(
        """
    executor = aiopar.ProcessExecutor(["cpu"] * 4)
    workers = [executor.on(worker=worker) for worker in range(4)]
    for worker in workers:
        worker.submit(abs, -1).result()
    fns = busy.spin, busy.hold_gil, busy.wait
    calls = [worker.submit(fn) for worker, fn in zip(workers, fns)]
    # A forked child keeps copies of whatever the parent has open, and lives on.
    if not os.fork():
        busy.say(f"forked:{os.getpid()}")
        signal.pause()
    calls[0].result()
    """
    ) as process:
        said = lines(process, "spins", "holds the GIL", "waits", "forked")
        [forked] = [line.split(":")[1] for line in said if line.startswith("forked")]
        others = started_by(process)
        [child] = [each for each in others if each.pid == int(forked)]
        [tracker] = [each for each in others if "resource_tracker" in " ".join(each.cmdline())]
        others.remove(child)
        others.remove(tracker)  # as long as a child of the program has it open
        assert len(others) == 5, "the fork server, and four workers"
        process.send_signal(signal.SIGKILL)
        assert gone_within(10, others)
        assert _runs(child)
        child.kill()
        assert gone_within(10, [tracker])
        assert process.end() == (-signal.SIGKILL, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["while the server starts", "in calls"])
def test_a_signal_to_the_whole_group(when: str, number: signal.Signals) -> None:
    with program(
        """
    async def main():
        async with aiopar.ProcessExecutor(["cpu"] * 2) as executor:
            busy.say("starts")
            await asyncio.gather(*(executor.run_sync(busy.work, 0.5) for _ in range(200)))

    try:
        asyncio.run(main())
    except KeyboardInterrupt:
        busy.say("interrupted")
    """
    ) as process:
        lines(process, "starts")
        if when == "in calls":
            lines(process, "works", "works")
        children = started_by(process)
        os.killpg(process.pid, number)
        code, out, err = process.end()
        if number == signal.SIGTERM:
            assert (code, out, err) == (-signal.SIGTERM, "", "")
            assert gone_within(10, children)
        else:
            assert (code, out.splitlines()[-1], err) == (0, "interrupted", "")
            assert out.count("works") < 100, "2 on idle cores: the queued calls are dropped"
            assert gone_within(10, children)


def wait_until_it_sleeps(process: Program) -> None:
    """Wait until the main thread has handled all signals, and waits, or the process has ended."""
    before = None
    while process.runs():
        text = Path(f"/proc/{process.pid}/task/{process.pid}/status").read_text()
        now = text[text.index("State:") :]
        if now == before and "(sleeping)" in now:
            return
        before = now
        sleep(0.1)


_ENDLESS = {
    "asyncio": """
    async def main():
        async with aiopar.ProcessExecutor(["cpu"]) as executor:
            await asyncio.gather(*(executor.run_sync(busy.spin) for _ in range(5)))

    asyncio.run(main())
    """,
    "asyncio, a batcher": """
    async def main():
        async with aiopar.ProcessExecutor(["cpu"]) as executor:
            with aiopar.use_executor(executor):
                async with aiopar.Batcher(busy.spin_items, max_batch_size=1) as batcher:
                    await asyncio.gather(*map(batcher, range(5)))

    asyncio.run(main())
    """,
    "trio": """
    import trio

    async def main():
        async with aiopar.ProcessExecutor(["cpu"]) as executor:
            executor.submit(busy.spin)
            await executor.run_sync(busy.spin)

    trio.run(main)
    """,
    "with": """
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        calls = [executor.submit(busy.spin) for _ in range(2)]
        calls[0].result()
    """,
    "not closed": """
    executor = aiopar.ProcessExecutor(["cpu"])
    calls = [executor.submit(busy.spin) for _ in range(5)]
    aiopar.wait_all(calls)
    """,
}


@pytest.mark.parametrize("text", _ENDLESS.values(), ids=_ENDLESS)
def test_two_ctrl_c_end_a_program_with_endless_calls(text: str) -> None:
    with program(textwrap.dedent(text)) as process:
        lines(process, "spins")
        children = started_by(process)
        for _ in range(2):
            wait_until_it_sleeps(process)
            process.send_signal(signal.SIGINT)
        _, _, err = process.end()
        assert "KeyboardInterrupt" in err
        assert gone_within(10, children)


def test_a_program_that_drains_on_sigterm() -> None:
    with program(
        """
    async def main():
        async with aiopar.ProcessExecutor(["cpu"]) as executor:
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            call = executor.submit(busy.work, 0.5)
            await stop.wait()
            busy.say(await call)

    asyncio.run(main())
    """
    ) as process:
        lines(process, "works")
        children = started_by(process)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.end() == (0, "worked\n", "")
        assert gone_within(10, children)


def python(
    *arguments: str | Path, cwd: Path = _ROOT, text: str | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the interpreter, which imports everything anew; `text` is its standard input."""
    return subprocess.run(
        [sys.executable, *arguments],
        input=text,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_exit_without_closing() -> None:
    program = """
    import torch, aiopar
    from tests.remote import busy

    executor = aiopar.ProcessExecutor(["cpu"] * 2)
    kept = executor.submit(torch.ones, 10**5).result()
    forgotten = aiopar.ProcessExecutor(["cpu"])
    forgotten.submit(abs, -1)
    del forgotten
    calls = [executor.submit(busy.work, 0.1) for _ in range(5)]
    """
    done = python("-X", "dev", "-W", "error", "-c", textwrap.dedent(program))
    assert (done.returncode, done.stdout, done.stderr) == (0, "works\n" * 5, "")


def test_forked_children_that_exit() -> None:
    """They neither end the parent's processes, nor free the memory of its results."""
    code, out, err = run(
        """
    import gc
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        kept = executor.submit(torch.ones, 10**6).result()
        pid = executor.submit(os.getpid).result()
        for way in ("exit", "_exit"):
            child = os.fork()
            if not child:
                del kept
                gc.collect()
                try:
                    executor.submit(abs, -1)
                except aiopar.ExecutorShutdown:
                    getattr(sys if way == "exit" else os, way)(7)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
            for _ in range(3):
                executor.submit(torch.zeros, 10**6).result()
            assert kept.sum() == 10**6
            assert executor.submit(os.getpid).result() == pid
        child = os.fork()
        if not child:  # it may have an executor of its own
            with aiopar.ProcessExecutor(["cpu"]) as own:
                assert own.submit(os.getppid).result() != os.getpid()  # the fork server's
            sys.exit(8)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 8
        assert executor.submit(os.getpid).result() == pid
    """
    )
    assert (code, out, err) == (0, "", "")


# Scripts.

_SCRIPT = """
import json, os, sys
import aiopar, my_model

def main_function(x):
    return [x, __name__, my_model.imported_by, os.getcwd(), sys.argv[1:], os.environ.get("LATE")]

def main():
    os.environ["LATE"] = "set by the program"
    os.chdir("/")
    with aiopar.ProcessExecutor(["cpu"] * 2, preload=["my_model"]) as executor:
        for worker in range(2):
            view = executor.on(worker=worker)
            seen = view.submit(main_function, worker).result(), view.submit(os.getpid).result()
            print(json.dumps(seen))
"""


def script(folder: Path, text: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """Run a script, in another folder than its own."""
    (folder / "script.py").write_text(text)
    return python(folder / "script.py", *arguments, cwd=_ROOT.parent)


def test_a_script_and_its_preloaded_module(tmp_path: Path) -> None:
    import json

    (tmp_path / "my_model.py").write_text(
        "import os, sys\n"
        "imported_by = os.getpid()\n"
        "print('imported')\n"
        "import torch\n"
        "torch.randn(300, 300) @ torch.randn(300, 300)  # starts threads, if it may\n"
    )
    guarded = _SCRIPT + '\nif __name__ == "__main__":\n    main()\n'
    done = script(tmp_path, guarded, "an argument")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("imported") == 2, "by the program, and by the fork server"
    first, second = (json.loads(line) for line in done.stdout.splitlines() if line[0] == "[")
    for worker, (seen, pid) in enumerate((first, second)):
        assert seen[:2] == [worker, "__mp_main__"]
        assert seen[2] != pid
        assert seen[3:] == ["/", ["an argument"], "set by the program"]
    assert first[0][2] == second[0][2]
    assert first[1] != second[1]


def test_a_script_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("imported_by = 0\n")
    done = script(tmp_path, _SCRIPT + "\nmain()\n")
    assert done.returncode == 1
    assert done.stdout == ""
    expected = (
        "RuntimeError: a worker process imports the main module, which calls a ProcessExecutor: "
        'what a script does must be under `if __name__ == "__main__":`\n'
        "worker process:0/cpu cannot start\n"
    )
    assert done.stderr.endswith(expected)


_MODULE = """
import os
import aiopar

executor = aiopar.ProcessExecutor(["cpu"])


def started():
    return sum(stats.host is not None for stats in executor.stats().workers)


if __name__ == "__main__":
    with executor:
        print(executor.submit(os.getpid).result() != os.getpid(), executor.submit(started).result())
"""


def test_an_executor_of_a_module_starts_no_processes_in_its_worker_processes(
    tmp_path: Path,
) -> None:
    done = script(tmp_path, _MODULE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True 0\n", "")


def test_a_program_from_standard_input() -> None:
    text = """
import aiopar

class Own:
    def __init__(self, x):
        self.x = x

    def doubled(self):
        return 2 * self.x

def own(x):
    return Own(x.doubled())

with aiopar.ProcessExecutor(["cpu"]) as executor:
    print(executor.submit(abs, -1).result())
    print(executor.submit(own, Own(2)).result().doubled())
    print(type(executor.submit(Own, 3).result()) is Own)
"""
    done = python("-", text=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == ["1", "8", "True"]


# Many executors.


def test_executors_leave_nothing_open() -> None:
    code, out, err = run(
        """
    import psutil

    def open_now():
        own = psutil.Process()
        return own.num_fds(), own.num_threads(), len(own.children(recursive=True))

    def use():
        with aiopar.ProcessExecutor(["cpu"] * 2) as executor:
            list(executor.map(abs, range(10)))

    use()
    before = open_now()
    for _ in range(10):
        use()
    give_up = time.monotonic() + 10  # the kernel may count a thread that has just ended
    while not (nothing_left := all(map(int.__le__, open_now(), before))):
        if time.monotonic() > give_up:
            break
        time.sleep(0.01)
    print(nothing_left or (before, open_now()))
    """
    )
    assert (code, out, err) == (0, "True\n", "")


def test_a_killed_fork_server() -> None:
    """The processes that it has started go on; another one starts the next ones."""
    with aiopar.ProcessExecutor(["cpu"] * 2) as executor:
        views = [executor.on(worker=worker) for worker in range(2)]
        pids = [view.submit(os.getpid).result() for view in views]
        [server] = {psutil.Process(pid).ppid() for pid in pids}
        os.kill(server, signal.SIGKILL)
        assert gone_within(10, [psutil.Process(server)] if psutil.pid_exists(server) else [])
        assert [view.submit(os.getpid).result() for view in views] == pids
        with pytest.raises(aiopar.WorkerLost, match=f"pid {pids[0]} .* has closed its connection"):
            views[0].submit(os._exit, 0).result()
        assert views[0].submit(os.getpid).result() not in pids
        assert views[1].submit(os.getpid).result() == pids[1]
        last = [psutil.Process(pids[1])]
    assert gone_within(10, last)


# Children of multiprocessing, as far as a function can tell.


def _use_pools(rounds: int) -> int | None:
    for _ in range(rounds):
        with multiprocessing.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    child = multiprocessing.Process(target=signal.pause)
    child.start()
    child.terminate()
    child.join()
    return child.exitcode


def test_a_worker_that_has_children() -> None:
    """They have the default handlers, by which `multiprocessing` and a terminal end them."""
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        assert executor.submit(_use_pools, 2).result(timeout=60) == -signal.SIGTERM
        child = executor.submit(_fork_and_wait).result()
        os.kill(child, signal.SIGINT)
        assert executor.submit(_exit_code, child).result() == 7


def _fork_and_wait() -> int:
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.read(read, 1)
        return child
    try:
        os.write(write, b"!")
        while True:
            signal.pause()
    except KeyboardInterrupt:
        os._exit(7)


def _exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _use_manager(queue: Any, event: Any, numbers: Any) -> str:
    queue.put("from the worker")
    event.set()
    numbers["one"] = 1
    return multiprocessing.current_process().name


def test_objects_of_a_manager() -> None:
    with multiprocessing.Manager() as manager, aiopar.ProcessExecutor(["cpu"]) as executor:
        shared = manager.Queue(), manager.Event(), manager.dict()
        assert executor.submit(_use_manager, *shared).result() == "aiopar-0"
        queue, event, numbers = shared
        assert queue.get(timeout=10) == "from the worker"
        assert (event.is_set(), dict(numbers)) == (True, {"one": 1})


def _write(name: str) -> None:
    attached = SharedMemory(name)
    assert attached.buf is not None
    attached.buf[0] = 7
    attached.close()


def test_a_program_and_its_multiprocessing_stay_as_they_are(tmp_path: Path) -> None:
    """Its shared memory outlives the worker; its start method stays open; its path is any."""
    code, out, err = run(
        f"""
    import multiprocessing, pathlib
    from multiprocessing.shared_memory import SharedMemory
    from tests.remote.test_process_programs import _write

    sys.path.append(pathlib.Path({str(tmp_path)!r}))
    own = SharedMemory(create=True, size=10)
    with aiopar.ProcessExecutor(["cpu"]) as executor:
        executor.submit(_write, own.name).result()
    multiprocessing.set_start_method("spawn")
    again = SharedMemory(own.name)
    print(again.buf[0])
    again.close()
    own.close()
    own.unlink()
    """
    )
    assert (code, out, err) == (0, "7\n", "")


@pytest.mark.parametrize("limit", ["RLIMIT_AS", "RLIMIT_FSIZE"])
def test_a_limit_of_the_process(limit: str) -> None:
    bound = (1 << 36) if limit == "RLIMIT_AS" else 1 << 30  # either way, 1 GB for each worker
    code, out, err = run(
        f"""
    import resource

    resource.setrlimit(resource.{limit}, ({bound}, {bound}))
    with aiopar.ProcessExecutor(["cpu"] * 2) as executor:
        print(executor.submit(len, torch.ones(1 << 20)).result())
        try:
            executor.submit(len, torch.empty(1 << 30, dtype=torch.int8)).result()
        except MemoryError as error:
            print(error)
        print(executor.submit(len, torch.ones(1 << 20)).result())
    """
    )
    assert (code, err) == (0, "")
    first, error, last = out.splitlines()
    assert (first, last) == ("1048576", "1048576")
    assert error.startswith("no room for 1073741824 bytes")
    assert "`ulimit -v`" in error
