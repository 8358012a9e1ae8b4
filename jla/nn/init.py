"""Initialisers that FLA's modules start from."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

Initializer = initializers.Initializer

# torch's default for Linear: uniform within 1/sqrt(fan_in).
torch_linear: Initializer = initializers.variance_scaling(1 / 3, "fan_in", "uniform")


def torch_depthwise(key, shape, dtype=jnp.float32, out_sharding=None) -> jax.Array:
    """torch's default for a depthwise Conv1d kernel ``[W, D]``: uniform within 1/sqrt(W)."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def identity(key, shape, dtype=jnp.float32, out_sharding=None) -> jax.Array:
    """A kernel that changes nothing."""
    return jnp.eye(*shape, dtype=dtype)


@functools.cache
def normal(std: float) -> Initializer:
    """Normal with standard deviation ``std``; one object per value, so modules compare equal."""
    return initializers.normal(std)


@functools.cache
def orthogonal(gain: float) -> Initializer:
    """``gain`` times an orthogonal matrix, made in float32 (there is no narrower QR)."""
    wide = initializers.orthogonal(gain)

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        return wide(key, shape, jnp.float32).astype(dtype)

    return init


@functools.cache
def uniform(bound: float) -> Initializer:
    """Uniform within ``bound`` of 0; one object per value."""

    def draw(key, shape, dtype=jnp.float32, out_sharding=None) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return draw


@functools.cache
def into_residual(num_layers: int) -> Initializer:
    """torch's default for Linear over ``sqrt(num_layers)``, for what so many layers add to a
    residual (GPT-2's scheme as the Mamba models have it)."""
    return initializers.variance_scaling(1 / (3 * num_layers), "fan_in", "uniform")


def decay_rate(key, shape, low: float = 0.0, high: float = 16.0) -> jax.Array:
    """``A_log`` float32: the log of a decay rate uniform in ``[low, high)``, above 0 (Mamba-2)."""
    low = max(low, float(jnp.finfo(jnp.float32).tiny))
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high))


def step_size_bias(
    key, shape, low: float = 1e-3, high: float = 0.1, floor: float = 1e-4
) -> jax.Array:
    """``dt_bias`` float32: inverse softplus of a step log-uniform in ``[low, high]`` (Mamba)."""
    log_step = jax.random.uniform(key, shape, jnp.float32, jnp.log(low), jnp.log(high))
    step = jnp.maximum(jnp.exp(log_step), floor)
    return step + jnp.log(-jnp.expm1(-step))


def linear(dtype, param_dtype, precision, kernel_init: Initializer | None, rngs: nnx.Rngs):
    """``nnx.Linear`` with a mixer's settings filled in: call it with ``(inputs, outputs)``.

    Kernels start from ``kernel_init`` (torch's default if None), biases from 0.
    """
    return functools.partial(
        nnx.Linear,
        use_bias=False,
        dtype=dtype,
        param_dtype=param_dtype,
        precision=precision,
        kernel_init=kernel_init or torch_linear,
        rngs=rngs,
    )
