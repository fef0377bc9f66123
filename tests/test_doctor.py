"""`python -m aiopar doctor`."""

import dataclasses
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from aiopar import __main__ as command, _doctor
from aiopar._doctor import Accelerator, Report

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def ideal() -> Report:
    """A report of a machine on which nothing costs speed."""
    return Report(
        python="3.13.1",
        system="Linux",
        gil=True,
        free_threaded=False,
        versions=dict.fromkeys(_doctor.examine().versions, "1.0"),
        accelerators=[],
        supported=None,
        unsupported=None,
        default_workers=["cpu"] * 8,
        cores=_doctor.Cores(host=8, affinity=8, cgroup=None, usable=8, load=0.5),
        operator_threads=8,
        environment={},
        float32_precision="highest",
        shared_memory=(2**33, 2**33),
        missing={},
    )


def test_json_has_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == torch.__version__
    cores = found["cores"]
    assert cores["host"] == os.cpu_count()
    assert 1 <= cores["usable"] <= cores["affinity"] <= cores["host"]
    assert found["missing"] == _doctor.examine().missing
    assert found["advice"] == [*_doctor.advice(_report(found))]


def _report(found: dict[str, Any]) -> Report:
    """The report that was printed as JSON."""
    fields = {field.name: found[field.name] for field in dataclasses.fields(Report)}
    accelerators = [Accelerator(**one) for one in found["accelerators"]]
    cores = _doctor.Cores(**found["cores"])
    return Report(**{**fields, "accelerators": accelerators, "cores": cores})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_variables_that_cost_speed_are_named() -> None:
    left_out = ("MKL_NUM_THREADS", "OMP_NUM_THREADS", "PYTHONASYNCIODEBUG", "PYTHONDEVMODE")
    inherited = {name: value for name, value in os.environ.items() if name not in left_out}
    slow = {"OMP_NUM_THREADS": "1", "PYTHONASYNCIODEBUG": "1", "PYTHONDEVMODE": "0"}
    command = [sys.executable, "-m", "aiopar", "doctor"]
    shown = subprocess.check_output(command, cwd=ROOT, env=inherited | slow, text=True)
    assert ("OMP_NUM_THREADS=1: torch," in shown) == (len(os.sched_getaffinity(0)) > 1)
    assert "PYTHONASYNCIODEBUG=1: asyncio records" in shown
    assert "PYTHONDEVMODE=0:" not in shown


def test_text_has_a_line_for_each_extra(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for extra, packages in _doctor.EXTRAS.items():
        (line,) = [line for line in lines if line.startswith(f"[{extra}]")]
        assert packages[0] in line
    assert any("costs speed" in line for line in lines)


def test_a_missing_extra_says_how_to_install_it(ideal: Report) -> None:
    found = dataclasses.replace(
        ideal, versions={**ideal.versions, "ray": None}, missing={"ray": ["ray"]}
    )
    assert ("[ray]", "needs ray: pip install 'aiopar[ray]'") in [*_doctor.describe(found)]


def test_nothing_is_advised_where_nothing_costs_speed(ideal: Report) -> None:
    assert [*_doctor.advice(ideal)] == []


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({"unsupported": "This machine has an NVIDIA GPU"}, "install a build of torch"),
        ({"unsupported": "An NVIDIA GPU", "supported": "cuda"}, "CUDA_VISIBLE_DEVICES"),
        ({"accelerators": [Accelerator("cuda:0", "H100", 2**36)]}, "tensor cores"),
        ({"operator_threads": 64}, "set OMP_NUM_THREADS=8"),
        ({"operator_threads": 1, "environment": {"MKL_NUM_THREADS": "1"}}, "MKL_NUM_THREADS=1"),
        ({"cores": _doctor.Cores(2, 2, 1.0, 1, 0.5), "operator_threads": 1}, "one core"),
        ({"cores": _doctor.Cores(8, 8, None, 8, 9.5)}, "9.5 threads ran or waited"),
        ({"environment": {"CUDA_LAUNCH_BLOCKING": "1"}}, "each kernel is waited for"),
        ({"free_threaded": True}, "PYTHON_GIL=0"),
        ({"shared_memory": (2**26, 2**26)}, "/dev/shm has 64 MiB"),
    ],
)
def test_each_thing_that_costs_speed_has_one_line(
    ideal: Report, changes: dict[str, Any], advised: str
) -> None:
    (line,) = _doctor.advice(dataclasses.replace(ideal, **changes))
    assert advised in line


@pytest.mark.parametrize("package", ["uvloop", "httptools"])
def test_a_missing_faster_package_is_advised(ideal: Report, package: str) -> None:
    found = dataclasses.replace(ideal, versions={**ideal.versions, package: None})
    (line,) = _doctor.advice(found)
    assert f"pip install {package}" in line


@pytest.mark.sim
def test_accelerators_are_shown() -> None:
    found = _doctor.examine()
    count = torch.accelerator.device_count()
    assert [one.device for one in found.accelerators] == [f"sim:{index}" for index in range(count)]
    assert found.supported == "sim"
    assert {"sim:0", f"sim:{count - 1}"} <= {subject for subject, _ in _doctor.describe(found)}


def test_extras_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for extra, packages in _doctor.EXTRAS.items():
        names = [name.replace("anyio[trio]", "trio").partition(">")[0] for name in extras[extra]]
        assert sorted(names) == sorted(packages)
