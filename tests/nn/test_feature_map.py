"""Feature maps and the forget gates of HGRN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, random

from jla import convert
from jla.layers import LinearAttention
from jla.nn import init
from jla.nn.feature_map import count_features, feature_map
from jla.nn.lower_bound import log_forget_gate, lower_bounds
from jla.ops.activation import ACTIVATIONS

LINEAR = init.linear(None, jnp.float32, None, None, nnx.Rngs(0))
POSITIVE = ["hedgehog", "t2r", "dpfp", "elu", "relu"]


@pytest.mark.parametrize("name", [*POSITIVE, "elementwise_product", "identity", "swish"])
def test_sizes_and_signs(name):
    x = random(0, (2, 3, 4))
    y = feature_map(name, 4, LINEAR)(x)
    assert y.shape == (2, 3, count_features(name, 4))
    assert name not in POSITIVE or np.all(y >= 0)


def test_numbers():
    x = np.array([1.0, -2.0], np.float32)
    weights = np.exp([2, -4, -2, 4])
    assert_close(feature_map("hedgehog", 2, LINEAR)(x), weights / weights.sum())
    assert_close(feature_map("elu", 2, LINEAR)(x), [2, np.exp(-2)])
    # r = [1, 0, 0, 2]; turned by 1: [2, 1, 0, 0], by 2: [0, 2, 1, 0], by 3: [0, 0, 2, 1].
    dpfp = np.array([[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 2], [1, 0, 0, 4]], np.float32)
    assert_close(feature_map("dpfp", 2, LINEAR)(x), dpfp.ravel())
    assert_close(ACTIVATIONS["sqrelu"](x), [1, 0])
    assert_close(ACTIVATIONS["exact_gelu"](x), [0.8413447, -0.0455003])


def test_hedgehog_starts_where_the_model_says():
    assert_close(feature_map("hedgehog", 3, LINEAR).layer.kernel[...], np.eye(3))
    wide = feature_map("hedgehog", 3, LINEAR, init.normal(0.02)).layer.kernel[...]
    assert 0 < np.abs(wide).max() < 0.1


def test_an_unknown_map_is_named():
    with pytest.raises(ValueError, match="feature map must be one of .*got 'cosine'"):
        feature_map("cosine", 2, LINEAR)


def test_a_tied_map_is_one_map_under_two_torch_names():
    mixer = LinearAttention(hidden_size=8, num_heads=2, tie_feature_map_qk=True, rngs=nnx.Rngs(0))
    ours = convert.to_state_dict(mixer)
    assert not any(name.startswith("feature_map_k") for name in ours)
    twice = {name.replace("_q.", "_k."): x for name, x in ours.items() if "feature_map" in name}
    convert.load_state_dict(mixer, ours | twice)
    untied = LinearAttention(hidden_size=8, num_heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"missing tensors: feature_map_k.layer1.bias"):
        convert.load_state_dict(untied, ours)


def test_lower_bounds_rise_from_nothing():
    bounds = lower_bounds(random(0, (4, 3)))
    assert not np.any(bounds[0]) and np.all(np.diff(bounds, axis=0) > 0) and np.all(bounds < 1)
    shares = np.exp(random(0, (4, 3)))
    shares = shares / shares.sum(axis=0)
    assert_close(bounds[2], shares[1] + shares[2])


def test_a_forget_gate_above_its_bound():
    """Exact for every logit, with finite gradients, also where the bound is 0."""
    f = np.array([-200.0, -30.0, -1.0, 0.0, 5.0, 200.0], np.float32)
    for bound in (0.0, 1e-3, 0.9):
        wide = bound + (1 - bound) / (1 + np.exp(-np.asarray(f, np.float64)))
        bounds = np.full(f.shape, bound, np.float32)
        got, back = jax.vjp(log_forget_gate, f, bounds)
        assert_close(got, np.log(wide))
        assert all(np.all(np.isfinite(d)) for d in back(np.ones_like(f)))
    assert_close(log_forget_gate(f), log_forget_gate(f, np.zeros_like(f)))
    with pytest.raises(ValueError, match=r"lower_bound must be \(6,\), got shape \(2,\)"):
        log_forget_gate(f, np.zeros(2))
