"""Arguments, checked before anything begins; and what the functions of a stream return."""

import inspect
from collections.abc import AsyncIterable, Callable
from types import AsyncGeneratorType, CoroutineType
from typing import Any, TypeVar

import torch

from .._base.arguments import check_int, described, generator_kind, is_iterable, not_begun
from ..futures._future import Future

F = TypeVar("F", bound=Callable[..., Any])

UNAWAITED: frozenset[type] = frozenset((CoroutineType, Future))
"""What a plain function must not return: nobody would await it, and it is true whatever it comes
to. Looked up by exact type, for each item."""


def check_source(source: Any) -> Any:
    """`source`, if it can be iterated.

    Raises:
        TypeError: It cannot.
    """
    if not is_iterable(source) and not isinstance(source, AsyncIterable):
        raise TypeError(f"expected an iterable or async iterable, got {described(source)}")
    return source


def is_stateful(given: object) -> bool:
    """Whether it has a state of its own, and can be put back to it.

    Not if its state cannot be had for nothing: some datasets have a `state_dict` that a loader of
    their own is to tell how many samples were delivered.
    """
    state_dict = getattr(given, "state_dict", None)
    if state_dict is None or not hasattr(given, "load_state_dict"):
        return False
    try:
        inspect.signature(state_dict).bind()
    except TypeError:
        return False
    except ValueError:  # what some that are written in C take, nobody knows
        pass
    return True


def check_generator(generator: torch.Generator | None) -> torch.Generator | None:
    """`generator`, if it is None or one of torch's.

    Raises:
        TypeError: It is something else.
    """
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, not {type(generator).__name__}")
    return generator


def check_function(fn: F) -> F:
    """`fn`, if it can be called.

    Raises:
        TypeError: It cannot.
    """
    if not callable(fn):
        raise TypeError(f"expected a callable, got {fn!r}")
    return fn


def check_one_value(fn: F) -> F:
    """`fn`, if it can be called, and gives one value for each item.

    Raises:
        TypeError: It cannot; or it is a generator function, plain or async, of which a generator
            would come that nobody has begun.
    """
    kind = generator_kind(check_function(fn))
    if kind is not None:
        raise TypeError(
            f"{fn!r} is {kind}, and gives any number of items for one: those are what "
            "Pipeline.flat_map takes"
        )
    return fn


def check_concurrency(concurrency: int | None) -> int | None:
    """`concurrency`, if it is None or a positive int.

    Raises:
        TypeError: It is neither None nor an int.
        ValueError: It is below 1.
    """
    return None if concurrency is None else check_int("concurrency", concurrency, at_least=1)


def unawaited(made: Any) -> TypeError:
    """What to raise where a plain function has returned one of `UNAWAITED`."""
    if isinstance(made, Future):
        return TypeError("the function returned a Future: give an `async def` that awaits it")
    return not_begun(made)


def check_parts(made: Any) -> Any:
    """What the function of a `flat_map` returned, if it can be iterated.

    Raises:
        TypeError: It cannot.
    """
    if is_iterable(made):
        return made
    if type(made) in UNAWAITED:
        raise unawaited(made)
    if isinstance(made, AsyncGeneratorType):
        raise not_begun(made)
    raise TypeError(
        f"the function of a flat_map must return an iterable, not {type(made).__name__}"
    )
