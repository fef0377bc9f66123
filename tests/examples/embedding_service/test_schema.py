"""What OpenAPI says of the service is true of it: schemathesis asks for whatever it allows."""

import subprocess
import sys
from pathlib import Path

from tests.examples.served_example import PATIENCE

from .service import Service


def test_the_service_keeps_to_its_schema(service: Service, tmp_path: Path) -> None:
    finished = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            *("run", f"{service.url}/openapi.json"),
            *("--checks", "all", "--max-examples", "10", "--generation-deterministic"),
            *("--suppress-health-check", "all", "--request-timeout", str(PATIENCE)),
            "--no-color",
        ],
        cwd=tmp_path,  # where it keeps what it has found
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout
    assert "Tested: 6" in finished.stdout
