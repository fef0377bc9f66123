"""Async loaders and pipelines that feed devices."""

from ._epoch import LoaderStats, LoaderStream
from ._fetch import FailedSample
from ._loader import AsyncDataLoader
from ._map import map  # noqa: A004
from ._pipeline import Pipeline
from ._stages import StageStats
from ._steps import FailedItem
from ._stream import Stream, StreamStats

__all__ = [
    "AsyncDataLoader",
    "FailedItem",
    "FailedSample",
    "LoaderStats",
    "LoaderStream",
    "Pipeline",
    "StageStats",
    "Stream",
    "StreamStats",
    "map",
]


def __dir__() -> list[str]:
    return __all__
