"""``jla convert``."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jla.cli.checkpoint import look_at
from jla.convert import to_state_dict
from jla.convert.files import Tensors
from jla.convert.pretrained import DTYPES
from jla.eval.tokens import FILES
from jla.models import CausalLM

COPIED = (*FILES, "generation_config.json")


def run(source: str, target: Path, dtype: str | None, max_shard_size: str, report: bool) -> None:
    """Writes ``source`` to ``target`` and says what was written."""
    target = target.resolve()
    check_target(target)
    checkpoint = look_at(source)
    with np.errstate(over="ignore"):  # check_range says which tensor it is
        model = checkpoint.load(dtype)
    tensors = to_state_dict(model)
    check_range(tensors)
    save(model, checkpoint.folder, target, max_shard_size)
    if report:
        print(table(Tensors(checkpoint.folder).dtypes(), tensors))
    print(f"{len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()):,} bytes: {target}")


def check_target(target: Path) -> None:
    """Raises OSError unless ``target`` can be made: nothing is ever overwritten."""
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is no folder to write to")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty folder")


def check_range(tensors: dict[str, np.ndarray]) -> None:
    """Raises ValueError where float16 could not hold a tensor's values."""
    for name, tensor in tensors.items():
        if tensor.dtype == np.float16 and np.isinf(tensor).any():
            raise ValueError(f"{name} has values beyond the range of float16")


def save(model: CausalLM, source: Path, target: Path, max_shard_size: str) -> None:
    """Writes beside the target, then renames: an interruption leaves no target at all."""
    size = int(max_shard_size) if max_shard_size.isdecimal() else max_shard_size
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
        whole = Path(aside, target.name)
        model.save_pretrained(whole, max_shard_size=size)
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, whole / name)
        os.rename(whole, target)


def table(before: dict[str, str], after: dict[str, np.ndarray]) -> str:
    """A line per tensor: name, shape, dtype in, dtype out; those that were dropped too."""
    names = [*after, *(name for name in before if name not in after)]
    rows = [("name", "shape", "dtype in", "dtype out")]
    for name in names:
        shape = "x".join(map(str, after[name].shape)) if name in after else ""
        out = after[name].dtype.name if name in after else "dropped"
        rows.append((name, shape, spell(before.get(name)), out))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def spell(dtype: str | None) -> str:
    """safetensors' name of a dtype as numpy spells it; a new name has none."""
    if dtype is None:
        return "-"
    return jnp.dtype(DTYPES[dtype]).name if dtype in DTYPES else dtype
