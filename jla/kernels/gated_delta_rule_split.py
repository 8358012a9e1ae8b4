"""Exact split of long rows of the gated delta rule into pieces that run in parallel.

A piece is an affine map of the state that enters it, S_out = M S_in + E. ``piece_maps`` runs the
chain without outputs from the identity (M) and from zero with values (E), ``scan_pieces`` chains
the pieces, and the full kernels then start every piece from its true state. Gradients go the
other way through the same M: dS_in = M^T dS_out + E', E' from ``state_gradients`` started at
zero. A document boundary inside a piece makes its M zero by itself.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jla.kernels import common as cm
from jla.kernels.gated_delta_rule_forward import (
    BETA,
    BETA_GAMMA,
    BOUND,
    ROWS,
    TO_END,
    TOTAL,
    C,
)

MIN_STEPS = 4  # chunks of a piece below which the scan over pieces costs more than it saves
MAX_PIECES = 16


def piece_count(rows, chunks):
    """Pieces a row (a power of two, 1 for no split) for ``rows`` = batch * heads.

    The pieces of all rows should just fill the chip. The maps cost about as much as the pass
    itself, so that two pieces gain nothing.
    """
    pieces = 1
    while pieces < MAX_PIECES and rows * pieces * 2 <= cm.SMS and chunks >= MIN_STEPS * pieces * 2:
        pieces *= 2
    return pieces if pieces > 2 else 1


def split_float(x):
    """float32 as the sum of two bfloat16 (relative error 2^-17)."""
    high = x.astype(jnp.bfloat16)
    return high, (x - high.astype(cm.F32)).astype(jnp.bfloat16)


DEAD = -150.0  # log2 of a factor that leaves nothing of a float32


def closed(tables, pieces):
    """How many chunks of a piece pass nothing of what enters them to its end; int32 [B, H, P].

    If there are any, M is zero, and E begins with the last of them.
    """
    bounds = _bounds(tables, pieces)
    behind = np.tri(bounds.shape[-1], dtype=bool)  # a chunk itself and those behind it
    passes = jnp.sum(jnp.where(behind, bounds[..., None], 0.0), axis=-2)
    return jnp.sum(passes < DEAD, axis=-1, dtype=jnp.int32)


def reaching(tables, pieces):
    """How many chunks of a piece have gradients that reach its start; int32 [B, H, P]."""
    bounds = _bounds(tables, pieces)
    before = np.tri(bounds.shape[-1], k=-1, dtype=bool).T  # the chunks in front of one
    passes = jnp.sum(jnp.where(before, bounds[..., None], 0.0), axis=-2)
    return jnp.sum(passes >= DEAD, axis=-1, dtype=jnp.int32)


def _bounds(tables, pieces):
    """log2 of how much of a state a chunk lets pass at most, ``[B, H, P, steps]``."""
    bounds = jnp.sum(tables[:, :, :, BOUND], axis=-1)
    return bounds.reshape(*bounds.shape[:2], pieces, -1)


def _wanted(piece, pieces, ends):
    """Whether a piece's M is wanted; ``ends`` as in ``piece_maps``."""
    first, last = ends
    return (first | (piece > 0)) & (last | (piece < pieces - 1))


