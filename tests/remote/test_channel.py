"""The arena, from inside: blocks are free when their last reader is gone."""

import os
from collections import deque

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, rule

from aiopar.remote._channel import Arena, shared_file

_SIZE = 1 << 20


def _both_sides(size: int = _SIZE) -> tuple[Arena, Arena]:
    file = shared_file(size)
    try:
        return Arena(file), Arena(file)
    finally:
        os.close(file)


def test_a_full_arena() -> None:
    writer, reader = _both_sides()
    first, second = (writer.allocate(_SIZE // 4) for _ in range(2))
    with pytest.raises(MemoryError, match=f"no room for {_SIZE // 2} bytes"):
        writer.allocate(_SIZE // 2)
    assert writer.sweep() == 2
    del second  # an offset: the block lives until it was read, or is taken back
    view = reader.read(first, 10)
    del view
    assert writer.allocate(_SIZE // 4) == first
    writer.take_back(first)
    assert writer.sweep() == 1


@pytest.mark.parametrize("large", [[200], [8] * 25])
@pytest.mark.parametrize("small", [0, 20_000])
def test_freed_pages_are_given_back(large: list[int], small: int) -> None:
    file = shared_file(512 << 20)
    try:
        writer, reader = Arena(file), Arena(file)
        views = []
        for size in (*(each << 20 for each in large), *[small] * bool(small)):
            offset = writer.allocate(size)
            torch.frombuffer(writer.write_to(offset, size), dtype=torch.uint8).fill_(1)
            views.append(reader.read(offset, size))
        assert os.fstat(file).st_blocks * 512 >= 200 << 20
        del views[: len(large)]
        assert writer.sweep() == len(views)
        assert os.fstat(file).st_blocks * 512 <= 66 << 20, (
            "some pages are kept, because they are warm"
        )
        assert all(view[-1] == 1 for view in views)
    finally:
        os.close(file)


def test_a_reader_that_keeps_all_blocks() -> None:
    """Neither does a block overlap another one, nor does each search take longer than the last."""
    writer, reader = _both_sides(64 << 20)
    kept = []
    for value in range(20_000):
        offset = writer.allocate(8)
        writer.write_to(offset, 8)[:] = value.to_bytes(8, "little")
        kept.append(reader.read(offset, 8))
    assert [int.from_bytes(view, "little") for view in kept] == list(range(20_000))
    kept.clear()
    assert writer.sweep() == 0


class Arenas(RuleBasedStateMachine):
    """Allocates, reads and frees in any order; each block keeps its own content."""

    views = Bundle("views")

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.reader = _both_sides()
        self.live: dict[int, np.ndarray] = {}
        self.unread: deque[tuple[int, int]] = deque()

    @rule(size=st.integers(1, _SIZE // 8))
    def write(self, size: int) -> None:
        try:
            offset = self.writer.allocate(size)
        except MemoryError:
            return
        assert offset % 64 == 0
        self.writer.write_to(offset, size)[:] = bytes([offset // 64 % 251]) * size
        self.unread.append((offset, size))

    @rule(target=views)
    def read(self) -> int | None:
        if not self.unread:
            return None
        offset, size = self.unread.popleft()
        self.live[offset] = np.frombuffer(self.reader.read(offset, size), dtype=np.uint8)
        return offset

    @rule(offset=consumes(views))
    def free(self, offset: int | None) -> None:
        if offset is not None:
            array = self.live.pop(offset)
            assert (array == offset // 64 % 251).all()

    def teardown(self) -> None:
        assert self.writer.sweep() == len(self.live) + len(self.unread)
        for offset, array in self.live.items():
            assert (array == offset // 64 % 251).all()


TestArenas = Arenas.TestCase
TestArenas.settings = settings(deadline=None, max_examples=50)
