"""Fixtures of the data tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.data.loaders import earlier_threads, loader_threads
from tests.workers import KINDS, MakeWorkers, Workers


@pytest.fixture(scope="module", params=[pytest.param(None, id="own"), *KINDS])
def executor(
    request: pytest.FixtureRequest, shared_workers: Callable[[MakeWorkers], Workers]
) -> Workers | None:
    """The executor of a stream: none, so that it has threads of its own, or one of each kind."""
    return None if request.param is None else shared_workers(request.param)


@pytest.fixture
def _threads_of_one_test_are_gone_before_the_next() -> Iterator[None]:
    earlier_threads.update(loader_threads())
    yield
    for thread in loader_threads():
        thread.join(30)
