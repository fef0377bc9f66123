"""What is shipped and what importing it costs, seen from fresh interpreters and the built wheel."""

import importlib
import importlib.metadata
import pydoc
import re
import subprocess
import sys
import tomllib
import venv
import zipfile
from email import message_from_bytes
from itertools import chain
from pathlib import Path
from types import ModuleType

import pytest
from packaging.requirements import Requirement

import aiopar
import aiopar.asgi
from tests import programs

ROOT = Path(__file__).resolve().parent.parent
DEPENDENCIES = {"anyio", "cloudpickle", "threadpoolctl", "torch"}


def _run(*arguments: str) -> str:
    """Run a fresh interpreter of the suite's own kind; return what it printed."""
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def _packages_after(statement: str) -> set[str]:
    report = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    return set(_run("-c", f"{statement}\n{report}").split())


def _requirement_name(requirement: str) -> str:
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, requirement
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def test_importing_loads_torch_anyio_and_the_standard_library_alone() -> None:
    # anyio loads its parts when they are first named: name them all.
    needed = _packages_after("import torch, anyio; [getattr(anyio, name) for name in dir(anyio)]")
    loaded = _packages_after("import aiopar.data, aiopar.serve")
    assert loaded - needed - sys.stdlib_module_names == {"aiopar"}


@pytest.mark.parametrize(
    ("module", "missing"),
    [
        ("aiopar.asgi", "starlette"),
        ("aiopar.fastapi", "starlette"),
        ("aiopar.fastapi", "pydantic"),
        ("aiopar.ray", "ray"),
    ],
)
def test_without_an_optional_package_its_extra_is_named(module: str, missing: str) -> None:
    extra = "ray" if missing == "ray" else "fastapi"
    _, _, err = programs.run(f"sys.modules['{missing}'] = None; import {module}")
    assert "\nImportError: aiopar." in err
    assert f"pip install 'aiopar[{extra}]'" in err


def test_what_not_everybody_needs_is_loaded_when_it_is_named() -> None:
    program = (
        "import sys, aiopar\n"
        "assert set(aiopar.__all__) | {'data', 'serve'} <= set(dir(aiopar))\n"
        "print(*sorted({'aiopar.data', 'aiopar.serve'} & set(sys.modules)))\n"
        "aiopar.data, aiopar.serve\n"
        "print(aiopar.Batcher is aiopar.serve.Batcher, aiopar.map is aiopar.data.map)"
    )
    assert _run("-c", program) == "\nTrue True\n"
    with pytest.raises(AttributeError, match="module 'aiopar' has no attribute 'Bacher'"):
        _ = aiopar.Bacher  # type: ignore[attr-defined]  # which is to be known before it runs


def test_importing_starts_no_thread_registers_no_hook_and_warns_of_nothing() -> None:
    program = (
        "import aiopar, threading, torch.optim.optimizer as o;"
        "print(threading.active_count(), len(o._global_optimizer_post_hooks))"
    )
    assert _run("-W", "error", "-c", program) == "1 0\n"


def test_version_is_the_installed_one() -> None:
    assert aiopar.__version__ == importlib.metadata.version("aiopar")


@pytest.mark.parametrize(
    "package", [aiopar, aiopar.asgi, aiopar.data, aiopar.nn, aiopar.serve], ids=lambda p: p.__name__
)
def test_all_is_what_a_package_publishes(package: ModuleType) -> None:
    for name in package.__all__:
        getattr(package, name)  # those that are loaded when they are named
    public = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert set(package.__all__) == public


def test_dir_shows_public_names_only() -> None:
    names = "asgi", "data", "fastapi", "nn", "ray", "remote", "serve", "testing", "train"
    for module in [importlib.import_module(f"aiopar.{name}") for name in names]:
        assert set(dir(module)) == set(module.__all__)
    shown = dir(aiopar)
    assert set(shown) - {"transformers"} == {*aiopar.__all__, *names, "__version__"}
    assert len(shown) == len(set(shown))


def test_help_shows_what_is_published() -> None:
    # Of what other modules define pydoc shows what `__all__` names, and nothing else.
    shown = pydoc.plain(pydoc.render_doc(aiopar))
    assert re.search(r"^    parallel_apply\(modules", shown, flags=re.MULTILINE)


