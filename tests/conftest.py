"""What every test has at hand: event loops, devices, and a loop that nobody may block.

A coroutine test says where it runs: `@pytest.mark.asyncio` once on asyncio, `@pytest.mark.anyio`
on every loop of `anyio_backend`. Tests of the simulated accelerator carry `@pytest.mark.sim`,
those that need a GPU `@pytest.mark.gpu`; a test that takes `devices` gets these marks by parameter.
"""

import functools
import gc
import importlib.util
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import hypothesis
import pytest
import torch
from blockbuster import BlockBuster
from playwright.sync_api import Browser, expect, sync_playwright

from tests import simdevice
from tests.workers import KINDS, RAY, MakeWorkers, Workers, on_ray

# No deadline: how long an example takes says nothing on a busy machine.
hypothesis.settings.register_profile("aiopar", parent=hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("aiopar")

_NEEDS_UVLOOP = pytest.mark.skipif(
    importlib.util.find_spec("uvloop") is None, reason="uvloop is not built for this platform"
)


def pytest_configure() -> None:
    """Started in the background of a shell, the suite ignores Ctrl-C, and so would its programs."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--all`, which `make test-all` passes."""
    parser.addoption("--all", action="store_true", help="run slow tests and all event loops too")


_LOOPS = [
    pytest.param(("asyncio", {}), id="asyncio"),
    pytest.param(("trio", {}), id="trio"),
]
_OTHER_LOOPS = [
    pytest.param(("asyncio", {"debug": True}), id="asyncio-debug"),
    pytest.param(("asyncio", {"use_uvloop": True}), id="uvloop", marks=_NEEDS_UVLOOP),
]


@pytest.fixture(scope="module")
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """Run the test on each of the event loops that aiopar supports."""
    backend: tuple[str, dict[str, Any]] = request.param
    return backend


@pytest.fixture(
    scope="module",  # hypothesis refuses fixtures of a narrower scope
    params=[
        pytest.param(("cpu",), id="cpu"),
        pytest.param(("cpu", "cpu"), id="cpu,cpu"),
        pytest.param(("sim:0", "sim:1"), id="sim:0,sim:1", marks=pytest.mark.sim),
        pytest.param(("cuda:0", "cuda:0"), id="cuda:0,cuda:0", marks=pytest.mark.gpu),
    ],
)
def devices(request: pytest.FixtureRequest) -> tuple[torch.device, ...]:
    """Run the test on one slot of the CPU, on two, on two simulated devices, and on a GPU twice."""
    return tuple(torch.device(name) for name in request.param)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests on each event loop, and on each kind of worker; on Ray where `ON_RAY` says so."""
    chosen = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if "anyio_backend" in metafunc.fixturenames and "anyio_backend" not in chosen:
        loops = [*_LOOPS, *_OTHER_LOOPS] if metafunc.config.getoption("--all") else _LOOPS
        metafunc.parametrize("anyio_backend", loops, indirect=True, scope="module")
    if "make_workers" in metafunc.fixturenames:
        kinds = [*KINDS, RAY] if getattr(metafunc.module, "ON_RAY", False) else KINDS
        metafunc.parametrize("make_workers", kinds, indirect=True, scope="module")


@pytest.fixture(scope="module")
def make_workers(request: pytest.FixtureRequest) -> MakeWorkers:
    """Make executors of so many CPU workers; the test runs with each kind of worker."""
    make: MakeWorkers = request.param
    if make is on_ray:
        request.getfixturevalue("cluster")
    return make


@pytest.fixture(scope="session")
def shared_workers() -> Iterator[Callable[[MakeWorkers], Workers]]:
    """Give out one executor of each kind, which all tests share."""
    executors: dict[MakeWorkers, Workers] = {}

    def shared(make: MakeWorkers) -> Workers:
        if make not in executors:
            executors[make] = make(2)
        return executors[make]

    yield shared
    for executor in executors.values():
        executor.shutdown()


@pytest.fixture(scope="session")
def shared_actors(cluster: object) -> Iterator[Workers]:
    """The executor on Ray that all tests share. It ends before the cluster does."""
    with on_ray(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def workers(
    make_workers: MakeWorkers,
    shared_workers: Callable[[MakeWorkers], Workers],
    request: pytest.FixtureRequest,
) -> Workers:
    """An executor of two CPU workers of each kind; it is closed at the end of the session.

    What goes to other processes must have a name in a module, or be a `tests.home.AtHome`.
    """
    if make_workers is on_ray:
        actors: Workers = request.getfixturevalue("shared_actors")
        return actors
    return shared_workers(make_workers)


# As root and without a way to the internet; the second half looks for no updates there.
_CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")  # while it is open, asyncio's tests cannot run
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    path = shutil.which("chromium")
    if path is None:
        # In CI the pages would go unseen.
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("pages are tested in chromium, and there is none: apt-get install chromium")
    with sync_playwright() as playwright:
        expect.set_options(timeout=100_000)  # patience, on a busy machine
        browser = playwright.chromium.launch(executable_path=path, args=_CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """Start a cluster with one node, which says that it has a GPU; this process joins it."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_TQDM_PATCH_PRINT"] = "0"  # other tests pickle `print`
    cluster = Cluster()
    try:
        cluster.add_node(
            num_cpus=8,
            num_gpus=1,
            object_store_memory=200 << 20,
            include_dashboard=False,
            _system_config={"worker_niceness": 0},  # else actors hardly run on a busy machine
        )
        # On a thread: on the main thread Ray would replace the handler of SIGTERM.
        init = threading.Thread(target=ray.init, args=(cluster.address,))
        init.start()
        init.join()
        yield cluster
        ray.shutdown()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]


