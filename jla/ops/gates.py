"""Log decays and write strengths of the recurrences, from a mixer's projections; all float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def softplus_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """``-exp(A_log) * softplus(a + dt_bias)``: log decay (natural log), below 0 (Mamba-2, GDN).

    ``a [..., H]`` with parameters ``[H]``, or ``a [..., H, K]`` with ``[H, 1]`` and ``[H, K]``.
    """
    return -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)


def bounded_decay(
    a: jax.Array, a_log: jax.Array, dt_bias: jax.Array, lower_bound: float
) -> jax.Array:
    """``lower_bound * sigmoid(exp(A_log) * (a + dt_bias))``: log decay above ``lower_bound`` (KDA).

    Shapes as in :func:`softplus_decay`.
    """
    return lower_bound * jax.nn.sigmoid(jnp.exp(a_log) * (a.astype(jnp.float32) + dt_bias))


def write_strength(b: jax.Array, allow_neg_eigval: bool) -> jax.Array:
    """``sigmoid(b)``, doubled where a write may flip a direction's sign (arXiv:2411.12537)."""
    beta = jax.nn.sigmoid(b.astype(jnp.float32))
    return beta * 2 if allow_neg_eigval else beta
