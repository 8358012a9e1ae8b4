"""Attention residuals (arXiv:2603.15031): a sub-layer reads a softmax mix of earlier sums."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jla.ops.norm import rms_norm


def mix_residuals(
    query: jax.Array, sources: Sequence[jax.Array], scale: jax.Array, *, eps: float
) -> jax.Array:
    """Mixes residual sources with weights from their normalised selves (FLA's ``attnres``).

    ``softmax_l(query . (rms_norm(source_l) * scale))`` weighs the sources, in float32.

    Args:
        query: ``[D]``, learned.
        sources: at least one ``[..., D]``.
        scale: ``[D]`` of the norm.
        eps: of the norm.

    Returns:
        ``[..., D]`` in the sources' dtype.
    """
    stacked = jnp.stack(sources)
    wide = stacked.astype(jnp.promote_types(stacked.dtype, jnp.float32))
    keys = rms_norm(wide, scale, eps=eps)
    weights = jax.nn.softmax(jnp.sum(keys * query.astype(wide.dtype), axis=-1), axis=0)
    return jnp.sum(weights[..., None] * wide, axis=0).astype(stacked.dtype)
