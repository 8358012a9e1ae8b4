"""Rotary position embedding (RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rotate(x: jax.Array, positions: jax.Array, *, theta: float = 10000.0) -> jax.Array:
    """Rotates each pair of channels by its position's angle.

    Channel i is paired with i + D/2 (GPT-NeoX's halves, FLA's default); the angle is
    ``position * theta ** (-2i / D)`` radians, computed in float32.

    Args:
        x: ``[B, T, H, D]``, D even.
        positions: int ``[B, T]`` or ``[T]``.
        theta: base of the frequencies.

    Returns:
        ``[B, T, H, D]`` in x's dtype.
    """
    half = x.shape[-1] // 2
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None].astype(jnp.float32) * frequency
    wide = jnp.promote_types(x.dtype, jnp.float32)
    cos, sin = jnp.cos(angle)[..., None, :].astype(wide), jnp.sin(angle)[..., None, :].astype(wide)
    first, second = x[..., :half].astype(wide), x[..., half:].astype(wide)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)
