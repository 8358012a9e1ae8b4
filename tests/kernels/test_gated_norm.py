"""Gated norm kernels: interpreter parity, lowering, offline compile, and parity on a GPU."""

import dataclasses
import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import interpret_shim  # noqa: E402
import offline  # noqa: E402

from jla import ops  # noqa: E402
from jla.kernels import gated_norm as kernels  # noqa: E402
from jla.kernels import limits  # noqa: E402
from jla.kernels.gated_norm import gated_norm  # noqa: E402

EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    shape: tuple[int, ...] = (3, 50, 64)
    dtype: str = "bfloat16"
    activation: str = "swish"
    scale: bool = True
    group: int | None = None  # of a norm after the gate

    def __str__(self):
        sizes = "x".join(map(str, self.shape))
        name = f"{sizes}-{self.dtype}-{self.activation}" + ("" if self.scale else "-unscaled")
        return name + (f"-{self.group}" if self.group else "")

    @property
    def ways(self):
        order = dict(norm_before_gate=not self.group, group_size=self.group)
        return dict(activation=self.activation) | order


def inputs(case, seed=0):
    """x, scale, gate and the cotangent, numpy; rows of very different sizes, one of zeros."""
    rng = np.random.default_rng(seed)
    x, gate, dy = (rng.standard_normal(case.shape).astype(np.float32) for _ in range(3))
    sizes = 10.0 ** rng.uniform(-2, 1, (*case.shape[:-1], 1))
    x = x * sizes.astype(np.float32)
    x[0, ..., :] = x[0, ..., :] * (np.arange(x[0, ..., :1].size).reshape(x[0, ..., :1].shape) != 1)
    gate = gate * 4
    scale = rng.standard_normal(case.shape[-1]).astype(np.float32) if case.scale else None
    dtype = jnp.dtype(case.dtype)
    return x.astype(dtype), scale, gate.astype(dtype), dy.astype(dtype)


def reference(x, scale, gate, *, activation, norm_before_gate, group_size):
    s = 1 / (1 + jnp.exp(-gate))
    act = s if activation == "sigmoid" else gate * s
    x = x if norm_before_gate else x * act
    groups = x.reshape(*x.shape[:-1], -1, group_size or x.shape[-1])
    y = (groups / jnp.sqrt(jnp.mean(groups * groups, -1, keepdims=True) + EPS)).reshape(x.shape)
    y = y if scale is None else y * scale
    return y * act if norm_before_gate else y


def with_gradients(fn, x, scale, gate, dy):
    """y, dx, dgate and dscale if there is a scale."""
    if scale is None:
        y, pull = jax.vjp(lambda x, gate: fn(x, None, gate), x, gate)
        dx, dgate = pull(dy)
        return dict(y=y, dx=dx, dgate=dgate)
    y, pull = jax.vjp(fn, x, scale, gate)
    return dict(zip(("y", "dx", "dscale", "dgate"), (y, *pull(dy)), strict=True))


def kernel_results(case, args):
    fn = functools.partial(gated_norm, eps=EPS, **case.ways)
    args = [None if x is None else jnp.asarray(x) for x in args]
    return jax.jit(lambda *args: with_gradients(fn, *args))(*args)


def reference_results(case, args):
    fn = functools.partial(reference, **case.ways)
    with jax.enable_x64(True):
        wide = [None if x is None else jnp.asarray(np.asarray(x, np.float64)) for x in args]
        run = jax.jit(lambda *args: with_gradients(fn, *args))
        return {n: np.asarray(x) for n, x in run(*wide).items()}


def check(case, seed=0):
    """Every result within the rounding of its dtype of the oracle; dx row by row."""
    args = inputs(case, seed)
    got, want = kernel_results(case, args), reference_results(case, args)
    rounding = 4e-3 if case.dtype == "bfloat16" else 6e-4
    for name, ref in want.items():
        x = np.asarray(got[name], np.float64)
        axes = -1 if name in ("y", "dx") else None
        size = np.linalg.norm(ref, axis=axes)
        error = np.max(np.linalg.norm(x - ref, axis=axes) / np.maximum(size, 1e-3))
        print(case, name, f"{error:.1e}")
        assert error < (2e-5 if name == "dscale" else rounding), (name, error)