@functools.cache
def _blockbuster() -> BlockBuster:
    watching = BlockBuster()
    # A worker process that was not forked has named semaphores. They are handed back where the last
    # reference goes, an error's traceback perhaps: a few bytes, which another process reads.
    written = watching.functions["os.write"]
    written.can_block_in("multiprocessing/resource_tracker.py", ("_send", "_write"))
    return watching


@pytest.fixture(autouse=True)
def _nothing_blocks_the_loop(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a coroutine test that blocks asyncio's loop: lock, sleep, file or socket.

    trio's loop is not watched: the calls are the same. A test that blocks on purpose says why with
    `@pytest.mark.may_block("reason")`.
    """
    node = request.node
    is_coroutine = any(node.get_closest_marker(name) for name in ("asyncio", "anyio"))
    if not is_coroutine or node.get_closest_marker("may_block"):
        yield
        return
    _blockbuster().activate()
    try:
        yield
    finally:
        _blockbuster().deactivate()


@functools.cache
def _build_error() -> Exception | None:
    """Build and register the simulated accelerator, once; return what kept it from it."""
    try:
        simdevice.load()
        # torch imports its meta kernels in Python, a second of work under the GIL, when the first
        # of them runs: let that be here, and not on a worker whose loop is being watched.
        shape = torch.empty(1, device="meta")
        torch.mul(shape, shape, out=shape)
    except Exception as error:  # noqa: BLE001 - what the compiler says goes to every test that asks
        return error
    return None


def _load_simulated_accelerator() -> None:
    if not (found := simdevice.available()):
        # In CI a missing compiler would leave part of the suite unseen.
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up(f"the simulated accelerator cannot be built: {found.reason}")
    if error := _build_error():
        raise RuntimeError("the simulated accelerator cannot be built") from error


def _is_simulated(item: pytest.Item) -> bool:
    return item.get_closest_marker("sim") is not None


_LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture(scope="module", autouse=True)
def _collections_are_short() -> None:
    """Keep all objects of before the file out of garbage collections; many tests collect often."""
    gc.collect()
    gc.freeze()


def _leave_out_slow(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out slow tests, unless `--all` is given."""
    if config.getoption("--all"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    if slow:
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if not item.get_closest_marker("slow")]


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave the simulated accelerator out of a run that has other tests too.

    It has to be loaded before autograd's first backward, and is `torch.accelerator` from then on,
    so that `devices=None` means something else: both kinds cannot share a process.
    """
    _leave_out_slow(config, items)
    simulated = [item for item in items if _is_simulated(item)]
    if simulated and len(simulated) < len(items):
        config.stash[_LEFT_OUT] = len(simulated)
        config.hook.pytest_deselected(items=simulated)
        items[:] = [item for item in items if not _is_simulated(item)]


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    """Say how the tests that were left out are run."""
    left_out = config.stash.get(_LEFT_OUT, 0)
    return [f"left out, for a run of their own with -m sim: {left_out} tests"] if left_out else []


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Build the simulated accelerator before a time limit starts: it takes half a minute."""
    if _is_simulated(item) and simdevice.available():
        _build_error()
    return (yield)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine has no device for; where it ought to have one, fail."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if _is_simulated(item):
        _load_simulated_accelerator()


@pytest.hookimpl(trylast=True)  # after the fixtures' own
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Put every knob of the simulated accelerator back."""
    if _is_simulated(item) and simdevice.available() and _build_error() is None:
        simdevice.reset()


_STATUS = pytest.StashKey[int]()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Remember how the run ended."""
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leave a process that ran on the simulated accelerator without taking the interpreter down.

    autograd's device threads are torch's own and nobody can join them. One that asks for the GIL
    during the interpreter's last steps aborts the process: seen in one run of six, after all tests
    had passed. How programs end is tested in processes of their own.
    """
    if (
        _build_error.cache_info().currsize
        and (status := config.stash.get(_STATUS, None)) is not None
    ):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
