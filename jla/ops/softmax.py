"""Causal softmax attention under the same contract as the recurrences.

A query sees a key iff both are real tokens of the same document and the key is not later; with a
window of w it sees itself and the w - 1 real tokens before. Keys of earlier calls come as ``past``.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from jla.kernels import limits
from jla.ops import segments
from jla.ops.chunking import product, repeat_heads
from jla.ops.dispatch import Choice, select

QUERY_BLOCK = 256


class Past(NamedTuple):
    """Keys and values of the row's first document that earlier calls have seen.

    Attributes:
        k: ``[B, L, Hkv, K]``.
        v: ``[B, L, Hkv, V]``.
        positions: int ``[B, L]`` position of each slot in its document, -1 where it is empty.
        length: int ``[B]`` real tokens of the document so far.
    """

    k: jax.Array
    v: jax.Array
    positions: jax.Array
    length: jax.Array


class _Tag(NamedTuple):
    """Where tokens stand: ``document [B, T]`` (-1: padding or empty) and ``position [B, T]``."""

    document: jax.Array
    position: jax.Array


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float | None = None,
    window_size: int | None = None,
    segment_ids: jax.Array | None = None,
    past: Past | None = None,
    impl: str = "auto",
) -> jax.Array:
    """Causal softmax attention.

    Args:
        q: ``[B, T, H, K]``.
        k: ``[B, T, Hkv, K]``, H a multiple of Hkv.
        v: ``[B, T, Hkv, V]``.
        scale: factor of the scores, ``K**-0.5`` if None.
        window_size: how many real tokens a query sees, itself counted; all if None.
        segment_ids: int ``[B, T]``, 0 = padding, a change = new document.
        past: keys and values before this piece, see :class:`Past`.
        impl: ``"auto"``, ``"reference"`` (all scores at once), ``"chunk"`` (a block of queries at
            a time, memory linear in T, forward and backward), ``"cudnn"`` (cuDNN's fused kernel,
            dense rows on an NVIDIA GPU) or ``"mosaic"``.

    Returns:
        ``[B, T, H, V]`` in v's dtype, 0 at padding. Scores and softmax are float32.

    Raises:
        ValueError: shapes that disagree, a window below 1, or an unknown impl.
        ImplUnavailable: a named impl that cannot run this call.
    """
    _check(q, k, v, window_size)
    choice = choose(q, k, v, window_size=window_size, segment_ids=segment_ids, past=past, impl=impl)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if choice.impl == "cudnn":
        window = None if window_size is None else (window_size - 1, 0)
        return jax.nn.dot_product_attention(
            q, k, v, scale=scale, is_causal=True, local_window_size=window, implementation="cudnn"
        )
    q_tag = _tags(q, segment_ids)
    k_tag = q_tag
    if past is not None:
        # The piece's first document goes on where the past one stopped.
        offset = jnp.where(q_tag.document == 0, past.length[:, None], 0)
        q_tag = k_tag = _Tag(q_tag.document, q_tag.position + offset)
        empty = _Tag(jnp.where(past.positions < 0, -1, 0), past.positions)
        k_tag = _Tag(*(jnp.concatenate(pair, axis=1) for pair in zip(empty, q_tag, strict=True)))
        k = jnp.concatenate([past.k.astype(k.dtype), k], axis=1)
        v = jnp.concatenate([past.v.astype(v.dtype), v], axis=1)
    k, v = repeat_heads(k, q.shape[2]), repeat_heads(v, q.shape[2])
    run = _dense if choice.impl == "reference" else _blocked
    return run(q, k, v, q_tag, k_tag, scale, window_size)


def attend_past(q: jax.Array, past: Past, *, scale: float | None = None) -> jax.Array:
    """One query per row, ``[B, 1, H, K]``, over every filled slot of ``past``; ``[B, 1, H, V]``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = repeat_heads(past.k, q.shape[2]), repeat_heads(past.v, q.shape[2])
    seen = jnp.where(past.positions < 0, -1, 0)
    q_tag = _Tag(jnp.zeros_like(seen[:, :1]), past.length[:, None])
    return _dense(q, k, v, q_tag, _Tag(seen, past.positions), scale, None)


def choose(
    q, k, v, *_, window_size=None, segment_ids=None, past=None, impl: str = "auto", **__
) -> Choice:
    """Which implementation a call with these arguments runs; decided from static facts only."""
    offers = {
        "reference": None,
        "chunk": None,
        "cudnn": _no_cudnn(q, v, segment_ids, past),
        "mosaic": limits.NO_KERNEL,
    }
    short = q.shape[1] <= QUERY_BLOCK
    order = ("mosaic", "cudnn", "reference") if short else ("mosaic", "cudnn", "chunk", "reference")
    return select("attention", impl, offers, order)


