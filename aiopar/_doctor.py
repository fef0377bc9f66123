"""`doctor`: show what this machine offers to aiopar, and what costs speed."""

import argparse
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from math import isfinite

import torch

from ._base.devices import (
    all_accelerators,
    default_devices,
    describe_accelerator,
    supported_accelerator,
    unsupported_hardware,
)
from ._base.operator_threads import cgroup_cores, core_count

EXTRAS: dict[str, Sequence[str]] = {
    "fastapi": ("fastapi", "uvicorn"),
    "metrics": ("prometheus-client",),
    "progress": ("tqdm",),
    "ray": ("numpy", "ray"),
    "tracing": ("opentelemetry-api",),
    "trio": ("trio",),
    "tune": ("matplotlib", "tqdm"),
}
"""The packages that each extra of aiopar installs."""

_PACKAGES = (
    *("aiopar", "torch", "anyio", "threadpoolctl"),
    *(package for packages in EXTRAS.values() for package in packages),
    *("httptools", "uvloop"),
)

_SHARED = "/dev/shm"  # noqa: S108  # no file is made in it


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One accelerator: its device, its name from the driver, and the bytes of its memory."""

    device: str
    name: str | None
    memory: int | None


@dataclass(frozen=True, slots=True)
class Cores:
    """Numbers of cores: of the machine, and those that limits leave to this process."""

    host: int
    affinity: int
    cgroup: float | None  # None: no limit
    usable: int  # within both limits
    load: float | None  # threads of all programs that ran or waited for a core in the last minute


@dataclass(frozen=True, slots=True)
class Report:
    """What this process found."""

    python: str
    system: str
    gil: bool  # whether threads of Python code run one at a time
    free_threaded: bool  # whether this build of Python can do without a GIL
    versions: dict[str, str | None]  # None: not installed
    accelerators: Sequence[Accelerator]
    supported: str | None  # the device type for which torch was built; None: CPU only
    unsupported: str | None  # hardware of this machine that torch cannot use, in words
    default_workers: Sequence[str]
    cores: Cores
    operator_threads: int  # of one operator of torch
    environment: dict[str, str]  # variables that change the speed
    float32_precision: str
    shared_memory: tuple[int, int] | None  # all and free bytes of `/dev/shm`
    missing: Mapping[str, Sequence[str]]  # packages, for each extra of aiopar


def examine() -> Report:
    """Look at this machine and this process."""
    versions = {name: version_of(name) for name in dict.fromkeys(_PACKAGES)}
    missing = {
        extra: lacking
        for extra, packages in EXTRAS.items()
        if (lacking := [name for name in packages if versions[name] is None])
    }
    return Report(
        python=platform.python_version(),
        system=platform.platform(),
        gil=getattr(sys, "_is_gil_enabled", lambda: True)(),
        free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
        versions=versions,
        accelerators=[
            Accelerator(str(device), *describe_accelerator(device)) for device in all_accelerators()
        ],
        supported=supported_accelerator(),
        unsupported=unsupported_hardware(),
        default_workers=[str(device) for device in default_devices()],
        cores=examine_cores(),
        operator_threads=torch.get_num_threads(),
        environment={name: os.environ[name] for name in _VARIABLES if name in os.environ},
        float32_precision=torch.get_float32_matmul_precision(),
        shared_memory=_shared_memory(),
        missing=missing,
    )


def version_of(package: str) -> str | None:
    """The version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine_cores() -> Cores:
    """Look at the cores of this machine."""
    host = os.cpu_count() or 1
    cgroup = cgroup_cores()
    return Cores(
        host=host,
        affinity=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else host,
        cgroup=cgroup if isfinite(cgroup) else None,
        usable=core_count(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )


def _shared_memory() -> tuple[int, int] | None:
    with suppress(OSError):
        total, _, free = shutil.disk_usage(_SHARED)
        return total, free
    return None


_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "each kernel is waited for",
    "HIP_LAUNCH_BLOCKING": "each kernel is waited for",
    "PYTHONASYNCIODEBUG": "asyncio records the stack of each task and callback",
    "PYTHONDEVMODE": "Python checks every allocation, and asyncio is in debug mode",
    "MKL_NUM_THREADS": None,
    "OMP_NUM_THREADS": None,
}
"""Environment variables that may cost speed, and how. None: depends on the value."""


