"""A small corpus on a cluster that loses a node."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[2]
EVENTS = [
    "a node is killed",
    "its actor is missed: the other one gets its batches",
    "a new node has joined",
    "an actor is ready there",
]


def test_all_texts_are_embedded_although_a_node_is_killed() -> None:
    finished = subprocess.run(  # the cluster would change this process
        [sys.executable, "examples/cluster.py", "--texts", "96"],
        cwd=ROOT,
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"},  # on a busy machine threads must not spin
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    events = re.findall(r"^ +[\d.]+ s +(\d+) texts   (.+)$", finished.stdout, re.MULTILINE)
    assert [event for _, event in events] == EVENTS
    assert 32 <= int(events[0][0]) < 96  # killed while there was something to do
    # The program itself compares the embeddings.
    assert "\nall 96 texts are embedded after " in finished.stdout
    assert re.search(r"^wait of a text: median .+ s, longest .+ s$", finished.stdout, re.MULTILINE)
