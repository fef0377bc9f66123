"""The code blocks of the site as a file and as a notebook; conftest.py runs them one by one."""

import ast
import builtins
import inspect
import re
import runpy
import symtable
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import prometheus_client
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?P<skip><!--- skip: next -->\n\n)?"
    r"(?:```python\n(?P<shown>.*?)^```|<!--- invisible-code-block: python\n(?P<hidden>.*?)^-->)",
    re.MULTILINE | re.DOTALL,
)
FROM_ABOVE = re.compile(r"^# from above: (.*)$", re.MULTILINE)


def _blocks(page: Path) -> list[str]:
    """The Python blocks of a page that run, also those that only test it."""
    found = BLOCK.finditer(page.read_text())
    return [block["shown"] or block["hidden"] for block in found if not block["skip"]]


def _shown(page: Path) -> list[str]:
    return [block["shown"] for block in BLOCK.finditer(page.read_text()) if block["shown"]]


def _in_main(code: str) -> str:
    return f"async def main():\n{indent(code, '    ')}"


def _awaits(block: str) -> bool:
    """Whether a block uses `await`, `async with` or `async for` outside of functions."""
    code = compile(block, "block", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return bool(code.co_flags & inspect.CO_COROUTINE)


def _free_names(block: str) -> set[str]:
    """The names that a block uses but does not define."""

    def free(scope: symtable.SymbolTable) -> Iterator[str]:
        yield from (one.get_name() for one in scope.get_symbols() if one.is_global())
        for child in scope.get_children():
            yield from free(child)

    [main] = symtable.symtable(_in_main(block), "block", "exec").get_children()
    return set(free(main)) - set(vars(builtins))


def _defined_names(block: str) -> set[str]:
    """The names that a block defines, without those that it imports."""
    [main] = symtable.symtable(_in_main(block), "block", "exec").get_children()
    return {
        one.get_name() for one in main.get_symbols() if one.is_local() and not one.is_imported()
    }


def _each(pages: list[Path]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("page", pages, ids=lambda page: str(page.relative_to(ROOT)))


each_page = _each([page for page in PAGES if _blocks(page)])
each_awaiting_page = _each([page for page in PAGES if any(map(_awaits, _blocks(page)))])


@each_awaiting_page
def test_a_page_is_a_file_when_its_blocks_are_in_main(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pages leave metrics open, and a registry takes one of a name.
    monkeypatch.setattr(prometheus_client, "REGISTRY", prometheus_client.CollectorRegistry())
    code = _in_main("\n\n".join(_blocks(page)))
    file = tmp_path / "page.py"
    run = 'if __name__ == "__main__":\n    asyncio.run(main())\n'  # worker processes import it
    file.write_text(f"import asyncio\n\n\n{code}\n\n{run}")
    runpy.run_path(str(file), run_name="__main__")


@each_awaiting_page
def test_a_page_says_how_its_blocks_become_a_file(page: Path) -> None:
    prose = BLOCK.sub("", page.read_text())
    assert ("asyncio.run(main())" in prose) == any(map(_awaits, _shown(page)))


@pytest.mark.slow  # a kernel for each page
@each_page
def test_a_page_is_a_notebook(page: Path) -> None:
    cells = [new_code_cell(block) for block in _blocks(page)]  # type: ignore[no-untyped-call]
    NotebookClient(new_notebook(cells=cells), timeout=200).execute()  # type: ignore[no-untyped-call]


@each_page
def test_a_block_says_what_it_needs_from_above(page: Path) -> None:
    defined: set[str] = set()
    for block in _shown(page):
        [said] = [*FROM_ABOVE.findall(block), ""][:1]
        assert set(filter(None, said.split(", "))) == _free_names(block) & defined, block
        defined |= _defined_names(block)
