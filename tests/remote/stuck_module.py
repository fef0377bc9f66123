"""A module whose import hangs, but in the process of the tests."""

import sys
import threading

if "pytest" not in sys.modules:
    threading.Event().wait()
