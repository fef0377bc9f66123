"""Programs that use `RayExecutor`: their own Ray, signals, actors that several programs share."""

import signal
import threading
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest

import aiopar
from aiopar.ray import RayExecutor
from tests.programs import run, start
from tests.remote.test_ray import lines, pids, wait_for_lines

pytestmark = pytest.mark.ray


def wait_for_end(processes: list[int]) -> None:
    while any(map(psutil.pid_exists, processes)):
        threading.Event().wait(0.05)


def test_a_program_without_ray_has_its_own_until_it_ends() -> None:
    """It is a script whose classes and functions have no module."""
    code, out, err = run(
        """
    import logging, ray, aiopar.ray

    def note(record):
        print(record.getMessage().split(" at ")[0], flush=True)

    log = logging.getLogger("aiopar")
    log.setLevel(logging.INFO)
    log.addFilter(note)

    class Point:
        def __init__(self, x):
            self.x = x

    class Failed(Exception):
        pass

    def moved(point):
        if not isinstance(point, Point):
            raise TypeError
        if point.x is None:
            raise Failed("no x", point)
        return Point(point.x + 1)

    with aiopar.ray.RayExecutor(1, address="local") as executor:
        # Ray is not joined yet.
        other = aiopar.ray.RayExecutor(1, address="127.0.0.1:1", in_flight=1)
        print(type(other.submit(abs, -1).exception()).__name__)
        other.shutdown()
        result = executor.submit(moved, Point(1)).result()
        print(type(result) is Point, result.x)
        error = executor.submit(moved, Point(None)).exception()
        print(type(error) is Failed, type(error.args[1]) is Point)
        print("niceness", executor.submit(os.nice, 0).result() - os.nice(0))
    print(ray.is_initialized(), threading.active_count())

    aiopar.ray._link._GIVES_UP_AFTER = 200.0  # a busy machine starts Ray slowly
    executor = aiopar.ray.RayExecutor(1, address="local")  # a new Ray, which nobody closes
    queued = [executor.submit(pow, number, 2) for number in range(5)]
    queued[-1].add_done_callback(lambda future: print(future.result(), flush=True))
    """
    )
    assert (code, err) == (0, "")
    assert out.splitlines() == [
        "Ray: started the cluster",
        "worker ray:0/cpu cannot start: RuntimeError: address='127.0.0.1:1', but this process has "
        "joined the cluster",
        "RuntimeError",
        "True 2",
        "True True",
        "niceness 0",
        "False 1",
        "Ray: started the cluster",
        "16",
    ]


def test_a_program_ends_whose_cluster_does_not_answer() -> None:
    code, out, err = run(
        """
    import aiopar.ray
    aiopar.ray._link._GIVES_UP_AFTER = 1.0
    aiopar.ray._session._ANSWERS_WITHIN = 0.1
    os.environ["RAY_ADDRESS"] = "127.0.0.1:1"
    with aiopar.ray.RayExecutor(1) as executor:
        call = executor.submit(abs, -1)
    print(type(call.exception()).__name__)
    """
    )
    assert (code, out.splitlines()[-1]) == (0, "WorkerLost")
    assert "Ray: not joined the cluster at 127.0.0.1:1 within 0.1 s; it still tries\n" in err


