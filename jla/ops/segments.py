"""What ``segment_ids`` mean, written once for every op and mixer.

``segment_ids`` is int32 ``[B, T]``. ``0`` is padding: an identity step that may stand anywhere.
Between two non-padding neighbours (padding skipped) a change of id starts a new document. A
document's *position* counts its real tokens from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import PartitionSpec as P


def check_segment_ids(
    segment_ids, shape: tuple[int, ...], like: jax.Array | None = None
) -> jax.Array:
    """Returns ``segment_ids`` as int32 of ``shape`` ``(B, T)`` or raises.

    On Explicit axes they are placed as the rows of ``like [B, T, ...]`` are, if that is given.

    Raises:
        TypeError: the dtype is neither integer nor bool.
        ValueError: the shape differs from ``shape``, or a concrete id is negative.
    """
    dtype = jnp.result_type(segment_ids)
    if not (jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_):
        raise TypeError(f"segment_ids must be integers (0 = padding), got dtype {dtype}")
    if tuple(np.shape(segment_ids)) != tuple(shape):
        raise ValueError(
            f"segment_ids must have shape {tuple(shape)} ([B, T] of the inputs), "
            f"got {tuple(np.shape(segment_ids))}"
        )
    if not isinstance(segment_ids, Tracer) and np.any(np.asarray(segment_ids) < 0):
        raise ValueError(
            "segment_ids must be >= 0 (0 = padding), "
            f"got a smallest id of {int(np.min(np.asarray(segment_ids)))}"
        )
    segment_ids = jnp.asarray(segment_ids).astype(jnp.int32)
    sharding = None if like is None else jax.typeof(like).sharding
    if sharding is None or not any(sharding.spec[:2]):
        return segment_ids
    return jax.sharding.reshard(segment_ids, sharding.update(spec=P(*sharding.spec[:2])))


def previous_real(segment_ids: jax.Array) -> jax.Array:
    """Index ``[B, T]`` of the last non-padding token strictly before each token, -1 if none."""
    last = lax.cummax(_real_indices(segment_ids, -1), axis=1)
    return jnp.concatenate([jnp.full_like(last[:, :1], -1), last[:, :-1]], axis=1)


def next_real(segment_ids: jax.Array) -> jax.Array:
    """Index ``[B, T]`` of the first non-padding token strictly after each token, T if none."""
    length = segment_ids.shape[1]
    first = lax.cummin(_real_indices(segment_ids, length), axis=1, reverse=True)
    return jnp.concatenate([first[:, 1:], jnp.full_like(first[:, :1], length)], axis=1)


def last_real(positions: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
    """Index ``[B, S]`` of the last real token up to ``positions [B, S]``, -1 if there is none."""
    if segment_ids is None:
        return positions
    last = lax.cummax(_real_indices(segment_ids, -1), axis=1)
    return take_time(last, positions)


def _real_indices(segment_ids, elsewhere):
    time = lax.broadcasted_iota(jnp.int32, segment_ids.shape, 1)
    return jnp.where(segment_ids != 0, time, elsewhere)


def take_time(x: jax.Array, index: jax.Array) -> jax.Array:
    """``x[b, index[b, s], ...]`` for ``x [B, T, ...]`` and ``index [B, S]``, clipped to the row."""
    index = jnp.clip(index, 0, x.shape[1] - 1)
    return jax.vmap(lambda row, at: row[at])(x, index)


def document_starts(segment_ids: jax.Array) -> jax.Array:
    """True ``[B, T]`` where a new document starts; the row's first document does not start."""
    previous = previous_real(segment_ids)
    changed = take_time(segment_ids, previous) != segment_ids
    return (segment_ids != 0) & (previous >= 0) & changed


def marks_or_none(segment_ids, v: jax.Array) -> jax.Array | None:
    """:func:`token_marks` of ids that are checked against ``v [B, T, ...]``; None of None."""
    if segment_ids is None:
        return None
    return token_marks(check_segment_ids(segment_ids, v.shape[:2], like=v))


def token_marks(segment_ids: jax.Array) -> jax.Array:
    """What kernels are told, float32 ``[B, T]``: 0 padding, 2 a document's start, 1 the rest."""
    real = (segment_ids != 0).astype(jnp.float32)
    return jnp.where(document_starts(segment_ids), 2.0, real)


def document_index(segment_ids: jax.Array) -> jax.Array:
    """Running number ``[B, T]`` of the row's documents, from 0; padding carries the last one."""
    return jnp.cumsum(document_starts(segment_ids).astype(jnp.int32), axis=1)


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """Position ``[B, T]`` of each real token in its document, from 0; padding gets 0."""
    real = jnp.cumsum((segment_ids != 0).astype(jnp.int32), axis=1) - 1
    start = lax.cummax(jnp.where(document_starts(segment_ids), real, 0), axis=1)
    return jnp.where(segment_ids != 0, real - start, 0)


