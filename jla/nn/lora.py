"""Low-rank and interpolating projections of the RWKV layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from jla.nn import init
from jla.nn.check import check_choice

ACTIVATIONS: Mapping[str | None, Callable[[jax.Array], jax.Array]] = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "sigmoid": jax.nn.sigmoid,
    "tanh": jnp.tanh,
}


class LoRA(nnx.Module):
    """``up(act(down(x))) + bias`` through a bottleneck (FLA's ``LoRA``).

    ``down`` starts at 0 and ``up`` nearly so, orthogonal: at first the output is the bias.

    Args:
        inputs, outputs, rank: widths.
        activation: of the bottleneck, a key of ``ACTIVATIONS``.
        bias: the bias ``[outputs]`` at first, or None: there is none.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`.
        rngs: ``params`` stream.

    Raises:
        ValueError: unknown activation.
    """

    checkpoint_names: ClassVar[Mapping[str, str]] = {"down": "lora.0", "up": "lora.2"}

    def __init__(
        self,
        inputs: int,
        outputs: int,
        rank: int,
        activation: str | None = "tanh",
        bias: jax.Array | None = None,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        rngs: nnx.Rngs,
    ):
        check_choice("activation", activation, ACTIVATIONS)
        self.activation = activation
        linear = init.linear(dtype, param_dtype, precision, nnx.initializers.zeros, rngs)
        up = init.orthogonal(0.1 * max(rank / outputs, 1) ** 0.5)
        self.down = linear(inputs, rank)
        self.up = linear(rank, outputs, use_bias=bias is not None, kernel_init=up)
        if bias is not None:
            self.up.bias = nnx.Param(bias.astype(param_dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., inputs]`` to ``[..., outputs]``."""
        return self.up(ACTIVATIONS[self.activation](self.down(x)))


class LerpLinear(nnx.Module):
    """``linear(x + mu * delta)``: between a token and the one before it (FLA's ``LerpLinear``).

    Args:
        linear: what :func:`jla.nn.init.linear` made.
        inputs, outputs: widths.
        param_dtype: dtype of ``mu [inputs]``, which starts at 0.
    """

    def __init__(self, linear: Callable, inputs: int, outputs: int, *, param_dtype=jnp.float32):
        self.linear = linear(inputs, outputs)
        self.mu = nnx.Param(jnp.zeros((inputs,), param_dtype))

    def __call__(self, x: jax.Array, delta: jax.Array) -> jax.Array:
        """``x`` and ``delta`` (see :func:`jla.ops.token_shift`) ``[..., D]``."""
        return self.linear(lerp(x, delta, self.mu))


def lerp(x: jax.Array, delta: jax.Array, share: nnx.Param | jax.Array) -> jax.Array:
    """``x + share * delta`` in x's dtype."""
    return x + delta * share[...].astype(x.dtype)
