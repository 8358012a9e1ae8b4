"""Scalar-decay linear attention kernels: interpreter parity, lowering, offline compile, GPU parity.

The oracle is the token loop written here, in float64.
"""

import dataclasses
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import drawn  # noqa: E402
import interpret_shim  # noqa: E402
import offline  # noqa: E402

from jla.kernels import common  # noqa: E402
from jla.kernels.linear_attention import linear_attention  # noqa: E402
from jla.ops import segments  # noqa: E402

SCALE = 0.7


@dataclasses.dataclass(frozen=True)
class Case(drawn.Named):
    batch: int = 1
    length: int = 150
    heads: int = 2
    groups: int = 2
    key: int = 64
    value: int = 64
    dtype: str = "bfloat16"
    gates: str = "mixed"  # mixed | hard | none | head | a number
    documents: bool = False
    state: bool = False
    weights: bool = False
    skip: bool = False
    pieces: int | None = None


def gates(case, shape, rng):
    mild = -np.log1p(np.exp(rng.standard_normal(shape))) * 2.0 ** np.linspace(-6, -1, shape[2])
    if case.gates == "none":
        return None
    if case.gates == "head":
        return -(2.0 ** np.linspace(-5, -1, shape[2]))
    if case.gates == "hard":
        mild[rng.random(shape) < 0.05] = -80
        mild[rng.random(shape) < 0.03] = -np.inf
    elif case.gates != "mixed":
        mild = np.full(shape, float(case.gates))
    return mild


def inputs(case, seed=0):
    """(float inputs, segment ids or None, cotangents of o and the final state)."""
    rng = np.random.default_rng(seed)
    c = case
    tokens, state = (c.batch, c.length), (c.batch, c.heads, c.key, c.value)

    def normal(*shape, dtype="float32", factor=1.0):
        return jnp.asarray(factor * rng.standard_normal(shape)).astype(dtype)

    values = dict(
        q=normal(*tokens, c.groups, c.key, dtype=c.dtype, factor=c.key**-0.5),
        k=normal(*tokens, c.groups, c.key, dtype=c.dtype, factor=c.key**-0.5),
        v=normal(*tokens, c.heads, c.value, dtype=c.dtype),
    )
    g = gates(c, (*tokens, c.heads), rng)
    if g is not None:
        values["g"] = jnp.asarray(g, "float32")
    if c.state:
        values["initial_state"] = normal(*state)
    if c.weights:
        values["v_scale"] = jnp.log1p(jnp.exp(normal(*tokens, c.heads)))
    if c.skip:
        values["skip"] = normal(c.heads)
    ids = (
        jnp.asarray(drawn.packed(*tokens, rng, range(1, max(2, c.length // 3)), 0.05))
        if c.documents
        else None
    )
    if c.skip and c.documents:
        values["v"] = jnp.where((ids != 0)[..., None, None], values["v"], 0)
    cotangents = normal(*tokens, c.heads, c.value, dtype=c.dtype), normal(*state, factor=0.1)
    return values, ids, cotangents


def reference(q, k, v, g, *, scale, initial_state=None, segment_ids=None, v_scale=None, skip=0.0):
    """The recurrence, token by token, in q's dtype."""
    skipped = v * jnp.broadcast_to(skip, v.shape[2])[:, None]
    batch, length, heads, value = v.shape
    q, k = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (q, k))
    g = jnp.broadcast_to(0.0 if g is None else g, (batch, length, heads))
    if v_scale is not None:
        v = v * v_scale[..., None]
    if segment_ids is None:
        segment_ids = jnp.ones((batch, length), jnp.int32)
    if initial_state is None:
        initial_state = jnp.zeros((batch, heads, q.shape[3], value), q.dtype)

    def token(carry, x):
        state, last = carry
        q, k, v, g, name = x
        real = name != 0
        starts = real & (last != 0) & (last != name)
        # The inner where keeps the gradient of exp finite at -inf.
        decay = jnp.where(starts[:, None] | jnp.isinf(g), 0, jnp.exp(jnp.where(jnp.isinf(g), 0, g)))
        step = decay[..., None, None] * state + k[..., :, None] * v[..., None, :]
        state = jnp.where(real[:, None, None, None], step, state)
        out = scale * jnp.einsum("bhkv,bhk->bhv", state, q) * real[:, None, None]
        return (state, jnp.where(real, name, last)), out

    over = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, segment_ids))
    first = initial_state, jnp.zeros((batch,), segment_ids.dtype)
    (state, _), out = lax.scan(token, first, over)
    return jnp.moveaxis(out, 0, 1) + skipped, state


def results(fn, values, cotangents, **options):
    """{name: array} of outputs and gradients."""

    def run(values):
        rest = {n: x for n, x in values.items() if n not in "qkvg"}
        return fn(*(values.get(n) for n in "qkvg"), scale=SCALE, **rest, **options)

    (o, state), pull = jax.vjp(run, values)
    (grads,) = pull(tuple(c.astype(x.dtype) for c, x in zip(cotangents, (o, state), strict=True)))
    return dict(o=o, state=state) | {"d" + n: x for n, x in grads.items()}


def kernel_results(case, values, ids, cotangents):
    marks = None if ids is None else segments.token_marks(ids)
    run = jax.jit(
        lambda values, cotangents, marks: results(
            linear_attention, values, cotangents, marks=marks, pieces=case.pieces
        )
    )
    return {n: np.asarray(x) for n, x in run(values, cotangents, marks).items()}


def reference_results(values, ids, cotangents):
    with jax.enable_x64(True):
        values, cotangents = jax.tree.map(
            lambda x: jnp.asarray(np.asarray(x).astype(np.float64)), (values, cotangents)
        )
        run = jax.jit(
            lambda values, cotangents: results(reference, values, cotangents, segment_ids=ids)
        )
        return {n: np.asarray(x) for n, x in run(values, cotangents).items()}


def check(case, bound=8e-3):
    values, ids, cotangents = inputs(case)
    got = kernel_results(case, values, ids, cotangents)
    want = reference_results(values, ids, cotangents)
    found = {}
    for name, ref in want.items():
        x = got[name].astype(np.float64)
        found[name] = float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-30))
    print(case, " ".join(f"{n}={e:.1e}" for n, e in found.items()))
    assert all(e < bound for e in found.values()), found
    if ids is not None:  # what the skip adds at padding is the caller's: it zeroes v there
        for name in ("o", "dq", "dk", "dg", "dv_scale", *([] if case.skip else ["dv"])):
            assert name not in got or not np.any(got[name][np.asarray(ids) == 0]), name


