"""The gated feed-forward block of FLA's models."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jla.nn import init


def power_glu(x: jax.Array, power: float = 3.0) -> jax.Array:
    """``sigmoid(x) * x ** (power / (sqrt(x) + 1))`` for x > 0, else ``silu(x)`` (FLA's PowLU)."""
    positive = x > 0
    base = jnp.where(positive, x, 1.0)
    grown = jnp.exp(power / (jnp.sqrt(base) + 1) * jnp.log(base))
    return jax.nn.sigmoid(x) * jnp.where(positive, grown, x)


ACTIVATIONS = {"swish": jax.nn.silu, "powlu": power_glu}


class GatedMLP(nnx.Module):
    """``down(act(gate(x)) * up(x))`` (FLA's ``GatedMLP``).

    Args:
        hidden_size: D.
        hidden_ratio: the parameters are about ``hidden_ratio * D^2``; 4 if None.
        intermediate_size: inner width; if None, ``2/3 * hidden_ratio * D`` up to the next 256.
        hidden_act: ``"swish"`` or ``"powlu"``.
        fuse_swiglu: FLA's implementation switch, kept and without effect on the numbers.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`.
        kernel_init: initialiser of the kernels; torch's default if None.
        rngs: ``params`` stream.

    Raises:
        ValueError: unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        hidden_ratio: float | None = None,
        intermediate_size: int | None = None,
        hidden_act: str = "swish",
        fuse_swiglu: bool = True,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        rngs: nnx.Rngs,
    ):
        if hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act must be one of {sorted(ACTIVATIONS)}, got {hidden_act!r}")
        if intermediate_size is None:
            ratio = 4 if hidden_ratio is None else hidden_ratio
            intermediate_size = 256 * ((int(hidden_size * ratio * 2 / 3) + 255) // 256)
        self.intermediate_size, self.hidden_act = intermediate_size, hidden_act
        self.fuse_swiglu = fuse_swiglu
        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.gate_proj = linear(hidden_size, intermediate_size)
        self.up_proj = linear(hidden_size, intermediate_size)
        self.down_proj = linear(intermediate_size, hidden_size)

    def __call__(self, x: jax.Array) -> jax.Array:
        """``[..., D]`` to ``[..., D]``; the activation is float32."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        wide = jnp.promote_types(gate.dtype, jnp.float32)
        inner = ACTIVATIONS[self.hidden_act](gate.astype(wide)) * up.astype(wide)
        return self.down_proj(inner.astype(gate.dtype))
