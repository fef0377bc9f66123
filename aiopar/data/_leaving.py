"""A word to the workers of an iteration: nobody waits for what they fetch any more."""


class Left(Exception):  # nothing is wrong, and nobody sees it
    """Raised by a worker that goes no further; its stage is closed, where no outcome is read."""


class Leaving:
    """Whether the consumer has left; workers look between two samples."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = False
