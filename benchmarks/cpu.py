"""Chunked recurrences against their token-by-token references on a CPU, and their memory.

    python -m benchmarks.cpu                    # prints two tables
    python -m benchmarks.cpu --ops gdn,kda      # of these ops only
    python -m benchmarks.cpu --save             # and appends them to benchmarks/RESULTS.md

The reference is a plain ``lax.scan`` over tokens. Both run at B1 T4096 H4 in float32, with heads of
64 and of 128: the states of the former fit in a core's first cache, which suits the reference.
Memory is what XLA's analysis says that forward and backward together need beside their inputs and
outputs; linear in T means that it doubles with T.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from jla.bench import cases
from jla.bench.timing import median_ms
from tools.versions import versions

RESULTS = Path(__file__).parent / "RESULTS.md"
SIZES = dict(B=1, T=4096, H=4)
WIDTHS = (64, 128)
IMPLS = ("reference", "chunk")
LENGTHS = (2048, 4096, 8192)
NO_RECURRENCE = ("attn", "conv", "norm_gate")


def shape(op: str, width: int, **sizes: int) -> cases.Shape:
    """A case of ``op`` at this benchmark's sizes; what else it has stays as in its first case."""
    known = next(iter(cases.OPS[op].shapes.values()))
    # Mamba's channels are no heads, and each has a few states of its own.
    widths = dict(C=SIZES["H"] * width) if "C" in known else dict(D=width, N=width)
    wanted = SIZES | widths | sizes
    return known | {name: size for name, size in wanted.items() if name in known}


def speed(op: str, width: int, rounds: int) -> str:
    """A row of the table of times; the implementations take turns, so that load meets both."""
    p = shape(op, width)
    inputs = cases.make_inputs(op, p, jnp.float32)
    cotangent = cases.make_cotangent(op, p, jnp.float32)
    calls = {}
    for impl in IMPLS:
        forward, both = map(jax.jit, cases.functions(op, p, impl))
        calls["forward", impl] = lambda f=forward: f(inputs)
        calls["both", impl] = lambda f=both: f(inputs, cotangent)
    times = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(median_ms(call, batches=3))
    cells = [op]
    for what in ("forward", "both"):
        slow, fast = (statistics.median(times[what, impl]) for impl in IMPLS)
        cells += [f"{slow:.1f}", f"{fast:.1f}", f"{slow / fast:.1f}"]
    return f"| {' | '.join(cells)} |"


def memory(op: str) -> str:
    """A row of the table of temporaries of forward and backward."""
    found = [temporary_mib(op, impl, shape(op, WIDTHS[0], T=t)) for t in LENGTHS for impl in IMPLS]
    return f"| {op} | {' | '.join(f'{mib:.0f}' for mib in found)} |"


def temporary_mib(op: str, impl: str, p: cases.Shape) -> float:
    """MiB of temporaries that forward and backward together allocate."""
    inputs = cases.make_inputs(op, p, jnp.float32)
    cotangent = cases.make_cotangent(op, p, jnp.float32)
    compiled = jax.jit(cases.functions(op, p, impl)[1]).lower(inputs, cotangent).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend has no memory analysis"
    return analysis.temp_size_in_bytes / 2**20


def table(head: list[str], rows: list[str]) -> list[str]:
    """Lines of Markdown."""
    return [f"| {' | '.join(head)} |", "| --- " * len(head) + "|", *rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", help="comma-separated ops; all recurrences if not given")
    parser.add_argument("--rounds", type=int, default=3, help="of measuring times, in turns")
    parser.add_argument("--save", action="store_true", help="append to benchmarks/RESULTS.md")
    options = parser.parse_args()
    names = (
        options.ops.split(",")
        if options.ops
        else [op for op in cases.OPS if op not in NO_RECURRENCE]
    )
    load, command = os.getloadavg()[0], " ".join(["python -m benchmarks.cpu", *sys.argv[1:]])
    times = ["ref fwd ms", "chunk fwd ms", "faster", "ref fwd+bwd ms", "chunk fwd+bwd ms", "faster"]
    sizes = [f"{impl} T={t}" for t in LENGTHS for impl in IMPLS]
    speeds = []
    for width in WIDTHS:
        rows = [speed(op, width, options.rounds) for op in names]
        speeds += [f"B1 T4096 H4 K=V={width}, float32:", "", *table(["op", *times], rows), ""]
    lines = [
        f"## {datetime.date.today()}: `{command}`",
        "",
        f"{versions()}; load average before the run {load:.1f}.",
        "",
        *speeds,
        "MiB of temporaries of forward + backward at B1 H4 K=V=64:",
        "",
        *table(["op", *sizes], [memory(op) for op in names]),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        with open(RESULTS, "a") as out:
            out.write("\n" + text)


if __name__ == "__main__":
    main()
