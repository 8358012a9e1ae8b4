"""Named shapes and inputs that benchmarks and tests share: ``gdn/A`` is an op and a shape.

Inputs are random, like a trained model's: normalised keys, decays of long and short memories. An op
is one row of ``OPS``; its ``inputs`` say what it takes, its ``run`` calls the library.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jla import ops

PEAK, BANDWIDTH = 790e12, 4.3e12  # bfloat16 FLOP/s and copied bytes/s measured on an H200
CHUNK = 64  # of the floors' FLOP counts

Shape = dict[str, int]

# B rows, T tokens, H heads of size D, KV key heads, docs packed documents, win window, slots.
# State space models: states of size N, G groups of heads, R ranks; C channels instead of heads.
A = dict(B=1, T=8192, H=16, D=128)
B = dict(B=8, T=2048, H=16, D=128)
L = dict(B=1, T=32768, H=16, D=128)
P = dict(B=1, T=16384, H=16, D=128, docs=16)
S = dict(B=2, T=4096, H=32, D=64)
A1 = dict(B=1, T=8192, H=4, D=128)
A8 = dict(B=1, T=16384, H=8, D=128)
C4 = dict(B=4, T=4096, H=16, D=128)
C16 = dict(B=1, T=16384, H=16, D=128)
W = dict(B=1, T=16384, H=16, D=128, win=1024)
GQA = dict(B=1, T=16384, H=16, D=128, KV=4)
E1 = dict(B=1, T=8192, C=2048)
E8 = dict(B=8, T=2048, C=2048)
EP = dict(B=1, T=16384, C=2048, docs=16)
M1 = dict(B=1, T=8192, C=4096, N=16)
M2 = dict(B=1, T=8192, H=64, D=64, N=128, G=1)
M = dict(B=4, T=4096, H=32, D=64, N=128, G=1)
ML = dict(B=1, T=32768, H=32, D=64, N=128, G=1)
MP = dict(B=1, T=16384, H=32, D=64, N=128, G=1, docs=16)
M3 = dict(B=1, T=8192, H=64, D=64, N=128, R=1)
M3R = dict(B=1, T=8192, H=64, D=64, N=128, R=4)


class Input(NamedTuple):
    """One differentiable argument: its shape, how it is drawn (see ``DRAWS``), and its dtype."""

    name: str
    shape: tuple[int, ...]
    draw: str
    dtype: Any


class Op(NamedTuple):
    """How an op is benchmarked."""

    kind: str  # of jla.ops.linear_attention
    shapes: dict[str, Shape]
    inputs: Callable[[Shape, Any], list[Input]]  # of (shape, dtype of the 16-bit inputs)
    options: Callable[[Shape], dict[str, Any]]
    flops: Callable[[Shape], float]  # forward; the backward is counted as 2.5 times that


class Case(NamedTuple):
    """An op at a shape."""

    op: str
    tag: str

    @property
    def id(self) -> str:
        return f"{self.op}/{self.tag}"

    @property
    def shape(self) -> Shape:
        return OPS[self.op].shapes[self.tag]


def _inputs(key: str = "unit", writes: int = 1, **gates: tuple[str, str]):
    """q, k, v and ``gates``: the draw of each, and whether it is per ``"head"``, ``"channel"``,
    ``"slot"`` or ``"write"`` (per head; k, v and such gates come ``writes`` times a token)."""

    def inputs(p, dtype):
        full = (p["B"], p["T"], p["H"], p["D"])
        several = (p["B"], p["T"] * writes, *full[2:])
        shapes = {"head": full[:3], "channel": full, "write": several[:3]}
        shapes["slot"] = (*full[:3], p.get("slots", p["D"]))
        drawn = [
            Input("q", full, key, dtype),
            Input("k", several, key, dtype),
            Input("v", several, "normal", dtype),
        ]
        more = [Input(name, shapes[per], draw, jnp.float32) for name, (draw, per) in gates.items()]
        return drawn + more

    return inputs


def _linear_flops(p):
    """Of linear attention: scores, their product with v, reads of and writes to the state."""
    return p["B"] * p["T"] * p["H"] * (4 * CHUNK * p["D"] + 4 * p["D"] ** 2)


def _delta_flops(p, writes: int = 1):
    d = p["D"]
    per_token = 4 * CHUNK * d + 4 * d * d + 2 * CHUNK * d + 4 * CHUNK * d + 2 * d * d
    return writes * p["B"] * p["T"] * p["H"] * (per_token + 2 * CHUNK * CHUNK / 3)


def _rwkv6_inputs(p, dtype):
    bonus = Input("u", (p["H"], p["D"]), "normal", jnp.float32)
    return [*_received(_inputs(w=("decay", "channel")))(p, dtype), bonus]


def _rwkv7_inputs(p, dtype):
    directions: Any = dict(a=("direction", "channel"), b=("direction", "channel"))
    return _received(_inputs(w=("decay", "channel"), **directions))(p, dtype)


def _received(inputs):
    """The same inputs with RWKV's name of queries."""

    def renamed(p, dtype):
        return [x._replace(name="r") if x.name == "q" else x for x in inputs(p, dtype)]

    return renamed


