"""The chunked gated delta rule against the token-by-token reference on a CPU, and its memory.

    python -m benchmarks.cpu            # prints two tables
    python -m benchmarks.cpu --save     # and appends them to benchmarks/RESULTS.md

The reference is a plain ``lax.scan`` over tokens. Both run at B1 T4096 H4 K=V=64 in float32.
Memory is what XLA's analysis says that forward and backward together need beside their inputs and
outputs; linear in T means that it doubles with T.
"""

from __future__ import annotations

import argparse
import datetime
import os
import statistics
from pathlib import Path

import jax
import jax.numpy as jnp

from benchmarks import cases
from benchmarks.run import median_ms
from tools.versions import versions

RESULTS = Path(__file__).parent / "RESULTS.md"
SHAPE = dict(B=1, T=4096, H=4, D=64)
IMPLS = ("reference", "chunk")


def speed(rounds: int = 5) -> list[str]:
    """Rows of the table of times; the implementations take turns, so that load meets both."""
    inputs = cases.make_inputs("gdn", SHAPE, jnp.float32)
    cotangent = cases.make_cotangent("gdn", SHAPE, jnp.float32)
    calls = {}
    for impl in IMPLS:
        forward, both = map(jax.jit, cases.functions("gdn", SHAPE, impl))
        calls[impl, "forward"] = lambda f=forward: f(inputs)
        calls[impl, "forward + backward"] = lambda f=both: f(inputs, cotangent)
    times = {key: [] for key in calls}
    for _ in range(rounds):
        for key, call in calls.items():
            times[key].append(median_ms(call, batches=3))
    rows = ["| | reference ms | chunk ms | times faster |", "| --- | --- | --- | --- |"]
    for what in ("forward", "forward + backward"):
        slow, fast = (statistics.median(times[impl, what]) for impl in IMPLS)
        rows.append(f"| {what} | {slow:.1f} | {fast:.1f} | {slow / fast:.1f} |")
    return rows


def memory() -> list[str]:
    """Rows of the table of peak memory of forward and backward."""
    rows = ["| T | reference MiB | chunk MiB |", "| --- | --- | --- |"]
    for length in (2048, 4096, 8192):
        found = [temporary_mib(impl, SHAPE | dict(T=length)) for impl in IMPLS]
        rows.append(f"| {length} | " + " | ".join(f"{mib:.0f}" for mib in found) + " |")
    return rows


def temporary_mib(impl: str, p: cases.Shape) -> float:
    """MiB of temporaries that forward and backward together allocate."""
    inputs = cases.make_inputs("gdn", p, jnp.float32)
    cotangent = cases.make_cotangent("gdn", p, jnp.float32)
    compiled = jax.jit(cases.functions("gdn", p, impl)[1]).lower(inputs, cotangent).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "this backend has no memory analysis"
    return analysis.temp_size_in_bytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="append to benchmarks/RESULTS.md")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    lines = [
        f"## {datetime.date.today()}: `python -m benchmarks.cpu`",
        "",
        f"{versions()}; load average before the run {load:.1f}.",
        "",
        "B1 T4096 H4 K=V=64, float32:",
        "",
        *speed(),
        "",
        "Temporaries of forward + backward at B1 H4 K=V=64:",
        "",
        *memory(),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.save:
        with open(RESULTS, "a") as out:
            out.write("\n" + text)


if __name__ == "__main__":
    main()
