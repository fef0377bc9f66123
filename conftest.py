"""README.md and docs/ are tested: their Python blocks run from top to bottom.

The blocks of one file share a namespace, as they do for someone who types them in. They run as
`__main__`, so that `if __name__ == "__main__":` is no way around. `<!--- skip: next -->` before a
block leaves it out.
"""

from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

collect_ignore = ["docs/conf.py"]  # read by Sphinx; its docstrings have no examples


def _run_as_main(namespace: dict[str, Any]) -> None:
    namespace["__name__"] = "__main__"


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/*/*.md"],
    setup=_run_as_main,
).pytest()


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark the docstring examples that start Ray."""
    if item.path.name == "ray.py":
        item.add_marker(pytest.mark.ray)
