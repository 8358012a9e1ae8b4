"""RMS normalisation with learned scale, plain and gated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jla.ops.norm import GATES, rms_norm


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis (FLA's ``RMSNorm``).

    Args:
        num_features: D.
        eps: added to the mean square.
        param_dtype: dtype of ``scale [D]``, which starts at 1. Statistics are float32.
        rngs: unused, taken so that all modules are made alike.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.num_features, self.eps = num_features, eps
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]`` in x's dtype."""
        return rms_norm(x, self.scale[...], eps=self.eps)


class GatedRMSNorm(nnx.Module):
    """``rms_norm(x) * scale * act(gate)`` (FLA's ``FusedRMSNormGated``).

    Args:
        num_features: D.
        activation: ``"swish"``, ``"silu"`` (the same) or ``"sigmoid"``, of the gate.
        eps: added to the mean square.
        param_dtype: dtype of ``scale [D]``, which starts at 1. Everything is computed in float32.
        rngs: unused, taken so that all modules are made alike.

    Raises:
        ValueError: unknown activation.
    """

    def __init__(
        self,
        num_features: int,
        *,
        activation: str = "swish",
        eps: float = 1e-5,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        if activation not in GATES:
            raise ValueError(f"activation must be one of {sorted(GATES)}, got {activation!r}")
        self.num_features, self.activation, self.eps = num_features, activation, eps
        self.scale = nnx.Param(jnp.ones((num_features,), param_dtype))

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """``x`` and ``gate`` ``[..., D]`` to ``[..., D]`` in x's dtype."""
        return rms_norm(x, self.scale[...], gate=gate, activation=self.activation, eps=self.eps)


def head_norm(
    num_features: int, activation: str | None, eps: float, param_dtype
) -> RMSNorm | GatedRMSNorm:
    """The norm of a mixer's heads before its output projection; ungated if no activation is."""
    if activation is None:
        return RMSNorm(num_features, eps=eps, param_dtype=param_dtype)
    return GatedRMSNorm(num_features, activation=activation, eps=eps, param_dtype=param_dtype)
