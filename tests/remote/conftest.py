"""Worker processes, and a Ray cluster on this machine for the tests that are marked `ray`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from aiopar import ProcessExecutor

from .held import ProcessGate

# The import of these fails, hangs, or breaks the process: doctest must not collect them.
collect_ignore = [
    "broken_module.py",
    "no_fork_module.py",
    "stuck_module.py",
]


@pytest.fixture(scope="module")
def executor() -> Iterator[ProcessExecutor]:
    with ProcessExecutor(["cpu", "cpu"]) as executor:
        yield executor


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[ProcessGate]:
    gate = ProcessGate(tmp_path)
    yield gate
    gate.close()
