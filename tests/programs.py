"""Programs that tests run in processes of their own."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_NO_FORK_WARNING = "ignore:This process:DeprecationWarning"
_HEAD = """
import asyncio, os, signal, sys, threading, time
import torch, aiopar
from aiopar.testing import Gate

def multiply(seconds):
    # Operators that use OpenMP, for a while.
    x, end = torch.rand(400, 400), time.monotonic() + seconds
    while time.monotonic() < end:
        x = torch.tanh(x @ x)
    return "multiplied"
"""


def start(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        # CPython warns of any fork of a process with threads, since 3.12.
        [sys.executable, "-W", _NO_FORK_WARNING, "-c", _HEAD + textwrap.dedent(program)],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(program: str) -> tuple[int, str, str]:
    with start(program) as process:
        return end(process)


def end(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=90)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"the program hangs; it wrote {process.communicate()}")
    return process.returncode, out, err
