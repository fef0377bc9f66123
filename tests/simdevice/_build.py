"""Builds the extension, once per version of its sources, of torch and of Python."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

NAME = "_simdevice"
_HERE = Path(__file__).resolve().parent
_SOURCES = _HERE / "csrc"
# -O1 and no debug information: the CPU kernels are torch's, this code only calls them.
_FLAGS = ["-O1", "-g0", "-Wall", "-Wextra", "-Wno-unused-parameter"]


def missing() -> str | None:
    """What the machine lacks to build the extension, or None."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None and shutil.which("g++") is None:
        return f"no C++ compiler: neither {compiler!r} nor 'g++' is on PATH"
    if shutil.which("ninja", path=_path()) is None:
        return "no ninja on PATH nor beside the Python interpreter"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"no Python headers in {sysconfig.get_path('include')}"
    return None


def built() -> Path | None:
    """The finished library, or None if it has to be built first."""
    library = _directory() / f"{NAME}.so"
    return library if (_directory() / "finished").exists() and library.exists() else None


def build() -> Path:
    """Build the library unless that was done, and return its path.

    Two processes may call this at once: one builds, the other waits and finds it done.

    Raises:
        RuntimeError: the compiler failed; the message has its output.
    """
    if library := built():
        return library
    with _lock():
        if library := built():
            return library
        _compile(_directory())
        (_directory() / "finished").touch()
    return _directory() / f"{NAME}.so"


def _compile(directory: Path) -> None:
    # A killed build leaves torch's own lock file behind, for which the next would wait for ever.
    (directory / "lock").unlink(missing_ok=True)
    # In a process of its own: torch's helper writes to os.environ and imports what it has built.
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), str(directory)],
        env={**os.environ, "PATH": _path()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"building {NAME} failed:\n{done.stdout}\n{done.stderr}")


def _path() -> str:
    # `pip install ninja` puts it beside the interpreter, which need not be on PATH.
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _files() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in {".cpp", ".h"})


def _directory() -> Path:
    digest = hashlib.sha256()
    tag = sysconfig.get_config_var("EXT_SUFFIX")
    for part in (torch.__version__, torch.version.git_version, str(tag), *_FLAGS):
        digest.update(part.encode() + b"\0")
    for path in _files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return _HERE / "build" / digest.hexdigest()[:16]


@contextlib.contextmanager
def _lock() -> Iterator[None]:
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True)
    # The kernel lets an flock go when its holder dies.
    with (directory / "flock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _main(directory: str) -> None:
    from torch.utils import cpp_extension

    source = str(_SOURCES / "all.cpp")
    # This also imports it: a library that does not load is never called finished.
    cpp_extension.load(NAME, source, extra_cflags=_FLAGS, build_directory=directory, verbose=True)
    for path in Path(directory).glob("*.o"):
        path.unlink()


if __name__ == "__main__":
    _main(sys.argv[1])
