"""Workers whose calls run in other processes or on other machines."""

from ._process import ProcessExecutor

__all__ = ["ProcessExecutor"]
