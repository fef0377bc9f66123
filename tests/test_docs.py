"""README and docs/ as text: the API is complete, and links lead somewhere, also on GitHub.

That their code runs is tested by sybil (conftest.py); the built site by test_site.py.
"""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.routing import Route
from starlette.testclient import TestClient

import aiopar
import aiopar.nn
from aiopar.asgi import install

ROOT = Path(__file__).resolve().parent.parent
MODULES = [
    import_module(name)
    for name in (
        "aiopar",
        *(
            f"aiopar.{sub}"
            for sub in (
                "asgi",
                "data",
                "fastapi",
                "nn",
                "ray",
                "serve",
                "testing",
                "transformers",
            )
        ),
    )
]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def _names_in_the_api() -> list[str]:
    """The names whose docstrings the pages in docs/api/ show, each with its module."""
    blocks = [
        block
        for page in (ROOT / "docs" / "api").glob("*.md")
        for block in re.findall(
            r"^```{public-names}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL
        )
    ]
    return "".join(blocks).split()


def _public_object(path: str) -> object:
    """The object at a path whose last part is in the `__all__` of its module."""
    module, _, name = path.rpartition(".")
    assert name in import_module(module).__all__, path
    return getattr(import_module(module), name)


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def _links(page: Path) -> list[tuple[str, Path, str]]:
    """Each relative link of a page: as it is written, its target, and the anchor in it."""
    links = []
    for link in re.findall(r"\]\(([^)\s]+)\)", _without_code(page.read_text())):
        if not re.match(r"[a-z]+:", link):  # https:, mailto:
            path, _, anchor = link.partition("#")
            links.append((link, (page.parent / path).resolve() if path else page, anchor))
    return links


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    headings = re.findall(r"^#+ (.*)", _without_code(page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_api_has_every_public_name_once_and_no_other() -> None:
    shown = _names_in_the_api()
    public = {id(getattr(module, name)) for module in MODULES for name in module.__all__}
    assert sorted(id(_public_object(name)) for name in shown) == sorted(public)


def test_nn_exports_nothing_that_the_package_does_not() -> None:
    assert set(aiopar.nn.__all__) <= set(aiopar.__all__)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_resolve(page: Path) -> None:
    broken = [
        link
        for link, target, anchor in _links(page)
        if not target.exists() or (anchor and anchor not in _anchors(target))
    ]
    assert not broken


def _logged_messages() -> set[tuple[str, str]]:
    """The level and text of each message in the package's code: "%s failed to close"."""
    found = set[tuple[str, str]]()
    for path in (ROOT / "aiopar").rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call):
                continue
            function = re.fullmatch(r"logger\.(\w+)|log_callback_error", ast.unparse(call.func))
            texts = [one.value for one in call.args if isinstance(one, ast.Constant)]
            if function and texts:
                level = function[1] if function[1] in ("info", "warning") else "error"
                found.add((level, str(texts[0])))
    return found


def test_each_message_in_the_log_is_documented() -> None:
    guide = (ROOT / "docs" / "guides" / "operations.md").read_text()
    for level, message in _logged_messages():
        documented = re.findall(rf"^\| {level} \| `(.*?)` \|", guide, flags=re.MULTILINE)
        pattern = ".+".join(map(re.escape, re.split(r"%\w", message)))
        assert any(re.fullmatch(pattern, text) for text in documented), message


def _sections(page: Path) -> dict[str, str]:
    """The text under each heading of a page."""
    parts = re.split(r"^#+ (.*)\n", page.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _endpoint_that_raises(error: Exception) -> Route:
    def endpoint(_: Request) -> None:
        raise error

    return Route("/", endpoint)


ERRORS = [
    found
    for found in vars(aiopar.errors).values()
    if isinstance(found, type) and issubclass(found, Exception)
]


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: str(kind.__name__))
def test_each_error_is_documented_with_its_status(kind: type[Exception]) -> None:
    overloaded = issubclass(kind, aiopar.Overloaded)
    error = kind("why", **({"estimated_wait": 0.2} if overloaded else {}))
    app = Starlette(routes=[_endpoint_that_raises(error)])
    install(app)
    answer = TestClient(app, raise_server_exceptions=False).get("/")
    sections = _sections(ROOT / "docs" / "errors.md")
    assert ("retry-after" in answer.headers) == ("`Retry-After`" in sections[kind.__name__])
    status = answer.status_code
    assert f"Status [{status}](#{status})" in sections[kind.__name__]


def test_each_status_that_the_package_sends_is_documented() -> None:
    numbers = {
        node.value
        for file in [*(ROOT / "aiopar" / "asgi").glob("*.py"), ROOT / "aiopar" / "fastapi.py"]
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and type(node.value) is int
    }
    # Those of errors in HTTP, and the close codes of websockets.
    sent = {str(number) for number in numbers if 400 <= number < 600 or 1001 <= number < 1016}
    assert {"499", "503", "1013"} <= sent <= {*_sections(ROOT / "docs" / "errors.md")}