def _dplr_flops(p):
    """As the delta rule's, with two more pairs of scores and twice the rows written."""
    per_token = 18 * CHUNK * p["D"] + 8 * p["D"] ** 2 + 2 * CHUNK * CHUNK / 3
    return p["B"] * p["T"] * p["H"] * per_token


def _slot_flops(p):
    """Of gated slot attention: one pass over the slots' keys, one over their values."""
    d, slots = p["D"], p["slots"]
    return p["B"] * p["T"] * p["H"] * (4 * CHUNK * (d + slots) + 8 * d * slots)


def _channel_inputs(p, dtype):
    full = (p["B"], p["T"], p["C"])
    return [Input("x", full, "normal", dtype), Input("g", full, "decay", jnp.float32)]


def _attention_inputs(p, dtype):
    query = (p["B"], p["T"], p["H"], p["D"])
    key = (p["B"], p["T"], p.get("KV", p["H"]), p["D"])
    shapes = {"q": query, "k": key, "v": key}
    return [Input(name, shape, "normal", dtype) for name, shape in shapes.items()]


def _attention_flops(p):
    length = p["T"] // p.get("docs", 1)
    window = min(p.get("win", length), length)
    pairs = length * window - window * window / 2
    return 4 * p["B"] * p["H"] * p["D"] * pairs * p.get("docs", 1)


def _scan_inputs(p, dtype):
    full, states = (p["B"], p["T"], p["C"]), (p["B"], p["T"], p["N"])
    return [
        Input("x", full, "normal", dtype),
        Input("dt", full, "step", jnp.float32),
        Input("A", (p["C"], p["N"]), "rate", jnp.float32),
        Input("B", states, "normal", dtype),
        Input("C", states, "normal", dtype),
    ]


def _scan_flops(p):
    return 7 * p["B"] * p["T"] * p["C"] * p["N"]


def _ssd_inputs(p, dtype):
    tokens, groups = (p["B"], p["T"], p["H"]), (p["B"], p["T"], p["G"], p["N"])
    return [
        Input("x", (*tokens, p["D"]), "normal", dtype),
        Input("dt", tokens, "step", jnp.float32),
        Input("A", (p["H"],), "rate", jnp.float32),
        Input("B", groups, "unit", dtype),
        Input("C", groups, "normal", dtype),
    ]