def get(port: str, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as response:
        body: str = response.read().decode()
        return body


def test_an_executor_that_a_running_service_opens_drains_on_sigterm(cluster: Any) -> None:
    process = start(
        f"""
    import aiopar.ray, uvicorn
    from contextlib import asynccontextmanager
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route

    opening = asyncio.Event()

    async def open_executor(_):
        global executor
        executor = aiopar.ray.RayExecutor(1, address={cluster.address!r})
        opening.set()
        return PlainTextResponse(str(await executor.run_sync(os.getpid)))

    async def wait(_):
        # In flight while Ray is initialised and the actor starts.
        print("waits", flush=True)
        await opening.wait()
        return PlainTextResponse(str(await executor.run_sync(os.getpid)))

    async def work(_):
        call = asyncio.ensure_future(executor.run_sync(time.sleep, 4))
        await executor.run_sync(int)  # the other worker: the actor has got both
        print("works", flush=True)
        await call
        return PlainTextResponse("done")

    @asynccontextmanager
    async def lifespan(_):
        yield
        await executor.aclose()
        print("closed", flush=True)

    routes = [Route("/open", open_executor), Route("/wait", wait), Route("/work", work)]
    config = uvicorn.Config(Starlette(routes=routes, lifespan=lifespan), port=0, log_level="error")
    server = uvicorn.Server(config)

    async def main():
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await serving

    asyncio.run(main())
    """
    )
    port = process.stdout.readline().strip()
    answers: dict[str, str] = {}

    def ask(path: str) -> threading.Thread:
        thread = threading.Thread(target=lambda: answers.update({path: get(port, path)}))
        thread.start()
        return thread

    waiting = ask("/wait")
    assert process.stdout.readline() == "waits\n"
    ask("/open").join()
    waiting.join()
    assert answers["/wait"] == answers["/open"]
    working = ask("/work")
    # Ray's own handler of SIGTERM would abort the process after 3 seconds.
    assert process.stdout.readline() == "works\n"
    process.send_signal(signal.SIGTERM)
    working.join()
    assert answers["/work"] == "done"
    code, out, err = process.end()
    assert out == "closed\n"
    # On a busy machine the actor starts so late that a warning says so.
    assert [line for line in err.splitlines() if "has not started within" not in line] == []
    assert code in (0, -signal.SIGTERM)


_DRIVER = """
import aiopar.ray, contextlib, logging
from pathlib import Path
aiopar.ray._executor.LEASE = {lease}
from tests.remote.test_ray import Logged, pids, wait_for

logging.basicConfig(format="%(message)s")
logging.getLogger("aiopar").setLevel("INFO")

async def main():
    folder, x = Path({folder!r}), torch.ones(1)
    async with (
        aiopar.ray.RayExecutor(2, address={address!r}, name={name!r}) as executor,
        aiopar.ReplicaPool(Logged(folder), executor=executor, warmup=x) as pool,
    ):
        await pool(x)
        with contextlib.suppress(RuntimeError):
            aiopar.ray.RayExecutor(1, address="local")
            print("joined a second Ray")
        print(pids(executor), flush=True)
        await aiopar.run_sync(wait_for, folder / {until!r})

asyncio.run(main())
"""


def driver(
    cluster: Any, folder: Path, *, name: str, until: str = "never", lease: float = 10.0
) -> str:
    values = {"address": cluster.address, "folder": str(folder)}
    return _DRIVER.format(name=name, until=until, lease=lease, **values)


def test_programs_share_actors_and_weights(cluster: Any, tmp_path: Path) -> None:
    with RayExecutor(2, name="shared") as executor:
        aiopar.wait_all([executor.on(worker=index).submit(int) for index in range(4)])
        shared = pids(executor)
        programs = [start(driver(cluster, tmp_path, name="shared", until="go")) for _ in range(2)]
        for program in programs:
            assert program.stdout.readline() == f"{shared}\n"
        assert lines(tmp_path / "loaded") == sorted(shared)
        (tmp_path / "go").touch()
        for program in programs:
            assert program.end() == (0, "", f"Ray: joined the cluster at {cluster.address}\n")
        wait_for_lines(tmp_path / "dropped", sorted(shared))
        assert executor.submit(abs, -1).result() == 1
    wait_for_end(shared)


def test_shared_actors_end_after_their_last_program_was_killed(
    cluster: Any, tmp_path: Path
) -> None:
    program = start(driver(cluster, tmp_path, name="alone", lease=4.0))
    actors = [int(pid) for pid in program.stdout.readline().strip("[]\n").split(",")]
    program.send_signal(signal.SIGKILL)
    program.end()
    wait_for_end(actors)
