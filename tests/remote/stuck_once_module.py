"""A module whose first import, which writes its process to a file, does not end."""

import os
import signal
from pathlib import Path

_file = Path(os.environ["STUCK_ONCE"])
if not _file.exists():
    _file.with_suffix(".new").write_text(str(os.getpid()))
    _file.with_suffix(".new").rename(_file)
    while True:
        signal.pause()
