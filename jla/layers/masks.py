"""Reads a flax attention mask as what a causal mixer can honour: padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer


def padding_from_mask(mask, batch: int, length: int) -> jax.Array | None:
    """``segment_ids [B, T]`` (1 real, 0 padding) of a flax attention mask, None if all are real.

    Args:
        mask: ``[..., heads, 1, T]`` (key padding, may be traced) or ``[..., heads, T, T]`` (causal,
            with or without padding; its diagonal tells the padding), broadcastable to the batch.
        batch, length: B and T of the inputs.

    Raises:
        ValueError: the shape fits neither form, the mask differs between heads, is not causal, or
            is a traced square one, which cannot be checked.
    """
    shape = tuple(np.shape(mask))
    if len(shape) < 2 or shape[-1] != length or shape[-2] not in (1, length):
        raise ValueError(
            f"mask must be [..., heads, 1, T] or [..., heads, T, T] with T={length}, got {shape}; "
            "to tell documents and padding apart pass segment_ids"
        )
    heads = 1 if len(shape) == 2 else shape[-3]
    if shape[-2] == 1 and length > 1:
        if heads != 1:
            raise ValueError(f"mask must not differ between heads, got shape {shape}")
        return _per_row(jnp.asarray(mask)[..., 0, :], batch, length, dropped=len(shape) > 2)
    value = known_value(mask)
    if value is None:
        raise ValueError(
            f"mask {shape} is traced, so it cannot be checked to be causal: this mixer is causal "
            "by itself, leave the mask out and pass padding or documents as segment_ids"
        )
    value = value.astype(bool)
    if heads > 1 and np.any(value != value[..., :1, :, :]):
        raise ValueError(f"mask must not differ between heads, got shape {shape}")
    real = np.diagonal(value, axis1=-2, axis2=-1)
    causal = np.tril(np.ones((length, length), bool)) & real[..., None, :]
    if np.any((value != causal) & real[..., :, None]):
        raise ValueError(
            "mask is not causal: a mixer's token sees exactly itself and the real tokens before "
            "it; documents are told apart by segment_ids"
        )
    padding = _per_row(jnp.asarray(real), batch, length, dropped=len(shape) > 2)
    return None if real.all() else padding


def _per_row(real, batch, length, dropped):
    if dropped:
        real = real[..., 0, :]
    rows = int(np.prod(real.shape[:-1]))
    if rows not in (1, batch):
        raise ValueError(f"mask has {rows} rows, the inputs have a batch of {batch}")
    real = real.reshape(rows, length).astype(bool).astype(jnp.int32)
    return jnp.broadcast_to(real, (batch, length))


def known_value(x) -> np.ndarray | None:
    """The value of ``x``, also where jit traces it but only constants went in; else None.

    A causal mask made of ``jnp.tril(jnp.ones(...))`` inside a jitted function is traced like
    anything else. What it was made of can still be run here and now, which is what this does;
    where a JAX version does not tell what a tracer was made of, the answer is None.
    """
    if not isinstance(x, Tracer):
        return np.asarray(x)
    primal = getattr(x, "primal", None)
    if primal is not None and primal is not x:
        return known_value(primal)
    made_by = getattr(x, "parent", None)
    if made_by is None:  # an argument, or a constant of the traced function
        look_up = getattr(getattr(x, "_trace", None), "get_const", None)
        constant = None if look_up is None else look_up(x)
        return None if constant is None else known_value(constant)
    inputs = [known_value(each) for each in made_by.in_tracers]
    if any(each is None for each in inputs):
        return None
    with jax.ensure_compile_time_eval():
        outputs = made_by.primitive.bind(*map(jnp.asarray, inputs), **made_by.params)
    if not made_by.primitive.multiple_results:
        return np.asarray(outputs)
    position = next(i for i, var in enumerate(made_by.outvars) if var is x.val)
    return np.asarray(outputs[position])
