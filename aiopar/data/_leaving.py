"""A word to who works for a reader: nobody waits for what comes of it any more."""


class Leaving:
    """Whether the reader has left; workers look between two items.

    No `threading.Event`: it is set by finalizers too, and after Ctrl-C, where no lock may be taken.
    """

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left: bool = False
