"""The library's kernels and the best peer's, side by side on one GPU.

    python -m benchmarks.compare --ops gdn,mamba2/M --peer FOLDER --out DIR

``FOLDER`` holds jax-linear-attention 0.1.0 unpacked; its package is called ``jla`` as well, so each
library has processes of its own. Every case is compiled in a process, all side by side; then one
process at a time measures, so that two timings never overlap. Both get the same inputs. Results are
the records of ``benchmarks.run`` (one JSON object a line, ``impl`` is ``ours`` or ``peer``), and a
table.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

KINDS = {
    "gdn": "gated_deltanet",
    "gdn_l2": "gated_deltanet",
    "deltanet": "deltanet",
    "kda": "kda",
    "gla": "gla",
    "gdn2": "gdn2",
    "simple_gla": "simple_gla",
}


def peer_call(op: str, inputs, ids, options):
    """One call of jax-linear-attention."""
    from jla import ops

    if op == "mamba2":
        from jla.layers.ssm import mamba2_ssd  # pyright: ignore

        operands = [inputs[name] for name in ("x", "dt", "A", "B", "C")]
        return mamba2_ssd(*operands, segment_ids=ids, impl="mosaic_gpu", grouped_key_grads=True)[0]
    if op == "conv":
        from jla.ops.mosaic_gpu.short_conv import short_conv  # pyright: ignore

        return short_conv(inputs["x"], inputs["kernel"].T, None, activation=True, segment_ids=ids)
    if op == "norm_gate":
        import equinox  # pyright: ignore
        from jla.layers.norm import GatedRMSNorm  # pyright: ignore

        norm = GatedRMSNorm(inputs["x"].shape[-1])
        norm = equinox.tree_at(lambda norm: norm.weight, norm, inputs["scale"])
        return norm(inputs["x"], inputs["gate"])
    more = dict(segment_ids=ids, impl="mosaic_gpu", **options)
    return ops.linear_attention(KINDS[op], **inputs, **more)[0]


def peer_functions(op: str, p, options):
    """As ``cases.functions``, of jax-linear-attention."""
    import jax

    from jla.bench import cases

    def forward(inputs):
        return peer_call(op, inputs, cases.segment_ids(p), options)

    def both(inputs, cotangent):
        o, pull = jax.vjp(forward, inputs)
        return o, pull(cotangent.astype(o.dtype))[0]

    return forward, both


def work(lib: str, name: str) -> None:
    """Compiles a case, says so, waits for its turn, and prints its record."""
    import jax
    import jax.numpy as jnp

    from jla.bench import cases
    from jla.bench.timing import median_ms

    case = cases.CASES[name]
    op, p = case.op, case.shape
    record: dict = dict(id=name, op=op, tag=case.tag, p=p, impl=lib, method="jit")
    record["floor_fwd"], record["floor_fb"] = cases.floors(op, p)
    try:
        if lib == "ours":
            forward, both = cases.functions(op, p)
            record["ran"] = cases.explain(op, p).impl
        else:
            forward, both = peer_functions(op, p, cases.OPS[op].options(p))
        inputs = cases.make_inputs(op, p, jnp.bfloat16)
        cotangent = cases.make_cotangent(op, p, jnp.bfloat16)
        one = jax.jit(forward).lower(inputs).compile()
        two = jax.jit(both).lower(inputs, cotangent).compile()
        jax.block_until_ready((one(inputs), two(inputs, cotangent)))
        memory: Any = two.memory_analysis()
        record["temp_mib"] = round(memory.temp_size_in_bytes / 2**20, 1)
        print("ready", flush=True)
        sys.stdin.readline()
        record["fwd"] = median_ms(lambda: one(inputs))
        record["fb"] = median_ms(lambda: two(inputs, cotangent))
        record["ok"] = True
    except Exception as error:  # noqa: BLE001  one failing case must not lose the others
        print("ready", flush=True)
        sys.stdin.readline()
        record |= dict(ok=False, error=f"{type(error).__name__}: {error}"[:300])
    print(json.dumps(record), flush=True)


def start(lib: str, name: str, peer: str) -> subprocess.Popen:
    """A process that compiles; it says "ready"."""
    root = str(Path(__file__).parent.parent)
    paths = [root] if lib == "ours" else [peer, root]
    # The peer's package has no cases: they are found in ours.
    package = str(Path(root, "jla"))
    code = f"import sys; sys.path[:0] = {paths!r}; import jla; jla.__path__.append({package!r}); "
    code += "from benchmarks import compare; "
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(
        [sys.executable, "-c", code + f"compare.work({lib!r}, {name!r})"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd="/",
    )


def answer(process: subprocess.Popen) -> dict:
    """Lets a process measure."""
    stdout, _ = process.communicate("go\n")
    lines = [line for line in stdout.splitlines() if line.startswith("{")]
    return json.loads(lines[-1]) if lines else dict(ok=False, error=f"exit {process.returncode}")


def table(records: list[dict]) -> str:
    """Ours and the peer's times as Markdown."""
    times = {(r["id"], r["impl"]): r for r in records if r["ok"]}
    lines = [
        "| case | floor | ours | peer | peer / ours | temporaries, MiB: ours, peer |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(r["id"] for r in records):
        ours, peer = times.get((name, "ours")), times.get((name, "peer"))
        if ours is None or peer is None:
            continue
        pairs = [f"{r['fwd']:.3f} / {r['fb']:.3f}" for r in (ours, peer)]
        floor = f"{ours['floor_fwd']:.3f} / {ours['floor_fb']:.3f}"
        gain = f"{peer['fwd'] / ours['fwd']:.2f} / {peer['fb'] / ours['fb']:.2f}"
        memory = f"{ours['temp_mib']:.0f}, {peer['temp_mib']:.0f}"
        lines.append(f"| {name} | {floor} | {pairs[0]} | {pairs[1]} | {gain} | {memory} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", required=True, help="comma-separated ops and ids")
    parser.add_argument("--peer", required=True, help="folder of jax-linear-attention, unpacked")
    parser.add_argument("--out", required=True, help="file to write JSON lines to")
    options = parser.parse_args()
    from jla.bench import cases

    chosen = [case for case in cases.select(options.ops)]
    pairs = [(lib, case.id) for case in chosen for lib in ("ours", "peer")]
    processes = [start(lib, name, options.peer) for lib, name in pairs]
    for process in processes:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != "ready\n":
            pass
    records = []
    for (lib, name), process in zip(pairs, processes, strict=True):
        records.append(dict(id=name, impl=lib) | answer(process))
        print(records[-1], file=sys.stderr, flush=True)
    Path(options.out).write_text("".join(json.dumps(r) + "\n" for r in records))
    print(table(records))


if __name__ == "__main__":
    main()
