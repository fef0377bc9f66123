"""The notebooks, run in a kernel; they are stored without output."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request: pytest.FixtureRequest) -> nbformat.NotebookNode:
    node: nbformat.NotebookNode = nbformat.read(request.param, as_version=4)  # type: ignore[no-untyped-call]
    return node


def _outputs(notebook: nbformat.NotebookNode) -> list[nbformat.NotebookNode]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


def test_it_is_stored_without_output(notebook: nbformat.NotebookNode) -> None:
    assert _outputs(notebook) == []
    assert {cell.execution_count for cell in notebook.cells if cell.cell_type == "code"} == {None}
    assert {key for cell in notebook.cells for key in cell.metadata} == set()


def test_every_cell_runs(notebook: nbformat.NotebookNode) -> None:
    NotebookClient(notebook, timeout=200).execute()
    assert [output for output in _outputs(notebook) if output.get("name") == "stderr"] == []
    drawn = any("image/png" in output.get("data", {}) for output in _outputs(notebook))
    assert drawn == any("plt.show()" in cell.source for cell in notebook.cells)
