"""Imports go one way, torch is nowhere, and importing prints nothing."""

import ast
from pathlib import Path

import fresh
import pytest

PACKAGE = fresh.ROOT / "jla"
# Each may import what stands before it, and itself.
ORDER = [
    ("kernels",),
    ("ops",),
    ("nn",),
    ("layers",),
    ("cache",),
    ("models",),
    ("convert", "generation"),
    ("train", "eval", "bench"),
    ("cli",),
]
RANK = {name: rank for rank, group in enumerate(ORDER) for name in group}
FLAX_FROM = RANK["nn"]
# Inside a function only: methods of models that hand over to what is built on models.
UPWARD = {
    ("models/causal_lm.py", "generation"),
    ("models/causal_lm.py", "convert"),
    ("models/auto.py", "convert"),
}
FILES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


def imports(file):
    """``(absolute module name, whether at module level)`` of every import of a file."""
    tree = ast.parse((PACKAGE / file).read_text())
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    inside = {id(n) for f in ast.walk(tree) if isinstance(f, functions) for n in ast.walk(f)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            yield name, id(node) not in inside


def part_of(file):
    return Path(file).parts[0].removesuffix(".py")


def parts(file, *, module_level=None):
    """Parts of this package that a file imports."""
    for name, at_top in imports(file):
        pieces = name.split(".")
        if pieces[0] == "jla" and len(pieces) > 1 and module_level in (None, at_top):
            yield pieces[1], at_top


def test_every_part_has_its_place():
    own = {part_of(file) for file in FILES} - {"__init__", "py"}
    assert own <= set(RANK) | {"examples"}, "a new part: say in ORDER where it stands"


@pytest.mark.parametrize("file", FILES)
def test_imports_go_one_way(file):
    own = part_of(file)
    if own == "__init__":
        assert not list(parts(file, module_level=True)), "the package loads its parts on demand"
        return
    for other, at_top in parts(file):
        if other == own:
            continue
        if RANK[other] < RANK[own]:
            continue
        assert not at_top and (file, other) in UPWARD, f"{file} imports jla.{other}"


def test_exceptions_are_still_needed():
    used = {(file, part) for file in FILES for part, at_top in parts(file) if not at_top}
    assert used >= UPWARD


@pytest.mark.parametrize("file", FILES)
def test_no_torch_and_flax_from_nn_on(file):
    roots = {name.split(".")[0] for name, _ in imports(file)}
    assert not roots & {"torch", "triton", "fla", "tensorflow"}
    if RANK.get(part_of(file), FLAX_FROM) < FLAX_FROM:
        assert not roots & {"flax", "transformers"}
    if RANK.get(part_of(file), 0) < RANK["models"]:
        assert "transformers" not in roots


@pytest.mark.parametrize("file", FILES)
def test_pallas_in_kernels_only(file):
    uses = any("pallas" in name for name, _ in imports(file))
    assert not uses or part_of(file) == "kernels"


SILENT = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)
sys.modules["torch"] = None
import jla
assert "transformers" not in sys.modules and "flax" not in sys.modules, "import jla is not light"
import jla.layers
assert "transformers" not in sys.modules, "layers need no transformers"
import jla.cli
assert "transformers" not in sys.modules, "the command line loads it when a command runs"
import jla.models, jla.convert, jla.generation
assert sys.modules["torch"] is None
import os
assert "TRANSFORMERS_NO_ADVISORY_WARNINGS" not in os.environ
"""


def test_importing_prints_nothing():
    """Neither to stdout nor to stderr, also without torch, whose absence Transformers notes."""
    code = f"""
import subprocess, sys
done = subprocess.run([sys.executable, "-c", {SILENT!r}], capture_output=True, text=True)
print(done.returncode, repr(done.stdout), repr(done.stderr))
"""
    assert fresh.python("-c", code) == "0 '' ''\n"
