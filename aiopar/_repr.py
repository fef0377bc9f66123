"""What a REPL or a debugger shows of an object: `<Class and how it is>`, briefly."""

import functools
from collections.abc import Callable, Collection
from itertools import islice
from typing import TypeVar

S = TypeVar("S")

_MOST_LISTED = 8


def short_repr(describe: Callable[[S], str]) -> Callable[[S], str]:
    """Make a `__repr__` of `describe`, which says what follows the name of the class.

    That may only read what is there: no lock is taken, for who asks may be a debugger that has
    stopped a thread which holds it. What it fails with (of an object that is half made, say) is
    shown as such: a `repr` that raises hides the error in whose report it is.
    """

    @functools.wraps(describe)
    def shown(self: S) -> str:
        # A private subclass is to its user what it is derived from.
        kind = next(one for one in type(self).__mro__ if not one.__name__.startswith("_"))
        try:
            said = describe(self)
        except Exception:  # noqa: BLE001  # whatever it is
            said = "half made"
        return f"<{kind.__name__} {said}>"

    return shown


def listed(items: Collection[object]) -> str:
    """The first few of them, and how many there are if these are not all."""
    shown = [str(item) for item in islice(items, _MOST_LISTED)]
    if len(items) > _MOST_LISTED:
        shown.append(f"... ({len(items)})")
    return ", ".join(shown)
