"""Runs the notebooks of examples/ and writes them with their outputs: ``make notebooks``.

    python -m tools.notebooks                    # all of them
    python -m tools.notebooks swap_attention     # some

A notebook's source is a script in jupytext's percent format. The ``.ipynb`` beside it holds the
same cells and what they gave on a CPU; a test keeps the two in sync.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError as CellExecutionError
from nbformat import NotebookNode

EXAMPLES = Path(__file__).parent.parent / "examples"
SECONDS_A_CELL = 240  # against cells that hang; a busy machine takes its time
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}


def sources() -> list[Path]:
    """The scripts that are notebooks: they begin with a cell."""
    return [path for path in sorted(EXAMPLES.glob("*.py")) if path.read_text().startswith("# %%")]


def cells(notebook: NotebookNode) -> list[tuple[str, str]]:
    """Kind and text of every cell."""
    return [(cell.cell_type, cell.source) for cell in notebook.cells]


def execute(source: Path) -> NotebookNode:
    """The notebook of a script with its outputs, run on a CPU in the script's folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised.
        nbclient.exceptions.CellTimeoutError: a cell took more than ``SECONDS_A_CELL``.
    """
    notebook = jupytext.read(source)
    notebook.metadata = NotebookNode(kernelspec=KERNEL)
    # jupytext draws the ids at random; a new run should change outputs only.
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    client = NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        kernel_name=KERNEL["name"],
        resources={"metadata": {"path": str(source.parent)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute(env={**os.environ, "JAX_PLATFORMS": "cpu"})
    notebook.metadata = NotebookNode(kernelspec=KERNEL)
    return notebook


def take_warnings(notebook: NotebookNode) -> str:
    """Removes what cells wrote to stderr, and returns it: it speaks of one machine."""
    taken = ""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            taken += output.text if output.get("name") == "stderr" else ""
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    known = {path.stem: path for path in sources()}
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    names = parser.parse_args().names or list(known)
    if unknown := set(names) - set(known):
        parser.error(f"no such notebook: {', '.join(sorted(unknown))}")
    for name in names:
        print(name, flush=True)
        notebook = execute(known[name])
        print(take_warnings(notebook), file=sys.stderr, end="")
        nbformat.write(notebook, known[name].with_suffix(".ipynb"))


if __name__ == "__main__":
    main()
