"""Decays within a chunk that cannot overflow, written once for scalar and per-channel gates.

The log decay between two tokens is the sum of the gates in between. A chunk is halved again and
again: for a pair in different halves of a block, the decay is (from the later half's entry to the
later token) times (from after the earlier token to the earlier half's end). Both factors are made
of gates that really lie in between, so nothing is subtracted: a ``-inf`` gate makes an exact 0, a
weak decay behind a very strong one keeps its digits, and gradients add up the same way. All
factors are at most 1. Those of blocks are products of those of their halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jla.ops.chunking import HIGHEST, diagonal_blocks, join_blocks, product

# Below this block size a batched matrix product costs more than multiplying and adding.
SMALL = 4


class Decay:
    """The decays of chunks with log gates ``g [..., C, X]`` (natural log, at most 0).

    X is 1 for a gate per head and K for one per channel; C is a power of two.

    Attributes:
        upto: from the chunk's entry to each token, its own gate included ``[..., C, X]``.
        after: from after each token to the chunk's end ``[..., C, X]``.
        total: over the whole chunk ``[..., X]``.
    """

    def __init__(self, g: jax.Array):
        self._g = g
        self.upto, self.after = _to_the_ends(g)
        self.total = self.upto[..., -1, :]

    def enter(self, x: jax.Array) -> jax.Array:
        """What reads the entering state, decayed from the entry to its token: ``[..., C, K]``."""
        return x * self.upto

    def leave(self, x: jax.Array) -> jax.Array:
        """What writes the leaving state, decayed from its token to the end: ``[..., C, K]``."""
        return x * self.after

    def pairs(
        self, rows: Sequence[jax.Array], columns: Sequence[jax.Array], dtype
    ) -> tuple[tuple[jax.Array, ...], ...]:
        """``sum_k a_ik b_jk decay_k(j to i)`` for j <= i, else 0, ``[..., C, C]``.

        A table of them: of every a in ``rows`` with every b in ``columns``, each ``[..., C, K]``.
        Operands are rounded to ``dtype``, sums are float32.
        """
        if self._g.shape[-1] > 1:
            return _channel_pairs(tuple(rows), tuple(columns), self._g, dtype)
        a, b = (jnp.stack([x.astype(dtype) for x in each], axis=-3) for each in (rows, columns))
        table = product("...rik,...sjk->...risj", a, b, dtype)
        between = self.between()
        return tuple(
            tuple(table[..., r, :, s, :] * between for s in range(len(columns)))
            for r in range(len(rows))
        )

    def spread(self, scores: jax.Array, x: jax.Array, dtype) -> jax.Array:
        """``sum_j scores_ij decay_c(j to i) x_jc`` over j <= i, ``[..., C, X]``.

        What :meth:`pairs` is for gates on the channels that are summed over, for gates on those
        that are not: ``scores [..., C, C]``, ``x [..., C, X]``.
        """
        out = jnp.diagonal(scores, axis1=-2, axis2=-1)[..., None] * x
        for upto, after in _levels(self._g)[:-1]:
            half = upto.shape[-2]
            corner = diagonal_blocks(scores, scores.shape[-1] // (2 * half))[..., half:, :half]
            columns = _halves(x, half, 0) * after[..., 0::2, :, :]
            if half <= SMALL:
                later = jnp.sum(corner[..., None] * columns[..., None, :, :], axis=-2)
            else:
                later = product("...ij,...jc->...ic", corner, columns, dtype)
            later = later * upto[..., 1::2, :, :]
            out = out + _merge(jnp.zeros_like(later), later)
        return out

    def between(self) -> jax.Array:
        """Decays of a scalar gate from after j to i, 0 for j > i: ``[..., C, C]``."""
        return _scalar_pairs(self._g[..., 0])

    def enter_before(self, x: jax.Array) -> jax.Array:
        """:meth:`enter` for what reads before its own token decays the state."""
        return forth(self.enter(back(x)), x)


def back(x: jax.Array) -> jax.Array:
    """Rows ``[..., C, K]`` that read before their own token decays and writes, as rows of the token
    before: what :meth:`Decay.pairs` gives for them goes there with :func:`forth`."""
    return jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)


def forth(x: jax.Array, first: jax.Array | None = None) -> jax.Array:
    """The reverse of :func:`back`, ``[..., C, X]``; its first row is ``first``'s, or 0."""
    first = jnp.zeros_like(x) if first is None else first
    return jnp.concatenate([first[..., :1, :].astype(x.dtype), x[..., :-1, :]], axis=-2)


