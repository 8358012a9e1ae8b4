"""Building blocks with parameters: numbers, dtypes, initial values, bad arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, random

from jla.nn import (
    GatedMLP,
    GatedRMSNorm,
    GroupNorm,
    LayerNorm,
    LoRA,
    RMSNorm,
    ShortConvolution,
    head_norm,
    init,
)
from jla.nn.mlp import power_glu
from jla.nn.param import float32_param, is_float32_param
from jla.ops import causal_conv1d, layer_norm, rms_norm
from jla.ops.activation import ACTIVATIONS

RNGS = nnx.Rngs(0)


def test_norms():
    x, gate = random(0, (2, 3, 8)), random(1, (2, 3, 8))
    plain, gated = RMSNorm(8, eps=1e-2), GatedRMSNorm(8, activation="sigmoid", eps=1e-2)
    for norm in (plain, gated):
        assert_close(norm.scale[...], np.ones(8))
        norm.scale[...] = random(2, (8,))
    assert_close(plain(x), rms_norm(x, random(2, (8,)), eps=1e-2))
    want = rms_norm(x, random(2, (8,)), gate=gate, activation="sigmoid", eps=1e-2)
    assert_close(gated(x, gate), want)
    assert RMSNorm(8, param_dtype=jnp.bfloat16).scale.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="activation must be one of .*got 'tanh'"):
        GatedRMSNorm(8, activation="tanh")
    with pytest.raises(ValueError, match=r"activation must be one of \['sigmoid', .*got 'relu'"):
        head_norm(8, "relu", 1e-5, jnp.float32)
    for norm in (RMSNorm(8, elementwise_affine=False), head_norm(8, None, 1e-5, jnp.float32)):
        assert_close(norm(x), rms_norm(x))
    assert not jax.tree.leaves(nnx.state(RMSNorm(8, elementwise_affine=False)))
    relu = head_norm(8, "relu", 1e-5, jnp.float32, elementwise_affine=False, allowed=ACTIVATIONS)
    assert_close(relu(x, gate), rms_norm(x) * np.maximum(gate, 0))


@pytest.mark.parametrize("bias", [False, True])
def test_short_convolution(bias):
    conv = ShortConvolution(5, 3, bias, rngs=RNGS)
    assert conv.kernel.shape == (3, 5) and np.all(np.abs(conv.kernel[...]) <= 3**-0.5)
    if bias:
        assert_close(conv.bias[...], np.zeros(5))
        conv.bias[...] = random(1, (5,))
    x, ids = random(0, (2, 6, 5)), np.array([[1, 1, 2, 0, 2, 2]] * 2)
    y, window = conv(x, segment_ids=ids)
    assert window is None
    taps, offset = conv.kernel[...], conv.bias[...] if bias else None
    want, _ = causal_conv1d(x, taps, offset, activation="silu", segment_ids=ids)
    assert_close(y, want)
    y, window = conv(x, segment_ids=ids, window=conv.new_window(2, jnp.bfloat16))
    assert_close(y, want)
    assert window.dtype == jnp.bfloat16 and window.shape == (2, 2, 5)
    for options, message in (
        ({"kernel_size": 0}, "kernel_size must be at least 1, got 0"),
        ({"kernel_size": 3, "activation": "relu"}, "activation must be one of .*got 'relu'"),
    ):
        with pytest.raises(ValueError, match=message):
            ShortConvolution(5, **options, rngs=RNGS)


@pytest.mark.parametrize("act", ["swish", "powlu"])
def test_gated_mlp(act):
    mlp = GatedMLP(6, intermediate_size=10, hidden_act=act, rngs=RNGS)
    x = random(0, (2, 3, 6))
    gate, up = x @ mlp.gate_proj.kernel[...], x @ mlp.up_proj.kernel[...]
    inner = (jax.nn.silu(gate) if act == "swish" else power_glu(gate)) * up
    assert_close(mlp(x), inner @ mlp.down_proj.kernel[...])
    assert mlp(x.astype(jnp.bfloat16)).dtype == jnp.float32  # float32 parameters decide
    narrow = GatedMLP(6, intermediate_size=10, dtype=jnp.bfloat16, rngs=RNGS)
    assert narrow(x).dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"hidden_act must be one of \['powlu', 'swish'\], got"):
        GatedMLP(6, hidden_act="gelu", rngs=RNGS)


def test_inner_width_of_the_mlp():
    def width(*args):
        return nnx.eval_shape(lambda: GatedMLP(*args, rngs=nnx.Rngs(0))).intermediate_size

    assert width(1024) == 2816  # 2/3 * 4 * 1024 = 2730.7, up to a multiple of 256
    assert width(1024, 3) == 2048
    assert width(1024, None, 77) == 77


def test_power_glu():
    x = np.array([-2.0, 0.0, 1.0, 4.0], np.float32)
    sigmoid = 1 / (1 + np.exp(-x))
    powers = np.array([-2.0, 0.0, 1.0, 4.0 ** (3 / (2 + 1))])
    assert_close(power_glu(jnp.asarray(x)), sigmoid * powers)
    assert np.all(np.isfinite(jax.vmap(jax.grad(power_glu))(jnp.asarray(x))))


def test_initial_decay_rates_and_step_sizes():
    """S12, FLA's ranges: rates in (0, 16), steps in [0.001, 0.1], both float32."""
    rate = jnp.exp(init.decay_rate(jax.random.key(0), (1000,)))
    assert rate.dtype == jnp.float32 and 0 < rate.min() < 1 and 15 < rate.max() < 16.1
    step = jax.nn.softplus(init.step_size_bias(jax.random.key(1), (1000,)))
    assert np.all((step > 0.99e-3) & (step < 0.101)) and step.min() < 2e-3 and step.max() > 0.05
    # Log-uniform: half of the steps below the geometric mean.
    assert 0.4 < np.mean(step < 1e-2) < 0.6


