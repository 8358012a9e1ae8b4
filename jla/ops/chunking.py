"""What every chunked recurrence shares: layout, decays that cannot overflow, the UT inverse."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST


def accumulator(dtype) -> jnp.dtype:
    """The dtype of states and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(dtype, jnp.float32)


def product(spec: str, a: jax.Array, b: jax.Array, dtype) -> jax.Array:
    """``einsum`` with operands in ``dtype`` (the inputs' dtype), summed and returned wide.

    float32 products are true float32 (no TF32): a recurrence feeds its errors back.
    """
    return jnp.einsum(
        spec,
        a.astype(dtype),
        b.astype(dtype),
        precision=HIGHEST,
        preferred_element_type=accumulator(dtype),
    )


def repeat_heads(x: jax.Array, heads: int, axis: int = 2) -> jax.Array:
    """Gives each group of heads its shared one: head h reads ``h // (heads // x.shape[axis])``."""
    groups = x.shape[axis]
    return x if groups == heads else jnp.repeat(x, heads // groups, axis=axis)


def pick_chunk(length: int, chunk_size: int | None, name: str) -> int:
    """The chunk for a row of ``length``: ``chunk_size``, less for short rows; a power of two.

    None takes 32 on CPUs, where the fewer operations of short chunks win, and 64 elsewhere.

    Raises:
        ValueError: another size than 16, 32, 64, 128.
    """
    if chunk_size is None:
        chunk_size = 32 if jax.default_backend() == "cpu" else 64
    if chunk_size not in (16, 32, 64, 128):
        raise ValueError(f"{name} must be 16, 32, 64 or 128, got {chunk_size}")
    return min(chunk_size, max(16, 1 << math.ceil(math.log2(length))))


def to_chunks(x: jax.Array, chunk: int, fill: float = 0.0) -> jax.Array:
    """``[B, T, H, ...] -> [N, B, H, C, ...]``, the tail filled up to a whole chunk."""
    batch, length, heads, *rest = x.shape
    pad = -length % chunk
    x = jnp.pad(x, ((0, 0), (0, pad), (0, 0), *((0, 0) for _ in rest)), constant_values=fill)
    x = x.reshape(batch, (length + pad) // chunk, chunk, heads, *rest)
    return jnp.moveaxis(x, (1, 3), (0, 2))


def from_chunks(x: jax.Array, length: int) -> jax.Array:
    """``[N, B, H, C, ...] -> [B, T, H, ...]``, the inverse of :func:`to_chunks`."""
    x = jnp.moveaxis(x, (0, 2), (1, 3))
    batch, chunks, chunk, heads, *rest = x.shape
    return x.reshape(batch, chunks * chunk, heads, *rest)[:, :length]


class Decay(NamedTuple):
    """Products of a chunk's scalar decays, each at most 1; resets cut them to exactly 0."""

    pairs: jax.Array  # [..., C, C]: from after j to i, for j <= i, else 0
    from_start: jax.Array  # [..., C]: from the chunk's entry to token i
    to_end: jax.Array  # [..., C]: from after j to the chunk's end
    total: jax.Array  # [...]: over the whole chunk


def scalar_decay(g: jax.Array) -> Decay:
    """Decays of chunks from log decays ``g [..., C]`` (natural log, at most 0).

    A gate whose ``exp`` is 0 (``-inf`` included) is a *reset*: pairs across it are cut by comparing
    counts, so no difference of infinities arises. Exponents are masked before ``exp``, hence
    nothing overflows forward or backward.
    """
    reset = g < math.log(float(jnp.finfo(g.dtype).smallest_subnormal)) - 1.0
    gaps = _gaps(jnp.where(reset, 0.0, g))
    resets = jnp.cumsum(reset.astype(jnp.int32), axis=-1)
    last, lower = resets[..., -1:], jnp.tril(jnp.ones((g.shape[-1],) * 2, bool))

    def decay(gap, connected):
        return jnp.exp(jnp.where(connected, gap, -jnp.inf))

    return Decay(
        pairs=decay(gaps.pairs, lower & (resets[..., :, None] == resets[..., None, :])),
        from_start=decay(gaps.from_start, resets == 0),
        to_end=decay(gaps.to_end, resets == last),
        total=decay(gaps.total, last[..., 0] == 0),
    )


@jax.custom_vjp
def _gaps(g) -> Decay:
    """The log decays between the points of a chunk, as sums of ``g`` over the tokens in between.

    Differences of running sums, without their cancellation: the sums are split in a coarse part,
    whose sums and differences are exact in floating point, and a small remainder. So a weak decay
    behind a very strong one keeps its digits.
    """
    info = jnp.finfo(g.dtype)
    # |g| < 2^7 (2^10 in float64) over at most 2^7 tokens: 14 (17) bits before the point.
    step = 2.0 ** ((14 if info.bits == 32 else 17) - info.nmant)
    coarse = jnp.round(g / step) * step
    sums = (jnp.cumsum(coarse, axis=-1), jnp.cumsum(g - coarse, axis=-1))
    return Decay(
        pairs=sum(x[..., :, None] - x[..., None, :] for x in sums),
        from_start=sum(sums),
        to_end=sum(x[..., -1:] - x for x in sums),
        total=sum(sums)[..., -1],
    )


def _gaps_fwd(g):
    return _gaps(g), None


def _gaps_bwd(_, d):
    # g_l stands in every gap that spans l. Adding those gradients directly, instead of taking the
    # running sums' difference, lets no large gradient of another pair swallow a small one.
    before = jnp.tril(jnp.ones(d.pairs.shape[-2:], bool), -1)
    later = lax.cumsum(jnp.tril(d.pairs, -1), axis=d.pairs.ndim - 2, reverse=True)
    pairs = jnp.sum(jnp.where(before, later, 0), axis=-1)
    from_start = lax.cumsum(d.from_start, axis=d.from_start.ndim - 1, reverse=True)
    to_end = jnp.cumsum(d.to_end, axis=-1)
    to_end = jnp.concatenate([jnp.zeros_like(to_end[..., :1]), to_end[..., :-1]], axis=-1)
    return (pairs + from_start + to_end + d.total[..., None],)


_gaps.defvjp(_gaps_fwd, _gaps_bwd)


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """``(I + a)^-1`` of strictly lower triangular ``a [..., C, C]``, C a power of two.

    Diagonal blocks of 16 by substitution, then doubled: the off-diagonal block of the inverse is
    ``-T2 a21 T1``. No powers of ``a`` are formed, so equal keys (entries near 1) lose no digits.
    """
    size = a.shape[-1]
    base = min(size, 16)
    t = _substitute(_diagonal_blocks(a, base))
    while base < size:
        below = _diagonal_blocks(a, 2 * base)[..., base:, :base]
        first, second = t[..., 0::2, :, :], t[..., 1::2, :, :]
        left = jnp.matmul(second, jnp.matmul(below, first, precision=HIGHEST), precision=HIGHEST)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        t = jnp.concatenate([top, jnp.concatenate([-left, second], axis=-1)], axis=-2)
        base *= 2
    return t[..., 0, :, :]


def _diagonal_blocks(a, size):
    count = a.shape[-1] // size
    blocks = [a[..., i * size : (i + 1) * size, i * size : (i + 1) * size] for i in range(count)]
    return jnp.stack(blocks, axis=-3)


def _substitute(a):
    size = a.shape[-1]
    eye = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    rows = [eye[..., 0, :]]
    for i in range(1, size):
        above = jnp.stack(rows, axis=-2)
        rows.append(eye[..., i, :] - jnp.sum(a[..., i, :i, None] * above, axis=-2))
    return jnp.stack(rows, axis=-2)


def _inverse_fwd(a):
    t = unit_lower_inverse(a)
    return t, t


def _inverse_bwd(t, dt):
    left = jnp.matmul(t.mT, dt, precision=HIGHEST)
    return (jnp.tril(-jnp.matmul(left, t.mT, precision=HIGHEST), -1),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
