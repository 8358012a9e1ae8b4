"""Decays within a chunk that cannot overflow, written once for scalar and per-channel gates.

The log decay between two tokens is the sum of the gates in between. A chunk is halved again and
again: for a pair in different halves of a block, the decay is (from the later half's entry to the
later token) times (from after the earlier token to the earlier half's end). Both factors are sums
of gates that really lie in between, so nothing is subtracted: a ``-inf`` gate makes an exact 0, a
weak decay behind a very strong one keeps its digits, and gradients add up the same way. All
factors are at most 1.
"""

from __future__ import annotations

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
        log_upto, log_after = _sums(g)
        self.upto, self.after = jnp.exp(log_upto), jnp.exp(log_after)
        self.total = self.upto[..., -1, :]

    def enter(self, x: jax.Array) -> jax.Array:
        """What reads the entering state, decayed from the entry to its token: ``[..., C, K]``."""
        return x * self.upto

    def leave(self, x: jax.Array) -> jax.Array:
        """What writes the leaving state, decayed from its token to the end: ``[..., C, K]``."""
        return x * self.after

    def pairs(self, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
        """``sum_k a_ik b_jk decay_k(j to i)`` for j <= i, else 0, ``[..., C, C]``.

        Operands ``[..., C, K]`` are rounded to ``dtype``, sums are float32.
        """
        if self._g.shape[-1] == 1:
            return product("...ik,...jk->...ij", a, b, dtype) * self.between()
        diagonal = jnp.sum(a.astype(self._g.dtype) * b.astype(self._g.dtype), axis=-1)

        def corner(level, *_):
            half = 1 << level
            rows = _halves(a, half, 1) * jnp.exp(_sums(_halves(self._g, half, 1))[0])
            columns = _halves(b, half, 0) * jnp.exp(_sums(_halves(self._g, half, 0))[1])
            if half <= SMALL:
                return jnp.sum(rows[..., :, None, :] * columns[..., None, :, :], axis=-1)
            return product("...ik,...jk->...ij", rows, columns, dtype)

        return join_blocks(diagonal[..., None, None], corner)

    def spread(self, scores: jax.Array, x: jax.Array, dtype) -> jax.Array:
        """``sum_j scores_ij decay_c(j to i) x_jc`` over j <= i, ``[..., C, X]``.

        What :meth:`pairs` is for gates on the channels that are summed over, for gates on those
        that are not: ``scores [..., C, C]``, ``x [..., C, X]``.
        """
        out = jnp.diagonal(scores, axis1=-2, axis2=-1)[..., None] * x
        half = 1
        while half < x.shape[-2]:
            corner = diagonal_blocks(scores, 2 * half)[..., half:, :half]
            columns = _halves(x, half, 0) * jnp.exp(_sums(_halves(self._g, half, 0))[1])
            if half <= SMALL:
                later = jnp.sum(corner[..., None] * columns[..., None, :, :], axis=-2)
            else:
                later = product("...ij,...jc->...ic", corner, columns, dtype)
            later = later * jnp.exp(_sums(_halves(self._g, half, 1))[0])
            out = out + jnp.stack([jnp.zeros_like(later), later], axis=-3).reshape(out.shape)
            half *= 2
        return out

    def between(self) -> jax.Array:
        """Decays of a scalar gate from after j to i, 0 for j > i: ``[..., C, C]``."""
        return _scalar_pairs(self._g[..., 0])

    def enter_before(self, x: jax.Array) -> jax.Array:
        """:meth:`enter` for what reads before its own token decays the state."""
        entered = self.enter(_back(x))
        return jnp.concatenate([x[..., :1, :].astype(entered.dtype), entered[..., :-1, :]], axis=-2)

    def pairs_before(self, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
        """:meth:`pairs` for ``a`` that reads before its own token decays and writes: j < i."""
        pairs = self.pairs(_back(a), b, dtype)
        return jnp.concatenate([jnp.zeros_like(pairs[..., :1, :]), pairs[..., :-1, :]], axis=-2)


def _back(x):
    """``x [..., C, K]`` a token earlier; zeros at the end."""
    return jnp.concatenate([x[..., 1:, :], jnp.zeros_like(x[..., :1, :])], axis=-2)


def _sums(g):
    """Sums of ``g [..., h, X]`` up to each token (itself included) and from after it to the end."""
    axis = g.ndim - 2
    behind = lax.cumsum(g, axis=axis, reverse=True)
    behind = jnp.concatenate([behind[..., 1:, :], jnp.zeros_like(g[..., :1, :])], axis=-2)
    return lax.cumsum(g, axis=axis), behind


def _halves(x, half, which):
    """The later (``which`` 1) or earlier (0) half of every block of two, ``[..., n, half, K]``."""
    shape = (*x.shape[:-2], x.shape[-2] // (2 * half), 2, half, x.shape[-1])
    return x.reshape(shape)[..., which, :, :]


@jax.custom_vjp
def _scalar_pairs(g):
    """Decays from after j to i of scalar gates ``g [..., C]``, 0 for j > i: ``[..., C, C]``."""
    g = g[..., None]

    def corner(level, *_):
        rows = jnp.exp(_sums(_halves(g, 1 << level, 1))[0])
        columns = jnp.exp(_sums(_halves(g, 1 << level, 0))[1])
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