def test_float32_parameters_know_themselves():
    kept = float32_param(jnp.ones(3, jnp.bfloat16))
    assert kept.dtype == jnp.float32 and is_float32_param(kept)
    assert not is_float32_param(nnx.Param(jnp.ones(3)))


def test_torch_default_initialisers():
    kernel = init.torch_linear(jax.random.key(0), (400, 300), jnp.float32)
    assert np.abs(kernel).max() <= 400**-0.5 and np.abs(kernel).max() > 0.99 * 400**-0.5
    assert init.normal(0.02) is init.normal(0.02)


def test_layer_and_group_norm():
    x = random(0, (2, 5, 6))
    for norm, groups in (
        (LayerNorm(6, eps=1e-3, bias=True), 1),
        (GroupNorm(3, 6, eps=1e-3, bias=True), 3),
    ):
        norm.scale[...], norm.bias[...] = random(1, (6,)), random(2, (6,))
        want = layer_norm(x, norm.scale[...], norm.bias[...], groups=groups, eps=1e-3)
        assert_close(norm(x), want)
    assert LayerNorm(6).bias is None
    bare = GroupNorm(2, 6, elementwise_affine=False, bias=True)
    assert bare.scale is None and bare.bias is None
    assert_close(bare(x), layer_norm(x, groups=2))
    with pytest.raises(ValueError, match="num_features=6 must be a multiple of num_groups=4"):
        GroupNorm(4, 6)


def test_low_rank_projection_starts_as_its_bias():
    bias, x = random(1, (8,)), random(0, (2, 3, 6))
    lora = LoRA(6, 8, 4, "sigmoid", jnp.asarray(bias), rngs=RNGS)
    up = lora.up.kernel[...]
    # Orthogonal rows of length 0.1, and a bottleneck of sigmoid(0).
    assert_close(up @ up.T, 0.01 * np.eye(4))
    assert_close(lora(x), np.broadcast_to(bias + 0.5 * up.sum(0), (2, 3, 8)))
    lora.down.kernel[...] = random(2, (6, 4))
    want = 1 / (1 + np.exp(-(x @ lora.down.kernel[...]))) @ up + bias
    assert_close(lora(x), want)
    assert LoRA(6, 8, 4, rngs=RNGS).up.bias is None
    with pytest.raises(ValueError, match="activation must be one of .*got 'gelu'"):
        LoRA(6, 8, 4, "gelu", rngs=RNGS)
