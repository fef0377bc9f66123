"""Async loaders and pipelines that feed devices."""

from ._fetch import FailedSample as FailedSample
from ._item import FailedItem as FailedItem
from ._loader import AsyncDataLoader as AsyncDataLoader
from ._loader_stream import LoaderStats as LoaderStats, LoaderStream as LoaderStream
from ._map import map as map  # noqa: A004
from ._pipeline import Pipeline as Pipeline
from ._stream import StageStats as StageStats, Stream as Stream, StreamStats as StreamStats