INTERPRETED = (
    Case(length=130, heads=1, groups=1),
    Case(length=192, documents=True, state=True, pieces=2),
    Case(length=300, heads=1, groups=1, documents=True, state=True, pieces=3),
    Case(groups=1, key=128, documents=True, state=True, weights=True, skip=True),
    Case(length=128, heads=1, groups=1, key=128, value=128, gates="hard"),
    Case(length=1, heads=1, groups=1, state=True, gates="none"),
)


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(180, method="thread")
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case, capfd):
    with interpret_shim.interpreted():
        check(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(180, method="thread")
def test_wide_heads_interpreted(monkeypatch):
    """Heads wider than the widest, here 64, are cut into parts."""
    monkeypatch.setattr(common, "WIDEST", 64)
    with interpret_shim.interpreted():
        heads = dict(heads=1, groups=1, key=80, value=96, weights=True, skip=True)
        check(Case(length=70, **heads, documents=True, state=True))


def specs(batch, length, groups, heads, key, value, dtype="bfloat16"):
    q = jax.ShapeDtypeStruct((batch, length, groups, key), dtype)
    v = jax.ShapeDtypeStruct((batch, length, heads, value), dtype)
    g = jax.ShapeDtypeStruct((batch, length, heads), "float32")
    state = jax.ShapeDtypeStruct((batch, heads, key, value), "float32")
    skip = jax.ShapeDtypeStruct((heads,), "float32")
    return q, q, v, g, g, skip, state


def step(*args):
    """A sum over outputs and state with all its gradients."""

    def loss(q, k, v, g, weights, skip, state):
        more = dict(v_scale=weights, skip=skip, initial_state=state)
        o, end = linear_attention(q, k, v, g, scale=SCALE, **more)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(end)

    return jax.value_and_grad(loss, argnums=tuple(range(len(args))))(*args)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("key", [64, 128])
@pytest.mark.parametrize("value", [64, 128])
@pytest.mark.parametrize("groups", [1, 4])
def test_lowers_for_cuda(dtype, key, value, groups):
    traced = jax.jit(step).trace(*specs(2, 130, groups, 4, key, value, dtype))
    traced.lower(lowering_platforms=("cuda",))


# (K, V, q/k heads): shared memory, registers at launch and spilled bytes of every kernel. A change
# is looked at: spills in the gradients come from values kept across the loop over chunks.
RESOURCES = {
    (64, 64, 16): {
        ("jla_la_forward", 134144, 128, 0),
        ("jla_la_gradients", 179200, 128, 0),
        ("jla_la_maps", 51200, 100, 0),
        ("jla_la_states", 67584, 106, 0),
    },
    (128, 128, 16): {
        ("jla_la_forward", 199680, 128, 0),
        ("jla_la_gradients", 187392, 128, 0),
        ("jla_la_maps", 75776, 134, 0),
        ("jla_la_maps", 75776, 136, 0),
        ("jla_la_states", 108544, 139, 0),
    },
    (128, 64, 1): {
        ("jla_la_forward", 216064, 128, 0),
        ("jla_la_gradients", 211968, 128, 188),
        ("jla_la_maps", 75776, 134, 0),
        ("jla_la_maps", 75776, 136, 0),
        ("jla_la_states", 108544, 139, 0),
    },
}


@pytest.mark.skipif(not offline.available(), reason="needs the CUDA plugin wheels")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize(
    "dims",
    [pytest.param(d, marks=() if d == (128, 64, 1) else pytest.mark.slow) for d in RESOURCES],
    ids=str,
)
def test_compiles_offline(dims):
    key, value, groups = dims
    found = set()
    for report in offline.compile_kernels(step, *specs(1, 8192, groups, 16, key, value)):
        print(report)
        assert not report.bad_notes and not report.early_uses, report
        found.add((report.name, report.smem, report.registers, report.spills))
    assert found == RESOURCES[dims]


def test_refuses():
    q, k, v, g, *_ = (jnp.zeros(x.shape, x.dtype) for x in specs(1, 8, 2, 2, 64, 64))
    with pytest.raises(NotImplementedError, match="bfloat16"):
        linear_attention(*(x.astype("float32") for x in (q, k, v)), g, scale=1.0)
    with pytest.raises(NotImplementedError, match="incompatible"):
        linear_attention(q, k, v[:, :4], g, scale=1.0)
    with pytest.raises(ValueError, match="skip needs v_scale"):
        linear_attention(q, k, v, g, scale=1.0, skip=jnp.ones(2))


LARGE = dict(batch=2, length=517, heads=4, groups=4, state=True)
GPU = (
    Case(**LARGE, documents=True),
    Case(**LARGE, key=128, value=128, documents=True, gates="hard"),
    Case(**LARGE | dict(groups=2), key=128, value=128, documents=True),
    Case(**LARGE, key=64, value=128, dtype="float16", documents=True),
    Case(**LARGE | dict(groups=1), key=128, documents=True, weights=True),
    Case(**LARGE, key=128, value=128, gates="none"),
    Case(**LARGE, gates="head"),
    Case(batch=4, length=640, heads=32, groups=1, key=128, weights=True),
    Case(length=1300, heads=8, groups=1, key=128, weights=True, documents=True, state=True),
    Case(**LARGE | dict(groups=2), key=128, weights=True, skip=True, documents=True),
    Case(batch=4, length=640, heads=32, groups=1, key=128, weights=True, skip=True),
    Case(**LARGE, value=128, weights=True, skip=True, gates="none"),
    Case(length=2048, heads=4, groups=4, key=128, value=128, state=True),
    Case(length=1111, key=128, documents=True, state=True, pieces=3),
    Case(length=4096, heads=8, groups=1, key=128, documents=True, state=True, pieces=4),
    Case(length=1, key=128, value=128, state=True),
    Case(**LARGE | dict(groups=2), key=256, value=320, documents=True, weights=True, skip=True),
    Case(length=256, gates="-20"),
    Case(length=256, gates="-1e-4", key=128, value=128),
)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("case", GPU, ids=str)
def test_gpu_parity(case):
    check(case)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("groups", [1, 4])
def test_gpu_deterministic(groups):
    case = Case(2, 2048, 4, groups, 128, 128, documents=True, state=True)
    first, *rest = (kernel_results(case, *inputs(case)) for _ in range(4))
    for other in rest:
        for name, x in first.items():
            assert np.array_equal(x, other[name]), name
