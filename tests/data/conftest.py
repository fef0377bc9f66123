"""Fixtures of the data tests."""

from collections.abc import Iterator

import pytest
from torch.utils.data import _utils, dataloader

from tests.data.loaders import loader_threads


@pytest.fixture
def _threads_of_one_test_are_gone_before_the_next() -> Iterator[None]:
    yield
    for thread in loader_threads():
        thread.join(30)


@pytest.fixture
def _deaths_are_seen_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks every 0.1 s, not every 5 s, whether a worker process has died."""
    monkeypatch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.1)
    wait = dataloader._MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(wait, "__defaults__", (0.1,))
