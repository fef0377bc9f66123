"""`scatter`, `scatter_kwargs`, `gather` and `replicate`, waited for outside of an event loop."""

from collections.abc import Iterable
from typing import Any

import aiopar


def scatter(inputs: Any, devices: Iterable[Any], dim: Any = 0, **options: Any) -> list[Any]:
    return aiopar.wait(aiopar.scatter(inputs, devices, dim, **options))


def scatter_kwargs(inputs: Any, kwargs: Any, devices: Iterable[Any], dim: int = 0) -> Any:
    return aiopar.wait(aiopar.scatter_kwargs(inputs, kwargs, devices, dim))


def gather(outputs: Any, output_device: Any, dim: Any = 0, **options: Any) -> Any:
    return aiopar.wait(aiopar.gather(outputs, output_device, dim, **options))


def replicate(network: Any, devices: Iterable[Any], **options: Any) -> list[Any]:
    return aiopar.wait(aiopar.replicate(network, devices, **options))
