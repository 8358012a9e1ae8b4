"""Short convolution kernels: interpreter parity, lowering, offline compile, and parity on a GPU.

The oracle finds the tokens that a tap meets by a loop over the row, and is in float64.
"""

import dataclasses
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

from jla import ops  # noqa: E402
from jla.kernels import limits  # noqa: E402
from jla.kernels.short_conv import short_conv  # noqa: E402

NAMES = ("x", "kernel", "bias", "state")


@dataclasses.dataclass(frozen=True)
class Case(drawn.Named):
    batch: int = 1
    length: int = 40
    channels: int = 128
    width: int = 4
    dtype: str = "bfloat16"
    documents: bool = False
    bias: bool = True
    state: bool = True
    silu: bool = True


def inputs(case, seed=0):
    """Arguments by name, segment ids, and the cotangent of y; numpy."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(case.dtype)

    def normal(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, dy = (normal(case.batch, case.length, case.channels).astype(dtype) for _ in range(2))
    args = dict(x=x, kernel=normal(case.width, case.channels), bias=None, state=None)
    if case.bias:
        args["bias"] = normal(case.channels)
    if case.state:
        args["state"] = normal(case.batch, case.width - 1, case.channels).astype(dtype)
    ids = None
    if case.documents:
        lengths = [1, 2, 3, 7, 30, max(4, case.length // 4)]
        ids = drawn.packed(case.batch, case.length, rng, lengths, 0.1)
        ids[:, case.length // 2 : case.length // 2 + 20] = 0  # more than a tile
    return args, ids, dy


def sources(ids, past):
    """Index [T, W] in the row with its state in front of what each tap meets, -1: nothing."""
    found = np.full((len(ids), past + 1), -1)
    window, last = list(range(past)), 0
    for t, name in enumerate(ids):
        if name:
            window = window if last in (0, name) else [-1] * past
            window, last = [*window, t + past], name
            found[t] = window
            window = window[1:]
    return found


def reference(x, kernel, bias, state, *, ids, silu):
    past = kernel.shape[0] - 1
    if state is None:
        state = jnp.zeros((x.shape[0], past, x.shape[2]), x.dtype)
    ids = np.ones(x.shape[:2], np.int32) if ids is None else ids
    rows = []
    for b, row in enumerate(jnp.concatenate([state, x], axis=1)):
        where = sources(ids[b], past)
        met = jnp.where((where >= 0)[..., None], row[np.maximum(where, 0)], 0.0)
        y = jnp.einsum("twd,wd->td", met, kernel) + (0.0 if bias is None else bias)
        y = y * jax.nn.sigmoid(y) if silu else y
        rows.append(jnp.where((ids[b] != 0)[:, None], y, 0.0))
    return jnp.stack(rows)


def with_gradients(fn, args, dy):
    names = [n for n, x in args.items() if x is not None]

    def run(values):
        return fn(**{**args, **dict(zip(names, values, strict=True))})

    y, pull = jax.vjp(run, tuple(args[n] for n in names))
    (grads,) = pull(dy.astype(y.dtype))
    return dict(y=y) | {f"d{n}": x for n, x in zip(names, grads, strict=True)}


def kernel_results(case, args, ids, dy):
    def fn(x, kernel, bias, state):
        return short_conv(
            x, kernel, bias, silu=case.silu, segment_ids=segment_ids, initial_state=state
        )

    segment_ids = None if ids is None else jnp.asarray(ids)
    args = {n: None if x is None else jnp.asarray(x) for n, x in args.items()}
    return jax.jit(lambda args, dy: with_gradients(fn, args, dy))(args, jnp.asarray(dy))


def reference_results(case, args, ids, dy):
    def fn(x, kernel, bias, state):
        return reference(x, kernel, bias, state, ids=ids, silu=case.silu)

    with jax.enable_x64(True):
        wide = lambda x: None if x is None else jnp.asarray(np.asarray(x, np.float64))  # noqa: E731
        args = {n: wide(x) for n, x in args.items()}
        run = jax.jit(lambda args, dy: with_gradients(fn, args, dy))
        return {n: np.asarray(x) for n, x in run(args, wide(dy)).items()}


def check(case, seed=0):
    """Every result in its dtype: at most the rounding of 16 bits from the oracle, relative."""
    args, ids, dy = inputs(case, seed)
    if ids is not None:  # padding may hold anything
        args["x"] = np.where((ids == 0)[..., None], np.nan, args["x"]).astype(args["x"].dtype)
        dy = np.where((ids == 0)[..., None], np.nan, dy).astype(dy.dtype)
    got = kernel_results(case, args, ids, dy)
    if ids is not None:
        args["x"], dy = (np.nan_to_num(x.astype(np.float32)) for x in (args["x"], dy))
    want = reference_results(case, args, ids, dy)
    rounding = 4e-3 if case.dtype == "bfloat16" else 5e-4
    for name, ref in want.items():
        x = np.asarray(got[name], np.float64)
        bound = rounding if name in ("y", "dx", "dstate") else 1e-5
        error = np.linalg.norm(x - ref) / max(np.linalg.norm(ref), 1e-30)
        print(case, name, f"{error:.1e}")
        assert error < bound, (name, error)
    if ids is not None:
        for name in ("y", "dx"):
            assert not np.any(np.asarray(got[name])[ids == 0]), f"{name} at padding"


INTERPRETED = (
    Case(),
    Case(batch=2, length=34, width=3, documents=True, dtype="float16"),
    Case(length=1, bias=False, state=False),
    Case(length=150, channels=256, documents=True, state=False),  # more than one block
    Case(length=20, documents=True, bias=False),
    Case(length=130, width=2, silu=False),
)


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case, capfd):
    with interpret_shim.interpreted():
        check(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.fixture
def hopper(monkeypatch):
    """A process that sees one Hopper GPU, as far as limits look."""
    monkeypatch.setattr(limits, "hopper", lambda: None)


@pytest.mark.parametrize(
    "shape, dtype, reason",
    [
        ((1, 256, 96), "bfloat16", "D must be a multiple of 128, got 96"),
        ((1, 256, 128), "float32", "must be bfloat16 or float16, got float32"),
    ],
)
def test_the_op_tells_what_the_kernel_lacks(hopper, shape, dtype, reason):
    x, kernel = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct((4, shape[2]), "float32")
    assert ops.explain("causal_conv1d", x, kernel).impl == "reference"
    with pytest.raises(ops.ImplUnavailable, match=reason):
        ops.explain("causal_conv1d", x, kernel, impl="mosaic")
    with pytest.raises(ops.ImplUnavailable, match="2, 3 or 4 taps, got 1"):
        ops.explain("causal_conv1d", x.update(dtype="bfloat16"), kernel.update(shape=(1, 128)),
                    impl="mosaic")  # fmt: skip


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("documents", [False, True])
def test_the_op_runs_the_kernel(hopper, documents):
    args, ids, _ = inputs(Case(batch=2, length=32, channels=384, documents=documents))
    args["initial_state"] = args.pop("state")
    options = dict(activation="silu", segment_ids=ids, output_final_state=True)
    want = ops.causal_conv1d(**args, **options, impl="reference")
    with interpret_shim.interpreted():
        got = ops.causal_conv1d(**args, **options, impl="mosaic")
    for x, ref in zip(got, want, strict=True):
        np.testing.assert_allclose(np.float32(x), np.float32(ref), rtol=1e-2, atol=1e-6)


def specs(batch, length, channels, width=4, documents=False, dtype="bfloat16"):
    def spec(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, dtype)

    x = spec(batch, length, channels, dtype=dtype)
    state = spec(batch, width - 1, channels, dtype=dtype)
    ids = [spec(batch, length, dtype="int32")] if documents else []
    return x, spec(width, channels), spec(channels), state, *ids


def step(x, kernel, bias, state, ids=None):
    """The outputs and every gradient."""

    def fn(x, kernel, bias, state):
        return short_conv(x, kernel, bias, silu=True, segment_ids=ids, initial_state=state)

    y, pull = jax.vjp(fn, x, kernel, bias, state)
    return y, pull(y)


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "shape", [(2, 2049, 2048), pytest.param((1, 1, 128), marks=pytest.mark.slow)], ids=str
)
def test_lowers_for_cuda(shape, documents):
    args = specs(*shape, documents=documents, dtype="float16")
    jax.jit(step).trace(*args).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
def test_lowers_under_vmap_and_remat():
    args = specs(2, 200, 256, documents=True)
    wide = jax.tree.map(lambda x: jax.ShapeDtypeStruct((3, *x.shape), x.dtype), args)
    jax.jit(jax.vmap(step)).trace(*wide).lower(lowering_platforms=("cuda",))

    def loss(x, kernel, bias, state, ids):
        fn = jax.checkpoint(lambda x: short_conv(x, kernel, bias, silu=True, segment_ids=ids))
        return jnp.sum(fn(x).astype(jnp.float32))

    jax.jit(jax.grad(loss)).trace(*args).lower(lowering_platforms=("cuda",))


# Shared memory, registers at launch and spilled bytes of every kernel; a change is looked at.
RESOURCES = {
    ("short_conv_forward", False): (34816, 90, 0),
    ("short_conv_forward", True): (35840, 143, 0),
    ("short_conv_backward", False): (60416, 76, 0),
    ("short_conv_backward", True): (61440, 233, 0),
}


@pytest.mark.skipif(not offline.available(), reason="needs the CUDA plugin wheels")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("documents", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_compiles_offline(documents):
    for report in offline.compile_kernels(step, *specs(1, 8192, 2048, documents=documents)):
        print(documents, report)
        assert not report.bad_notes and not report.early_uses, report
        found = (report.smem, report.registers, report.spills)
        assert found == RESOURCES[report.name, documents], report


def need_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a Hopper GPU")


GPU = (
    Case(batch=2, length=2048, channels=512),
    Case(batch=2, length=2051, channels=384, width=3, state=False),
    Case(batch=2, length=2049, channels=512, documents=True),
    Case(batch=3, length=1000, channels=128, documents=True, dtype="float16", bias=False),
    Case(length=4099, channels=2304, width=2, documents=True, silu=False),
    Case(length=1),
    Case(length=1, documents=True),
    Case(batch=2, length=127, channels=256, dtype="float16"),
    Case(batch=2, length=129, channels=256, documents=True, state=False, bias=False),
    Case(length=8192, channels=2048, state=False, bias=False),
)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("case", GPU, ids=str)
def test_gpu_parity(case):
    need_gpu()
    check(case)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("documents", [False, True])
def test_gpu_deterministic(documents):
    need_gpu()
    case = Case(batch=2, length=3000, channels=512, documents=documents)
    args, ids, dy = inputs(case)
    first, *rest = (kernel_results(case, args, ids, dy) for _ in range(4))
    for other in rest:
        for name, x in first.items():
            assert np.array_equal(np.asarray(x), np.asarray(other[name])), name
