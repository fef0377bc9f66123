"""Tests that need a GIL say why."""

import sys

import pytest

GIL: bool = getattr(sys, "_is_gil_enabled", lambda: True)()


def needs_gil(why: str) -> pytest.MarkDecorator:
    """Skip a test without a GIL, for this reason."""
    return pytest.mark.skipif(not GIL, reason=f"needs a GIL: {why}")
