"""What docs/footprint.md and docs/security.md say of ports, files, signals, and of what stays."""

import sys

import psutil
import pytest

from tests import programs

_PROGRAM = """
    import psutil

    own = psutil.Process()

    def settings():
        variables = {**os.environ}
        variables.pop("KMP_DUPLICATE_LIB_OK", None)  # threadpoolctl sets it when it is imported
        handlers = [signal.getsignal(each) for each in signal.valid_signals()]
        return handlers, variables, os.getcwd(), sys.getswitchinterval()

    def processes():
        return [own, *own.children(recursive=True)]

    def ports():
        return [found for each in processes() for found in each.net_connections("inet")]

    def files():
        used = [found.path for each in processes() for found in each.open_files()]
        return used + [found.path for found in own.memory_maps() if "/dev/shm" in found.path]

    async def main():
        model, before, files_before = torch.nn.Linear(4, 2), settings(), files()
        async with (
            aiopar.DeviceExecutor(["cpu"] * 2) as threads,
            aiopar.ProcessExecutor(["cpu"] * 2) as workers,
        ):
            for executor in threads, workers:
                pool = aiopar.ReplicaPool(model, executor=executor)
                async with aiopar.Batcher(pool) as batcher:
                    await batcher(torch.ones(4))
            await workers.run_sync(torch.ones, 1 << 20)
            print(threading.active_count(), len(processes()))
            print(ports(), files() == files_before, settings() == before)
        print(threading.active_count(), len(processes()))
        print(*[each.pid for each in processes()])

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads the maps of Linux")
def test_what_executors_open_and_what_stays() -> None:
    code, out, err = programs.run(_PROGRAM)
    assert (code, err) == (0, "")
    opened, clean, left, pids = out.splitlines()
    assert opened == "5 5", "four workers and main; two workers, fork server, resource tracker"
    assert clean == "[] True True"
    assert left == "1 3", "the fork server and the resource tracker wait for the next executor"
    running = [psutil.Process(pid) for pid in map(int, pids.split()) if psutil.pid_exists(pid)]
    _, remaining = psutil.wait_procs(running, timeout=30)
    assert remaining == []
