"""Fixtures of the data tests."""

from collections.abc import Iterator

import pytest

from tests.data.loaders import earlier_threads, loader_threads


@pytest.fixture
def _threads_of_one_test_are_gone_before_the_next() -> Iterator[None]:
    earlier_threads.update(loader_threads())
    yield
    for thread in loader_threads():
        thread.join(30)
