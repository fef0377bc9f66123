"""A word to the workers of an iteration: nobody waits for what they fetch any more."""


class Leaving:
    """Whether the consumer has left; workers look between two samples.

    No `threading.Event`: it is set by finalizers too, and after Ctrl-C, where no lock may be taken.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = False