class Ends(NamedTuple):
    """Tokens that end documents: a cache after each is wanted, as a row of its own.

    Attributes:
        time: int32 ``[B, S]``, real tokens of each row.
        rows: int32 ``[N]``, which of these ``B * S``, counted row by row, get a row of the cache:
            rows of B may end fewer documents than S.
    """

    time: jax.Array
    rows: jax.Array


def document_ends(segment_ids: jax.Array, shape: tuple[int, ...] | None = None) -> Ends:
    """Where the documents of concrete ``segment_ids`` end, row by row.

    Args:
        segment_ids: int ``[B, T]``, 0 = padding, a change = new document.
        shape: ``(B, T)`` that they must have, if given.

    Raises:
        ValueError: another shape, a negative id, or no document at all.
        TypeError: traced ids, or no integers.
    """
    if isinstance(segment_ids, Tracer):
        raise TypeError("segment_ids must be concrete: they decide how many rows the cache has")
    ids = check_segment_ids(segment_ids, np.shape(segment_ids) if shape is None else shape)
    following = next_real(ids)
    goes_on = (following < ids.shape[1]) & ~take_time(document_starts(ids), following)
    last = np.asarray((ids != 0) & ~goes_on)
    counts = last.sum(axis=1)
    if not counts.any():
        raise ValueError("segment_ids has no document: every token is padding")
    used = np.arange(counts.max()) < counts[:, None]
    time = np.zeros(used.shape, np.int32)
    time[used] = np.nonzero(last)[1]
    return Ends(jnp.asarray(time), jnp.asarray(np.flatnonzero(used), jnp.int32))


class Resumed(NamedTuple):
    """How a piece of a row relates to what its cache has seen; see :func:`resume`."""

    restart: jax.Array  # bool [B]: the piece opens a new document, the cached state is void
    last_id: jax.Array  # int32 [B]: the id to remember after the piece


def resume(segment_ids: jax.Array, last_id: jax.Array) -> Resumed:
    """Compares a piece with ``last_id [B]``, the id its cache last saw (0: nothing yet)."""
    real = segment_ids != 0
    first = take_time(segment_ids, jnp.argmax(real, axis=1)[:, None])[:, 0]
    final_index = jnp.max(_real_indices(segment_ids, -1), axis=1, keepdims=True)
    final = take_time(segment_ids, final_index)[:, 0]
    some = jnp.any(real, axis=1)
    restart = some & (last_id != 0) & (first != last_id)
    return Resumed(restart, jnp.where(some, final, last_id))


def segment_ids_from_cu_seqlens(cu_seqlens, length: int) -> jax.Array:
    """``segment_ids [1, length]`` of one packed row, ids 1.. and 0 behind the last document.

    Args:
        cu_seqlens: int ``[N + 1]`` document boundaries, starting at 0 and not decreasing.
        length: T of the row, at least ``cu_seqlens[-1]``.

    Raises:
        ValueError: ``cu_seqlens`` is not such a list (checked when concrete).
    """
    if not isinstance(cu_seqlens, Tracer):
        bounds = np.asarray(cu_seqlens)
        bad = bounds.ndim != 1 or bounds.size < 1 or bounds[0] != 0 or np.any(np.diff(bounds) < 0)
        if bad or bounds[-1] > length:
            raise ValueError(
                "cu_seqlens must be one-dimensional, start at 0, not decrease and end at most at "
                f"length={length}, got {bounds.tolist()}"
            )
    cu_seqlens = jnp.asarray(cu_seqlens, jnp.int32)
    time = jnp.arange(length, dtype=jnp.int32)
    ids = jnp.searchsorted(cu_seqlens[1:], time, side="right").astype(jnp.int32) + 1
    return jnp.where(time < cu_seqlens[-1], ids, 0)[None]


def cu_seqlens_from_segment_ids(segment_ids) -> np.ndarray:
    """Boundaries int32 ``[N + 1]`` of the documents of one concrete row without inner padding.

    Args:
        segment_ids: int ``[1, T]`` or ``[T]``; padding may stand behind the last document only,
            because ``cu_seqlens`` has no way to say it stands elsewhere.

    Raises:
        ValueError: more than one row, or padding before or between documents.
    """
    row = np.asarray(segment_ids)
    if row.ndim == 2 and row.shape[0] == 1:
        row = row[0]
    if row.ndim != 1:
        raise ValueError(f"segment_ids must be one row, [1, T] or [T], got shape {row.shape}")
    used = int(np.max(np.nonzero(row)[0], initial=-1)) + 1
    if np.any(row[:used] == 0):
        raise ValueError(
            "segment_ids has padding before or between documents: no cu_seqlens says so"
        )
    inner = np.nonzero(np.diff(row[:used]))[0] + 1
    return np.concatenate([[0], inner, [used] if used else []]).astype(np.int32)
