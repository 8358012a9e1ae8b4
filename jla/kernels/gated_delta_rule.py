"""Gated delta rule (and delta rule) on Hopper, forward and backward.

Per head, state S float32 [K, V], per token
    S <- exp(g) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = scale S^T q.

Chunks of C = 64 tokens, G the cumulative log decay inside a chunk. Kernels of a training step:
    chunk_inverses   T = (I + A)^-1, all chunks in parallel
    outputs          serial over chunks: states, U (the e of the chunk) and o
    state_gradients  serial, reversed: dS and dX = T^T dU
    token_gradients  all chunks in parallel: dq, dk, dv, dbeta, dg

Long rows with few heads are split into pieces first (``gated_delta_rule_split``), exactly.

Saved for the backward, bytes per token and head at K = V = 128 in 16 bits: q, k, v 768, T 128,
the gate tables 32, the states entering the chunks 512, U 256; of a split row also the pieces'
maps. Only the 64 x 64 scores and k S are recomputed; dS (512) and dX (256) pass between the two
backward kernels. FLOPs per token and head: forward 2C(2K + 2V + C) + 6KV, backward
2C(4K + 6V) + 18KV.

Masks never reach the kernels. A padding token gets beta = 0, g = 0 and a decay of exp(-1e30)
for reading. A document's first token gets g = -111: exp underflows to an exact zero in float32,
so nothing crosses it; a hard reset (g = -inf) is clamped to the same value.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jla.kernels import common as cm
from jla.kernels import gated_delta_rule_backward as backward
from jla.kernels import gated_delta_rule_forward as forward
from jla.kernels import gated_delta_rule_split as split

C = forward.C
RESET = -111.0  # log decay whose exponential is zero in float32
HEAD_DIMS = (64, 128)
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


def gated_delta_rule(
    q, k, v, g, beta, *, scale, initial_state=None, segment_ids=None, use_qk_l2norm=False
):
    """Outputs and final states of the gated delta rule.

    Args:
      q, k: [B, T, Hq, K] bfloat16 or float16; head h of v uses q/k head h // (H // Hq).
      v: [B, T, H, V] in the same dtype.
      g: [B, T, H] float32 log decay (natural units, <= 0, -inf allowed), None for the delta rule.
      beta: [B, T, H] float32.
      scale: positive number on the outputs.
      initial_state: [B, H, K, V] float32 or None (zeros).
      segment_ids: [B, T] int32 or None; 0 is padding, a change of id starts a new document.
      use_qk_l2norm: normalise q and k over K first, x * rsqrt(sum(x^2) + 1e-6).
    Returns: o [B, T, H, V] in v's dtype, final states [B, H, K, V] float32.
    """
    _check(q, k, v, g, beta, scale)
    if use_qk_l2norm:
        q, k = _l2norm(q), _l2norm(k)
    key_dim, value_dim = k.shape[-1], v.shape[-1]
    length = q.shape[1]
    q, k, v, beta = (_lengthen(x) for x in (q, k, v, beta.astype(cm.F32)))
    q, k, v = (_widen(x) for x in (q, k, v))
    shape = (q.shape[0], v.shape[2], k.shape[-1], v.shape[-1])
    if initial_state is None:
        state = jnp.zeros(shape, cm.F32)
    else:
        state = _widen(_widen(initial_state.astype(cm.F32)), -2)
    g = jnp.zeros(beta.shape, cm.F32) if g is None else _lengthen(g.astype(cm.F32))
    g, real = jnp.maximum(g, RESET), None
    if segment_ids is not None:
        segment_ids = _lengthen(segment_ids)
        real, starts = _documents(segment_ids)
        g = jnp.where(real, jnp.where(starts, RESET, g), 0.0)
        beta = jnp.where(real, beta, 0.0)
        real = real.astype(cm.F32)
    o, state = _core(q, k, v, g, beta, state, real, float(scale))
    return o[:, :length, :, :value_dim], state[..., :key_dim, :value_dim]


def _check(q, k, v, g, beta, scale):
    if not q.dtype == k.dtype == v.dtype or jnp.dtype(v.dtype) not in DTYPES:
        raise NotImplementedError(
            f"q, k, v must share bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape != k.shape or v.shape[2] % k.shape[2] or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if beta.shape != v.shape[:3] or (g is not None and g.shape != beta.shape):
        raise ValueError(f"g and beta must be {v.shape[:3]}")
    if max(k.shape[-1], v.shape[-1]) > max(HEAD_DIMS):
        raise NotImplementedError(f"head sizes above {max(HEAD_DIMS)}")
    if q.shape[1] == 0:
        raise ValueError("T must be at least 1")
    if not scale > 0:
        raise NotImplementedError("scale must be positive: it is folded into a log decay")


def _l2norm(x):
    y = x.astype(cm.F32)
    return (y * jax.lax.rsqrt(jnp.sum(y * y, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def _lengthen(x):
    """Tokens up to a multiple of 8 (the rows of a TMA tile); zeros are identity steps."""
    extra = -x.shape[1] % 8
    return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) if extra else x


def _widen(x, axis=-1):
    """Zero columns up to the next head size that the kernels have."""
    size = x.shape[axis]
    extra = min(d for d in HEAD_DIMS if d >= size) - size
    if not extra:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, extra)
    return jnp.pad(x, pads)


def _documents(segment_ids):
    """real, starts: bool [B, T, 1]; starts are first tokens of all but a row's first document."""
    length = segment_ids.shape[1]
    real = segment_ids != 0
    position = jnp.where(real, jnp.arange(length), -1)
    last = jax.lax.cummax(position, axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=1)
    starts = real & (before >= 0) & (previous != segment_ids)
    return real[..., None], starts[..., None]


