"""What kernels say they cannot run, from shapes and dtypes alone."""

import jax
import jax.numpy as jnp
import pytest

from jla import ops
from jla.kernels import limits


def qkv(k=128, v=128, dtype=jnp.bfloat16, heads=4):
    spec = jax.ShapeDtypeStruct
    return spec((1, 64, 2, k), dtype), spec((1, 64, 2, k), dtype), spec((1, 64, heads, v), dtype)


@pytest.fixture
def hopper(monkeypatch):
    """A process that sees one Hopper GPU, as far as limits look."""
    monkeypatch.setattr(limits, "hopper", lambda: None)


def test_the_device_is_asked_last_and_named():
    if jax.default_backend() == "gpu":
        pytest.skip("here it may run")
    assert "needs a Hopper GPU" in limits.gated_delta_rule(*qkv())
    assert "at most K=256" in limits.gated_delta_rule(*qkv(512))


@pytest.mark.parametrize(
    "args, options, reason",
    [
        (qkv(512), {}, "head sizes may be at most K=256 and V=512, got K=512 and V=128"),
        (qkv(dtype=jnp.float32), {}, "must all be bfloat16 or float16, got float32"),
        (qkv(), dict(scale=-1.0), "scale must be above 0"),
        (qkv(), dict(state_positions=jnp.zeros((1, 1), jnp.int32)), "no state_positions"),
    ],
)
def test_the_gated_delta_rule_kernel_tells_what_it_lacks(hopper, args, options, reason):
    assert reason in ops.explain("gated_delta_rule", *args, **options).refused["mosaic"]
    with pytest.raises(ops.ImplUnavailable, match="impl='mosaic' cannot run this call"):
        ops.explain("gated_delta_rule", *args, impl="mosaic", **options)


@pytest.mark.parametrize("kind", ["gated_delta_rule", "delta_rule", "simple_gla"])
def test_auto_takes_the_kernel_where_it_can_run(hopper, kind):
    for sizes in ((64, 64), (80, 96), (128, 128)):
        assert ops.explain(kind, *qkv(*sizes)).impl == "mosaic"
    assert ops.explain(kind, *qkv(640)).impl == "chunk"
    one_token = [jax.ShapeDtypeStruct((1, 1, *x.shape[2:]), x.dtype) for x in qkv()]
    assert ops.explain(kind, *one_token).impl == "reference"


def test_s13_more_rows_than_a_grid_holds_are_left_to_the_chunk_form(hopper):
    """An axis of CUDA's grids ends at 65535; rows of long batches of short sequences go beyond."""
    spec = jax.ShapeDtypeStruct
    for rows, impl in ((32767, "mosaic"), (70_000, "chunk")):
        heads = spec((rows, 64, 2, 64), jnp.bfloat16)
        for kind in ("gated_delta_rule", "simple_gla"):
            chosen = ops.explain(kind, heads, heads, heads)
            assert chosen.impl == impl
            refused = chosen.refused.get("mosaic", "")
            assert ("at most 32767 rows, got 70000" in refused) == (impl == "chunk")
        x, taps = spec((rows, 64, 384), jnp.bfloat16), spec((4, 384), jnp.bfloat16)
        assert ("got 70000" in (limits.short_conv(x, taps) or "")) == (impl == "chunk")


def test_ops_without_a_kernel_say_so(hopper):
    assert "no Hopper kernel" in ops.explain("kda", *qkv()).refused["mosaic"]
