"""Parameters whose dtype is part of their meaning."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


def float32_param(value: jax.Array) -> nnx.Param:
    """A parameter that stays float32 whatever the model's ``param_dtype`` (decay rates, biases of
    step sizes): rounded to bfloat16 their exponentials would be off by percents."""
    return nnx.Param(value.astype(jnp.float32), float32=True)


def is_float32_param(variable: nnx.Variable) -> bool:
    """Whether :func:`float32_param` made ``variable``."""
    return bool(variable.get_metadata().get("float32", False))