def _chunked(x, chunks):
    """[B, T, H] to [B, H, chunks, C], zero-padded."""
    batch, length, heads = x.shape
    x = jnp.pad(x, ((0, 0), (0, chunks * C - length), (0, 0)))
    return jnp.moveaxis(x.reshape(batch, chunks, C, heads), 3, 1)


def _unchunked(x, length):
    """[B, H, N, C] to [B, T, H]."""
    batch, heads, chunks, _ = x.shape
    return jnp.moveaxis(x, 1, 3).reshape(batch, chunks * C, heads)[:, :length]


def gate_tables(g, beta, real, scale, chunks):
    """Per-token factors of every chunk, float32 [B, H, chunks, 8, C] (rows named in ``forward``).

    Reading decays (GQ, GAMMA_Q) carry the scale of the outputs and the padding mask.
    """
    beta = _chunked(beta, chunks)
    total = _prefix_sum(_chunked(g * cm.LOG2E, chunks))
    reads = total + math.log2(scale)
    if real is not None:
        reads = jnp.where(_chunked(real, chunks) > 0, reads, -1e30)
    last = total[..., -1:]
    gamma = jnp.exp2(last)
    rows = [total, reads, beta, beta * jnp.exp2(total), jnp.exp2(last - total), jnp.exp2(reads)]
    return jnp.stack([*rows, jnp.broadcast_to(gamma, total.shape), total], 3)


