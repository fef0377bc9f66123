"""Descriptions of inputs: types and shapes, no values, bounded."""

from collections import UserDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from aiopar._base.inputs import outline, outlines

SECRET = "4111 1111"
Pair = namedtuple("Pair", ["left", "right"])


class Hostile(dict[str, Any]):
    """Its `keys`, of a user's class, fails."""

    def keys(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "described"),
    [
        (torch.ones(3, 5), "Tensor float32 [3, 5]"),
        (torch.ones((), dtype=torch.bfloat16, device="meta"), "Tensor bfloat16 [] on meta"),
        (np.zeros((2, 3), np.uint8), "ndarray uint8 [2, 3]"),
        (SECRET, "str"),
        (4.5, "float"),
        (None, "NoneType"),
        ([], "list of 0"),
        ([1, 2, 2.0], "list of 3: 2 x int, float"),
        ((torch.ones(1), SECRET), "tuple of 2: Tensor float32 [1], str"),
        (Pair(1, None), "Pair {left: int, right: NoneType}"),
        ({"ids": [1], SECRET: 2, 7: 3}, "dict {ids: list of 1: int, a str: int, a int: int}"),
        (UserDict(mask=torch.ones(2)), "UserDict {mask: Tensor float32 [2]}"),
        (Hostile(), "Hostile"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_types_and_shapes_without_values(value: Any, described: str) -> None:
    assert outline(value) == described
    assert outlines([value] * 3) == f"3 x {described}"


def test_it_is_bounded() -> None:
    endless: list[Any] = []
    endless.append(endless)
    wide = {f"k{n}": [{f"j{m}": [0] * 100 for m in range(100)}] for n in range(100)}
    for value in (endless, wide, [torch.ones(n) for n in range(2000)], [[0] * 10**6] * 10):
        assert len(outline(value)) < 500
    assert outline([0] * 5000) == "list of 5000: 1000 x int, ..."
