"""Short causal depthwise convolution on Hopper, forward and backward.

One kernel each way. The backward saves the inputs only and recomputes the sums that the activation
meets; bytes per token and channel in 16 bits: forward 4, backward 6, and 20 / ``SPAN`` for the
filter's partial sums, which XLA adds up.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jla.kernels import common as cm
from jla.kernels import sharding
from jla.kernels import short_conv_kernels as kernels

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
WIDTHS = (2, 3, 4)


# Several devices divide rows, and channels by whole strips.
OPERANDS = ("b.h", ".h", "h", "b.h", "b")
FORWARD = sharding.Layout(OPERANDS, "b.h", multiple=128)
BACKWARD = sharding.Layout((*OPERANDS, "b.h"), ("b.h", "b..h", "b.h"), multiple=128)


class Options(NamedTuple):
    """Static choices of a call."""

    silu: bool


def short_conv(x, kernel, bias=None, *, silu, segment_ids=None, initial_state=None):
    """The last W real tokens of each token's document, weighted, channel by channel.

    Args:
      x: [B, T, D] bfloat16 or float16, D a multiple of 128.
      kernel: [W, D] with W in 2..4; the last tap meets the current token.
      bias: [D] or None.
      silu: whether silu follows.
      segment_ids: int32 [B, T] or None; 0 is padding, a change is a new document.
      initial_state: [B, W - 1, D] in x's dtype, what precedes the row's first document, or None.
    Returns: [B, T, D] in x's dtype, zero at padding.
    """
    _check(x, kernel)
    length = x.shape[1]
    # A copy that crosses a row's end may land in the next row: rows get whole tiles.
    x = cm.lengthen(x, kernels.TOKENS)
    bias = None if bias is None else bias.astype(cm.F32)
    ids = segment_ids
    if ids is not None:
        ids = cm.lengthen(ids.astype(jnp.int32), kernels.TOKENS)
    y = _core(x, kernel.astype(cm.F32), bias, initial_state, ids, Options(silu))
    return y[:, :length]


def _check(x, kernel):
    if jnp.dtype(x.dtype) not in DTYPES:
        raise NotImplementedError(f"x must be bfloat16 or float16, got {x.dtype}")
    if kernel.shape[0] not in WIDTHS or not kernels.strip_width(x.shape[2]):
        raise NotImplementedError(f"W must be in {WIDTHS} and D a multiple of 128: {kernel.shape}")
    if x.shape[1] == 0:
        raise ValueError("T must be at least 1")


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _core(x, kernel, bias, state, ids, options):
    return sharding.partitioned(_forward, FORWARD, options, x, kernel, bias, state, ids)


def _core_forward(x, kernel, bias, state, ids, options):
    return _core(x, kernel, bias, state, ids, options), (x, kernel, bias, state, ids)


def _core_backward(options, saved, dy):
    x, _, bias, state, _ = saved
    dx, sums, d_state = sharding.partitioned(
        _backward, BACKWARD, options, *saved, dy.astype(x.dtype)
    )
    sums = jnp.sum(sums, (0, 1))
    d_state = None if d_state is None else d_state.astype(state.dtype)
    return dx, sums[:-1], None if bias is None else sums[-1], d_state, None


_core.defvjp(_core_forward, _core_backward)


def _forward(x, kernel, bias, state, ids, options):
    return kernels.forward(x, kernel, bias, state, ids, silu=options.silu)


def _backward(x, kernel, bias, state, ids, dy, options):
    dx, sums, *d_state = kernels.backward(x, dy, kernel, bias, state, ids, silu=options.silu)
    return dx, sums, d_state[0] if d_state else None