def _pieces(v):
    """Static split of v's rows, and the chunks of a row rounded up to whole pieces."""
    batch, length, heads, _ = v.shape
    chunks = -(-length // C)
    pieces = split.piece_count(batch * heads, chunks)
    return pieces, -(-chunks // pieces) * pieces


def _run(q, k, v, g, beta, state, real, scale, save):
    """o, final state [B, H, K, V], and what the backward needs when ``save``."""
    pieces, chunks = _pieces(v)
    tables = gate_tables(g, beta, real, scale, chunks)
    inverses = forward.chunk_inverses(k, tables)
    start, maps = jnp.swapaxes(state, 2, 3), None
    if pieces > 1:
        *maps, add = split.piece_maps(k, v, inverses, tables, pieces=pieces)
        start = split.scan_pieces(start, *maps, add, pieces=pieces)
    o, final, *saved = forward.outputs(q, k, v, inverses, tables, start, pieces=pieces, save=save)
    final = jnp.swapaxes(_piece(final, pieces, -1), 2, 3)
    return (o, final), (q, k, v, tables, inverses, maps, saved, real)


def _piece(x, pieces, which):
    """[B * pieces, ...] to the [B, ...] of one piece."""
    return x.reshape(-1, pieces, *x.shape[1:])[:, which]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _core(q, k, v, g, beta, state, real, scale):
    return _run(q, k, v, g, beta, state, real, scale, save=False)[0]


def _core_forward(q, k, v, g, beta, state, real, scale):
    return _run(q, k, v, g, beta, state, real, scale, save=True)


def _core_backward(scale, saved, cotangents):
    q, k, v, tables, inverses, maps, (states, u), real = saved
    do, d_final = cotangents
    do, d_end = do.astype(v.dtype), jnp.swapaxes(d_final, 2, 3)
    pieces, _ = _pieces(v)
    if pieces > 1:
        zero = jnp.zeros((d_end.shape[0] * pieces, *d_end.shape[1:]), cm.F32)
        last = split.first_resets(tables, pieces)
        (add,) = backward.state_gradients(
            q, k, do, inverses, tables, zero, pieces=pieces, last=last
        )
        d_end = split.scan_pieces(d_end, *maps, add, pieces=pieces, reverse=True)
    d_start, d_states, dx = backward.state_gradients(
        q, k, do, inverses, tables, d_end, pieces=pieces
    )
    dq, dk, dv, sums = backward.token_gradients(q, k, v, do, states, u, d_states, dx, tables)
    dg, dbeta = _gate_gradients(sums, tables, q.shape[1])
    dq, dk = (_sum_group(x, q.shape[2]) for x in (dq, dk))
    d_state = jnp.swapaxes(_piece(d_start, pieces, 0), 2, 3)
    return dq, dk, dv, dg, dbeta, d_state, None if real is None else jnp.zeros_like(real)


_core.defvjp(_core_forward, _core_backward)


def _gate_gradients(sums, tables, length):
    """dg and dbeta [B, T, H] from the sums of ``token_gradients``.

    A token's gate scales everything that later tokens of its chunk read from earlier ones, so dg
    is a sum over later tokens. Nothing crosses a reset, where the sum starts anew: the terms
    would cancel there, but only up to their rounding.
    """
    q_dq, read, k_dk, d_beta, write, state = (sums[:, :, :, i] for i in range(6))
    total, gamma = tables[:, :, :, forward.G], tables[:, :, :, forward.TOTAL, :1]
    d_total = q_dq + 2 * read - k_dk  # reads minus writes
    d_last = jnp.sum(write, -1, keepdims=True) + gamma * jnp.sum(state, -1, keepdims=True)
    step = jnp.diff(total, axis=-1, prepend=0.0)
    resets = (step < 0.97 * RESET * cm.LOG2E).astype(cm.F32)
    last = jnp.arange(C) == C - 1
    dg = _sum_to_reset(d_total + jnp.where(last, d_last, 0.0), resets)
    return _unchunked(dg, length), _unchunked(d_beta, length)


def _shift(x, by):
    """x[t + by] along the last axis, zero outside."""
    pads = (0, by) if by > 0 else (-by, 0)
    kept = x[..., by:] if by > 0 else x[..., :by]
    return jnp.pad(kept, [(0, 0)] * (x.ndim - 1) + [pads])


def _prefix_sum(x):
    """Inclusive, over the C tokens of a chunk.

    Two sums of eight shifted reads, one small fused kernel each (cumsum and masked sums were
    several times slower); the barrier keeps XLA from fusing them into 64 reads.
    """
    for reach in (1, 8):
        x = jax.lax.optimization_barrier(sum(_shift(x, -d * reach) for d in range(1, 8)) + x)
    return x


def _sum_to_reset(x, resets):
    """Sum of x over a token and later ones of its chunk, up to before the next reset."""
    follows = 1.0 - _shift(resets, 1)  # no reset between a token and the next
    for reach in (1, 4, 16):
        linked, total = follows, x
        for d in range(1, 4):
            total = total + linked * _shift(x, d * reach)
            linked = linked * _shift(follows, d * reach)
        x, follows = jax.lax.optimization_barrier((total, linked))
    return x


def _sum_group(x, heads):
    """Sums [B, T, H, K] over the value heads that share a q/k head."""
    if x.shape[2] == heads:
        return x
    batch, length, _, dim = x.shape
    x = x.reshape(batch, length, heads, -1, dim)
    return jnp.sum(x, 3, dtype=cm.F32).astype(x.dtype)
