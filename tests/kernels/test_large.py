"""Arrays of more than 2^31 elements (S13): the last row of a batch equals the same row alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jla import ops

BATCH, LENGTH, HEADS, GROUPS, KEY, VALUE = 8, 131_136, 16, 2, 64, 128
assert BATCH * LENGTH * HEADS * VALUE > 2**31


def heads(key):
    """q, k, v, g."""
    keys = jax.random.split(key, 4)
    small = (BATCH, LENGTH, GROUPS, KEY)
    q, k = (0.125 * jax.random.normal(key, small, jnp.bfloat16) for key in keys[:2])
    v = jax.random.normal(keys[2], (BATCH, LENGTH, HEADS, VALUE), jnp.bfloat16)
    return q, k, v, -0.1 * jax.random.uniform(keys[3], (BATCH, LENGTH, HEADS))


def delta(key):
    q, k, v, g = heads(key)
    return lambda *x: ops.gated_delta_rule(*x, impl="mosaic")[0], (q, k, v, g, 1 + 5 * g)


def scalar(key):
    return lambda *x: ops.simple_gla(*x, impl="mosaic")[0], heads(key)


def conv(key):
    x = jax.random.normal(key, (BATCH, LENGTH, HEADS * VALUE), jnp.bfloat16)
    taps = jax.random.normal(key, (4, x.shape[-1]))
    return lambda x: ops.causal_conv1d(x, taps, activation="silu", impl="mosaic")[0], (x,)


def norm(key):
    x = jax.random.normal(key, (BATCH, LENGTH, HEADS, VALUE), jnp.bfloat16)
    return lambda x: ops.rms_norm(x, jnp.ones(VALUE), gate=x, impl="mosaic"), (x,)


@pytest.mark.gpu
@pytest.mark.timeout(300, method="thread")
@pytest.mark.xdist_group("large")
@pytest.mark.parametrize("make", [delta, scalar, conv, norm], ids=lambda make: make.__name__)
def test_rows_beyond_two_to_the_31_elements(make):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a Hopper GPU")
    run, operands = make(jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=1)
    def last_row(operands, alone):
        """Output and gradients of the last row, of the batch or of that row by itself."""
        operands = tuple(x[-1:] for x in operands) if alone else operands
        o, pull = jax.vjp(run, *operands)
        return [x[-1] for x in (o, *pull(o))]

    pairs = zip(last_row(operands, False), last_row(operands, True), strict=True)
    for got, want in pairs:
        got, want = np.asarray(got, np.float32), np.asarray(want, np.float32)
        assert np.linalg.norm(got - want) < 1e-2 * np.linalg.norm(want)