def _no_cudnn(q, v, segment_ids, past) -> str | None:
    if jax.default_backend() != "gpu":
        return f"needs an NVIDIA GPU, the default backend is {jax.default_backend()!r}"
    if segment_ids is not None or past is not None:
        return "it takes dense rows only, without segment_ids or past"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] != v.shape[-1] or q.shape[-1] > 128 or q.shape[-1] % 8:
        return f"head sizes must agree, be multiples of 8 and at most 128, got {q.shape[-1]}"
    return None


def _check(q, k, v, window_size):
    for name, x in {"q": q, "k": k, "v": v}.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be [B, T, H, D], got shape {x.shape}")
    if k.shape[:2] != q.shape[:2] or v.shape[:3] != k.shape[:3] or k.shape[3] != q.shape[3]:
        raise ValueError(
            "q, k, v must be [B, T, H, K], [B, T, Hkv, K], [B, T, Hkv, V], "
            f"got {q.shape}, {k.shape}, {v.shape}"
        )
    if 0 in (*q.shape, *k.shape, *v.shape):
        raise ValueError(f"q, k, v must not be empty, got {q.shape}, {k.shape}, {v.shape}")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"q's {q.shape[2]} heads must be a multiple of k's {k.shape[2]}")
    if window_size is not None and window_size < 1:
        raise ValueError(f"window_size must be at least 1 (a query sees itself), got {window_size}")


def _tags(q, segment_ids) -> _Tag:
    shape = q.shape[:2]
    if segment_ids is None:
        # Sharded as q is: on Explicit axes they meet the tags of past keys.
        sharding = jax.typeof(q).sharding
        sharding = sharding.update(spec=P(*sharding.spec[:2]))
        zeros = jnp.zeros(shape, jnp.int32, out_sharding=sharding)
        return _Tag(zeros, zeros + jnp.arange(shape[1], dtype=jnp.int32))
    segment_ids = segments.check_segment_ids(segment_ids, shape, q)
    document = jnp.where(segment_ids != 0, segments.document_index(segment_ids), -1)
    return _Tag(document, segments.document_positions(segment_ids))


# Compiled as one, so that calls outside of jit do not run operation by operation.
@partial(jax.jit, static_argnames="window_size")
def _dense(q, k, v, q_tag, k_tag, scale, window_size):
    """All scores at once: ``q [B, t, H, K]`` against ``k [B, L, H, K]``."""
    scores = scale * product("bthk,bshk->bhts", q, k, q.dtype)
    gap = q_tag.position[:, :, None] - k_tag.position[:, None, :]
    seen = (q_tag.document[:, :, None] == k_tag.document[:, None, :]) & (gap >= 0)
    seen = seen & (q_tag.document >= 0)[:, :, None]
    if window_size is not None:
        seen = seen & (gap < window_size)
    seen = seen[:, None]
    # A row without any key (padding) keeps finite numbers and outputs 0.
    top = lax.stop_gradient(jnp.max(jnp.where(seen, scores, -jnp.inf), axis=-1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    weights = jnp.exp(jnp.where(seen, scores - top, -jnp.inf))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return product("bhts,bshv->bthv", weights, v, v.dtype).astype(v.dtype)


@partial(jax.jit, static_argnames="window_size")
def _blocked(q, k, v, q_tag, k_tag, scale, window_size):
    """:func:`_dense` for a block of queries at a time, recomputed in the backward."""
    batch, length = q.shape[:2]
    pad = -length % QUERY_BLOCK

    def blocks(x, fill):
        x = jnp.pad(x, ((0, 0), (0, pad), *((0, 0) for _ in x.shape[2:])), constant_values=fill)
        x = x.reshape(batch, (length + pad) // QUERY_BLOCK, QUERY_BLOCK, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    @partial(jax.checkpoint, prevent_cse=False)
    def block(queries):
        q, document, position = queries
        return _dense(q, k, v, _Tag(document, position), k_tag, scale, window_size)

    o = lax.map(block, (blocks(q, 0), blocks(q_tag.document, -1), blocks(q_tag.position, 0)))
    return jnp.moveaxis(o, 0, 1).reshape(batch, length + pad, *o.shape[3:])[:, :length]
