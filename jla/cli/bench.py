"""``jla bench``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from tqdm import tqdm

import jla
from jla.bench import cases
from jla.bench.timing import device, times
from jla.ops import ImplUnavailable


def run(
    ops: Sequence[str], shapes: Sequence[str], impl: str, dtype: str, tiny: bool, as_json: bool
) -> None:
    """Times cases and prints what each took, and where."""
    chosen = select(ops, shapes)
    sizes = {case.id: cases.shrink(case.shape) if tiny else case.shape for case in chosen}
    # All of them are asked before the first is timed.
    ran = {case.id: choose(case, sizes[case.id], impl, dtype) for case in chosen}
    rows = []
    for case in tqdm(chosen, unit="case", disable=None):
        fwd, fb = times(case.op, sizes[case.id], impl, jnp.dtype(dtype))
        row = dict(case=case.id, shape=sizes[case.id], impl=ran[case.id], dtype=dtype)
        rows.append(row | dict(fwd_ms=fwd, fwd_bwd_ms=fb))
    facts = dict(device=device(), platform=jax.default_backend())
    facts |= dict(jla=jla.__version__, jax=jax.__version__, cases=rows)
    print(json.dumps(facts, indent=2) if as_json else text(facts))


def show(ops: Sequence[str], shapes: Sequence[str], as_json: bool) -> None:
    """Prints the cases there are, and their shapes."""
    found = {case.id: case.shape for case in select(ops, shapes)}
    lines = (f"{name:<14}{sizes_of(shape)}" for name, shape in found.items())
    print(json.dumps(found, indent=2) if as_json else "\n".join(lines))


def select(ops: Sequence[str], shapes: Sequence[str]) -> list[cases.Case]:
    """Cases of some ops and some shapes; of all where none is named.

    Raises:
        ValueError: an unknown op or shape, or a shape that none of the ops has.
    """
    for name in ops:
        if name not in cases.OPS:
            raise ValueError(f"--op must be one of {list(cases.OPS)}, got {name!r}")
    found = [case for case in cases.CASES.values() if not ops or case.op in ops]
    known = list(dict.fromkeys(case.tag for case in found))
    for name in shapes:
        if name not in known:
            raise ValueError(f"--shape must be one of {known} for these ops, got {name!r}")
    return [case for case in found if not shapes or case.tag in shapes]


def choose(case: cases.Case, shape: cases.Shape, impl: str, dtype: str) -> str:
    """The implementation that runs a case here.

    Raises:
        ValueError: ``impl`` is none of its op, or cannot run it here.
    """
    try:
        return cases.explain(case.op, shape, impl, jnp.dtype(dtype)).impl
    except ImplUnavailable as error:
        raise ValueError(f"{case.id}: {error}") from error


def text(facts: dict[str, Any]) -> str:
    """The facts for people."""
    head = f"{facts['device']}, jla {facts['jla']}, jax {facts['jax']}"
    if facts["platform"] == "cpu":
        head += "\nThis times a CPU: it says nothing about a GPU."
    lines = [head, "", f"{'case':<14}{'impl':<11}{'forward':>12}{'+ backward':>14}  dtype, shape"]
    for row in facts["cases"]:
        ms = f"{row['fwd_ms']:>9.3f} ms{row['fwd_bwd_ms']:>11.3f} ms"
        shape = f"{row['dtype']}, {sizes_of(row['shape'])}"
        lines.append(f"{row['case']:<14}{row['impl']:<11}{ms}  {shape}")
    return "\n".join(lines)


def sizes_of(shape: cases.Shape) -> str:
    """Like ``B1 T8192 H16 D128``."""
    return " ".join(f"{name}{size}" for name, size in shape.items())
