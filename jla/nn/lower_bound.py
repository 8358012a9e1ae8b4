"""Forget gates that a layer's depth keeps open (HGRN, arXiv:2311.04823)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def lower_bounds(logits: jax.Array) -> jax.Array:
    """Bounds ``[L, D]``, rising from 0 in the first layer towards 1, from parameters ``[L, D]``.

    ``cumsum(softmax(logits over layers))`` less the first layer's share, in float32.
    """
    shares = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), axis=0)
    return jnp.cumsum(shares, axis=0) - shares[0]


def log_forget_gate(f: jax.Array, lower_bound: jax.Array | None = None) -> jax.Array:
    """``log(b + (1 - b) sigmoid(f))`` of logits ``f [..., D]`` and bounds ``b [D]`` (None: 0).

    Natural log, float32; finite with finite gradients for every f, also where b is 0.

    Raises:
        ValueError: bounds of another shape than ``[D]``.
    """
    g = jax.nn.log_sigmoid(f.astype(jnp.promote_types(f.dtype, jnp.float32)))
    if lower_bound is None:
        return g
    if lower_bound.shape != f.shape[-1:]:
        raise ValueError(f"lower_bound must be {f.shape[-1:]}, got shape {lower_bound.shape}")
    above = jnp.log1p(-lower_bound) + g
    bounded = lower_bound > 0
    bound = jnp.log(jnp.where(bounded, lower_bound, 1))
    return jnp.where(bounded, jnp.logaddexp(bound, above), above)