INTERPRETED = (
    Case(),
    Case((1, 128), activation="sigmoid", dtype="float16"),
    Case((2, 70, 1, 256), scale=False),
    Case((9, 32, 256)),
    Case((3, 5, 512), group=512),
    Case((7, 1536), group=768, activation="sigmoid", dtype="float16"),
    Case((3, 512), group=256, scale=False),
)


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_interpreted(case, capfd, monkeypatch):
    monkeypatch.setattr(kernels.cm, "SMS", 1)
    monkeypatch.setattr(kernels, "SMEM", 0)  # one block, so that its ring comes round
    with interpret_shim.interpreted():
        check(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


def specs(*shape, dtype="bfloat16"):
    x = jax.ShapeDtypeStruct(shape, dtype)
    return x, jax.ShapeDtypeStruct(shape[-1:], "float32"), x


def step(x, scale, gate, **ways):
    """The output and every gradient."""
    fn = functools.partial(gated_norm, activation="swish", eps=EPS, **ways)
    y, pull = jax.vjp(fn, x, scale, gate)
    return y, pull(y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(1, 64), (2, 333, 4, 128), (5, 1000, 256)], ids=str)
def test_lowers_for_cuda(shape, dtype):
    jax.jit(step).trace(*specs(*shape, dtype=dtype)).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim, group", [(1536, 1536), (4096, 512)])
def test_lowers_for_cuda_gate_first(dim, group, dtype):
    fn = functools.partial(step, norm_before_gate=False, group_size=group)
    jax.jit(fn).trace(*specs(2, 33, dim, dtype=dtype)).lower(lowering_platforms=("cuda",))


def test_lowers_under_vmap_and_remat():
    x, scale, gate = specs(3, 200, 128)
    fn = jax.vmap(step, in_axes=(0, None, 0))
    jax.jit(fn).trace(x, scale, gate).lower(lowering_platforms=("cuda",))

    def loss(x, scale, gate):
        fn = jax.checkpoint(lambda x: gated_norm(x, scale, gate, activation="sigmoid", eps=EPS))
        return jnp.sum(fn(x).astype(jnp.float32))

    jax.jit(jax.grad(loss)).trace(x, scale, gate).lower(lowering_platforms=("cuda",))


# Shared memory, registers at launch and spilled bytes of every kernel; a change is looked at.
RESOURCES = {
    ("gated_norm_forward", 64): (100352, 132, 0),
    ("gated_norm_forward", 128): (100352, 151, 0),
    ("gated_norm_forward", 256): (198656, 169, 0),
    ("gated_norm_backward", 64): (100352, 201, 0),
    ("gated_norm_backward", 128): (100352, 254, 0),
    ("gated_norm_backward", 256): (198656, 255, 32),
    ("gated_norm_wide_forward", 1536): (2048, 56, 0),
    ("gated_norm_wide_forward", 4096): (2048, 117, 0),
    ("gated_norm_wide_backward", 1536): (2048, 157, 0),
    ("gated_norm_wide_backward", 4096): (2048, 255, 24),
}


@pytest.mark.skipif(not offline.available(), reason="needs the CUDA plugin wheels")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize(
    "dim", [128, 4096, *(pytest.param(dim, marks=pytest.mark.slow) for dim in (64, 256, 1536))]
)
def test_compiles_offline(dim):
    fn = functools.partial(step, norm_before_gate=dim in kernels.DIMS)
    shape = (8, 2048, 16, dim) if dim in kernels.DIMS else (8, 2048, dim)
    for report in offline.compile_kernels(fn, *specs(*shape)):
        print(dim, report)
        assert not report.bad_notes and not report.early_uses, report
        found = (report.smem, report.registers, report.spills)
        assert found == RESOURCES[report.name, dim], report


