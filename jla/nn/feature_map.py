"""Feature maps of linear attention: what queries and keys go through before their product."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jla.nn import init
from jla.nn.check import check_choice
from jla.ops.activation import ACTIVATIONS, elu_plus_one, identity


class HedgehogFeatureMap(nnx.Module):
    """``softmax([2y, -2y])`` of a learned ``y = layer(x)`` (arXiv:2402.04347): D to 2D features.

    Args:
        head_dim: D.
        linear: what :func:`jla.nn.init.linear` made.
        kernel_init: initialiser of the kernel; the identity if None.
    """

    def __init__(self, head_dim: int, linear: Callable, kernel_init: init.Initializer | None):
        kernel_init = kernel_init or init.identity
        self.layer = linear(head_dim, head_dim, use_bias=True, kernel_init=kernel_init)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., 2D]``; the softmax is float32."""
        y = 2 * self.layer(x)
        wide = jnp.concatenate([y, -y], axis=-1).astype(jnp.promote_types(y.dtype, jnp.float32))
        return jax.nn.softmax(wide, axis=-1).astype(y.dtype)


class T2RFeatureMap(nnx.Module):
    """``relu(layer(x))`` (arXiv:2103.13076): D to D features."""

    def __init__(self, head_dim: int, linear: Callable):
        self.layer = linear(head_dim, head_dim)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        return jax.nn.relu(self.layer(x))


class HadamardFeatureMap(nnx.Module):
    """``layer1(x) * layer2(x)``: D to D features."""

    def __init__(self, head_dim: int, linear: Callable):
        self.layer1 = linear(head_dim, head_dim, use_bias=True)
        self.layer2 = linear(head_dim, head_dim, use_bias=True)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        return self.layer1(x) * self.layer2(x)


class DPFPFeatureMap(nnx.Module):
    """Products of ``r = relu([x, -x])`` with itself turned by 1 to ``nu`` places
    (arXiv:2102.11174): D to 2 nu D features."""

    def __init__(self, nu: int = 4):
        self.nu = nu

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., 2 nu D]``."""
        r = jax.nn.relu(jnp.concatenate([x, -x], axis=-1))
        turned = [r * jnp.roll(r, shift, axis=-1) for shift in range(1, self.nu + 1)]
        return jnp.concatenate(turned, axis=-1)


class Pointwise(nnx.Module):
    """A function of each entry, by name: a key of ``ACTIVATIONS``, ``"elu"`` (plus 1) or
    ``"identity"``."""

    def __init__(self, name: str):
        check_choice("feature map", name, POINTWISE)
        self.name = name

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``."""
        return POINTWISE[self.name](x)


POINTWISE = {**ACTIVATIONS, "elu": elu_plus_one, "identity": identity}

FeatureMap = HedgehogFeatureMap | T2RFeatureMap | HadamardFeatureMap | DPFPFeatureMap | Pointwise


def count_features(name: str, head_dim: int) -> int:
    """How many features the map called ``name`` makes of ``head_dim`` channels."""
    return head_dim * {"hedgehog": 2, "dpfp": 2 * DPFPFeatureMap().nu}.get(name, 1)


def feature_map(
    name: str, head_dim: int, linear: Callable, kernel_init: init.Initializer | None = None
) -> FeatureMap:
    """The map that FLA's layers call ``name``.

    Args:
        name: ``"hedgehog"``, ``"t2r"``, ``"elementwise_product"``, ``"dpfp"`` or a pointwise one.
        head_dim: D.
        linear: what :func:`jla.nn.init.linear` made, for maps that learn.
        kernel_init: of Hedgehog's kernel, which else starts as the identity.
    """
    if name == "hedgehog":
        return HedgehogFeatureMap(head_dim, linear, kernel_init)
    if name == "t2r":
        return T2RFeatureMap(head_dim, linear)
    if name == "elementwise_product":
        return HadamardFeatureMap(head_dim, linear)
    return DPFPFeatureMap() if name == "dpfp" else Pointwise(name)
