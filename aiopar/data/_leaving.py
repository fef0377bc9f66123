"""A word to the workers of an iteration: nobody waits for what they fetch any more."""


class Leaving:
    """Whether the consumer has left; workers look between two samples."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = False
