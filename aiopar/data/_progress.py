"""Progress bars; tqdm is imported when the first is asked for."""

from typing import Protocol


class Bar(Protocol):
    """What a stream tells of its progress."""

    def update(self, count: int) -> object:
        """So many more items were delivered."""

    def close(self) -> object:
        """There are no more."""


def progress_bar(total: int | None, initial: int = 0, unit: str = "item") -> Bar:
    """A bar with rate and, where the total is known, time left.

    Raises:
        ImportError: There is no tqdm.
    """
    try:
        from tqdm.auto import tqdm
    except ImportError as error:
        raise ImportError("progress needs tqdm: pip install 'aiopar[progress]'") from error

    class Unwatched(tqdm):  # type: ignore[type-arg]
        # No thread that watches over bars: nothing outlives a stream.
        monitor_interval = 0

    bar: Bar = Unwatched(total=total, initial=initial, unit=unit)
    return bar


def length_of(source: object) -> int | None:
    """`len(source)`, where there is one."""
    try:
        return len(source)  # type: ignore[arg-type]
    except TypeError:
        return None
