"""Times the library's ops at named shapes, as ``jla bench`` does; one JSON object a line.

    python -m benchmarks.run --list
    python -m benchmarks.run --ops gdn/A,attn --impl chunk --out ours.jsonl

``fwd`` is the forward where no gradient is wanted, ``fb`` the forward and every gradient, in ms:
the median over batches of back-to-back calls, so that host time is hidden. ``floor_*`` is what an
H200 needs at least. ``ran`` is the implementation that ran.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
import jax.numpy as jnp

from jla.bench import cases
from jla.bench.timing import times
from tools.versions import versions


def measure(case: cases.Case, impl: str, dtype, tiny: bool = False) -> dict:
    """The record of one case; a failure is recorded, not raised."""
    p = cases.shrink(case.shape) if tiny else case.shape
    floor_fwd, floor_fb = cases.floors(case.op, p)
    record = dict(id=case.id, op=case.op, tag=case.tag, p=p, impl="ours", method="jit")
    record |= dict(floor_fwd=floor_fwd, floor_fb=floor_fb, dtype=jnp.dtype(dtype).name)
    try:
        record["ran"] = cases.explain(case.op, p, impl, dtype).impl
        return record | times(case.op, p, impl, dtype)._asdict() | dict(ok=True)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        # Out of memory, or an implementation that refuses: the other cases still count.
        return record | dict(ok=False, error=f"{type(error).__name__}: {error}"[:300])


def summary(record: dict) -> str:
    """One line for a person."""
    head = f"{record['id']:12s} {record.get('ran', '-'):10s}"
    if not record["ok"]:
        return f"{head} {record['error']}"
    times = f"{record['fwd']:9.3f} / {record['fb']:9.3f} ms"
    return f"{head} {times}   floor {record['floor_fwd']:.3f} / {record['floor_fb']:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--ops", help="comma-separated ops and ids, like gdn/A,attn; all if not given"
    )
    parser.add_argument("--impl", default="auto")
    parser.add_argument("--dtype", default="bfloat16", help="of q, k and v")
    parser.add_argument("--out", help="file to append JSON lines to")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try the script")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    options = parser.parse_args()
    chosen = cases.select(options.ops)
    if options.list:
        for case in chosen:
            print(f"{case.id:12s} {case.shape}")
        return
    print(versions(), file=sys.stderr)
    for case in chosen:
        record = measure(case, options.impl, options.dtype, options.tiny)
        record["versions"] = versions()
        print(summary(record), file=sys.stderr, flush=True)
        if options.out:
            with open(options.out, "a") as out:
                out.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
