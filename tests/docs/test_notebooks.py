"""The notebooks are valid, have no outputs, and run from top to bottom."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="nbformat, which reads notebooks, is not installed")
FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def test_there_are_three_notebooks():
    assert [path.stem for path in NOTEBOOKS] == ["forward_pass_by_hand", "look_inside_smollm2", "train_and_study"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.nbformat == 4
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) >= 5
    assert [cell for cell in code if cell.outputs or cell.execution_count is not None] == []
    assert notebook.cells[0].source.startswith("# ")
    for cell in code:
        compile(cell.source, f"{path.name} {cell.id}", "exec")


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path, tmp_path, request):
    client = pytest.importorskip("nbclient", reason="nbclient, which runs notebooks, is not installed")
    if "smollm2" in path.stem:
        request.getfixturevalue("smollm2_gguf")
    notebook = read(path)
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
