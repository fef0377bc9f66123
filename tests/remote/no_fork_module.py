"""A module with which the server of worker processes cannot fork."""

import errno
import os
from typing import Never


def _fork() -> Never:
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))


os.fork = _fork
