"""The README is true: its examples run, and its status table is what the code says."""

import re
from pathlib import Path

import pytest

from tools import status_table

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
TITLES = [
    re.findall(r"^## (.*)$", README[: README.index(block)], re.MULTILINE)[-1] for block in BLOCKS
]


@pytest.mark.parametrize("block", BLOCKS, ids=TITLES)
def test_example_runs(block, tmp_path, monkeypatch):
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "README.md", "exec"), {"__name__": "readme"})


def test_status_table_is_current():
    assert status_table.updated(README) == README, "run python -m tools.status_table --write"


@pytest.mark.parametrize("name", re.findall(r"\]\(([^)#:]+)\)", README))
def test_linked_file_exists(name):
    assert (ROOT / name).exists()


def test_first_example_is_short():
    assert len(BLOCKS[0].strip().splitlines()) <= 15
