"""Normalisations without parameters of their own; statistics in float32."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from jla.kernels import limits
from jla.kernels.sharding import per_device
from jla.ops.activation import ACTIVATIONS
from jla.ops.dispatch import Choice, select

# The gates of FLA's fused norm; the norm here takes any of ACTIVATIONS.
GATES = ("swish", "silu", "sigmoid")


def l2_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """``x / sqrt(sum(x^2) + eps)`` over the last axis, in x's dtype.

    ``eps`` stands under the root, so the gradient at ``x = 0`` is ``1/sqrt(eps)`` and finite (FLA's
    ``l2norm``).
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + eps)).astype(x.dtype)


def l1_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
    """``x / max(sum(|x|), eps)`` over the last axis, in x's dtype."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    size = jnp.sum(jnp.abs(wide), axis=-1, keepdims=True)
    return (wide / jnp.maximum(size, eps)).astype(x.dtype)


def layer_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    bias: jax.Array | None = None,
    *,
    groups: int = 1,
    eps: float = 1e-5,
) -> jax.Array:
    """``(x - mean) / sqrt(var + eps) * scale + bias``, with statistics per group of channels.

    Args:
        x: ``[..., D]``, D a multiple of ``groups``.
        scale, bias: ``[D]`` or None (1 and 0).
        groups: neighbouring channels share their statistics: 1 is layer, more is group norm.
        eps: added to the variance.

    Returns:
        ``[..., D]`` in x's dtype; everything before the last cast is float32.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    y = wide - jnp.mean(wide, axis=-1, keepdims=True)
    y = y * lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    y = y.reshape(x.shape)
    if scale is not None:
        y = y * scale.astype(y.dtype)
    if bias is not None:
        y = y + bias.astype(y.dtype)
    return y.astype(x.dtype)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    gate: jax.Array | None = None,
    activation: str = "swish",
    norm_before_gate: bool = True,
    group_size: int | None = None,
    eps: float = 1e-5,
    impl: str = "auto",
) -> jax.Array:
    """``x / sqrt(mean(x^2) + eps) * scale``, times ``act(gate)`` if a gate is given.

    Args:
        x: ``[..., D]``.
        scale: ``[D]`` or None (1).
        gate: ``[..., D]`` or None.
        activation: a key of ``ACTIVATIONS``, applied to the gate.
        norm_before_gate: normalise x, then gate it; else normalise the gated x.
        group_size: features that are normalised together, a divisor of D; all if None.
        eps: added to the mean square.
        impl: ``"auto"``, ``"reference"`` or, gated, ``"mosaic"`` (Hopper kernel).

    Returns:
        ``[..., D]`` in x's dtype; everything before the last cast is float32.

    Raises:
        ImplUnavailable: the named impl cannot run this call.
    """
    # Without a gate XLA does as well, and an impl pinned for all ops does not mean this.
    if gate is not None or impl != "auto":
        facts = dict(gate=gate, activation=activation, eps=eps)
        ways = dict(norm_before_gate=norm_before_gate, group_size=group_size)
        if choose(x, scale, impl=impl, **facts, **ways).impl == "mosaic":
            return _on_hopper(x, scale, gate, activation=activation, eps=eps, **ways)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    factor = 1 if gate is None else ACTIVATIONS[activation](gate.astype(wide.dtype))
    wide = wide if norm_before_gate else wide * factor
    groups = wide if group_size is None else wide.reshape(*x.shape[:-1], -1, group_size)
    y = groups * lax.rsqrt(jnp.mean(groups * groups, axis=-1, keepdims=True) + eps)
    y = y.reshape(x.shape)
    if scale is not None:
        y = y * scale.astype(wide.dtype)
    return (y * factor if norm_before_gate else y).astype(x.dtype)


def _on_hopper(x, scale, gate, **options):
    from jla.kernels import gated_norm as kernels

    def kernel(x, scale, gate):
        return kernels.gated_norm(x, scale, gate, **options)

    return per_device(kernel, kernels.layout(x.ndim), 0, x, scale, gate)


def choose(x, scale=None, *, impl: str = "auto", **facts) -> Choice:
    """Which implementation of :func:`rms_norm` a call runs; decided from static facts only."""
    refusal = limits.gated_norm(x, **facts)
    # A step of decoding is too small for a kernel of its own.
    order = ("mosaic", "reference") if math.prod(x.shape[:-1]) >= 2048 else ("reference",)
    return select("rms_norm", impl, {"reference": None, "mosaic": refusal}, order)
