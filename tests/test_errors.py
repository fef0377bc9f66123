"""Exceptions as values: copied, sent to other processes, raised more than once."""

import copy
import pickle
from collections.abc import Callable

import pytest

import aiopar
from aiopar._errors import add_note_once


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))]
)
def test_overloaded_can_be_copied(
    again: Callable[[aiopar.Overloaded], aiopar.Overloaded],
) -> None:
    error = aiopar.Overloaded("the queue is full", estimated_wait=1.5)
    error.add_note("of replica 3")
    found = again(error)
    assert type(found) is aiopar.Overloaded
    assert found is not error
    assert (str(found), found.estimated_wait) == ("the queue is full", 1.5)
    assert found.__notes__ == ["of replica 3"]


def test_a_note_is_added_once() -> None:
    error = ValueError("again")
    for note in ("one", "two", "one", "two"):
        add_note_once(error, note)
    assert error.__notes__ == ["one", "two"]