def test_refuses():
    x = jnp.zeros((4, 64), jnp.bfloat16)
    run = functools.partial(gated_norm, activation="swish", eps=EPS)
    with pytest.raises(NotImplementedError, match="bfloat16"):
        run(x.astype(jnp.float32), None, x)
    with pytest.raises(NotImplementedError, match="D=32"):
        run(x[:, :32], None, x[:, :32])
    with pytest.raises(NotImplementedError, match="groups of 64"):
        run(x, None, x, norm_before_gate=False)
    with pytest.raises(ValueError, match="agree"):
        run(x, None, x[:2])


@pytest.fixture
def hopper(monkeypatch):
    """A process that sees one Hopper GPU, as far as limits look."""
    monkeypatch.setattr(limits, "hopper", lambda: None)


@pytest.mark.parametrize(
    "options, reason",
    [
        (dict(gate=None), "there is no gate"),
        (dict(gate=jax.ShapeDtypeStruct((8, 64), "float32")), "got bfloat16, float32"),
        (dict(activation="relu"), "got 'relu'"),
        (dict(eps=0.0), "eps must be above 0"),
        (dict(group_size=32), "before the gate it normalises all of D"),
        (dict(norm_before_gate=False), "groups of 256, 512 .. 4096 channels, got 64"),
    ],
)
def test_the_op_tells_what_the_kernel_lacks(hopper, options, reason):
    x = jax.ShapeDtypeStruct((8, 64), "bfloat16")
    options = dict(gate=x) | options
    assert ops.explain("rms_norm", x, **options).impl == "reference"
    with pytest.raises(ops.ImplUnavailable, match=reason):
        ops.explain("rms_norm", x, **options, impl="mosaic")


@pytest.mark.skipif(not interpret_shim.supported(), reason="interpreter patch is for JAX 0.11.2")
@pytest.mark.timeout(300, method="thread")
def test_the_op_runs_the_kernel(hopper):
    x, scale, gate, _ = inputs(Case((2, 24, 3, 64)))
    with interpret_shim.interpreted(), ops.use_impl("mosaic"):
        ungated = ops.rms_norm(x, scale)  # what has no kernel is left alone by a pin for all
        got = ops.rms_norm(x, scale, gate=gate)
    assert np.array_equal(ungated, ops.rms_norm(x, scale))
    want = ops.rms_norm(x, scale, gate=gate)
    np.testing.assert_allclose(np.float32(got), np.float32(want), rtol=1e-2, atol=1e-6)


def need_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip("needs a Hopper GPU")


GPU = (
    Case((2, 1024, 16, 128)),
    Case((2, 1001, 3, 128), activation="sigmoid", dtype="float16"),
    Case((100_003, 64)),
    Case((4, 2048, 4, 256)),
    Case((50_001, 256), activation="sigmoid", scale=False),
    Case((3, 700, 64), dtype="float16", scale=False),
    Case((1, 128)),
    Case((1, 1, 1, 64), activation="silu"),
    Case((65, 256), dtype="float16"),
    Case((2, 1001, 4096), group=4096),
    Case((1, 700, 1536), group=1536, activation="sigmoid", dtype="float16"),
    Case((333, 4096), group=1024),
    Case((5000, 2560), group=2560, scale=False),
    Case((3, 768), group=768),
)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("case", GPU, ids=str)
def test_gpu_parity(case):
    need_gpu()
    check(case)


@pytest.mark.gpu
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("dim", [*kernels.DIMS, 4096])
def test_gpu_deterministic(dim):
    need_gpu()
    case = Case((30_001, dim), group=None if dim in kernels.DIMS else dim)
    args = inputs(case)
    first, *rest = (kernel_results(case, args) for _ in range(4))
    for other in rest:
        for name, x in first.items():
            assert np.array_equal(np.asarray(x), np.asarray(other[name])), name
