"""Building, loading, leaving and forking a process that uses the simulated accelerator."""

import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import programs, simdevice
from tests.simdevice import _build

pytestmark = pytest.mark.sim

_HEAD = """
import os, threading, warnings
import torch
from tests import simdevice
warnings.simplefilter("error")
"""
# CPython warns of every fork of a process with threads, since 3.12.
_FORKS = 'warnings.filterwarnings("ignore", "This process")\n'


def _output(code: str) -> str:
    status, out, err = programs.start(_FORKS + textwrap.dedent(code), head=_HEAD).end()
    assert status == 0, err
    return out.strip()


def test_number_of_devices_comes_from_the_environment() -> None:
    code = """
        os.environ["SIMDEV_COUNT"] = "4"
        simdevice.load()
        x = torch.ones(2, device="sim:3", requires_grad=True)
        (x.to("sim:0") * 2).sum().backward()
        print(torch.accelerator.device_count(), x.grad.tolist())
    """
    assert _output(code) == "4 [2.0, 2.0]"


@pytest.mark.parametrize("count", ["0", "17", "two"])
def test_bad_number_of_devices(count: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMDEV_COUNT", count)
    with pytest.raises(ValueError, match="SIMDEV_COUNT must be a number from 1 to 16"):
        simdevice.load.__wrapped__()  # without its cache


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_build, "_directory", lambda: tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = simdevice.available()
    assert not found
    assert found.reason is not None
    assert "no C++ compiler" in found.reason


def test_a_finished_build_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert simdevice.available()
    assert _build.build() == _build.built()


def test_builds_at_once_are_one_build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    builds = []

    def compile_(directory: Path) -> None:
        builds.append(directory)
        (directory / f"{_build.NAME}.so").touch()

    monkeypatch.setattr(_build, "_directory", lambda: tmp_path)
    monkeypatch.setattr(_build, "_compile", compile_)
    with ThreadPoolExecutor(4) as pool:
        paths = {call.result() for call in [pool.submit(_build.build) for _ in range(4)]}
    assert len(paths) == len(builds) == 1


def test_a_failed_build_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_build, "_HERE", tmp_path)
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(RuntimeError, match=r"building _simdevice failed:\n(.|\n)*'false'"):
        _build.build()
    assert _build.built() is None


EXITS = {
    "after a backward": """
        x = torch.ones(2, device="sim:1", requires_grad=True)
        x.sum().backward()
    """,
    "with queued work": """
        simdevice.set_kernel_latency(3600)
        x = torch.ones(2, device="sim:0").to("sim:1", non_blocking=True)
        y = [x + i for i in range(100)]
    """,
    "with a stream that waits for another": """
        simdevice.set_kernel_latency(3600)
        torch.ones(2, device="sim:0")
        side = torch.Stream("sim:0")
        side.wait_stream(torch.accelerator.current_stream(0))
        with side: torch.ones(2, device="sim:0")
    """,
    "while paused": """
        hold = simdevice.paused()
        hold.__enter__()
        x = torch.ones(2, device="sim:0") + 1
    """,
    "with a thread that waits": """
        simdevice.set_kernel_latency(3600)
        x = torch.ones(2, device="sim:0")
        entered = threading.Event()
        threading.Thread(target=lambda: (entered.set(), x.tolist()), daemon=True).start()
        entered.wait()
    """,
}


@pytest.mark.parametrize("state", EXITS)
def test_exit(state: str) -> None:
    code = "simdevice.load()\n" + textwrap.dedent(EXITS[state]) + "\nprint('end')"
    assert _output(code) == "end"


def test_a_forked_child_cannot_use_the_device_but_lives() -> None:
    code = """
        simdevice.load()
        x = torch.ones(2, device="sim:0") + 1
        if (child := os.fork()) == 0:
            assert torch.sim._is_in_bad_fork()
            try:
                torch.ones(2, device="sim:0")
            except RuntimeError as error:
                assert "Cannot re-initialize sim in forked subprocess" in str(error)
            del x  # freed without the parent's threads
            assert torch.ones(3).sum().item() == 3
            torch.manual_seed(1)
            raise SystemExit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), x.tolist())
    """
    assert _output(code) == "7 [2.0, 2.0]"


def test_a_child_forked_before_use_may_use_it() -> None:
    code = """
        simdevice.load()
        if (child := os.fork()) == 0:
            simdevice.set_inline(False)
            assert (torch.ones(2, device="sim:0") + 1).tolist() == [2, 2]
            raise SystemExit(7)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert _output(code) == "7"
