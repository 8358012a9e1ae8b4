"""Gates of the delta-rule mixers: their forms, their ranges, where they start."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, random

from jla import convert
from jla.layers import KDA, GatedDeltaNet, GatedDeltaNet2, GatedDeltaProduct
from jla.ops.gates import bounded_decay, softplus_decay


def zeroed(mixer, *names):
    for name in names:
        parameter = getattr(mixer, name)
        parameter[...] = jnp.zeros_like(parameter[...])
    return mixer


@pytest.mark.parametrize(("bound", "log_decay"), [(None, -0.693147), (-5.0, -2.5)])
def test_s14_the_config_chooses_the_form_of_the_gate(bound, log_decay):
    """Of an input of zeros: nothing is written, so the state shows the decay alone."""
    mixer = KDA(8, head_dim=4, num_heads=2, lower_bound=bound, rngs=nnx.Rngs(0))
    zeroed(mixer, "A_log", "dt_bias")
    cache = mixer.new_cache(1)
    cache["recurrent_state"] = jnp.ones_like(cache["recurrent_state"])
    _, after = mixer(jnp.zeros((1, 3, 8)), cache=cache)
    want = np.full_like(cache["recurrent_state"], np.exp(3 * log_decay))
    assert_close(after["recurrent_state"], want)


@pytest.mark.parametrize("size", [0.0, 1.0, 1e3, 1e30])
def test_gates_stay_in_range_and_finite(size):
    """S10: however large the projection, the log decay is at most 0 and gradients are finite."""
    a = size * jnp.linspace(-1, 1, 9, dtype=jnp.bfloat16)[:, None]
    a_log, dt_bias = jnp.log(jnp.array([15.7])), jnp.array([0.3])
    for gate, low in ((softplus_decay, -np.inf), (lambda *x: bounded_decay(*x, -5.0), -5.0)):
        g, pull = jax.vjp(gate, a, a_log, dt_bias)
        assert g.dtype == jnp.float32
        assert np.all(g <= 0) and np.all(g >= low)
        assert all(np.all(np.isfinite(d)) for d in pull(jnp.ones_like(g)))


def test_where_decay_starts():
    """As FLA: rates of KDA and GDN-2 in (1, 16); with a safe gate A_log is 0."""
    make = dict(hidden_size=8, head_dim=4, num_heads=64, rngs=nnx.Rngs(0))
    for cls in (KDA, GatedDeltaNet2):
        mixer = cls(**make)
        rate, step = jnp.exp(mixer.A_log[...]), jax.nn.softplus(mixer.dt_bias[...])
        assert np.all((rate > 1) & (rate < 16)) and np.ptp(rate) > 5
        assert np.all((step > 0.9e-3) & (step < 0.11))
        assert mixer.dt_bias.shape == (64 * 4,)
    assert not np.any(KDA(**make, safe_gate=True, lower_bound=-5.0).A_log[...])


def test_one_write_per_token_is_gated_deltanet():
    """Same tensors, same numbers: Gated DeltaProduct with n = 1."""
    sizes = dict(hidden_size=24, head_dim=6, num_heads=3, num_v_heads=6, expand_v=1.5)
    one = GatedDeltaProduct(**sizes, num_householder=1, rngs=nnx.Rngs(0))
    other = GatedDeltaNet(**sizes, allow_neg_eigval=True, rngs=nnx.Rngs(1))
    convert.load_state_dict(other, convert.to_state_dict(one))
    x = random(0, (2, 9, 24))
    call = nnx.jit(lambda mixer, x: mixer(x))
    assert_close(call(one, x), call(other, x))