def piece_maps(k, v, inverses, tables, closed=None, *, pieces, ends):
    """M^T and E^T of every piece, S_out = M S_in + E.

    Args: k [B, T, Hq, K]; v [B, T, H, V]; inverses; tables; closed: see above, or None for none;
      ends: whether M of the first and of the last piece are wanted, too.
    Returns: M^T as two bfloat16 terms [B * pieces, H, K, K] and E^T float32 [B * pieces, H, V, K];
      E of the last piece, which starts no other, is left unwritten.
    One block a (piece, head, map): 64 rows of the transposed map a warpgroup, and a loader.
    """
    batch, _, _, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    dtype = v.dtype
    steps = tables.shape[2] // pieces
    group = heads // k.shape[2]
    parts = value_dim // C
    states = max(key_dim, value_dim) // C
    stages = 4
    tile = (C, C)

    def body(k_ref, v_ref, t_ref, table_ref, *refs, k_s, v_s, t_s, table_s, full, free, done):
        *closed_ref, high_ref, low_ref, add_ref = refs
        bp, h, kind, wg = (lax.axis_index(x) for x in ("b", "h", "kind", "wg"))
        b, piece = lax.div(bp, pieces), lax.rem(bp, pieces)
        blocked = closed_ref[0][b, h, piece] if closed_ref else jnp.int32(0)
        begin = jnp.maximum(blocked - 1, 0)
        # Kind 0 is M, kind 1 is E.
        wanted = jnp.where(kind == 0, _wanted(piece, pieces, ends), piece < pieces - 1)
        count = jnp.where(wanted & ((kind == 1) | (blocked == 0)), steps - begin, 0)
        first = piece * steps + begin

        @pl.when(wg < states)
        def _state():
            if states == 2:
                plgpu.set_max_registers(216, action="increase")
            part = jnp.minimum(wg, parts - 1)
            value_factor = kind.astype(cm.F32)

            def step(n, state):
                slot = lax.rem(n, stages)
                table = table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])

                def values():
                    value = cm.load_tile(v_s.at[slot * parts + part].T)
                    beta = cm.load_col(table.at[BETA]) * value_factor
                    return value * cm.per_col(beta, tile), cm.load_col(table.at[BETA_GAMMA])

                def decayed():
                    return state * table_s[slot, TOTAL, 0], cm.load_col(table.at[TO_END])

                lo = state.astype(dtype)
                read, (x, decay) = cm.product(lo, k_s.at[slot].T, tile, values)
                x = (x - read * cm.per_col(decay, tile)).astype(dtype)
                u, (state, decay) = cm.product(x, t_s.at[slot].T, tile, decayed)
                u = (u * cm.per_col(decay, tile)).astype(dtype)
                state = cm.accumulate(state, (u, k_s.at[slot]))
                plgpu.barrier_arrive(free.at[slot])
                return state

            i, j = (cm.iota((C, key_dim), axis) for axis in (0, 1))
            identity = jnp.where((kind == 0) & (blocked == 0), 1.0, 0.0)
            start = jnp.where(i + wg * C == j, identity, 0.0)
            state = lax.fori_loop(0, count, step, start)

            rows = pl.ds(wg * C, C)

            @pl.when(wanted & (kind == 0) & (wg < key_dim // C))
            def _():
                high, low = split_float(state)
                high_ref.at[bp, h, rows][...] = high
                low_ref.at[bp, h, rows][...] = low

            @pl.when(wanted & (kind == 1) & (wg < parts))
            def _():
                add_ref.at[bp, h, rows][...] = state

        @pl.when(wg == states)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, stages)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                rows, bar = pl.ds((first + n) * C, C), full.at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[b, rows, lax.div(h, group)], k_s.at[slot], bar)
                for c in range(parts):
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[b, rows, h, pl.ds(c * C, C)], v_s.at[slot * parts + c], bar
                    )
                plgpu.copy_gmem_to_smem(t_ref.at[b, h, first + n], t_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(table_ref.at[b, h, first + n], table_s.at[slot], bar)

            cm.drain(free, count, stages)

        cm.meet(done)

    square = jax.ShapeDtypeStruct((batch * pieces, heads, key_dim, key_dim), jnp.bfloat16)
    return cm.kernel(
        body,
        name="gdr_piece_maps",
        out_type=[
            square,
            square,
            jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32),
        ],
        scratch=dict(
            k_s=cm.smem((stages, C, key_dim), dtype),
            v_s=cm.smem((stages * parts, C, C), dtype),
            t_s=cm.smem((stages, C, C), dtype),
            table_s=plgpu.SMEM((stages, ROWS, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=3 + parts, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=states + 1),
        ),
        grid=(batch * pieces, heads, 2),
        grid_names=("b", "h", "kind"),
        warpgroups=states + 1,
    )(k, v, inverses, tables, *([] if closed is None else [closed]))


def scan_pieces(start, high, low, add, *, pieces, reverse=False):
    """States at the pieces' starts (ends when ``reverse``) from the maps; float32 accuracy.

    Args: start [B, H, V, K] float32, the state entering the first piece (leaving the last), or
      None for zeros (that piece's M is then not read); high, low [B * pieces, H, K, K] bfloat16,
      M^T = high + low; add [B * pieces, H, V, K] float32.
    Returns: [B * pieces, H, V, K] float32. One block a (row, head, 64 value columns), one
    warpgroup: two took as long.
    """
    batch, heads, value_dim, key_dim = add.shape[0] // pieces, *add.shape[1:]
    inputs = [high, low, add] + ([] if start is None else [start])
    steps, stages = pieces - 1, 2
    first = 1 if start is None else 0

    def body(high_ref, low_ref, add_ref, *refs, high_s, low_s, add_s, state_s, bar):
        *start_ref, out_ref = refs
        b, h, c = (lax.axis_index(x) for x in "bhc")
        rows = pl.ds(c * C, C)

        def piece(n):
            return b * pieces + (pieces - 1 - n if reverse else n)

        def fetch(n):
            slot = lax.rem(n, stages)
            for ref, to in ((high_ref, high_s), (low_ref, low_s)):
                plgpu.copy_gmem_to_smem(ref.at[piece(n), h], to.at[slot], bar.at[slot])
            plgpu.copy_gmem_to_smem(add_ref.at[piece(n), h, rows], add_s.at[slot], bar.at[slot])

        def load(ref):
            return plgpu.load(ref, layout=cm.WGMMA, optimized=False)

        def publish(n, state):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # the waiting thread speaks for all warps
            state_s[...] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(state_s, out_ref.at[piece(n), h, rows])

        def step(n, state):
            slot = lax.rem(n, stages)
            m_high, m_low = high_s.at[slot], low_s.at[slot]
            if reverse:
                m_high, m_low = m_high.T, m_low.T
            s_high, s_low = split_float(state)
            plgpu.barrier_wait(bar.at[slot])

            def meanwhile():
                publish(n, state)
                return plgpu.load(add_s.at[slot], layout=cm.WGMMA)

            terms = ((s_high, m_high), (s_high, m_low), (s_low, m_high))
            moved, added = cm.product_sum(terms, state.shape, meanwhile)
            plgpu.commit_smem()  # all warps have read this slot

            @pl.when(n + stages < steps)
            def _():
                fetch(n + stages)

            return moved + added

        for n in range(first, min(first + stages, steps)):
            fetch(n)
        if start_ref:
            state = load(start_ref[0].at[b, h, rows])
        else:  # the first step is known
            publish(0, cm.zeros((C, key_dim)))
            state = load(add_ref.at[piece(0), h, rows])
        state = lax.fori_loop(first, steps, step, state)
        publish(steps, state)
        plgpu.wait_smem_to_gmem(0)

    return cm.kernel(
        body,
        name="gdr_scan_pieces",
        out_type=jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32),
        scratch=dict(
            high_s=cm.smem((stages, key_dim, key_dim), jnp.bfloat16),
            low_s=cm.smem((stages, key_dim, key_dim), jnp.bfloat16),
            add_s=cm.smem((stages, C, key_dim), cm.F32),
            state_s=cm.smem((C, key_dim), cm.F32),
            bar=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        ),
        grid=(batch, heads, value_dim // C),
        grid_names=("b", "h", "c"),
    )(*inputs)
