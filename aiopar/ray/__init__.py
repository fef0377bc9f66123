"""`RayExecutor`: workers whose calls run in Ray actors, on any machine (extra `ray`)."""

try:
    from ._executor import RayExecutor
except ModuleNotFoundError as error:
    if error.name != "ray":
        raise
    raise ImportError("aiopar.ray needs Ray: pip install 'aiopar[ray]'") from error

__all__ = ["RayExecutor"]


def __dir__() -> list[str]:
    return __all__
