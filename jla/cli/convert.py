"""``jla convert``."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jla.cli.checkpoint import impossible_sizes, look_at
from jla.convert import to_state_dict
from jla.convert.files import Tensors
from jla.convert.pretrained import DTYPES
from jla.eval.tokens import FILES
from jla.models import CausalLM

COPIED = (*FILES, "generation_config.json")


class Source(NamedTuple):
    """What is converted: its folder, its model, and the dtype of every tensor as it is stored."""

    folder: Path
    model: CausalLM
    dtypes: Mapping[str, str]


def run(
    source: str,
    target: Path,
    to: Literal["fla", "orbax"],
    dtype: str | None,
    max_shard_size: str | None,
    report: bool,
) -> None:
    """Writes ``source`` to ``target`` and says what was written."""
    if to == "orbax" and max_shard_size is not None:
        raise ValueError("--max-shard-size is for --to fla: Orbax cuts files by itself")
    target = target.resolve()
    check_target(target)
    with np.errstate(over="ignore"):  # check_range says which tensor it is
        read = read_orbax if Path(source, "params").is_dir() else read_fla
        given = read(source, dtype)
    tensors = to_state_dict(given.model)
    check_range(tensors)
    with beside(target) as whole:
        if to == "orbax":
            save_orbax(given.model, whole)
        else:
            given.model.save_pretrained(whole, max_shard_size=size(max_shard_size or "50GB"))
        copy_tokenizer(given.folder, whole)
    if report:
        print(table(given.dtypes, tensors))
    print(f"{len(tensors)} tensors, {sum(t.nbytes for t in tensors.values()):,} bytes: {target}")


def read_fla(source: str, dtype: str | None) -> Source:
    """A folder or hub repository in FLA's format."""
    checkpoint = look_at(source)
    stored = {name: spell(each) for name, each in Tensors(checkpoint.folder).dtypes().items()}
    return Source(checkpoint.folder, checkpoint.load(dtype), stored)


def read_orbax(source: str, dtype: str | None) -> Source:
    """A folder with ``config.json`` and an Orbax checkpoint ``params``."""
    from jla.train.checkpoint import load_orbax

    folder = Path(source)
    with impossible_sizes(folder):
        model = load_orbax(folder)
        stored = {name: tensor.dtype.name for name, tensor in to_state_dict(model).items()}
        return Source(folder, load_orbax(folder, dtype=dtype) if dtype else model, stored)


def save_orbax(model: CausalLM, folder: Path) -> None:
    """As :func:`jla.train.checkpoint.save_orbax`, which loads Orbax."""
    from jla.train.checkpoint import save_orbax

    save_orbax(model, folder)


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


@contextlib.contextmanager
def beside(target: Path) -> Iterator[Path]:
    """A folder to write to that becomes the target at the end: an interruption leaves no target."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as aside:
        whole = Path(aside, target.name)
        yield whole
        os.rename(whole, target)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copies what a checkpoint holds beside its weights and config."""
    for name in COPIED:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def size(given: str) -> int | str:
    """Bytes, as a number or as they were given."""
    return int(given) if given.isdecimal() else given


def table(before: Mapping[str, str], after: dict[str, np.ndarray]) -> str:
    """A line per tensor: name, shape, dtype in, dtype out; those that were dropped too."""
    names = [*after, *(name for name in before if name not in after)]
    rows = [("name", "shape", "dtype in", "dtype out")]
    for name in names:
        shape = "x".join(map(str, after[name].shape)) if name in after else ""
        out = after[name].dtype.name if name in after else "dropped"
        rows.append((name, shape, before.get(name, "-"), out))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def spell(dtype: str) -> str:
    """safetensors' name of a dtype as numpy spells it."""
    return jnp.dtype(DTYPES[dtype]).name if dtype in DTYPES else dtype