def _mamba3_inputs(p, dtype):
    tokens, rank = (p["B"], p["T"], p["H"]), (p["H"], p["R"], p["D"])
    ranks = (*tokens, p["R"], p["N"])
    return [
        Input("x", (*tokens, p["D"]), "normal", dtype),
        Input("dt", tokens, "step", jnp.float32),
        Input("A", tokens, "rate", jnp.float32),
        Input("B", ranks, "unit", dtype),
        Input("C", ranks, "normal", dtype),
        Input("trap", tokens, "normal", jnp.float32),
        Input("angles", (p["B"], p["T"], p["N"] // 4), "normal", jnp.float32),
        Input("mimo_x", rank, "normal", jnp.float32),
    ]


def _ssm_flops(p):
    ranks, sizes = p.get("R", 1), p["N"] + p["D"]
    per_token = 2 * CHUNK * ranks**2 * sizes + 4 * ranks * p["N"] * p["D"]
    return p["B"] * p["T"] * p["H"] * per_token


def _conv_inputs(p, dtype):
    taps = Input("kernel", (4, p["C"]), "normal", jnp.float32)
    return [Input("x", (p["B"], p["T"], p["C"]), "normal", dtype), taps]


def _norm_inputs(p, dtype):
    scale = Input("scale", (p["D"],), "normal", jnp.float32)
    full = (p["B"], p["T"], p["H"], p["D"])
    return [Input("x", full, "normal", dtype), Input("gate", full, "normal", dtype), scale]


def _few_flops(p):
    return 0.0


def _no_options(p):
    return {}


OPS = {
    "gdn": Op(
        "gated_delta_rule",
        dict(A=A, B=B, L=L, P=P, S=S, A1=A1, A8=A8),
        _inputs(g=("decay", "head"), beta=("sigmoid", "head")),
        _no_options,
        _delta_flops,
    ),
    "gdn_l2": Op(
        "gated_delta_rule",
        dict(A=A),
        _inputs("normal", g=("decay", "head"), beta=("sigmoid", "head")),
        lambda p: dict(use_qk_l2norm=True),
        _delta_flops,
    ),
    "deltanet": Op(
        "delta_rule",
        dict(A=A, B=B),
        _inputs(beta=("sigmoid", "head")),
        _no_options,
        _delta_flops,
    ),
    "kda": Op(
        "kda",
        dict(A=A, B=B),
        _inputs(g=("decay", "channel"), beta=("sigmoid", "head")),
        _no_options,
        _delta_flops,
    ),
    "gdn2": Op(
        "gdn2",
        dict(A=A),
        _inputs(g=("decay", "channel"), b=("sigmoid", "channel"), w=("sigmoid", "channel")),
        _no_options,
        _delta_flops,
    ),
    "gdp": Op(
        "gated_delta_product",
        dict(A=A),
        _inputs(writes=2, g=("decay", "head"), beta=("sigmoid", "write")),
        lambda p: dict(num_householder=2),
        functools.partial(_delta_flops, writes=2),
    ),
    "simple_gla": Op(
        "simple_gla",
        dict(A=A, B=B, S=S, P=P),
        _inputs(g=("decay", "head")),
        _no_options,
        _linear_flops,
    ),
    "gla": Op(
        "gla",
        dict(A=A),
        _inputs(g=("decay", "channel")),
        _no_options,
        _linear_flops,
    ),
    "dplr": Op(
        "dplr_delta_rule",
        dict(A=A),
        _inputs(a=("direction", "channel"), b=("direction", "channel"), g=("decay", "channel")),
        _no_options,
        _dplr_flops,
    ),
    "iplr": Op(
        "iplr_delta_rule",
        dict(A=A),
        _inputs(a=("direction", "channel"), b=("direction", "channel")),
        _no_options,
        _dplr_flops,
    ),
    "rwkv6": Op("rwkv6", dict(A=A), _rwkv6_inputs, _no_options, _linear_flops),
    "rwkv7": Op("rwkv7", dict(A=A, S=S), _rwkv7_inputs, _no_options, _dplr_flops),
    "mamba": Op("selective_scan", dict(M1=M1), _scan_inputs, _no_options, _scan_flops),
    "mamba2": Op("ssd", dict(M2=M2, M=M, ML=ML, MP=MP), _ssd_inputs, _no_options, _ssm_flops),
    "mamba3": Op("mamba3", dict(M3=M3, M3R=M3R), _mamba3_inputs, _no_options, _ssm_flops),
    "retention": Op("retention", dict(A=A, B=B), _inputs(), _no_options, _linear_flops),
    "linear_attn": Op("linear_attn", dict(A=A), _inputs(), _no_options, _linear_flops),
    "gsa": Op(
        "gsa",
        dict(A=A | dict(slots=64)),
        _inputs(s=("sigmoid", "slot"), g=("decay", "slot")),
        _no_options,
        _slot_flops,
    ),
    "hgrn": Op(
        "hgrn",
        dict(E1=E1),
        _channel_inputs,
        _no_options,
        lambda p: 3 * p["B"] * p["T"] * p["C"],
    ),
    "attn": Op(
        "attention",
        dict(C4=C4, C16=C16, W=W, DOC=P, GQA=GQA),
        _attention_inputs,
        lambda p: dict(window_size=p.get("win")),
        _attention_flops,
    ),
    "conv": Op(
        "causal_conv1d",
        dict(E1=E1, E8=E8, EP=EP),
        _conv_inputs,
        lambda p: dict(activation="silu"),
        _few_flops,
    ),
    "norm_gate": Op("rms_norm", dict(E8=B), _norm_inputs, _no_options, _few_flops),
}
CASES = {case.id: case for op, row in OPS.items() for case in (Case(op, tag) for tag in row.shapes)}


def select(names: str | None) -> list[Case]:
    """Cases of a comma-separated list of ops and ids; all if None.

    Raises:
        ValueError: an unknown op or id.
    """
    if names is None:
        return list(CASES.values())
    chosen = []
    for name in names.split(","):
        found = [case for case in CASES.values() if name in (case.op, case.id)]
        if not found:
            raise ValueError(f"{name!r} is neither an op {list(OPS)} nor one of {list(CASES)}")
        chosen += found
    return chosen


def shrink(p: Shape) -> Shape:
    """The same kind of shape, small enough for a test on a CPU."""
    small = dict(B=1, T=256, H=2, D=32, KV=1, docs=4, win=64, slots=16, C=32, N=16, G=1, R=2)
    return {name: min(size, small[name]) for name, size in p.items()}


def make_inputs(op: str, p: Shape, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
    """The op's differentiable arguments by name, the same in every run."""
    specs = OPS[op].inputs(p, dtype)
    return {
        spec.name: DRAWS[spec.draw](_normal(spec.shape, seed)).astype(spec.dtype)
        for seed, spec in enumerate(specs, 1)
    }


def make_cotangent(op: str, p: Shape, dtype=jnp.bfloat16) -> jax.Array:
    """A random gradient of the outputs."""
    return _normal(output_shape(p), 99).astype(dtype)


def output_shape(p: Shape) -> tuple[int, ...]:
    """``[B, T, H, D]``, ``[B, T, H, R, D]`` with ranks, ``[B, T, C]`` of channels."""
    return tuple(p[name] for name in "BTHRDC" if name in p)


def segment_ids(p: Shape) -> jax.Array | None:
    """``docs`` documents of one length in each row, None where the shape packs none."""
    if "docs" not in p:
        return None
    row = jnp.arange(p["T"], dtype=jnp.int32) // (p["T"] // p["docs"]) + 1
    return jnp.broadcast_to(row, (p["B"], p["T"]))


def _packing(p: Shape) -> dict[str, jax.Array]:
    ids = segment_ids(p)
    return {} if ids is None else dict(segment_ids=ids)


def functions(op: str, p: Shape, impl: str = "auto"):
    """``forward(inputs) -> o`` and ``both(inputs, cotangent) -> (o, gradients)``, not jitted."""
    row, packing = OPS[op], _packing(p)

    def forward(inputs):
        out = ops.linear_attention(row.kind, **inputs, **packing, impl=impl, **row.options(p))
        return out[0] if isinstance(out, tuple) else out

    def both(inputs, cotangent):
        o, pull = jax.vjp(forward, inputs)
        return o, pull(cotangent.astype(o.dtype))[0]

    return forward, both


def explain(op: str, p: Shape, impl: str = "auto", dtype=jnp.bfloat16) -> ops.Choice:
    """What ``functions(op, p, impl)`` runs on this machine."""
    row = OPS[op]
    specs = {
        spec.name: jax.ShapeDtypeStruct(spec.shape, spec.dtype) for spec in row.inputs(p, dtype)
    }
    return ops.explain(row.kind, **specs, **_packing(p), impl=impl, **row.options(p))


def floors(op: str, p: Shape) -> tuple[float, float]:
    """Least ms on an H200 for forward, and forward and backward: FLOPs or bytes, whichever is more.

    The forward reads the inputs and writes the outputs; the backward reads the inputs and the
    cotangent and writes the gradients.
    """
    sizes = [
        math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in OPS[op].inputs(p, jnp.bfloat16)
    ]
    gradients = sum(sizes)
    moved = gradients + 2 * math.prod(output_shape(p))
    flops = OPS[op].flops(p)
    forward = max(flops / PEAK, moved / BANDWIDTH) * 1e3
    backward = max(2.5 * flops / PEAK, (moved + gradients) / BANDWIDTH) * 1e3
    return forward, forward + backward


def _decay(x):
    """Log decays of heads whose memories last from some tokens to some hundreds."""
    memory = jnp.asarray(2.0 ** np.linspace(-6, -1, x.shape[2]), jnp.float32)
    return jax.nn.log_sigmoid(x) * memory.reshape(-1, *(1,) * (x.ndim - 3))


def _unit(x):
    return x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6)


DRAWS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "normal": lambda x: x,
    "unit": _unit,
    "direction": lambda x: 0.5 * _unit(x),  # short: a low rank step must not make states grow
    "decay": _decay,
    "sigmoid": jax.nn.sigmoid,
    "step": lambda x: jax.nn.softplus(x - 4),
    "rate": lambda x: -jnp.exp(x + 1),
}


@functools.cache
def _pool() -> np.ndarray:
    return np.random.default_rng(7).standard_normal(1 << 24, dtype=np.float32)


def _normal(shape, seed: int) -> jax.Array:
    """Standard normals: a stretch of one pool, which is quicker than drawing gigabytes."""
    pool, size = _pool(), math.prod(shape)
    start = (seed * 7368787) % pool.size
    repeated = (
        np.concatenate([pool] * -(-(start + size) // pool.size))
        if start + size > pool.size
        else pool
    )
    return jnp.asarray(repeated[start : start + size].reshape(shape))
