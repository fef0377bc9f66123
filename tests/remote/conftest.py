"""Worker processes, and a Ray cluster on this machine for the tests that are marked `ray`."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from aiopar import ProcessExecutor

from .held import ProcessGate

# The import of these fails, or hangs: doctest must not collect them.
collect_ignore = ["broken_module.py", "stuck_module.py"]


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    with ProcessExecutor(["cpu", "cpu"]) as executor:
        yield executor


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[ProcessGate]:
    gate = ProcessGate(tmp_path)
    yield gate
    gate.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[object]:
    """Start a cluster with one node, which says that it has a GPU; this process joins it."""
    import ray
    from ray.cluster_utils import Cluster

    os.environ["RAY_TQDM_PATCH_PRINT"] = "0"  # other tests pickle `print`
    cluster = Cluster()
    try:
        cluster.add_node(
            num_cpus=8, num_gpus=1, object_store_memory=200 << 20, include_dashboard=False
        )
        # On a thread: on the main thread Ray would replace the handler of SIGTERM.
        init = threading.Thread(target=ray.init, args=(cluster.address,))
        init.start()
        init.join()
        yield cluster
        ray.shutdown()
    finally:
        cluster.shutdown()  # type: ignore[no-untyped-call]