def advice(found: Report) -> Iterator[str]:
    """One line for each thing that costs speed."""
    yield from _advice_on_devices(found)
    yield from _advice_on_cores(found)
    for name, value in found.environment.items():
        if (cost := _VARIABLES[name]) is not None and value not in ("", "0"):
            yield f"{name}={value}: {cost}. Unset it."
    if found.free_threaded and found.gil:
        yield "This Python can run without the GIL, but it is on: set PYTHON_GIL=0."
    if found.versions["uvloop"] is None and sys.platform != "win32":
        yield "asyncio needs more time per call than with uvloop: pip install uvloop"
    if found.versions["uvicorn"] is not None and found.versions["httptools"] is None:
        yield "uvicorn parses HTTP in Python: pip install httptools"
    if found.shared_memory is not None and found.shared_memory[0] < 2**30:
        yield (
            f"{_SHARED} has {_size(found.shared_memory[0])}. Worker processes of loaders and Ray "
            "pass tensors through it. In Docker: --shm-size=2g"
        )


def _advice_on_devices(found: Report) -> Iterator[str]:
    if found.unsupported is not None and found.supported is None:
        yield f"{found.unsupported}: install a build of torch for it (pytorch.org)."
    elif found.unsupported is not None:
        yield (
            f"{found.unsupported}: its driver may be too old for this build of torch (see "
            "nvidia-smi), or CUDA_VISIBLE_DEVICES hides it."
        )
    if found.accelerators and found.float32_precision == "highest":
        yield (
            "Products of float32 matrices use no tensor cores. If three decimal digits are enough: "
            "torch.set_float32_matmul_precision('high')"
        )


def _advice_on_cores(found: Report) -> Iterator[str]:
    cores, threads = found.cores, found.operator_threads
    if threads > cores.usable:
        yield (
            f"torch uses {threads} threads, but this process may use {cores.usable} of the cores: "
            f"set OMP_NUM_THREADS={cores.usable}."
        )
    elif threads < cores.usable:
        # Without such a variable, torch may have good reasons: hyper-threads.
        for name in ("MKL_NUM_THREADS", "OMP_NUM_THREADS"):
            if name in found.environment:
                yield (
                    f"{name}={found.environment[name]}: torch, and all CPU workers together, use "
                    f"{threads} of {cores.usable} cores. Unset it."
                )
    if cores.usable == 1:
        yield "There is one core: the event loop and the workers take turns on it."
    yield from advice_on_load(cores)


def advice_on_load(cores: Cores) -> Iterator[str]:
    """One line if the machine is busy."""
    if cores.load is not None and cores.load > cores.host:
        yield (
            f"{cores.load:.1f} threads ran or waited for the {cores.host} cores of this machine in "
            "the last minute: other programs take time from this one."
        )


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def describe(found: Report) -> Iterator[tuple[str, str]]:
    """The lines of the report: a subject and what was found."""
    versions, cores = found.versions, found.cores
    yield "aiopar", f"{versions['aiopar']}, Python {found.python}, {found.system}"
    yield "torch", f"{versions['torch']}, built for {found.supported or 'the CPU only'}"
    for one in found.accelerators:
        memory = "" if one.memory is None else f", {_size(one.memory)}"
        yield one.device, f"{one.name or 'unnamed'}{memory}"
    if not found.accelerators:
        yield "devices", "the CPU; no accelerator"
    granted = "unlimited" if cores.cgroup is None else f"{cores.cgroup:g}"
    yield "workers", f"{len(found.default_workers)} by default: {', '.join(found.default_workers)}"
    limits = f"machine {cores.host}, affinity {cores.affinity}, cgroup {granted}"
    yield "cores", f"{cores.usable} usable ({limits})"
    yield "threads", f"{found.operator_threads} per operator of torch"
    yield "GIL", "on" if found.gil else "off"
    uvloop = versions["uvloop"]
    yield "event loop", "asyncio" if uvloop is None else f"asyncio, or uvloop {uvloop}"
    if found.shared_memory is not None:
        total, free = map(_size, found.shared_memory)
        yield _SHARED, f"{total}, {free} free"
    for extra, packages in EXTRAS.items():
        text = ", ".join(f"{name} {versions[name]}" for name in packages)
        if extra in found.missing:
            text = f"needs {', '.join(found.missing[extra])}: pip install 'aiopar[{extra}]'"
        yield f"[{extra}]", text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def run(arguments: argparse.Namespace) -> int:
    """Print the report; return the exit status."""
    found = examine()
    lines = [*advice(found)]
    if arguments.json:
        print(json.dumps({**asdict(found), "advice": lines}, indent=2))
        return 0
    for subject, text in describe(found):
        print(f"{subject:12}{text}")
    print("\nWhat costs speed:" if lines else "\nNothing was found that costs speed.")
    for line in lines:
        print(f"- {line}")
    return 0
