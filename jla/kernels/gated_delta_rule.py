"""Gated delta rule (and delta rule) on Hopper, forward and backward.

Per head, state S float32 [K, V], per token
    S <- exp(g) S;  e = beta (v - S^T k);  S <- S + k e^T;  o = scale S^T q.

Chunks of C = 64 tokens, G the cumulative log decay inside a chunk. Kernels of a training step:
    chunk_inverses   gate tables and T = (I + A)^-1, all chunks in parallel
    outputs          serial over chunks: states, U (the e of the chunk) and o
    state_gradients  serial, reversed: dS and dX = T^T dU
    token_gradients  all chunks in parallel: dq, dk, dv, dbeta
    gate_gradients   dg

Long rows with few heads are split into pieces first (``gated_delta_rule_split``), exactly.

Saved for the backward, bytes per token and head at K = V = 128 in 16 bits: q, k, v 768, T 128,
the gate tables 40, the states entering the chunks 512, U 256; of a split row also the maps of its
sections. Only the 64 x 64 scores and k S are recomputed; dS (512) and dX (256) pass between the
two backward kernels. FLOPs per token and head: forward 2C(2K + 2V + C) + 6KV, backward
2C(4K + 6V) + 18KV.

Masks never reach the later kernels. A padding token gets beta = 0, g = 0 and a decay of
exp(-1e30) for reading. A document's first token gets g = -111: exp underflows to an exact zero in
float32, so nothing crosses it; a hard reset (g = -inf) is clamped to the same value. Nor does the
normalisation of q and k: the inverse norms are factors in the tables, and the last kernel takes
the part along q and k out of the gradients.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jla.kernels import common as cm
from jla.kernels import gated_delta_rule_backward as backward
from jla.kernels import gated_delta_rule_forward as forward
from jla.kernels import gated_delta_rule_split as split
from jla.kernels import sharding

C = forward.C
WIDEST_KEY = 256
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))

# Several devices divide rows and heads. Of q, k, v, g, beta, a state, marks | what is saved
# besides: tables, inverses, the sections' maps (matrix and diagonal), states, U.
OPERANDS = ("b.g", "b.g", "b.h", "b.h", "b.h", "bh", "b")
OUTPUTS, SAVED = ("b.h", "bh"), ("bh", "bh", "b.h", "b.h", "bh", "b.h")
FORWARD = sharding.Layout(OPERANDS, OUTPUTS)
SAVING = sharding.Layout(OPERANDS, (OUTPUTS, SAVED))
BACKWARD = sharding.Layout((*OPERANDS[:5], "b", *SAVED, *OUTPUTS), OPERANDS[:6])


class Options(NamedTuple):
    """Static choices of a call."""

    scale: float
    normalised: bool
    final: bool
    stateful: bool
    pieces: int  # of a row
    sections: int  # of a row, each with a map; a multiple of the pieces


def gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    *,
    scale,
    initial_state=None,
    marks=None,
    use_qk_l2norm=False,
    output_final_state=True,
):
    """Outputs and final states of the gated delta rule.

    Args:
      q, k: [B, T, Hq, K] bfloat16 or float16, K at most 256; head h of v uses q/k head
        h // (H // Hq).
      v: [B, T, H, V] in the same dtype.
      g: [B, T, H] float32 log decay (natural units, <= 0, -inf allowed), None for the delta rule.
      beta: [B, T, H] float32.
      scale: positive number on the outputs.
      initial_state: [B, H, K, V] float32 or None (zeros).
      marks: [B, T] float32 or None; 0 is padding, 2 the first token of a document other than the
        row's first, 1 any other token.
      use_qk_l2norm: normalise q and k over K first, x * rsqrt(sum(x^2) + 1e-6).
      output_final_state: whether the final states are wanted.
    Returns: o [B, T, H, V] in v's dtype, final states [B, H, K, V] float32 or None.
    """
    _check(q, k, v, g, beta, scale)
    length, key_dim, value_dim = k.shape[1], k.shape[-1], v.shape[-1]
    g, beta = (None if x is None else x.astype(cm.F32) for x in (g, beta))
    state = initial_state
    if state is not None:
        state = cm.widen(cm.widen(state.astype(cm.F32)), -2)
    q, k, v = (cm.lengthen(cm.widen(x), 8) for x in (q, k, v))
    fading = not (g is None and marks is None)
    options = Options(
        float(scale), use_qk_l2norm, output_final_state, state is not None, *_pieces(q, v, fading)
    )
    o, state = _core(q, k, v, g, beta, state, marks, options)
    if state is not None:
        state = state[..., :key_dim, :value_dim]
    return o[:, :length, :, :value_dim], state


def _check(q, k, v, g, beta, scale):
    if not q.dtype == k.dtype == v.dtype or jnp.dtype(v.dtype) not in DTYPES:
        raise NotImplementedError(
            f"q, k, v must share bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if q.shape != k.shape or v.shape[2] % k.shape[2] or q.shape[:2] != v.shape[:2]:
        raise ValueError(f"q {q.shape}, k {k.shape} and v {v.shape} do not fit together")
    if beta.shape != v.shape[:3] or (g is not None and g.shape != beta.shape):
        raise ValueError(f"g and beta must be {v.shape[:3]}")
    if k.shape[-1] > WIDEST_KEY:
        raise NotImplementedError(f"key head sizes above {WIDEST_KEY}, got {k.shape[-1]}")
    if q.shape[1] == 0:
        raise ValueError("T must be at least 1")
    if not scale > 0:
        raise NotImplementedError("scale must be positive: it is folded into a log decay")


def _unchunked(x, length):
    """[B, H, N, C] to [B, T, H]."""
    batch, heads, chunks, _ = x.shape
    return jnp.moveaxis(x, 1, 3).reshape(batch, chunks * C, heads)[:, :length]


def _inverse_norm(x):
    return jax.lax.rsqrt(jnp.sum(jnp.square(x.astype(cm.F32)), -1) + forward.EPS)


def _gates(q, g, beta, marks, tokens, normalised):
    """:class:`forward.Gates` of whole chunks; what is added to a row are identity steps."""
    gates = forward.Gates(g, beta, marks, _inverse_norm(q) if normalised else None)
    return jax.tree.map(lambda x: cm.lengthen(_whole_heads(x), tokens), gates)


def _whole_heads(x):
    """``x [B, T, H]`` with heads up to 4 or a multiple of 8: whole boxes of the gates' copies."""
    if x.ndim < 3:
        return x
    extra = -x.shape[2] % (4 if x.shape[2] <= 4 else forward.GATE_HEADS)
    return jnp.pad(x, [(0, 0), (0, 0), (0, extra)]) if extra else x


