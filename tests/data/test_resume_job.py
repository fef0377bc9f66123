"""The job of the guide on resuming, on other executors: only the line of the executor changes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "resume.md"
KILLED = """
if __name__ == "__main__":
    import asyncio, signal, sys

    def replace(*args, saves=[], replace=os.replace):
        saves.append(args)
        if len(saves) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    os.replace = replace
    asyncio.run(job())
"""


@pytest.mark.parametrize(
    ("executor", "fixture"),
    [
        pytest.param("aiopar.ProcessExecutor(['cpu'] * 2, ", "tmp_path", id="processes"),
        pytest.param(
            "__import__('aiopar.ray').ray.RayExecutor(1, ",
            "cluster",
            id="ray",
            marks=[pytest.mark.ray, pytest.mark.slow],
        ),
    ],
)
def test_killed_in_a_save_it_goes_on_with_the_next_item(
    executor: str, fixture: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cluster: Any = request.getfixturevalue(fixture)
    match = re.search(r"```python\n(# job\.py\n.*?)```", GUIDE.read_text(), re.DOTALL)
    assert match is not None
    job = match[1].replace("aiopar.DeviceExecutor(", executor)
    assert executor in job
    job = job.replace("model = ", "torch.manual_seed(0)\nmodel = ")
    (tmp_path / "job.py").write_text(job + KILLED)
    environment = {**os.environ, "PYTHONPATH": str(GUIDE.parents[2])}
    if fixture == "cluster":
        environment["RAY_ADDRESS"] = cluster.address

    results = tmp_path / "results.txt"
    for kill_at, code, fewest in ((3, -signal.SIGKILL, 20 * 16), (1000, 0, 1000)):
        command = [sys.executable, "job.py", str(kill_at)]
        ended = subprocess.run(command, cwd=tmp_path, env=environment, check=False, timeout=200)
        assert ended.returncode == code
        assert len(results.read_text().splitlines()) >= fewest

    torch.manual_seed(0)
    with torch.inference_mode():
        numbers = torch.stack([torch.arange(1000.0), torch.ones(1000)], 1)
        expected = torch.nn.Linear(2, 1)(numbers)[:, 0]
    found = torch.tensor([float(line) for line in results.read_text().splitlines()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
