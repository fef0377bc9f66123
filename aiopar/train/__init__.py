"""Training on several workers: `Parallel` and `Parallelizable`."""

from ._parallel import Parallel, Parallelizable

__all__ = ["Parallel", "Parallelizable"]


def __dir__() -> list[str]:
    return __all__
