"""A service of examples/ in a process of its own, as make starts it."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Self

import httpx2

ROOT = Path(__file__).parents[2]
# Seconds for whatever has to happen: long enough for a machine that has other things to do.
PATIENCE = 100.0


class ServedExample:
    """`python -m examples.{name}`, on a port of the loopback.

    Args:
        name: The folder in examples/.
        options: Of the command line.
        environ: More variables of its environment.
    """

    def __init__(self, name: str, options: str, **environ: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"examples.{name}", "--port", "0", *options.split()],
            cwd=ROOT,
            # Threads that spin at the barriers of OpenMP make a batch 20 times as long on a busy
            # machine.
            env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | environ,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._log: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def __enter__(self) -> Self:
        try:
            self._listening.wait()
            running = re.search(r"running on (http://\S+)", self.log)
            assert running is not None, "it has ended"
            self.url = running[1]
        except BaseException as error:  # perhaps that the time of the test is up
            self.__exit__()
            error.add_note(self.log)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # if it has not ended
        self._process.wait()
        self._reader.join()
        assert self._process.stderr is not None
        self._process.stderr.close()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._log.append(line)
            if "running on" in line:
                self._listening.set()
        self._listening.set()  # it has ended, maybe before it listened

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        return "".join(self._log)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Wait until it has ended, as it should."""
        status = self._process.wait(PATIENCE)
        self._reader.join()
        assert status in {0, -signal.SIGTERM}, self.log
        assert "Traceback" not in self.log
        assert "ERROR" not in self.log

    def client(self) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=PATIENCE)