@pytest.mark.parametrize(
    "package",
    ["", "asgi", "data", "fastapi", "nn", "ray", "remote", "serve", "testing", "train"],
)
def test_help_shows_no_addresses(package: str) -> None:
    module = importlib.import_module(f"aiopar.{package}".rstrip("."))
    for name in module.__all__:
        shown = pydoc.plain(pydoc.render_doc(getattr(module, name)))
        assert not re.search(r"<.* at 0x\w+>", shown), name


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and the wheel from it, as `make dist` does; return their folder."""
    target = tmp_path_factory.mktemp("dist")
    _run("-m", "build", "--no-isolation", "--outdir", str(target))
    return target


@pytest.fixture(scope="module")
def wheel(dist: Path) -> dict[str, bytes]:
    """The wheel's files by name."""
    (path,) = dist.glob("aiopar-*.whl")
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_index_accepts_sdist_and_wheel(dist: Path) -> None:
    _run("-m", "twine", "check", "--strict", *map(str, dist.iterdir()))


def _with_requirements(names: set[str]) -> set[str]:
    """Add to the names of distributions those of all that they require."""
    requirements = [
        Requirement(text) for name in names for text in importlib.metadata.requires(name) or ()
    ]
    needed = names | {
        _requirement_name(requirement.name)
        for requirement in requirements
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    }
    return names if needed == names else _with_requirements(needed)


def test_the_wheel_runs_with_torch_anyio_and_threadpoolctl_only(dist: Path, tmp_path: Path) -> None:
    venv.create(tmp_path, with_pip=False)
    (site,) = tmp_path.glob("lib/python3.*/site-packages")
    for name in _with_requirements(DEPENDENCIES):
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / top).symlink_to(str(distribution.locate_file(top)))
    python = tmp_path / "bin" / "python"
    pip = ("-m", "pip", "--python", str(python))
    (wheel,) = dist.glob("aiopar-*.whl")
    _run(*pip, "install", "--no-index", str(wheel))  # fails if a requirement is missing
    program = (
        "import aiopar, asyncio, torch\n"
        "async def main():\n"
        "    async with aiopar.Batcher(torch.nn.Linear(4, 2)) as batcher:\n"
        "        print(aiopar.__file__, (await batcher(torch.ones(4))).shape)\n"
        "asyncio.run(main())"
    )
    ran = subprocess.check_output([python, "-I", "-c", program], cwd=tmp_path, text=True)
    assert ran == f"{site / 'aiopar' / '__init__.py'} torch.Size([2])\n"


def test_wheel_ships_the_package_its_page_its_types_and_nothing_else(
    wheel: dict[str, bytes],
) -> None:
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "aiopar").rglob("*.py")}
    shipped = {name for name in wheel if ".dist-info/" not in name}
    assert shipped == modules | {"aiopar/asgi/_dashboard.html", "aiopar/py.typed"}


def test_wheel_ships_the_licence_and_asks_for_three_packages(wheel: dict[str, bytes]) -> None:
    info = f"aiopar-{aiopar.__version__}.dist-info"
    assert wheel[f"{info}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    metadata = message_from_bytes(wheel[f"{info}/METADATA"])
    assert metadata["License-Expression"] == "Apache-2.0"
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    assert {_requirement_name(text) for text in required} == DEPENDENCIES


def test_constraints_pin_whatever_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = chain.from_iterable(project["optional-dependencies"].values())
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {_requirement_name(pin) for pin in pins if "==" in pin}
    assert {_requirement_name(text) for text in (*project["dependencies"], *extras)} - pinned == {
        "aiopar"
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_nothing_that_is_ignored_is_in_the_repository() -> None:
    # The rule comes too late for what was committed before it: environments, build outputs, ...
    git = ("git", "-c", "safe.directory=*", "ls-files", "--cached", "--ignored")
    ignored = subprocess.check_output((*git, "--exclude-per-directory=.gitignore"), cwd=ROOT)
    assert ignored.decode().splitlines() == []
