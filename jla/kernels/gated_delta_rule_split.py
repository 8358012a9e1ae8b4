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
from jax import lax

from jla.kernels import common as cm
from jla.kernels.gated_delta_rule_forward import BETA, BETA_GAMMA, TO_END, TOTAL, C

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


def last_resets(tables, pieces):
    """Per piece the last chunk that clears the state (total decay 0), -1 if none; int32 [B, P, H].

    Only what follows it reaches the end of the piece.
    """
    clears = _clears(tables, pieces)
    index = jnp.arange(1, clears.shape[3] + 1, dtype=jnp.int32)
    return jnp.swapaxes(jnp.max(jnp.where(clears, index, 0), 3) - 1, 1, 2)


def first_resets(tables, pieces):
    """The first chunk of a piece that clears the state, the last one if none; int32 [B, P, H].

    Gradients of what follows it do not reach the start of the piece.
    """
    clears = _clears(tables, pieces)
    steps = clears.shape[3]
    index = jnp.arange(steps, dtype=jnp.int32)
    return jnp.swapaxes(jnp.min(jnp.where(clears, index, steps - 1), 3), 1, 2)


def _clears(tables, pieces):
    clears = tables[:, :, :, TOTAL, 0] == 0
    return clears.reshape(*clears.shape[:2], pieces, -1)


def piece_maps(k, v, inverses, tables, *, pieces):
    """M^T and E^T of every piece, S_out = M S_in + E.

    Args: k [B, T, Hq, K]; v [B, T, H, V]; inverses; tables.
    Returns: M^T as two bfloat16 terms [B * pieces, H, K, K] and E^T float32 [B * pieces, H, V, K].
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
    resets = last_resets(tables, pieces)

    def body(k_ref, v_ref, t_ref, table_ref, reset_ref, high_ref, low_ref, add_ref, k_s, v_s, t_s,
             table_s, full, free, done):  # fmt: skip
        bp, h, kind, wg = (lax.axis_index(x) for x in ("b", "h", "kind", "wg"))
        b, piece = lax.div(bp, pieces), lax.rem(bp, pieces)
        reset = reset_ref[b, piece, h]
        begin = jnp.maximum(reset, 0)
        # Kind 0 is M, which is zero after a reset; kind 1 is E, which starts there.
        count = jnp.where((kind == 0) & (reset >= 0), 0, steps - begin)
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
            identity = jnp.where((kind == 0) & (reset < 0), 1.0, 0.0)
            start = jnp.where(i + wg * C == j, identity, 0.0)
            state = lax.fori_loop(0, count, step, start)

            rows = pl.ds(wg * C, C)

            @pl.when((kind == 0) & (wg < key_dim // C))
            def _():
                high, low = split_float(state)
                high_ref.at[bp, h, rows][...] = high
                low_ref.at[bp, h, rows][...] = low

            @pl.when((kind == 1) & (wg < parts))
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
            table_s=plgpu.SMEM((stages, 8, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=3 + parts, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=states + 1),
        ),
        grid=(batch * pieces, heads, 2),
        grid_names=("b", "h", "kind"),
        warpgroups=states + 1,
    )(k, v, inverses, tables, resets)


def scan_pieces(start, high, low, add, *, pieces, reverse=False):
    """States at the pieces' starts (ends when ``reverse``) from the maps; float32 accuracy.

    Args: start [B, H, V, K] float32, the state entering the first piece (leaving the last);
      high, low [B * pieces, H, K, K] bfloat16, M^T = high + low; add [B * pieces, H, V, K] float32.
    Returns: [B * pieces, H, V, K] float32. One block a (row, head, 64 value columns).
    """
    batch, heads, value_dim, key_dim = start.shape

    def body(start_ref, high_ref, low_ref, add_ref, out_ref, m_s, bar):
        b, h, c = (lax.axis_index(x) for x in "bhc")
        rows = pl.ds(c * C, C)

        def piece(n):
            return b * pieces + (pieces - 1 - n if reverse else n)

        def fetch(n):
            slot = lax.rem(n, 2)
            plgpu.copy_gmem_to_smem(high_ref.at[piece(n), h], m_s.at[slot * 2], bar.at[slot])
            plgpu.copy_gmem_to_smem(low_ref.at[piece(n), h], m_s.at[slot * 2 + 1], bar.at[slot])

        def load(ref):
            return plgpu.load(ref, layout=cm.WGMMA, optimized=False)

        def step(n, state):
            slot = lax.rem(n, 2)

            @pl.when(n + 1 < pieces - 1)
            def _():
                fetch(n + 1)

            out_ref.at[piece(n), h, rows][...] = state
            plgpu.barrier_wait(bar.at[slot])
            m_high, m_low = m_s.at[slot * 2], m_s.at[slot * 2 + 1]
            if reverse:
                m_high, m_low = m_high.T, m_low.T
            s_high, s_low = split_float(state)
            state = load(add_ref.at[piece(n), h, rows])
            state = cm.accumulate(state, (s_high, m_high), (s_high, m_low), (s_low, m_high))
            plgpu.commit_smem()
            return state

        fetch(0)
        state = lax.fori_loop(0, pieces - 1, step, load(start_ref.at[b, h, rows]))
        out_ref.at[piece(pieces - 1), h, rows][...] = state

    return cm.kernel(
        body,
        name="gdr_scan_pieces",
        out_type=jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32),
        scratch=dict(
            m_s=cm.smem((4, key_dim, key_dim), jnp.bfloat16),
            bar=plgpu.Barrier(num_arrivals=2, num_barriers=2),
        ),
        grid=(batch, heads, value_dim // C),
        grid_names=("b", "h", "c"),
    )(start, high, low, add)
