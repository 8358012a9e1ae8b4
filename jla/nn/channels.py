"""Output channels of a module, in parts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jla.kernels.sharding import alone

LONG = 128  # tokens of a row from which Hopper kernels read its parts


def project(linear: nnx.Module, x: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
    """``linear(x [B, T, D])`` cut into ``[B, T, size]``, one a size; all sizes are its outputs.

    Long rows meet the kernel's columns part by part: columns cut out of one product are copied for
    the Hopper kernels that read them, and their gradients are copied together. What is not
    :class:`flax.nnx.Linear` itself (LoRA, quantisation) runs as a whole.
    """
    ends = list(itertools.accumulate(sizes))
    if type(linear) is not nnx.Linear or x.shape[-2] < LONG:
        return jnp.split(linear(x), ends[:-1], axis=-1)
    parts = [only(linear, end - size, end) for end, size in zip(ends, sizes, strict=True)]
    narrow = max(sizes) // 4
    return [
        _in_halves(part, x) if size < narrow and alone() else part(x)
        for part, size in zip(parts, sizes, strict=True)
    ]


def only(module, first: int, last: int):
    """The module with output channels ``first`` to ``last`` alone.

    For modules whose parameters all have these channels as their last axis, as
    :class:`flax.nnx.Linear` and :class:`jla.nn.ShortConvolution` do.
    """
    graphdef, state = nnx.split(module)
    return nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf[..., first:last], state))


def _in_halves(linear, x):
    """``linear(x)``, half of the tokens a batch.

    XLA for GPUs joins a narrow product with a wide one of the same inputs, and copies their parts
    after all, but not a batched one.
    """
    if x.size // x.shape[-1] % 2:
        return linear(x)
    graphdef, state = nnx.split(linear)
    twice = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (2, *leaf.shape)), state)
    halves = x.reshape(2, -1, x.shape[-1])
    y = jax.vmap(lambda state, x: nnx.merge(graphdef, state)(x))(twice, halves)
    return y.reshape(*x.shape[:-1], -1)
