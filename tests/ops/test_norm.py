"""Normalisations, rotation, and residual mixing without parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, random

from jla.ops import l2_norm, layer_norm, rms_norm, rotate
from jla.ops.residual import mix_residuals


def test_l2_norm_and_its_slope_at_zero():
    """S07: eps stands under the root, the slope at zero is 1/sqrt(eps) and not NaN."""
    x = random(0, (3, 8))
    assert_close(l2_norm(x), x / np.sqrt((x.astype(np.float64) ** 2).sum(-1, keepdims=True) + 1e-6))
    slope = jax.jacobian(l2_norm)(jnp.zeros(8))
    assert_close(slope, 1000 * np.eye(8))
    assert l2_norm(jnp.ones((2, 4), jnp.bfloat16)).dtype == jnp.bfloat16


@pytest.mark.parametrize("activation", [None, "swish", "silu", "sigmoid"])
def test_rms_norm(activation):
    x, scale, gate = random(0, (3, 8)), random(1, (8,)), random(2, (3, 8))
    wide = x.astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-3) * scale
    if activation is None:
        assert_close(rms_norm(x, scale, eps=1e-3), want)
        return
    sigmoid = 1 / (1 + np.exp(-gate.astype(np.float64)))
    want = want * (sigmoid if activation == "sigmoid" else gate * sigmoid)
    assert_close(rms_norm(x, scale, gate=gate, activation=activation, eps=1e-3), want)


def test_statistics_are_float32():
    x = jnp.full((1, 512), 300.0, jnp.float16)  # its squares overflow float16
    assert_close(rms_norm(x), np.ones((1, 512)))
    assert rms_norm(x).dtype == jnp.float16


def test_rotation():
    """Channel i turns with channel i + D/2, by position * theta^(-2i/D)."""
    x = random(0, (2, 5, 3, 6))
    positions = np.array([[0, 1, 2, 3, 4], [7, 0, 0, 1, 100]])
    angle = positions[..., None, None] * 100.0 ** (-2 * np.arange(3) / 6)
    pairs = x[..., :3] + 1j * x[..., 3:]
    turned = pairs * np.exp(1j * angle)
    want = np.concatenate([turned.real, turned.imag], axis=-1)
    assert_close(rotate(x, jnp.asarray(positions), theta=100.0), want)


def test_residual_mix():
    sources = [random(i, (2, 3, 8)) for i in range(3)]
    query, scale = random(5, (8,)), random(6, (8,))
    keys = [
        s / np.sqrt((s.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
        for s in sources
    ]
    weights = np.exp(np.stack([k @ query for k in keys]))
    want = np.einsum("lbt,lbtd->btd", weights / weights.sum(0), np.stack(sources))
    assert_close(mix_residuals(query, sources, scale, eps=1e-5), want)


@pytest.mark.parametrize("groups", [1, 3])
def test_layer_norm_of_groups(groups):
    x, scale, bias = random(0, (2, 4, 12)) + 3, random(1, (12,)), random(2, (12,))
    wide = x.astype(np.float64).reshape(2, 4, groups, -1)
    wide = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    want = wide.reshape(x.shape)
    assert_close(layer_norm(x, groups=groups, eps=1e-3), want)
    assert_close(layer_norm(x, scale, bias, groups=groups, eps=1e-3), want * scale + bias)
