"""Fixtures for tests of serving."""

import pytest


@pytest.fixture(params=["generator", "async generator"])
def kind(request: pytest.FixtureRequest) -> str:
    """Run the test with a generator function, and with an async one."""
    param: str = request.param
    return param