def _pieces(q, v, fading):
    """Pieces and sections of a row, for the rows and heads that a device is likely to have."""
    (batch, length, heads, value_dim), key_dim = v.shape, q.shape[-1]
    if key_dim > cm.WIDEST:  # their maps do not fit into shared memory
        return 1, 1
    heads = -(-batch * heads // sharding.shares())
    blocks = heads * (value_dim // forward.value_width(key_dim, value_dim))
    chunks = -(-length // C)
    pieces = split.piece_count(blocks, chunks)
    return pieces, pieces * (split.sections(chunks // pieces) if fading else 1)


def _run(q, k, v, g, beta, state, marks, options, save):
    """o, final state [B, H, K, V], and what the backward needs when ``save``."""
    pieces, sections = options.pieces, options.sections
    gates = _gates(q, g, beta, marks, sections * C, options.normalised)
    fading = pieces > 1 and not (g is None and marks is None)
    inverses, tables = forward.chunk_inverses(
        k, gates, v.shape[2], scale=options.scale, bounds=fading
    )
    start, maps = None if state is None else jnp.swapaxes(state, 2, 3), (None, None)
    if pieces > 1:
        closed = split.closed(tables, sections) if fading else None
        # The first section's M moves an initial state, the last one's the final state's gradient.
        ends = (state is not None, save and options.final)
        *maps, add = split.section_maps(
            k, v, inverses, tables, closed, sections=sections, ends=ends
        )
        start = split.scan_sections(start, *maps, add, sections=sections, pieces=pieces)
        maps = [x.reshape(-1, sections, *x.shape[1:]) for x in maps]
    o, final, *saved = forward.outputs(q, k, v, inverses, tables, start, pieces=pieces, save=save)
    final = jnp.swapaxes(_piece(final, pieces, -1), 2, 3) if options.final else None
    return (o, final), (tables, inverses, *maps, *saved)


def _piece(x, pieces, which):
    """[B * pieces, ...] to the [B, ...] of one piece."""
    return x.reshape(-1, pieces, *x.shape[1:])[:, which]


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _core(q, k, v, g, beta, state, marks, options):
    return sharding.partitioned(_outputs, FORWARD, options, q, k, v, g, beta, state, marks)


def _core_forward(q, k, v, g, beta, state, marks, options):
    operands = (q, k, v, g, beta, state, marks)
    out, made = sharding.partitioned(_outputs_and_saved, SAVING, options, *operands)
    return out, (q, k, v, g, beta, marks, *made)


def _core_backward(options, saved, cotangents):
    operands = (*saved, *cotangents)
    return *sharding.partitioned(_gradients, BACKWARD, options, *operands), None


_core.defvjp(_core_forward, _core_backward)


def _outputs(*operands):
    return _run(*operands, save=False)[0]


def _outputs_and_saved(*operands):
    return _run(*operands, save=True)


def _gradients(
    q, k, v, g, beta, marks, tables, inverses, matrix, diagonal, states, u, do, d_end, options
):
    do = do.astype(v.dtype)
    d_end = None if d_end is None else jnp.swapaxes(d_end, 2, 3)
    pieces, sections = options.pieces, options.sections
    chain = functools.partial(backward.state_gradients, q, k, do, inverses, tables)
    if pieces > 1:
        reaching = None if g is None and marks is None else split.reaching(tables, sections)
        (add,) = chain(None, pieces=sections, reaching=reaching, save=False)
        maps = [x.reshape(-1, *x.shape[2:]) for x in (matrix, diagonal)]
        d_end = split.scan_sections(
            d_end, *maps, add, sections=sections, pieces=pieces, reverse=True
        )
    d_start, d_states, dx = chain(d_end, pieces=pieces)
    inside = options.normalised and q.shape[-1] <= cm.WIDEST
    dq, dk, dv, sums = backward.token_gradients(
        q, k, v, do, states, u, d_states, dx, tables, normalised=options.scale if inside else None
    )
    dg, dbeta = _gate_cotangents(sums, tables, g, marks, beta.shape[1])
    dq, dk = (_sum_group(x, q.shape[2]) for x in (dq, dk))
    if options.normalised and not inside:
        shares = backward.along_shares(sums, tables, options.scale)
        dq, dk = (
            _without(dx, x, share) for dx, x, share in zip((dq, dk), (q, k), shares, strict=True)
        )
    d_state = jnp.swapaxes(_piece(d_start, pieces, 0), 2, 3) if options.stateful else None
    return dq, dk, dv, dg, dbeta, d_state


def _gate_cotangents(sums, tables, g, marks, length):
    """dg (None without decay) and dbeta, zero where a mark or the clamp replaced the value."""
    dbeta = _unchunked(sums[:, :, :, backward.D_BETA], length)
    if marks is not None:
        marks = marks[..., None]
        dbeta = jnp.where(marks != 0, dbeta, 0.0)
    if g is None:
        return None, dbeta
    dg = _unchunked(backward.gate_gradients(sums, tables), length)
    live = g > forward.RESET
    return jnp.where(live if marks is None else live & (marks == 1), dg, 0.0), dbeta


def _without(dx, x, share):
    """``dx [B, T, Hq, K]`` less its part along x; ``share [B, H, N, 64]``."""
    share = _sum_group(_unchunked(share, x.shape[1])[..., None], x.shape[2])
    return (dx.astype(cm.F32) - share * x.astype(cm.F32)).astype(x.dtype)


def _sum_group(x, heads):
    """Sums [B, T, H, K] over the value heads that share a q/k head."""
    if x.shape[2] == heads:
        return x
    batch, length, _, dim = x.shape
    x = x.reshape(batch, length, heads, -1, dim)
    return jnp.sum(x, 3, dtype=cm.F32).astype(x.dtype)
