"""Normalisations with learned scale."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.nn.check import check_choice
from jla.ops.activation import ACTIVATIONS
from jla.ops.norm import GATES, layer_norm, rms_norm


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis (FLA's ``RMSNorm``).

    Args:
        num_features: D.
        eps: added to the mean square.
        elementwise_affine: learn a scale; else there is none.
        param_dtype: dtype of ``scale [D]``, which starts at 1. Statistics are float32.
        rngs: unused, taken so that all modules are made alike.
    """

    def __init__(
        self,
        num_features: int,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        self.num_features, self.eps = num_features, eps
        self.scale: Any = _scale(num_features, elementwise_affine, param_dtype)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]`` in x's dtype."""
        return rms_norm(x, None if self.scale is None else self.scale[...], eps=self.eps)


class GatedRMSNorm(nnx.Module):
    """``rms_norm(x) * scale * act(gate)`` (FLA's ``FusedRMSNormGated``, ``RMSNormGated``).

    Args:
        num_features: D.
        activation: of the gate, a key of ``ACTIVATIONS``.
        norm_before_gate: normalise x, then gate it; else normalise the gated x.
        group_size: features that are normalised together, a divisor of D; all if None.
        eps: added to the mean square.
        elementwise_affine: learn a scale; else there is none.
        param_dtype: dtype of ``scale [D]``, which starts at 1. Everything is computed in float32.
        rngs: unused, taken so that all modules are made alike.

    Raises:
        ValueError: unknown activation, or groups that do not divide D.
    """

    def __init__(
        self,
        num_features: int,
        *,
        activation: str = "swish",
        norm_before_gate: bool = True,
        group_size: int | None = None,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        check_choice("activation", activation, ACTIVATIONS)
        if group_size is not None and num_features % group_size:
            raise ValueError(f"group_size={group_size} must divide {num_features=}")
        self.num_features, self.activation, self.eps = num_features, activation, eps
        self.norm_before_gate, self.group_size = norm_before_gate, group_size
        self.scale: Any = _scale(num_features, elementwise_affine, param_dtype)

    def __call__(self, x: jax.Array, gate: jax.Array) -> jax.Array:
        """``x`` and ``gate`` ``[..., D]`` to ``[..., D]`` in x's dtype."""
        return rms_norm(
            x,
            None if self.scale is None else self.scale[...],
            gate=gate,
            activation=self.activation,
            norm_before_gate=self.norm_before_gate,
            group_size=self.group_size,
            eps=self.eps,
        )


def _scale(num_features, elementwise_affine, param_dtype):
    return nnx.Param(jnp.ones((num_features,), param_dtype)) if elementwise_affine else None


def head_norm(
    num_features: int,
    activation: str | None,
    eps: float,
    param_dtype,
    *,
    elementwise_affine: bool = True,
    allowed: Collection[str] = GATES,
) -> RMSNorm | GatedRMSNorm:
    """The norm of a mixer's heads before its output projection; ungated if no activation is.

    ``allowed`` are the activations that FLA's mixer takes: its fused norm knows only ``GATES``.
    """
    norm: dict[str, Any] = dict(eps=eps, elementwise_affine=elementwise_affine)
    norm["param_dtype"] = param_dtype
    if activation is None:
        return RMSNorm(num_features, **norm)
    check_choice("activation", activation, allowed)
    return GatedRMSNorm(num_features, activation=activation, **norm)


class GroupNorm(nnx.Module):
    """Layer norm of each of ``num_groups`` groups of channels (FLA's ``GroupNorm``).

    Args:
        num_groups: groups of neighbouring channels.
        num_features: D, a multiple of ``num_groups``.
        eps: added to the variance.
        elementwise_affine: learn a scale, and a bias if there is one.
        bias: learn a bias.
        param_dtype: dtype of ``scale [D]``, which starts at 1, and ``bias [D]``. Statistics are
            float32.
        rngs: unused, taken so that all modules are made alike.

    Raises:
        ValueError: sizes that do not divide.
    """

    def __init__(
        self,
        num_groups: int,
        num_features: int,
        *,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = False,
        param_dtype=jnp.float32,
        rngs: nnx.Rngs | None = None,
    ):
        if num_features % num_groups:
            raise ValueError(f"{num_features=} must be a multiple of {num_groups=}")
        self.num_groups, self.num_features, self.eps = num_groups, num_features, eps
        self.scale = _scale(num_features, elementwise_affine, param_dtype)
        biased = bias and elementwise_affine
        self.bias = nnx.Param(jnp.zeros((num_features,), param_dtype)) if biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]`` in x's dtype."""
        scale, bias = (p if p is None else p[...] for p in (self.scale, self.bias))
        return layer_norm(x, scale, bias, groups=self.num_groups, eps=self.eps)


class LayerNorm(GroupNorm):
    """``(x - mean) / sqrt(var + eps) * scale + bias`` over the last axis (FLA's ``LayerNorm``).

    Arguments as of :class:`GroupNorm`, with one group.
    """

    def __init__(self, num_features: int, **options):
        super().__init__(1, num_features, **options)
