"""The notebook runs from top to bottom, on a CPU and a study of seconds."""

import sys
from pathlib import Path

import pytest

import effattn

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed")
pytest.importorskip("ipykernel", reason="ipykernel is not installed")

NOTEBOOK = Path(effattn.__file__).parents[1] / "experiments" / "colab.ipynb"


@pytest.mark.filterwarnings("ignore::DeprecationWarning:zmq", "ignore::DeprecationWarning:jupyter_client")
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ()))
    args = ["--backends", "full", "sliding_window(left=16, right=0)", "--seq-lens", "32", "64", "--num-heads", "2"]
    parameters.source += f'\nSTUDY, ARGS = "smoke", {args}\nOUT = "{tmp_path.as_posix()}"\nOUT = Path(OUT)'
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(NOTEBOOK.parent)}}
    ).execute()
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    printed = "".join(output.text for output in outputs if output.output_type == "stream")
    assert "effattn backends on cpu" in printed
    assert "[4/4]" in printed
    assert "broken" not in printed
    assert "6 of 6 attention sites served" in printed
    shown = [output.data for output in outputs if output.output_type in ("display_data", "execute_result")]
    assert any("sliding_window" in data.get("text/html", "") for data in shown)
    assert sum("image/png" in data for data in shown) >= 3
    assert (next(tmp_path.glob("smoke/*")) / "report.html").exists()


def test_the_notebook_is_kept_without_outputs():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert sys.executable not in NOTEBOOK.read_text()
