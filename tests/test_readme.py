"""The README and the pages of ``docs/`` are true: what they show runs, what they name exists."""

import contextlib
import importlib
import importlib.util
import io
import os
import pydoc
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import cases
import pytest
from typer.testing import CliRunner

from jla.cli import app
from tools import fla_tables, status_table

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
}
README = PAGES["README.md"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


class Block(NamedTuple):
    """A fenced block: the heading above it, its language, and its text."""

    title: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    found, title = [], ""
    fence = r"^(```+)(\w*)[^\n]*\n(.*?)^\2$"
    for match in re.finditer(rf"^#+ ([^\n]*)$|{fence}", page, re.DOTALL | re.MULTILINE):
        if match[1] is not None:
            title = match[1]
        else:
            found.append(Block(title, match[3], match[4]))
    return found


README_EXAMPLES = [block for block in blocks(README) if block.language == "python"]
WITH_EXAMPLES = [name for name in PAGES if name != "README.md" and "```python" in PAGES[name]]
# A command line, and the page it stands on. Those of these sections are run with the other tests of
# the command.
ELSEWHERE = [("README.md", "Evaluate"), ("README.md", "Command line")]
COMMANDS = [
    pytest.param(line, id=f"{name}: {line.strip()}")
    for name, page in PAGES.items()
    for block in blocks(page)
    if block.language == "sh" and (name, block.title) not in ELSEWHERE
    for line in block.text.replace("\\\n", " ").splitlines()
    if shlex.split(line, comments=True)
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The working folder of whoever tries the examples: a checkout to make anything in."""
    for name in ("examples", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("block", README_EXAMPLES, ids=[each.title for each in README_EXAMPLES])
def test_example_of_the_readme_runs_alone(block):
    exec(compile(block.text, "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_a_page_runs_from_top_to_bottom(name):
    """Its examples in one namespace; a text block behind one is what it prints."""
    namespace, printed = {"__name__": "page"}, ""
    for block in blocks(PAGES[name]):
        if block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(block.text, f"{name}, {block.title}", "exec"), namespace)
            printed = out.getvalue()
        elif block.language == "text":
            assert printed == block.text, f"{name}, {block.title}"


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_one(line):
    """``jla`` runs; of others, which install or take long, every name they use exists."""
    words = shlex.split(line, comments=True)
    match words:
        case ["jla", *arguments]:
            done = CliRunner().invoke(app, arguments)
            assert done.exit_code == 0, done.output
        case ["pip", "install", *what]:
            asked = re.findall(r"\[([\w,]+)\]", " ".join(what))
            assert set(",".join(asked).split(",")) - {""} <= EXTRAS.keys()
        case ["make", *targets]:
            assert set(targets) <= TARGETS
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module)
        case ["python", script, *_]:
            assert Path(script).exists()
        case _:
            assert words[0] in ("git", "cd"), "a command that no test looks at"


@pytest.mark.parametrize("name", PAGES)
def test_names_exist(name):
    """What stands in backticks: names of the package, tests, files, modules to run, targets."""
    for path in re.findall(r"`(jla(?:\.\w+)+)", PAGES[name]):
        assert pydoc.locate(path) is not None, path
    for file, test in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGES[name]):
        assert not test or f"\ndef {test}(" in (ROOT / file).read_text(), f"{file}::{test}"
    for file in re.findall(r"`((?:examples|tests|benchmarks|tools)/[\w/.]+)`", PAGES[name]):
        assert (ROOT / file).exists(), file
    for module in re.findall(r"`python -m ([\w.]+)", PAGES[name]):
        assert importlib.util.find_spec(module), module
    assert set(re.findall(r"`make ([\w-]+)", PAGES[name])) <= TARGETS


@pytest.mark.parametrize("name", re.findall(r"\]\(([^)#:]+)\)", README))
def test_linked_file_exists(name):
    assert (ROOT / name).exists()


def test_first_example_is_short():
    assert len(README_EXAMPLES[0].text.strip().splitlines()) <= 15


def test_tables_are_current():
    assert status_table.updated(README) == README, "run python -m tools.status_table --write"
    page = PAGES["docs/coming-from/fla.md"]
    assert fla_tables.updated(page) == page, "run python -m tools.fla_tables --write"


def test_the_contract_names_its_exceptions():
    """A question that a mixer is excused from stands on the contract's page, with the reason."""
    page = " ".join(PAGES["docs/contract.md"].split())
    for row in cases.MIXERS.values():
        for reason in row.cannot.values():
            assert reason in page


def test_the_site_shows_every_notebook():
    shown = {path.name: path.resolve() for path in (DOCS / "notebooks").iterdir()}
    assert shown == {path.name: path for path in (ROOT / "examples").glob("*.ipynb")}


def test_the_site_builds(tmp_path):
    """Every page is in the navigation, every link and every documented name resolves; not quietly,
    because mkdocs then does not count its warnings."""
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    for part in ("convert", "eval", "generation", "layers", "models", "nn", "ops", "train"):
        page = (tmp_path / "reference" / f"{part}.html").read_text()
        for name in importlib.import_module(f"jla.{part}").__all__:
            assert f'id="jla.{part}.{name}"' in page, f"jla.{part}.{name} is not in the reference"
    for page in (tmp_path / "reference").iterdir():
        # A role that is no link, a doctest that is taken for a quotation.
        raw = re.search(r":(attr|class|data|func|meth|mod):|<blockquote", page.read_text())
        assert not raw, f"{page.name}: {raw}"
