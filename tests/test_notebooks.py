"""The notebooks run, and what is checked in is what their scripts say."""

import re

import jupytext
import nbformat
import pytest

from tools import notebooks

SOURCES = {path.stem: path for path in notebooks.sources()}
# The others together take more than a minute.
FAST = {"choose_kernels", "fla_checkpoint"}
RUNS = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SOURCES]


@pytest.fixture(params=SOURCES)
def written(request):
    """Name and checked-in notebook."""
    path = SOURCES[request.param].with_suffix(".ipynb")
    return request.param, nbformat.read(path, as_version=4)


def test_all_six_are_found():
    assert len(SOURCES) == 6 and FAST < SOURCES.keys()
    assert {path.stem for path in notebooks.EXAMPLES.rglob("*.ipynb")} == SOURCES.keys()


def test_notebook_has_the_cells_of_its_script(written):
    name, notebook = written
    nbformat.validate(notebook)
    expected = notebooks.cells(jupytext.read(SOURCES[name]))
    assert notebooks.cells(notebook) == expected, "run make notebooks"


def test_outputs_are_those_of_one_whole_run(written):
    _, notebook = written
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    kinds = {output.output_type for cell in code for output in cell.outputs}
    assert {"stream"} <= kinds <= {"stream", "display_data", "execute_result"}
    assert not notebooks.take_warnings(notebook)


def test_outputs_name_no_machine(written):
    """No paths: they differ between machines, and mean nothing to a reader."""
    outputs = [output for cell in written[1].cells for output in cell.get("outputs", [])]
    # Pages and pictures are encoded, and may spell anything.
    texts = [each.get("text") or each.data.get("text/plain", "") for each in outputs]
    assert not re.search(r"site-packages|/(home|root|tmp|Users|usr|opt)/", "".join(texts))


def test_plots_have_words_on_their_axes(written):
    name, notebook = written
    images = [
        output.data["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if "image/png" in output.get("data", {})
    ]
    assert images, f"{name} shows no plot"
    script = SOURCES[name].read_text()
    assert script.count("plt.show()") == len(images)
    assert script.count("xlabel") >= len(images) and script.count("ylabel") >= len(images)


@pytest.mark.parametrize("name", RUNS)
def test_notebook_runs(name):
    """Every cell: an exception or an assertion that fails raises here."""
    cells = notebooks.execute(SOURCES[name]).cells
    assert any(cell.get("outputs") for cell in cells)


def test_a_cell_that_raises_fails_the_run(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("# %%\nraise ValueError('as it should')\n")
    with pytest.raises(notebooks.CellExecutionError, match="as it should"):
        notebooks.execute(script)


def test_warnings_are_taken_out():
    output = nbformat.v4.new_output
    cell = nbformat.v4.new_code_cell(
        outputs=[output("stream", name=name, text=name) for name in ("stdout", "stderr")]
    )
    notebook = nbformat.v4.new_notebook(cells=[cell])
    assert notebooks.take_warnings(notebook) == "stderr"
    assert [each.text for each in notebook.cells[0].outputs] == ["stdout"]
