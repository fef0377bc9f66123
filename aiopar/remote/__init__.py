"""Workers whose calls run in other processes or on other machines."""

from ._process import ProcessExecutor

__all__ = ["ProcessExecutor"]


def __dir__() -> list[str]:
    return __all__
