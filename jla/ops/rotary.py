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
    return turn(x, positions[..., None, None].astype(jnp.float32) * frequency)


def turn(x: jax.Array, angle: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotates pairs of channels, channels i and i + D/2 or, interleaved, 2i and 2i + 1.

    Args:
        x: ``[..., D]``, D even.
        angle: radians ``[..., S]``, S at most D/2; channels of later pairs stay.
        interleaved: which channels make a pair.

    Returns:
        ``[..., D]`` in x's dtype, computed in float32.
    """
    count, half = angle.shape[-1], x.shape[-1] // 2
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    cos, sin = jnp.cos(angle).astype(wide.dtype), jnp.sin(angle).astype(wide.dtype)
    pairs = wide.reshape(*x.shape[:-1], *((half, 2) if interleaved else (2, half)))
    axis = -1 if interleaved else -2
    first, second = pairs.take(0, axis), pairs.take(1, axis)
    a, b = first[..., :count], second[..., :count]
    first = jnp.concatenate([a * cos - b * sin, first[..., count:]], axis=-1)
    second = jnp.concatenate([a * sin + b * cos, second[..., count:]], axis=-1)
    return jnp.stack([first, second], axis=axis).reshape(x.shape).astype(x.dtype)
