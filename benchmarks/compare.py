"""The library's kernels and the best peer's, side by side on one GPU.

    python -m benchmarks.compare --ops gdn,mamba2/M --peer FOLDER --out DIR

``FOLDER`` holds jax-linear-attention 0.1.0 unpacked; its package is called ``jla`` as well, so each
library has processes of its own. Every case is compiled in a process, all side by side; then one
process at a time measures, so that two timings never overlap. Both get the same inputs. Results are
the records of ``benchmarks.run`` (one JSON object a line, ``impl`` is ``ours`` or ``peer``), and a
table. Ops are those of ``jla.bench.cases``, and whole layers (``LAYERS``: forward, and forward with
the gradients of parameters and input).

``fwd`` and ``fb`` are as a program sees them that calls again and again; calls of less than some
60 us are shorter than their dispatch. ``fwd_device`` and ``fb_device`` are the time on the GPU,
from the first kernel's start to the last one's end, by the profiler, one call at a time.
``compile_s`` is tracing and compiling forward and backward; it means something where few cases are
compiled at a time.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
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


HIDDEN = 2048
LAYERS = {
    f"{layer}/{tag}": (layer, shape)
    for layer in ("GatedDeltaNet", "Mamba2")
    for tag, shape in {"B8": (8, 2048), "B1": (1, 16384)}.items()
}


def case_call(lib: str, name: str):
    """``forward(inputs)``, its inputs, and what a record says of the case."""
    import jax.numpy as jnp

    from jla.bench import cases

    case = cases.CASES[name]
    op, p = case.op, case.shape
    facts: dict = dict(op=op, tag=case.tag, p=p)
    facts["floor_fwd"], facts["floor_fb"] = cases.floors(op, p)
    if lib == "ours":
        forward, _ = cases.functions(op, p)
        facts["ran"] = cases.explain(op, p).impl
    else:
        ids, options = cases.segment_ids(p), cases.OPS[op].options(p)

        def forward(inputs):
            return peer_call(op, inputs, ids, options)

    return forward, cases.make_inputs(op, p, jnp.bfloat16), facts


def layer_call(lib: str, name: str):
    """As ``case_call``, of a layer: bfloat16 with float32 parameters."""
    import jax
    import jax.numpy as jnp

    layer, shape = LAYERS[name]
    x = jax.random.normal(jax.random.key(1), (*shape, HIDDEN), jnp.bfloat16)
    if lib == "ours":
        from flax import nnx

        from benchmarks import models

        graphdef, state = nnx.split(models.LAYERS[layer](dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))

        def forward(inputs):
            return nnx.merge(graphdef, inputs["parameters"])(inputs["x"])
    else:
        import equinox  # pyright: ignore

        state, rest = equinox.partition(peer_layer(layer), equinox.is_array)

        def forward(inputs):
            return equinox.combine(inputs["parameters"], rest)(inputs["x"])

    facts: dict[str, Any] = dict(op=layer, p=dict(B=shape[0], T=shape[1]))
    return forward, dict(x=x, parameters=state), facts


def peer_layer(layer: str):
    """A layer of jax-linear-attention with the sizes of ours."""
    import jax
    from jla.layers.linear_attention import make_mixer  # pyright: ignore
    from jla.layers.ssm import Mamba2  # pyright: ignore

    from jla.models.config import LinearAttentionConfig, SSMConfig  # pyright: ignore

    more = dict(key=jax.random.key(0), std=0.02, norm_eps=1e-5)
    if layer == "Mamba2":
        return Mamba2(HIDDEN, SSMConfig(), **more)
    sizes = LinearAttentionConfig(16, 16, 128, 128)
    return make_mixer("gated_deltanet", HIDDEN, sizes, **more)


def programs(lib: str, name: str):
    """A case's facts, its forward, and its forward and backward: compiled, to call with nothing."""
    import jax

    forward, inputs, facts = (layer_call if name in LAYERS else case_call)(lib, name)

    def both(inputs, cotangent):
        o, pull = jax.vjp(forward, inputs)
        return o, pull(cotangent)[0]

    one = jax.jit(forward).lower(inputs).compile()
    cotangent = jax.random.normal(jax.random.key(99), *_shape_dtype(forward, inputs))
    began = time.perf_counter()
    two = jax.jit(both).lower(inputs, cotangent).compile()
    facts["compile_s"] = round(time.perf_counter() - began, 1)
    memory: Any = two.memory_analysis()
    facts["temp_mib"] = round(memory.temp_size_in_bytes / 2**20, 1)
    return facts, lambda: one(inputs), lambda: two(inputs, cotangent)


