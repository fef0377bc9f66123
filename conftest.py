"""README.md and docs/ are tested: their Python blocks run from top to bottom.

The blocks of one file share a namespace and an event loop, as the cells of a notebook do: a block
may `await`. They run as `__main__`, so that `if __name__ == "__main__":` is no way around.
`<!--- skip: next -->` before a block leaves it out. tests/test_code_blocks.py runs pages as files.
"""

import ast
import asyncio
import inspect
import re
from typing import Any

import pytest
from sybil import Example, Sybil
from sybil.evaluators.python import pad
from sybil.parsers.markdown import CodeBlockParser, SkipParser
from xdist.scheduler import LoadFileScheduling

from aiopar.serve import PrometheusMetrics

collect_ignore = ["docs/conf.py"]  # read by Sphinx; its docstrings have no examples


def _begin(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__main__"
    namespace["__runner__"] = asyncio.Runner()


def _run(example: Example) -> None:
    """Run a block on the event loop of its page, as the kernel of a notebook does."""
    source = pad(example.parsed, example.line + example.parsed.line_offset)
    flag = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    code = compile(source, example.path, "exec", flag, dont_inherit=True)

    async def cell() -> None:
        awaitable = eval(code, example.namespace)
        if code.co_flags & inspect.CO_COROUTINE:
            await awaitable

    example.namespace["__runner__"].run(cell())


def _end(namespace: dict[str, Any]) -> None:
    metrics = namespace.get("metrics")
    if isinstance(metrics, PrometheusMetrics):
        metrics.close()  # the registry of the process takes one
    namespace["__runner__"].close()


pytest_collect_file = Sybil(
    parsers=[CodeBlockParser("python", _run), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=_begin,
    teardown=_end,
).pytest()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the docstring examples that start Ray."""
    if item.path.parent.name == "ray":
        item.add_marker(pytest.mark.ray)


class _Groups(LoadFileScheduling):  # type: ignore[misc]  # xdist has no types
    """Gives each process of the suite all tests of a file, all on Ray, or all of one service.

    The blocks of a page depend on each other; the tests on Ray share one cluster.
    """

    def _split_scope(self, nodeid: str) -> str:
        # A file, a folder, a kind of worker.
        shared = re.search("(?<![a-z])ray(?![a-z])|(embedding|chat)_service", nodeid)
        return shared[0] if shared else str(super()._split_scope(nodeid))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Groups:
    """Share the tests out among the processes of `--numprocesses`."""
    return _Groups(config, log)
