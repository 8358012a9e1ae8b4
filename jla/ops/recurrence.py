"""Checks, masks and state reads that every recurrent op shares."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jla.ops import segments
from jla.ops.chunking import scalar_decay


def check_heads(
    *, q, k, v, per_head: Mapping[str, jax.Array | None], initial_state: jax.Array | None
) -> None:
    """Raises ValueError, naming the argument, unless the shapes agree.

    ``q, k [B, T, Hq, K]``, ``v [B, T, H, V]`` with H a multiple of Hq, each of ``per_head``
    ``[B, T, H]`` or None, ``initial_state [B, H, K, V]`` or None.
    """
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, D], got shape {x.shape}")
    if k.shape != q.shape:
        raise ValueError(f"k must have q's shape {q.shape}, got {k.shape}")
    if v.shape[:2] != q.shape[:2]:
        raise ValueError(f"v must start with q's [B, T] = {q.shape[:2]}, got shape {v.shape}")
    if q.shape[1] == 0:
        raise ValueError(f"q must have at least one token, got shape {q.shape}")
    heads = v.shape[2]
    if heads % q.shape[2]:
        raise ValueError(
            f"v's {heads} heads must be a multiple of the {q.shape[2]} heads of q and k"
        )
    for name, x in per_head.items():
        if x is not None and x.shape != v.shape[:3]:
            raise ValueError(f"{name} must be [B, T, H] = {v.shape[:3]}, got shape {x.shape}")
    expected = (v.shape[0], heads, q.shape[3], v.shape[3])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(
            f"initial_state must be [B, H, K, V] = {expected}, got shape {initial_state.shape}"
        )


def prepare_gates(segment_ids, operands: tuple[jax.Array, ...], g: jax.Array):
    """Turns packing and padding into operands: ``(*operands, g)`` with nothing left to mask.

    Padding becomes a step with zero operands and no decay, which changes nothing and outputs 0; a
    document's first token gets the log decay ``-inf``, which empties the state.
    """
    if segment_ids is None:
        return (*operands, g)
    segment_ids = segments.check_segment_ids(segment_ids, operands[0].shape[:2])
    real, starts = segment_ids != 0, segments.document_starts(segment_ids)

    def over(mask, x):
        return mask.reshape(*mask.shape, *(1,) * (x.ndim - 2))

    masked = tuple(jnp.where(over(real, x), x, 0) for x in operands)
    g = jnp.where(over(starts, g), -jnp.inf, jnp.where(over(real, g), g, 0))
    return (*masked, g)


def read_states(positions, entries, values, k, g):
    """States after chosen tokens, from what a chunked pass knows.

    Args:
        positions: int ``[B, S]`` tokens of the row.
        entries: ``[N, B, H, K, V]`` states that enter the chunks.
        values: ``[N, B, H, C, V]`` what each token writes along its key.
        k: ``[N, B, H, C, K]`` keys.
        g: ``[N, B, H, C]`` log decays.

    Returns:
        ``[B, S, H, K, V]`` in the entries' dtype.
    """
    chunk = g.shape[-1]
    index, offset = positions // chunk, positions % chunk
    pick = lambda x: segments.take_time(jnp.moveaxis(x, 0, 1), index)  # noqa: E731
    entry, values, k, g = pick(entries), pick(values), pick(k), pick(g)
    # Tokens behind the chosen one neither decay nor write.
    done = jnp.arange(chunk) <= offset[..., None, None]
    decay = scalar_decay(jnp.where(done, g, 0))
    keys = k * jnp.where(done, decay.to_end, 0)[..., None]
    wide = entry.dtype
    update = jnp.einsum(
        "bshck,bshcv->bshkv", keys.astype(wide), values.astype(wide), precision="highest"
    )
    return entry * decay.total[..., None, None] + update
