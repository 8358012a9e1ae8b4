"""Scalar-decay linear attention on Hopper, forward and backward.

For every head, with log decay g, state S `[K, V]` and an optional weight w of the values,

    S_t = exp(g_t) S_{t-1} + w_t k_t v_t^T        o_t = scale * S_t^T q_t + d v_t

covers simple GLA, Mamba-2's SSD (q = C, k = B, v = x, w = dt, g = dt * A, d = D), retention and
lightning attention (a constant g per head) and linear attention without decay (g = None).

Work, for N = B * T tokens, H heads and 16-bit tensors:

- Forward: one kernel reads q, k, v and writes o (2 (2K + 2V) N H bytes with H q/k heads) and does
  2 N H (64 K + 64 V + 2 K V) FLOPs. Rows too few to fill the card are cut into pieces: a first
  kernel reads k and v again for every piece's contribution to the state, a float32 scan in XLA
  gives every piece its true start. The split is exact.
- Saved for the backward: the inputs, the cumulated gates (256 B a chunk and head) and the states
  at piece starts (float32, none without a split). Neither o nor chunk states are saved.
- Backward: one kernel recomputes the states entering the chunks (k, v) and runs the gradients of
  the leaving states backwards (q, do), writing 2 * 2 K V / 64 bytes a token and head; then one
  kernel over all chunks in parallel makes dq, dk, dv and what dg needs. About 2.5 times the
  forward's FLOPs plus the states again. Split rows add one pass over q and do. With fewer q/k
  heads than v heads dq and dk are summed inside the kernel.

Gates reach the kernels as chunk-local cumulated log2 decays in float32. A document start is a
decay of exp(-120), zero in float32 also after the cumulation, so packing costs the kernels
nothing; smaller gates, -inf among them, are clamped to it. dg_t is made only of products that
cross token t: pairs (i, j) with j < t <= i, and the states. A token's contribution to itself
never has to cancel, so strong decays keep their relative accuracy.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jla.kernels import common as cm
from jla.kernels import linear_attention_kernels as kernels
from jla.kernels import sharding
from jla.kernels.linear_attention_kernels import CHUNK, F32, LOG2E

# exp of it is zero in float32, and 64 of them keep the cumulated exponent exact to 1e-3.
CUT = -120.0
DEAD = 150.0  # log2: a factor below the smallest float32
SMS = 132  # H100 and H200
MIN_PIECE_CHUNKS = 8

# Several devices divide rows and heads. Of q, k, v, g, v_scale, skip; an initial state, marks |
# what the backward gets besides: gates, weights, starts | the cotangents.
OPERANDS = ("b.g", "b.g", "b.h", "b.h", "b.h", "h", "bh", "b")
OUTPUTS, SAVED = ("b.h", "bh"), ("bh", "bh", "b.h")
FORWARD = sharding.Layout(OPERANDS, (OUTPUTS, SAVED))
BACKWARD = sharding.Layout((*OPERANDS[:4], "h", "b", *SAVED, *OUTPUTS), OPERANDS[:7])


class Options(NamedTuple):
    """Static choices of a call."""

    scale: float
    per_piece: int  # chunks of a piece of the forward and of the backward's state passes
    per_map: int  # chunks of a piece whose contribution to the state is computed on its own
    has_state: bool
    marked: bool  # padding may be in the gates
    interpret: object = None


def linear_attention(
    q,
    k,
    v,
    g,
    *,
    scale,
    initial_state=None,
    marks=None,
    v_scale=None,
    skip=None,
    pieces=None,
    interpret=None,
):
    """Linear attention with one decay per head.

    Args:
      q, k: `[B, T, Hq, K]` bfloat16 or float16; K above 128 is cut into parts of 128 that are
        added up.
      v: `[B, T, H, V]` of the same dtype, H a multiple of Hq: head h reads q/k head
        h // (H // Hq). V above 128 is cut into heads of 128.
      g: `[B, T, H]` or `[H]` natural log decay (<= 0), or None for no decay.
      scale: Python float, factor of the output.
      initial_state: `[B, H, K, V]` or None; belongs to the row's first document.
      marks: `[B, T]` float32 or None; 0 is padding (state unchanged, output 0), 2 the first token
        of a document other than the row's first (it starts from a zero state), 1 any other token.
      v_scale: `[B, T, H]` weight of every value row (Mamba-2's dt), or None for 1.
      skip: `[H]` or None; so much of v, without its weight, is added to the outputs. Only with
        v_scale; at padding v must be 0.
      pieces: pieces a row is cut into; None chooses from the shapes.
      interpret: Pallas interpreter parameters, for tests.

    Returns:
      o `[B, T, H, V]` in v's dtype and the state after the last token, `[B, H, K, V]` float32.

    Raises:
      NotImplementedError: shapes or dtypes that the kernels lack.
      ValueError: skip without v_scale.
    """
    reason = unsupported_reason(q, k, v)
    if reason is not None:
        raise NotImplementedError(reason)
    if skip is not None and v_scale is None:
        raise ValueError("skip needs v_scale, got None")
    rest = dict(scale=scale, marks=marks, v_scale=v_scale, pieces=pieces, interpret=interpret)
    if q.shape[3] > cm.WIDEST:
        return _by_key_parts(q, k, v, g, initial_state, skip, rest)
    heads, value_dim = v.shape[2:]
    if value_dim > cm.WIDEST:
        parts = cm.value_parts(v)
        per_part = functools.partial(jnp.repeat, repeats=parts.shape[2] // heads, axis=-1)
        g, rest["v_scale"], rest["skip"] = (
            None if x is None else per_part(x) for x in (g, v_scale, skip)
        )
        state = None if initial_state is None else cm.state_parts(initial_state)
        o, state = linear_attention(q, k, parts, g, initial_state=state, **rest)
        o = o.reshape(*v.shape[:3], -1)[..., :value_dim]
        return o, cm.join_state(state, heads)[..., :value_dim]
    batch, length = v.shape[:2]
    key_dim = q.shape[3]
    if g is None:
        g = jnp.zeros((batch, length, heads), F32)
    g = jnp.broadcast_to(g.astype(F32), (batch, length, heads))
    v_scale, skip = (None if x is None else x.astype(F32) for x in (v_scale, skip))
    if initial_state is not None:
        initial_state = initial_state.astype(F32)
    # The copy engine wants whole tiles of 8 tokens; a token of zeros with g = 0 changes nothing.
    q, k, v, g = (cm.lengthen(x, 8) for x in (cm.widen(q), cm.widen(k), cm.widen(v), g))
    v_scale, marks = (None if x is None else cm.lengthen(x, 8) for x in (v_scale, marks))
    if initial_state is not None:
        initial_state = cm.widen(cm.widen(initial_state), -2)
    options = _options(kernels.shapes_of(q, v), float(scale), pieces)._replace(
        has_state=initial_state is not None, marked=marks is not None, interpret=interpret
    )
    o, state = _core(q, k, v, g, v_scale, skip, initial_state, marks, options)
    return o[:, :length, :, :value_dim], state[..., :key_dim, :value_dim]


def _by_key_parts(q, k, v, g, initial_state, skip, rest):
    """The sum over parts of the keys' channels: outputs are linear in them, states apart."""
    o, states = 0.0, []
    for first in range(0, q.shape[3], cm.WIDEST):
        part = slice(first, first + cm.WIDEST)
        state = None if initial_state is None else initial_state[:, :, part]
        more, state = linear_attention(
            q[..., part], k[..., part], v, g, initial_state=state, skip=skip, **rest
        )
        skip = None  # it is added once
        o, states = o + more.astype(F32), [*states, state]
    return o.astype(v.dtype), jnp.concatenate(states, axis=2)


def unsupported_reason(q, k, v):
    """Why the kernels cannot run these shapes and dtypes, or None."""
    if q.dtype not in (jnp.bfloat16, jnp.float16) or k.dtype != q.dtype or v.dtype != q.dtype:
        return f"q, k, v must share bfloat16 or float16, got {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape != k.shape or q.shape[:2] != v.shape[:2] or v.shape[2] % q.shape[2]:
        return f"incompatible shapes q {q.shape}, k {k.shape}, v {v.shape}"
    if q.shape[1] == 0:
        return "empty sequence"
    return None


def _options(s, scale, pieces):
    heads = -(-s.batch * s.heads // sharding.shares())
    if pieces is None:
        pieces = 1
        while 2 * pieces * heads <= SMS and s.chunks >= 2 * pieces * MIN_PIECE_CHUNKS:
            pieces *= 2
    per_piece = per_map = -(-s.chunks // pieces)
    # Shorter maps until there is a block for every SM, while the float32 maps stay below an eighth
    # of k and v; pieces already limited by memory gained nothing from it.
    blocks = heads * s.value // CHUNK
    least = s.key * s.value // (4 * (s.key + s.value))
    while per_map % 2 == 0 and per_map >= 2 * least and (s.chunks // per_map - 1) * blocks < SMS:
        per_map //= 2
    return Options(scale, per_piece, per_map, False, False)


def _gradient_blocks(s):
    """How the gradient kernel is cut: splits of a group's heads, and work items of a block."""
    splits, group = 1, s.heads_per_group
    blocks = s.batch * s.chunks * s.groups
    while group > 1 and 2 * blocks * splits < 3 * SMS and group % (2 * splits) == 0:
        splits *= 2
    per_block = 1
    while per_block < 8 and s.batch * s.heads * s.chunks >= 2 * per_block * 4 * SMS:
        per_block *= 2
    return splits, per_block


# ------------------------------------------------------------------------------ gates and packing


def _chunked(x, chunks):
    """`[B, T, H]` to `[B, H, chunks, CHUNK]`, zero beyond T."""
    batch, length, heads = x.shape
    x = jnp.pad(x, ((0, 0), (0, chunks * CHUNK - length), (0, 0)))
    return x.reshape(batch, chunks, CHUNK, heads).transpose(0, 3, 1, 2)


def _matmul(x, matrix):
    """x @ matrix in full float32, over the last axis of x."""
    return jnp.matmul(x, matrix, precision=lax.Precision.HIGHEST)


def _chunk_gates(g, marks):
    """The kernels' cumulated log2 decays `[B, H, chunks, CHUNK]`; g `[B, T, H]` natural log."""
    chunks = -(-g.shape[1] // CHUNK)
    logs = jnp.clip(g, CUT, 0.0)
    real = None
    if marks is not None:
        mark = marks[..., None]
        logs = jnp.where(mark == 2, CUT, jnp.where(mark == 0, 0.0, logs))
        real = _chunked(mark != 0, chunks)
    logs = _chunked(logs, chunks) * LOG2E
    # A float32 product with a triangle of ones: XLA's fused sums took ten times as long.
    total = _matmul(logs, np.tri(CHUNK, dtype=np.float32).T)
    return total if real is None else jnp.where(real, total, 1 - total)


def _gate_gradients(stats, g, marks):
    """dg and dw `[B, T, H]` from the gradient kernel's statistics."""
    batch, length, heads = g.shape

    def per_token(x):
        return x.transpose(0, 2, 3, 1).reshape(batch, -1, heads)[:, :length]

    # Pairs (i, j) of the chunk with j < t <= i, tokens j < t reaching later chunks, tokens i >= t
    # reached from earlier ones, and what passes through the whole chunk.
    later = np.tri(CHUNK, dtype=np.float32)
    factors = np.zeros((stats.shape[3], CHUNK, CHUNK), np.float32)
    factors[kernels.PAIR_QUERY], factors[kernels.PAIR_KEY] = later, -later
    factors[kernels.STATE_QUERY], factors[kernels.STATE_KEY] = later, 1 - later
    factors[kernels.THROUGH] = 1
    flat = stats.reshape(*stats.shape[:3], -1)
    dg = per_token(_matmul(flat, factors.reshape(-1, CHUNK)))
    live = g > CUT
    if marks is not None:
        live = live & (marks == 1)[..., None]
    weighted = stats.shape[3] > kernels.WEIGHT_GRAD
    return jnp.where(live, dg, 0.0), (
        per_token(stats[:, :, :, kernels.WEIGHT_GRAD]) if weighted else None
    )


# ------------------------------------------------------------------------------------------ split


def _unmarked(gates):
    return jnp.where(gates > 0.5, 1 - gates, gates)


def _map_decays(gates, per_map):
    """log2 decay of every chunk, `[B, H, maps, per_map]` float32, 0 beyond the row's end."""
    last = _unmarked(gates[..., -1])
    last = jnp.pad(last, ((0, 0), (0, 0), (0, -last.shape[2] % per_map)))
    return last.reshape(*last.shape[:2], -1, per_map)


def _live_steps(gates, decays, reverse):
    """int32 `[B, maps - 1, H]`: chunks of a map that leave a trace in what the next map reads."""
    at = jnp.arange(decays.shape[-1])
    passed = at[:, None] > at if reverse else at[:, None] < at
    after = jnp.sum(jnp.where(passed, decays[..., None, :], 0.0), axis=-1)
    if reverse:
        after = after[:, :, 1:]
    else:  # nothing, if the next map begins with a document
        begin = _unmarked(gates[:, :, :: decays.shape[-1], 0])
        after = after[:, :, :-1] + begin[:, :, 1:, None]
    return jnp.sum(after > -DEAD, axis=-1, dtype=jnp.int32).transpose(0, 2, 1)


def _scan_maps(ends, decays, first, every, reverse):
    """State entering every piece of `every` maps, `[B, pieces, H, V, K]` float32.

    ends: `[B, maps - 1, H, V, K]`, each map's own contribution, without the map that no other
    follows; decays: `[B, maps, H]`; first: `[B, H, V, K]` entering the first map, or None.
    """
    maps = decays.shape[1]
    state = jnp.zeros_like(ends[:, 0]) if first is None else first
    starts = [state]
    for i in range(maps - 1, 0, -1) if reverse else range(maps - 1):
        state = decays[:, i, :, None, None] * state + ends[:, i - 1 if reverse else i]
        if (i if reverse else i + 1) % every == 0:
            starts.append(state)
    return jnp.stack(starts[::-1] if reverse else starts, axis=1)


def _entering(source, gates, weights, first, s, options):
    """`[B, pieces, H, V, K]` float32 state entering every piece, or None for zero."""
    if options.per_piece >= s.chunks:
        return None if first is None else first[:, None]
    decays = _map_decays(gates, options.per_map)
    live = None
    if options.marked:  # documents may end inside a map: what lies before them is not read
        live = _live_steps(gates, decays, source[2])
    _, ends = kernels.walk(
        [source],
        gates,
        weights,
        [None],
        live,
        s,
        scale=options.scale,
        per_piece=options.per_map,
        store=False,
        marked=options.marked,
        interpret=options.interpret,
    )
    decays = jnp.exp2(jnp.sum(decays, axis=-1)).transpose(0, 2, 1)
    every = options.per_piece // options.per_map
    return _scan_maps(ends[0], decays, first, every, source[2])


# --------------------------------------------------------------------------------- differentiation


@functools.partial(jax.custom_vjp, nondiff_argnums=(8,))
def _core(q, k, v, g, v_scale, skip, initial_state, marks, options):
    return _core_fwd(q, k, v, g, v_scale, skip, initial_state, marks, options)[0]


def _core_fwd(q, k, v, g, v_scale, skip, initial_state, marks, options):
    operands = (q, k, v, g, v_scale, skip, initial_state, marks)
    out, made = sharding.partitioned(_forward, FORWARD, options, *operands)
    return out, (q, k, v, g, skip, marks, *made)


def _core_bwd(options, saved, cotangents):
    operands = (*saved, *cotangents)
    return *sharding.partitioned(_backward, BACKWARD, options, *operands), None


_core.defvjp(_core_fwd, _core_bwd)


def _forward(q, k, v, g, v_scale, skip, initial_state, marks, options):
    s = kernels.shapes_of(q, v)
    gates = _chunk_gates(g, marks)
    weights = None if v_scale is None else _chunked(v_scale, s.chunks)
    first = None if initial_state is None else initial_state.swapaxes(-1, -2)
    starts = _entering((k, v, False), gates, weights, first, s, options)
    o, end = kernels.forward(
        q, k, v, gates, weights, skip, starts, **_settings(options, "scale", "per_piece", "marked")
    )
    return (o, end.swapaxes(-1, -2)), (gates, weights, starts)


def _backward(q, k, v, g, skip, marks, gates, weights, starts, do, dend, options):
    s = kernels.shapes_of(q, v)
    do = do.astype(v.dtype)
    dend = dend.astype(F32).swapaxes(-1, -2)
    reverse_starts = _entering((q, do, True), gates, weights, dend, s, options)
    both = [(k, v, False), (q, do, True)]
    states, ends = kernels.walk(
        both,
        gates,
        weights,
        [starts, reverse_starts],
        None,
        s,
        store=True,
        **_settings(options, "scale", "per_piece", "marked"),
    )
    splits, per_block = _gradient_blocks(s)
    dq, dk, dv, stats = kernels.gradients(
        q,
        k,
        v,
        do,
        states,
        gates,
        weights,
        skip,
        splits=splits,
        per_block=per_block,
        **_settings(options, "scale", "marked"),
    )
    if splits > 1:
        shape = (*q.shape[:3], splits, q.shape[3])
        dq, dk = (x.reshape(shape).sum(3).astype(q.dtype) for x in (dq, dk))
    dg, dscale = _gate_gradients(stats, g, marks)
    dskip = None if skip is None else jnp.sum(stats[:, :, :, kernels.SKIP_GRAD], axis=(0, 2, 3))
    dstate = ends[1, :, 0].swapaxes(-1, -2) if options.has_state else None
    return dq, dk, dv, dg, dscale, dskip, dstate


def _settings(options, *names):
    """Keyword arguments of a kernel."""
    return {n: getattr(options, n) for n in (*names, "interpret")}
