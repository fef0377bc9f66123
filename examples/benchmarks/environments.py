"""Virtual environments for rivals whose requirements conflict with the project's."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

FOLDER = Path(__file__).with_name(".environments")
REQUIREMENTS = Path(__file__).with_name("requirements")


def environment(name: str) -> Path:
    """The interpreter of an environment with the packages of requirements/NAME.txt.

    The environment is created once. Its own packages come first, then those of the current
    environment, such as torch.

    Raises:
        OSError, subprocess.SubprocessError: It cannot be created: no network, no space, ...
    """
    folder, requirements = FOLDER / name, REQUIREMENTS / f"{name}.txt"
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    here = sysconfig.get_path("purelib")
    # An environment that another checkout left here looks for the packages at another place.
    wanted = f"{sys.version}\n{here}\n{requirements.read_text()}"
    if installed.exists() and installed.read_text() == wanted:
        return python
    venv.create(folder, clear=True)
    own = sysconfig.get_path("purelib", vars={"base": str(folder)})
    Path(own, "project.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
    subprocess.run((*pip, "--no-deps", "-r", requirements), check=True, capture_output=True)
    installed.write_text(wanted)  # last: after an interruption the environment is created again
    return python
