"""Functions that keep a worker process busy; each says so first. Little is imported here."""

import ctypes
import os
from time import monotonic, sleep


def say(word: str) -> None:
    """Write a line at once, also from a process whose standard output is a pipe."""
    os.write(1, f"{word}\n".encode())


def spin() -> None:
    say("spins")
    while True:
        pass


def spin_items(_: object) -> None:
    spin()


def hold_gil() -> None:
    """Hold the GIL inside C code, so that no Python code runs, not even that of a signal."""
    say("holds the GIL")
    ctypes.PyDLL(None).sleep(1000)


def wait() -> None:
    say("waits")
    sleep(1000)


def work(seconds: float) -> str:
    say("works")
    end = monotonic() + seconds
    while monotonic() < end:
        sum(range(1000))
    return "worked"
