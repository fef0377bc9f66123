"""How much a body holds is told without reading it: what counts stands outside of its strings."""

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from examples.embedding_service.bodies import MAX_VALUES, holds_too_much

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='a\\",[]{}:\u2200\ud800'),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='"\\,[{'), inner),
)


def _count(value: Any) -> int:
    """Its lists and objects, and what else is in them."""
    if not isinstance(value, list | dict):
        return 0
    inner = value if isinstance(value, list) else list(value.values())
    return max(1, len(inner)) + sum(map(_count, inner))


def _strings(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(_strings, value.values()))
    return sum(map(_strings, value)) if isinstance(value, list) else isinstance(value, str)


@given(VALUES, st.booleans(), st.integers(0, 40))
def test_strings_hide_nothing_and_add_nothing(value: Any, ascii_only: bool, most: int) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    body = text.encode(errors="surrogatepass")
    if _strings(value) <= 2 * most:  # else it is not looked at any further
        assert holds_too_much(body, most) == (_count(value) > most)


@pytest.mark.parametrize("value", ['"a",', '"a":"b",', "[", "1,", "{", '"'])
def test_more_than_so_many_are_too_much(value: str) -> None:
    assert holds_too_much(value.encode() * 500, 100)
    assert not holds_too_much(value.encode() * 50, 100)
    assert not holds_too_much(json.dumps({"a": [value * 500] * 98}).encode(), 100)


def test_what_the_service_takes_is_not_too_much() -> None:
    texts = ['He said: "[1, 2]", \\ {and} left.'] * 256
    assert not holds_too_much(json.dumps({"source": texts[0], "texts": texts}).encode(), MAX_VALUES)
