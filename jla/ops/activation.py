"""Activations by the names that FLA's layers and configs use."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp


def identity(x: jax.Array) -> jax.Array:
    """``x``."""
    return x


def squared_relu(x: jax.Array) -> jax.Array:
    """``max(x, 0)^2``."""
    return jnp.square(jax.nn.relu(x))


def elu_plus_one(x: jax.Array) -> jax.Array:
    """``x + 1`` for x >= 0, else ``e^x``: positive, and exact where ``elu(x) + 1`` cancels."""
    return jnp.where(x >= 0, x + 1, jnp.exp(jnp.minimum(x, 0)))


def exact_gelu(x: jax.Array) -> jax.Array:
    """``x`` times the normal distribution function of x, which ``"gelu"`` approximates by tanh."""
    return jax.nn.gelu(x, approximate=False)


# FLA's ``ACT2FN``; its gelu is the one by tanh.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "exact_gelu": exact_gelu,
    "gelu": jax.nn.gelu,
    "logsigmoid": jax.nn.log_sigmoid,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "silu": jax.nn.silu,
    "sqrelu": squared_relu,
    "swish": jax.nn.silu,
}
