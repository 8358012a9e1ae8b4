"""What flash-linear-attention 0.6.0 really computed, to compare with.

The repository carries a copy of every case with few rows and columns of the results; ``trim.py``
made it. Where ``JLA_GOLDEN`` names the folder of the full archives, they are read instead.
"""

from __future__ import annotations

import atexit
import dataclasses
import fnmatch
import functools
import io
import json
import lzma
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from helpers import assert_close
from safetensors.numpy import load, save_file

from golden import draws

HERE = Path(__file__).parent


# FLA's outputs in these recordings are 3e-5 to 6e-5 of the largest off our float64 run, ours in
# float32 at most 3e-6 (:func:`check_inexact` asks it of each): FLA's kernel is in every run as
# inexact as its packed run tells.
INEXACT = {
    "layer": ("RWKV7Attention", "RWKV7Attention__layer1"),
    "model": ("rwkv7__deep", "rwkv7__ranks"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One case.

    Attributes:
        name: like ``"gated_deltanet__base"``.
        folder: holds FLA's ``config.json`` and ``model.safetensors``.
        meta: versions, tolerances, norms of all gradients, FLA's disagreements with itself.
        recorded: inputs, and the kept part of every result.
        index: for a result that was trimmed, the positions kept of each axis.
    """

    name: str
    folder: Path
    meta: dict[str, Any]
    recorded: dict[str, np.ndarray]
    index: dict[str, tuple[np.ndarray, ...]]

    def atol(self, run: str = "forward") -> float:
        """Absolute tolerance of a forward run: ``"forward"``, ``"packed"``, ``"padded"``,
        ``"decode"``. Where FLA disagrees with itself in a run, that run's is three times as wide as
        the disagreement."""
        base = 2e-5 if self.meta["case"]["amp"] is None else 3e-3
        largest = self.meta.get("logits_absmax", self.meta.get("out_absmax"))
        runs = (run, "packed") if any(self.name in each for each in INEXACT.values()) else (run,)
        own = [v for k, v in self.meta.items() if k.startswith(runs) and k.endswith("_maxdiff")]
        return max([base * largest, *(3 * float(np.max(diff)) for diff in own if diff)])

    @property
    def grad_tol(self) -> float:
        """Tolerance of a gradient's error, relative to the gradient, both as L2 norms."""
        return self.meta["tolerance"]["grad_rel_l2"]

    def __getitem__(self, name: str) -> np.ndarray:
        """An input, or a result that is kept whole."""
        assert name not in self.index, f"{name} is trimmed: compare it with Case.check"
        return self.recorded[name]

    def part(self, name: str, ours) -> np.ndarray:
        """The part of ``ours`` that was kept of a result."""
        ours = np.asarray(ours)
        return ours[np.ix_(*self.index[name])] if name in self.index else ours

    def check(self, name: str, ours, *, run: str = "forward", where=None) -> None:
        """Fails unless ``ours``, whole, agrees with a forward result.

        Args:
            run: sets the tolerance, see :meth:`atol`.
            where: bool, broadcastable to ``ours``: what is compared, everything if None.
        """
        expected = self.recorded[name]
        if where is not None:
            keep = self.part(name, np.broadcast_to(where, np.shape(ours)))
            expected = np.where(keep, expected, 0)
            ours = np.where(where, ours, 0)
        largest = max(1e-3, float(np.max(np.abs(expected))))
        what = f"{self.name} {name}"
        assert_close(self.part(name, ours), expected, tol=self.atol(run) / largest, what=what)

    def check_gradients(self, gradients: dict[str, np.ndarray]) -> None:
        """Fails unless gradients, under FLA's names, agree: the recorded ones entry by entry, the
        norms of all."""
        problems = []
        for name, norm in self.meta["grad_norms"].items():
            norm = norm or 0.0  # torch has no gradient for what does not act on the loss
            error = abs(float(np.linalg.norm(gradients[name])) - norm)
            if not error <= self.grad_tol * norm + 1e-9:
                problems.append(f"norm of {name} is off by {error:.2e} of {norm:.2e}")
        assert not set(self.meta["grad_norms"]) ^ set(gradients), "gradients of other parameters"
        for key in self.recorded:
            name = key.removeprefix("grad.")
            if name == key:
                continue
            expected = self.recorded[key]
            share = np.sqrt(expected.size / gradients[name].size)
            scale = max(np.linalg.norm(expected), share * np.linalg.norm(gradients[name]))
            error = np.linalg.norm(self.part(key, gradients[name]) - expected)
            if not error <= self.grad_tol * scale:
                problems.append(f"{name} is off by {error:.2e} of {scale:.2e}")
        assert not problems, f"{self.name}: {'; '.join(problems)}"


def check_inexact(case: Case, name: str, run: Callable[[Any], Any]) -> None:
    """Fails unless float64 decides against FLA: our float32 result is near our float64 one, while
    FLA's is further from it than other recordings may be, yet within this one's tolerance.

    Args:
        case: one of :data:`INEXACT`.
        name: of a forward result.
        run: gives the whole of it in a dtype.
    """
    exact = np.asarray(run(np.float64))
    assert exact.dtype == np.float64
    assert_close(run(np.float32), exact, tol=4e-6, what=f"{case.name} {name} in float32")
    case.check(name, exact)
    error = np.max(np.abs(case.recorded[name] - case.part(name, exact)))
    assert error > 2e-5 * np.max(np.abs(exact)), "FLA is exact: INEXACT need not name it"


def names(kind: str, pattern: str = "*") -> list[str]:
    """The cases of a kind, ``"model"`` or ``"layer"``, that the repository carries."""
    found = (path.name.removesuffix(".npz.xz") for path in (HERE / kind).glob("*.npz.xz"))
    return sorted(name for name in found if fnmatch.fnmatch(name, pattern))


@functools.cache
def fla_api(kind: str) -> dict[str, dict[str, Any]]:
    """What flash-linear-attention's classes take: ``kind`` is ``"config"`` (by ``model_type``; with
    ``cls`` and ``json``, the default config as it is saved) or ``"layer"`` (by class; ``init``)."""
    lines = (HERE / "fla_api.jsonl").read_text(encoding="utf-8").splitlines()
    return {row[kind]: row for row in map(json.loads, lines) if kind in row}


@functools.cache
def load_case(kind: str, name: str) -> Case:
    """A case from the full archives if ``JLA_GOLDEN`` is set, else from the repository."""
    source = os.environ.get("JLA_GOLDEN")
    return _full(kind, name, source) if source else trimmed(kind, name)


def _full(kind, name, source):
    files = _unpacked(kind, source)[f"{kind}/{name}"]
    folder = _new_folder(kind, name)
    for file in ("config.json", "model.safetensors"):
        (folder / file).write_bytes(files[file])
    meta = json.loads(files["meta.json"])
    return Case(name, folder, meta, load(files["io.safetensors"]), {})


@functools.cache
def _unpacked(kind, source):
    from golden import trim

    wanted = [f"{kind}/{name}" for name in names(kind)]
    return dict(trim.members(Path(source, trim.ARCHIVES[kind]), wanted))


def trimmed(kind: str, name: str) -> Case:
    """A case as the repository carries it."""
    packed = (HERE / kind / f"{name}.npz.xz").read_bytes()
    arrays = dict(np.load(io.BytesIO(lzma.decompress(packed))))
    text = {key: arrays[f"text/{key}"].tobytes().decode() for key in ("config", "recipes", "meta")}
    meta, recipes = json.loads(text["meta"]), json.loads(text["recipes"])
    recorded = {
        key: value.astype(np.float32) if value.dtype == np.float16 else value
        for key, value in _below(arrays, "io/").items()
    }
    folder = _new_folder(kind, name)
    (folder / "config.json").write_text(text["config"], encoding="utf-8")
    weights = _below(arrays, "weight/")
    for key, recipe in recipes.items():
        drawn = draws.draw(meta["case"]["seed"], draws.Draw(*recipe["draw"]), recipe["shape"])
        if f"fix/{key}" in arrays:
            drawn.ravel()[arrays[f"fix/{key}"]] = arrays[f"fixed/{key}"]
        weights[key] = drawn
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    index = {}
    for key, values in recorded.items():
        axes = [arrays.get(f"at/{i}/{key}") for i in range(values.ndim)]
        if any(axis is not None for axis in axes):
            sizes = zip(axes, values.shape, strict=True)
            index[key] = tuple(np.arange(n) if axis is None else axis for axis, n in sizes)
    return Case(name, folder, meta, recorded, index)


def _below(arrays, prefix):
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}


@functools.cache
def _root() -> Path:
    root = tempfile.TemporaryDirectory(prefix="golden-")
    atexit.register(root.cleanup)
    return Path(root.name)


def _new_folder(kind, name) -> Path:
    folder = _root() / kind / name
    folder.mkdir(parents=True)
    return folder