def work(lib: str, name: str) -> None:
    """Compiles a case, says so, waits for its turn, and prints its record."""
    import jax

    from jla.bench.timing import device_ms, median_ms

    record: dict = dict(id=name, impl=lib, method="jit")
    try:
        facts, one, two = programs(lib, name)
        record |= facts
        jax.block_until_ready((one(), two()))
        print("ready", flush=True)
        sys.stdin.readline()
        record |= dict(fwd=median_ms(one), fb=median_ms(two))
        record |= dict(ok=True, fwd_device=math.nan, fb_device=math.nan)
        record |= dict(fwd_device=device_ms(one), fb_device=device_ms(two))
    except Exception as error:  # noqa: BLE001  one failing case must not lose the others
        print("ready", flush=True)
        sys.stdin.readline()
        record["error"] = f"{type(error).__name__}: {error}"[:300]
        record.setdefault("ok", False)
    print(json.dumps(record), flush=True)


def _shape_dtype(forward, inputs):
    import jax

    out = jax.eval_shape(forward, inputs)
    return out.shape, out.dtype


def start(lib: str, call: str, peer: str | None) -> subprocess.Popen:
    """A process of its own for a library that runs ``call``, an expression of ``benchmarks``."""
    root = str(Path(__file__).parent.parent)
    paths = [root] if lib == "ours" else [str(peer), root]
    # The peer's package has no cases: they are found in ours.
    package = str(Path(root, "jla"))
    code = f"import sys; sys.path[:0] = {paths!r}; import jla; jla.__path__.append({package!r}); "
    code += "from benchmarks import compare, kernels; "
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    return subprocess.Popen(
        [sys.executable, "-c", code + call],
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
        "| case | floor | ours | peer | peer / ours | on the GPU: ours | peer | peer / ours "
        "| temporaries, MiB: ours, peer |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in dict.fromkeys(r["id"] for r in records):
        ours, peer = times.get((name, "ours")), times.get((name, "peer"))
        if ours is None or peer is None:
            continue
        cells = [_pair(ours, "floor_{}")] if "floor_fwd" in ours else [""]
        for key in ("{}", "{}_device"):
            cells += [_pair(ours, key), _pair(peer, key), _pair(peer, key, ours)]
        cells.append(f"{ours['temp_mib']:.0f}, {peer['temp_mib']:.0f}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _pair(record, key, over=None):
    """Forward / forward and backward of a record, in ms or over another record's."""
    keys = [key.format(part) for part in ("fwd", "fb")]
    if over is None:
        return " / ".join(f"{record[key]:.3f}" for key in keys)
    return " / ".join(f"{record[key] / over[key]:.2f}" for key in keys)


def names(chosen: str) -> list[str]:
    """Ids of a comma-separated list of ops, layers and ids."""
    from jla.bench import cases

    found = []
    for name in chosen.split(","):
        layers = [each for each in LAYERS if name in (each, each.split("/")[0])]
        found += layers or [case.id for case in cases.select(name)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ops", required=True, help="comma-separated ops, layers and ids")
    parser.add_argument("--peer", required=True, help="folder of jax-linear-attention, unpacked")
    parser.add_argument("--out", required=True, help="file to write JSON lines to")
    options = parser.parse_args()
    pairs = [(lib, name) for name in names(options.ops) for lib in ("ours", "peer")]
    processes = [start(pair[0], f"compare.work{pair!r}", options.peer) for pair in pairs]
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
