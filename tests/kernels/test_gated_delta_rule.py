"""Gated delta rule kernels: interpreter parity, lowering, offline compile, and parity on a GPU.

The oracle is a token loop written here, in float64 on the GPU runs.
"""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import drawn  # noqa: E402
import interpret_shim  # noqa: E402
import offline  # noqa: E402

from jla.kernels import gated_delta_rule as gdr  # noqa: E402
from jla.ops import segments  # noqa: E402

NAMES = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "dstate")


@dataclasses.dataclass(frozen=True)
class Case(drawn.Named):
    batch: int = 1
    length: int = 150
    heads: int = 2
    qk_heads: int = 1
    key_dim: int = 64
    value_dim: int = 64
    dtype: str = "bfloat16"
    documents: bool | int = False  # of random lengths, or all of this one
    gates: str = "mild"  # mild | mixed | hard | none
    state: bool = True
    l2norm: bool = False


def gates(case, shape, rng):
    mild = -0.1 * rng.random(shape)
    if case.gates == "mild":
        return mild
    if case.gates == "mixed":
        picks = rng.integers(0, 5, shape)
        return np.choose(picks, [mild, 0 * mild, 1e-3 * mild, mild - 20, 30 * mild])
    mild[:, shape[1] // 3] = -np.inf
    mild[:, shape[1] // 3 + 1] = -np.inf
    mild[:, shape[1] // 2] = -80.0
    return mild


def inputs(case, seed=0):
    """Arguments (q, k, v, g, beta, state), segment ids, and cotangents (do, dstate), numpy."""
    rng = np.random.default_rng(seed)
    batch, length, heads = case.batch, case.length, case.heads
    dtype = jnp.dtype(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    q, k = (normal(batch, length, case.qk_heads, case.key_dim) for _ in range(2))
    if not case.l2norm:
        q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v, do = (normal(batch, length, heads, case.value_dim) for _ in range(2))
    beta = 1 / (1 + np.exp(-normal(batch, length, heads)))
    beta[:, length // 5] = 0
    state, d_state = (normal(batch, heads, case.key_dim, case.value_dim) for _ in range(2))
    d_state *= 0.1  # larger, dg is a small difference of large sums in any 16-bit kernel
    g = None
    if case.gates != "none":
        g = gates(case, beta.shape, rng).astype(np.float32)
    ids = None
    if case.documents is True:
        ids = drawn.packed(batch, length, rng, range(1, max(2, length // 4)))
    elif case.documents:
        ids = np.tile(1 + np.arange(length) // case.documents, (batch, 1))
    args = dict(q=q.astype(dtype), k=k.astype(dtype), v=v.astype(dtype), g=g, beta=beta)
    args["state"] = state if case.state else None
    return args, ids, (do.astype(dtype), d_state)


def reference(q, k, v, g, beta, state, *, scale, ids, l2norm):
    """Token loop in the inputs' precision. A document's start and g = -inf clear the state."""
    batch, length, heads, value_dim = v.shape
    if l2norm:
        q, k = (x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (jnp.repeat(x, heads // x.shape[2], 2) for x in (q, k))
    if state is None:
        state = jnp.zeros((batch, heads, k.shape[-1], value_dim), v.dtype)
    g = jnp.zeros_like(beta) if g is None else g
    ids = np.ones((batch, length), np.int32) if ids is None else ids
    real, clear = np.asarray(ids) != 0, np.zeros((batch, length), bool)
    for row in range(batch):
        previous = 0
        for t in range(length):
            if ids[row, t]:
                clear[row, t] = previous not in (0, ids[row, t])
                previous = ids[row, t]

    def token(state, x):
        q, k, v, g, beta, real, clear = x
        hard = clear[:, None] | jnp.isneginf(g)
        decay = jnp.where(hard, 0.0, jnp.exp(jnp.where(hard, 0.0, g)))
        kept = state * decay[..., None, None]
        error = beta[..., None] * (v - jnp.einsum("bhkv,bhk->bhv", kept, k))
        new = kept + k[..., None] * error[..., None, :]
        new = jnp.where(real[:, None, None, None], new, state)
        out = scale * jnp.einsum("bhkv,bhk->bhv", new, q)
        return new, jnp.where(real[:, None, None], out, 0.0)

    over = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, v, g, beta, real, clear)]
    state, out = jax.lax.scan(token, state, over)
    return jnp.moveaxis(out, 0, 1), state


def with_gradients(fn, args, cotangents):
    """[o, final state, gradients in the order of ``args``], float inputs that are given."""
    names = [n for n, x in args.items() if x is not None]

    def run(values):
        return fn(**{**args, **dict(zip(names, values, strict=True))})

    out, pull = jax.vjp(run, tuple(args[n] for n in names))
    (grads,) = pull(tuple(c.astype(o.dtype) for c, o in zip(cotangents, out, strict=True)))
    return dict(zip(("o", "final_state"), out, strict=True)) | {
        f"d{n}": x for n, x in zip(names, grads, strict=True)
    }


def kernel_results(case, args, ids, cotangents):
    scale = case.key_dim**-0.5

    def fn(q, k, v, g, beta, state):
        return gdr.gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=state, marks=marks,
            use_qk_l2norm=case.l2norm,
        )  # fmt: skip

    args = {n: None if x is None else jnp.asarray(x) for n, x in args.items()}
    marks = None if ids is None else segments.token_marks(jnp.asarray(ids))
    run = jax.jit(lambda args, cot: with_gradients(fn, args, cot))
    return run(args, tuple(map(jnp.asarray, cotangents)))


def reference_results(case, args, ids, cotangents):
    fn = functools.partial(reference, scale=case.key_dim**-0.5, ids=ids, l2norm=case.l2norm)
    wide = lambda x: None if x is None else np.asarray(x).astype(np.float64)  # noqa: E731
    with jax.enable_x64(True):
        args = {n: wide(x) for n, x in args.items()}
        args = {n: x if x is None else jnp.asarray(x) for n, x in args.items()}
        run = jax.jit(lambda args, cot: with_gradients(fn, args, cot))
        return {n: np.asarray(x) for n, x in run(args, tuple(map(wide, cotangents))).items()}


def errors(case, seed=0):
    """Relative error |x - ref| / |ref| per result; NaN anywhere gives NaN."""
    args, ids, cotangents = inputs(case, seed)
    got = kernel_results(case, args, ids, cotangents)
    want = reference_results(case, args, ids, cotangents)
    if ids is not None:
        assert not np.any(np.asarray(got["o"])[ids == 0]), "padding must output zero"
        for name in ("dv", "dbeta", "dg"):
            if name in got:
                assert not np.any(np.asarray(got[name])[ids == 0]), f"{name} on padding"
    return {n: relative(np.asarray(got[n]), x) for n, x in want.items()}


def relative(x, ref):
    x = np.asarray(x, np.float64)
    return float(np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-30))


def check(case, bound=1e-2):
    found = errors(case)
    print(case, " ".join(f"{n}={e:.1e}" for n, e in found.items()))
    assert all(e < bound for e in found.values()), found


INTERPRETED = (
    Case(),
    Case(key_dim=128, value_dim=128, documents=True, gates="hard"),
    Case(length=1, qk_heads=2, state=False),
    Case(length=64, key_dim=64, value_dim=128, gates="none"),
    Case(length=70, heads=10, qk_heads=5, documents=True, l2norm=True),
    # One row of two pieces, see below: of one section each, and of two, of which the last begins
    # with a document.
    Case(length=250, heads=1, documents=True),
    Case(length=250, heads=1, documents=192),
    Case(length=70, heads=2, value_dim=160, documents=True),  # values of two blocks
    Case(length=70, heads=2, key_dim=256, value_dim=80, documents=True, l2norm=True),
)


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case, capfd, monkeypatch):
    monkeypatch.setattr(gdr.cm, "SMS", 1)  # blocks that walk over chunks have several each
    if case.heads == 1:
        sections = 1 if case.documents is True else 2
        monkeypatch.setattr(gdr.split, "piece_count", lambda rows, chunks: 2)
        monkeypatch.setattr(gdr.split, "sections", lambda chunks: sections)
    with interpret_shim.interpreted():
        check(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def specs(batch, length, heads, qk_heads, key_dim, value_dim, dtype="bfloat16"):
    def spec(*shape, dtype=dtype):
        return jax.ShapeDtypeStruct(shape, dtype)

    q = spec(batch, length, qk_heads, key_dim)
    v = spec(batch, length, heads, value_dim)
    g = spec(batch, length, heads, dtype="float32")
    return q, q, v, g, g, spec(batch, heads, key_dim, value_dim, dtype="float32")


def step(q, k, v, g, beta, state):
    """Every gradient of a sum of the outputs."""

    def loss(*args):
        *args, state = args
        o, final = gdr.gated_delta_rule(*args, scale=0.1, initial_state=state)
        return jnp.sum(o.astype(jnp.float32)) + jnp.sum(final)

    return jax.grad(loss, argnums=tuple(range(6)))(q, k, v, g, beta, state)


def forward_only(q, k, v, g, beta, state):
    return gdr.gated_delta_rule(q, k, v, g, beta, scale=0.1, initial_state=state)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "dims",
    [
        (64, 64),
        (128, 128),
        *(
            pytest.param(dims, marks=pytest.mark.slow)
            for dims in [(64, 128), (80, 96), (128, 192), (256, 512)]
        ),
    ],
)
def test_lowers_for_cuda(dims, dtype):
    for length in (130, 2048):  # one piece, and four
        for fn in (step, forward_only):
            traced = jax.jit(fn).trace(*specs(2, length, 4, 2, *dims, dtype))
            traced.lower(lowering_platforms=("cuda",))


# By head size and kernel: shared memory, and at most registers at launch and spilled bytes (which
# differ a little from one compilation to the next). A change is looked at.
RESOURCES = {
    64: dict(
        gdr_gate_gradients=(36864, 94, 0),
        gdr_inverse=(188416, 128, 16),
        gdr_outputs=(123904, 168, 0),
        gdr_section_maps=(110592, 255, 0),
        gdr_scan_sections=(91136, 144, 0),
        gdr_state_gradients=(132096, 168, 0),
        gdr_token_gradients=(163840, 128, 0),
    ),
    128: dict(
        gdr_gate_gradients=(36864, 94, 0),
        gdr_inverse=(221184, 128, 80),
        gdr_outputs=(230400, 128, 16),
        gdr_section_maps=(176128, 168, 0),
        gdr_scan_sections=(231424, 231, 0),
        gdr_state_gradients=(230400, 128, 0),
        gdr_token_gradients=(229376, 128, 288),
    ),
    256: dict(
        gdr_gate_gradients=(36864, 94, 0),
        gdr_inverse=(165888, 168, 0),
        gdr_outputs=(210944, 168, 0),
        gdr_state_gradients=(219136, 168, 128),
        gdr_token_gradients=(229376, 128, 160),
    ),
}


@pytest.mark.skipif(not offline.available(), reason="needs the CUDA plugin wheels")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize(
    "dim", [128, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 256))]
)
def test_compiles_offline(dim):
    seen = set()
    for report in offline.compile_kernels(step, *specs(1, 8192, 16, 16, dim, dim)):
        print(report)
        seen.add(report.name)
        smem, registers, spills = RESOURCES[dim][report.name]
        assert not report.bad_notes and not report.early_uses, report
        assert report.smem == smem, report
        assert report.registers <= registers and report.spills <= spills, report
    assert seen == RESOURCES[dim].keys()


def test_refuses():
    q, k, v, g, beta, _ = (jnp.zeros(x.shape, x.dtype) for x in specs(1, 8, 2, 2, 64, 64))
    with pytest.raises(NotImplementedError, match="bfloat16"):
        gdr.gated_delta_rule(*(x.astype("float32") for x in (q, k, v)), g, beta, scale=1.0)
    with pytest.raises(ValueError, match="fit"):
        gdr.gated_delta_rule(q, k, v[:, :4], g, beta, scale=1.0)
    with pytest.raises(NotImplementedError, match="head sizes"):
        wide = jnp.zeros((1, 8, 2, 512), q.dtype)
        gdr.gated_delta_rule(wide, wide, v, g, beta, scale=1.0)


def need_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a Hopper GPU")


LARGE = dict(batch=2, length=500, heads=4)
GPU = (
    Case(**LARGE, qk_heads=4, key_dim=128, value_dim=128),
    Case(**LARGE, qk_heads=2, key_dim=128, value_dim=128, documents=True, gates="hard"),
    Case(**LARGE, qk_heads=1, documents=True, gates="mixed", dtype="float16"),
    Case(**LARGE, qk_heads=4, key_dim=128, value_dim=128, gates="mixed", state=False),
    Case(**LARGE, qk_heads=4, key_dim=128, value_dim=64, gates="none", l2norm=True),
    Case(**LARGE, qk_heads=4, key_dim=64, value_dim=128, gates="hard"),
    Case(**LARGE, qk_heads=2, key_dim=80, value_dim=96, documents=True),
    Case(**LARGE, qk_heads=2, key_dim=128, value_dim=320, documents=True, gates="mixed"),
    Case(**LARGE, qk_heads=4, key_dim=256, value_dim=256, gates="mixed"),
    Case(length=200, heads=6, qk_heads=3, key_dim=256, value_dim=512, documents=True, l2norm=True),
    Case(length=300, heads=3, qk_heads=3, key_dim=192, value_dim=64, gates="hard", dtype="float16"),
    Case(length=2100, heads=2, value_dim=256, gates="mixed", documents=True),
    Case(**LARGE, qk_heads=2, key_dim=128, value_dim=128, documents=True, l2norm=True),
    Case(**LARGE, qk_heads=4, gates="mixed", l2norm=True, dtype="float16"),
    Case(length=1, heads=2, qk_heads=2, key_dim=128, value_dim=128),
    Case(length=2100, heads=2, key_dim=128, value_dim=128, gates="mixed", l2norm=True),
    Case(length=65, heads=1, qk_heads=1, documents=True),
    Case(length=65, heads=6, qk_heads=3, l2norm=True),
    Case(length=200, heads=20, qk_heads=10, documents=True, l2norm=True),
    Case(length=300, heads=16, qk_heads=16, key_dim=128, value_dim=128, documents=True),
    Case(length=2101, heads=2, key_dim=128, value_dim=128, gates="mixed"),
    Case(batch=2, length=2100, heads=4, qk_heads=4, key_dim=128, value_dim=128, documents=True),
    Case(length=2100, heads=2, qk_heads=2, documents=True, gates="hard"),
    Case(length=4096, heads=2, qk_heads=1, key_dim=128, value_dim=128, gates="mixed"),
    Case(length=4096, heads=2, qk_heads=1, key_dim=128, value_dim=128, documents=512),
)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("case", GPU, ids=str)
def test_gpu_parity(case):
    need_gpu()
    check(case)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("case", [case for case in GPU if case.length > 2000], ids=str)
def test_gpu_sections(case, monkeypatch):
    need_gpu()
    monkeypatch.setattr(gdr.split, "sections", lambda chunks: 2)  # of pieces this short, too
    check(case)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("length", [500, 4096])
def test_gpu_deterministic(length):
    need_gpu()
    case = Case(2, length, 4, 4, 128, 128, documents=True)
    args, ids, cotangents = inputs(case)
    first, *rest = (kernel_results(case, args, ids, cotangents) for _ in range(4))
    for other in rest:
        for name, x in first.items():
            assert np.array_equal(np.asarray(x), np.asarray(other[name])), name
