"""What every chunked recurrence shares: layout, products, the inverse of unit lower triangles."""

from __future__ import annotations

import math

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


def join_blocks(blocks: jax.Array, corner) -> jax.Array:
    """Joins lower triangular diagonal blocks, two and two, until one is left.

    Args:
        blocks: ``[..., N, b, c]``, N a power of two.
        corner: ``(n, first, second) -> [..., n, b, c]``, what stands below ``first`` and left of
            ``second`` in the n blocks that they are joined to.
    """
    while blocks.shape[-3] > 1:
        first, second = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]
        below = corner(first.shape[-3], first, second)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([below, second], axis=-1)], axis=-2)
    return blocks[..., 0, :, :]


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """``(I + a)^-1`` of strictly lower triangular ``a [..., C, C]``, C a power of two.

    Blocks of the diagonal are inverted, then joined two and two: the block below the diagonal of
    the larger inverse is ``-T2 a21 T1``. No powers of ``a`` are formed, so equal keys (entries near
    1) lose no digits.
    """

    def corner(count, first, second):
        size = first.shape[-1]
        return -_matmul(second, _matmul(diagonal_blocks(a, count)[..., size:, :size], first))

    return join_blocks(_joined_in_place(diagonal_blocks(a, max(a.shape[-1] // 16, 1))), corner)


def diagonal_blocks(a: jax.Array, count: int) -> jax.Array:
    """The ``count`` blocks of the diagonal of ``a [..., C, D]``, ``[..., count, b, c]``."""
    b, c = a.shape[-2] // count, a.shape[-1] // count
    blocks = [a[..., i * b : (i + 1) * b, i * c : (i + 1) * c] for i in range(count)]
    return jnp.stack(blocks, axis=-3)


def _joined_in_place(a):
    """The same joining for small blocks, all pairs at once by masks: cheap while blocks are."""
    size = a.shape[-1]
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    t = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), a.shape)
    for level in range(size.bit_length() - 1):
        half = 1 << level
        pair = row // (2 * half) == column // (2 * half)
        below = jnp.where(pair & (row // half > column // half), a, 0)
        # The first halves are 1 x 1, whose inverses are 1.
        t = t - (below if level == 0 else _matmul(t, _matmul(below, t)))
    return t


def _matmul(a, b):
    return jnp.matmul(a, b, precision=HIGHEST)


def _inverse_fwd(a):
    t = unit_lower_inverse(a)
    return t, t


def _inverse_bwd(t, dt):
    return (-jnp.tril(_matmul(_matmul(t.mT, dt), t.mT), -1),)


unit_lower_inverse.defvjp(_inverse_fwd, _inverse_bwd)