def _sums(g):
    """Sums of ``g [..., h, X]`` up to each token (itself included) and from after it to the end."""
    axis = g.ndim - 2
    behind = lax.cumsum(g, axis=axis, reverse=True)
    behind = jnp.concatenate([behind[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return lax.cumsum(g, axis=axis), behind


def _halves(x, half, which, axis=-2):
    """The later (``which`` 1) or earlier (0) half of every block of two tokens, ``[..., n, half,
    ...]``; tokens are on ``axis``."""
    axis += x.ndim
    x = x.reshape(*x.shape[:axis], -1, 2, half, *x.shape[axis + 1 :])
    return lax.index_in_dim(x, which, axis + 1, keepdims=False)


def _merge(earlier, later, axis=-2):
    """``[..., n, half, ...]`` of both halves to ``[..., C, ...]``, the way back."""
    axis += earlier.ndim
    both = jnp.stack([earlier, later], axis=axis)
    return both.reshape(*both.shape[: axis - 1], -1, *both.shape[axis + 2 :])


def _levels(g: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
    """Decays within blocks of 1, 2, 4, ... tokens of ``g [..., C, X]``.

    For each size h, ``[..., C / h, h, X]`` twice: from the block's entry to each token, its own
    gate included, and from after each token to the block's end.
    """
    upto = jnp.exp(g)[..., None, :]
    levels = [(upto, jnp.ones_like(upto))]
    while levels[-1][0].shape[-3] > 1:
        (early, later), (after, last) = (
            (x[..., 0::2, :, :], x[..., 1::2, :, :]) for x in levels[-1]
        )
        upto = jnp.concatenate([early, later * early[..., -1:, :]], axis=-2)
        levels.append((upto, jnp.concatenate([after * later[..., -1:, :], last], axis=-2)))
    return levels


@jax.custom_vjp
def _to_the_ends(g):
    """Decays from the chunk's entry to each token and from after it to the end, ``[..., C, X]``."""
    upto, after = _levels(g)[-1]
    return upto[..., 0, :, :], after[..., 0, :, :]


def _to_the_ends_fwd(g):
    ends = _to_the_ends(g)
    return ends, ends


def _to_the_ends_bwd(ends, d):
    (upto, after), (d_upto, d_after) = ends, d
    behind, before = _sums_by_gate(after * d_after, upto * d_upto)
    return (behind + before,)


_to_the_ends.defvjp(_to_the_ends_fwd, _to_the_ends_bwd)


def _sums_by_gate(behind, upto):
    """Gradients of gates from those of log decays ``[..., C, X]``: from after each token to the end
    (the gates behind it), and from the entry up to each token (the gates before and its own)."""
    ones = jnp.ones((upto.shape[-2],) * 2, upto.dtype)
    after = product("ij,...jk->...ik", jnp.tril(ones, -1), behind, upto.dtype)
    return after, product("ij,...jk->...ik", jnp.triu(ones), upto, upto.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _channel_pairs(rows, columns, g, dtype):
    """:meth:`Decay.pairs` for gates per channel."""
    # Those with the same decays side by side: every decay is multiplied, every block joined once.
    a, b = _ranked(rows), _ranked(columns)
    levels, wide = _levels(g), g.dtype

    def corner(count, *_):
        half = g.shape[-2] // (2 * count)
        reads, writes = _factors(a, b, levels[half.bit_length() - 1])
        if half <= SMALL:
            below = jnp.sum(reads[..., None, None, :] * writes[..., None, None, :, :, :], axis=-1)
        else:
            below = product("...irk,...jsk->...irjs", reads, writes, dtype)
        return _folded(below)

    own = _ranked(
        jnp.stack([jnp.sum(x.astype(wide) * y.astype(wide), axis=-1) for y in columns], axis=-1)
        for x in rows
    )
    table = _unfolded(join_blocks(own, corner), len(rows), len(columns))
    return tuple(tuple(table[..., r, :, s] for s in range(len(columns))) for r in range(len(rows)))


def _ranked(xs):
    """Several ``[..., C, K]`` that share their decays, ``[..., C, R, K]``."""
    return jnp.stack(list(xs), axis=-2)


def _folded(x):
    """``[..., C, R, D, S]`` as ``[..., C R, D S]``; an axis at a time, for Explicit meshes."""
    x = x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _unfolded(x, ranks, others):
    """The way back of :func:`_folded`."""
    x = x.reshape(*x.shape[:-1], x.shape[-1] // others, others)
    return x.reshape(*x.shape[:-3], x.shape[-3] // ranks, ranks, *x.shape[-2:])


def _factors(a, b, level):
    """What the later halves of blocks of two read with, and what the earlier ones are read by:
    of ``a [..., C, R, K]`` and ``b [..., C, S, K]``, ``[..., n, half, R or S, K]``."""
    upto, after = level
    half = upto.shape[-2]
    reads = _halves(a, half, 1, axis=-3) * upto[..., 1::2, :, None, :]
    return reads, _halves(b, half, 0, axis=-3) * after[..., 0::2, :, None, :]


def _channel_pairs_fwd(rows, columns, g, dtype):
    return _channel_pairs(rows, columns, g, dtype), (rows, columns, g)


def _channel_pairs_bwd(dtype, saved, d):
    # Level by level as forwards. A gate stands in the pairs of its level whose later token is not
    # before it (if it lies in the later half), or whose earlier token is (in the earlier half).
    rows, columns, g = saved
    a, b = _ranked(rows), _ranked(columns)
    chunk, wide = g.shape[-2], g.dtype
    d = jnp.stack([jnp.stack(row, axis=-1) for row in d], axis=-3)  # [..., C, R, C, S]
    own = jnp.sum(d * jnp.eye(chunk, dtype=wide)[:, None, :, None], axis=-2)
    da = _ranked(
        sum(own[..., r, s, None] * y.astype(wide) for s, y in enumerate(columns))
        for r in range(len(rows))
    )
    db = _ranked(
        sum(own[..., r, s, None] * x.astype(wide) for r, x in enumerate(rows))
        for s in range(len(columns))
    )
    dg, d = jnp.zeros_like(g), _folded(d)
    for level in _levels(g)[:-1]:
        half = level[0].shape[-2]
        below = diagonal_blocks(d, chunk // (2 * half))
        below = below[..., half * len(rows) :, : half * len(columns)]
        below = _unfolded(below, len(rows), len(columns))
        more = _level_bwd(below, *_factors(a, b, level), level)
        da, db, dg = (x + y for x, y in zip((da, db, dg), more, strict=True))
    return _unstacked(da, rows), _unstacked(db, columns), dg


def _level_bwd(below, reads, writes, level):
    """Gradients of rows, columns and gates from those of the blocks ``below [..., n, half, R, half,
    S]`` of one level, in the layouts of :func:`_ranked` and of gates."""
    upto, after = level
    d_reads = product("...irjs,...jsk->...irk", below, writes, below.dtype)
    d_writes = product("...irjs,...irk->...jsk", below, reads, below.dtype)
    behind, before = jnp.sum(writes * d_writes, axis=-2), jnp.sum(reads * d_reads, axis=-2)
    dg = _merge(*_sums_by_gate(behind, before))
    d_reads = d_reads * upto[..., 1::2, :, None, :]
    d_writes = d_writes * after[..., 0::2, :, None, :]
    da = _merge(jnp.zeros_like(d_reads), d_reads, axis=-3)
    return da, _merge(d_writes, jnp.zeros_like(d_writes), axis=-3), dg


def _unstacked(dx, xs):
    return tuple(dx[..., i, :].astype(x.dtype) for i, x in enumerate(xs))


_channel_pairs.defvjp(_channel_pairs_fwd, _channel_pairs_bwd)


@jax.custom_vjp
def _scalar_pairs(g):
    """Decays from after j to i of scalar gates ``g [..., C]``, 0 for j > i: ``[..., C, C]``."""
    g = g[..., None]

    def corner(count, *_):
        half = g.shape[-2] // (2 * count)
        rows, columns = (jnp.exp(_sums(_halves(g, half, i))[1 - i]) for i in (1, 0))
        return rows * jnp.swapaxes(columns, -1, -2)

    return join_blocks(jnp.ones_like(g)[..., None], corner)


def _scalar_pairs_fwd(g):
    pairs = _scalar_pairs(g)
    return pairs, pairs


def _scalar_pairs_bwd(pairs, d):
    # A gate l stands in the pairs (i, j) with j < l <= i: sum over earlier j, then over later i.
    earlier = jnp.tril(jnp.ones(pairs.shape[-2:], pairs.dtype), -1)
    spanned = jnp.matmul(d * pairs, earlier.mT, precision=HIGHEST)
    return (jnp.sum(jnp.tril(spanned), axis=-2),)


_scalar_pairs.defvjp(_scalar_pairs_fwd, _scalar_pairs_bwd)
