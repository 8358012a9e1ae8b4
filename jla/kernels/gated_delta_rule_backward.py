"""Backward kernels of the gated delta rule: state gradients (serial) and token gradients.

With the forward's X = beta (v - Gamma k S), U = T X and P of ``gated_delta_rule_forward``, dS'
the gradient of the state leaving a chunk and dX = T^T dU:
    dU = P^T do + Gamma_end (k dS'),
    dS = gamma dS' + (Gamma_q q)^T do - k^T (beta Gamma dX),
    dA = -tril(dX U^T, -1),  dP = tril(do U^T),  dv = beta dX,
    dq = Gamma_q do S^T + (dP D) k,
    dk = (Gamma_end U) dS'^T - (beta Gamma dX) S^T + (dP D)^T q + (B + B^T) k,  B = beta dA D.
The gate gradients are row sums of products that are there anyway: a token's own decay G_i gains
what it reads (q_i . dq_i and the reading part of k_i . dk_i) and loses what it writes.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm
from jla.kernels.gated_delta_rule_forward import (
    BETA,
    BETA_GAMMA,
    G_FROM,
    GAMMA_Q,
    GQ,
    RESET,
    ROWS,
    STEP,
    TO_END,
    TOTAL,
    C,
    G,
    item_count,
    value_width,
)

# Rows of the sums that ``token_gradients`` returns for the gates and beta.
Q_DQ, READ, K_DK, D_BETA, WRITE, STATE = range(6)


@cm.traced_once("pieces", "save")
def state_gradients(q, k, do, inverses, tables, d_final, *, pieces=1, reaching=None, save=True):
    """The reverse chain over chunks; the mirror of ``gated_delta_rule_forward.outputs``.

    Args: q, k [B, T, Hq, K]; do [B, T, H, V]; inverses; tables;
      d_final [B * pieces, H, V, K] float32 gradients of the states leaving each piece, None for
      zeros; reaching: int32 [B, H, pieces] or None, how many chunks of a piece matter.
    Returns: gradients of the states entering each piece [B * pieces, H, V, K] float32 (without
      ``save`` those of the first piece are not computed) and, with
      ``save``, of the states leaving each chunk [B, H, N, V, K] and dX [B, T, H, V], 16-bit.
    """
    extra = [x for x in (d_final, reaching) if x is not None]
    batch, length, _, key_dim = q.shape
    heads, value_dim = do.shape[2:]
    dtype = q.dtype
    steps = tables.shape[2] // pieces
    group = heads // q.shape[2]
    width = value_width(key_dim, value_dim)
    states = width // C
    wide = key_dim > cm.WIDEST  # a state's gradient is read from shared memory, not from registers
    stages = 2 if wide else 3
    tile = (C, C)

    def body(q_ref, k_ref, do_ref, t_ref, table_ref, *refs, q_s, k_s, do_s, t_s,
             table_s, p_s, ds_s, place_s, full, free, p_ready, p_free, done):  # fmt: skip
        refs = list(refs)
        final_ref = None if d_final is None else refs.pop(0)
        reaching_ref = None if reaching is None else refs.pop(0)
        start_ref, *saved = refs
        bp, h, part, wg = (lax.axis_index(x) for x in ("b", "h", "part", "wg"))
        b, piece = lax.div(bp, pieces), lax.rem(bp, pieces)
        hq = lax.div(h, group)
        count = jnp.int32(steps) if reaching is None else reaching_ref[b, h, piece]
        if not save:  # maps: the first piece's leads to no other
            count = jnp.where(piece == 0, 0, count)

        def chunk(m):  # the m-th step works on this chunk
            return piece * steps + count - 1 - m

        def rows(m):
            return pl.ds(chunk(m) * C, C)

        def columns(c):  # of the values
            return pl.ds(part * width + c * C, C)

        @pl.when(wg < states)
        def _state():
            plgpu.set_max_registers(240 if wide else 200 if states == 2 else 208, action="increase")
            leaving, cols = ds_s.at[pl.ds(wg * C, C)], columns(wg)

            def release_previous(m):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free.at[lax.rem(m - 1, stages)])

            def publish(m, lo):
                @pl.when(m > 0)
                def _():
                    release_previous(m)

                leaving[...] = lo
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(leaving, saved[0].at[b, h, chunk(m), cols])

            def step(m, state):
                slot, half = lax.rem(m, stages), lax.rem(m, 2)
                table, mine = table_s.at[slot], do_s.at[slot * states + wg]
                plgpu.barrier_wait(full.at[slot])
                lo = state.astype(dtype)
                if wide:
                    publish(m, lo)
                plgpu.barrier_wait(p_ready.at[half])

                def during_read():
                    if save and not wide:
                        publish(m, lo)
                    return plgpu.load(mine.T, layout=cm.WGMMA)

                def during_solve():
                    decay = cm.per_col(cm.load_col(table.at[GAMMA_Q]), tile)
                    scaled = (do_t.astype(cm.F32) * decay).astype(dtype)
                    return (
                        state * table_s[slot, TOTAL, 0],
                        scaled,
                        -cm.load_col(table.at[BETA_GAMMA]),
                    )

                (later, du), do_t = cm.products(
                    (leaving if wide else lo, k_s.at[slot].T, tile),
                    (mine.T, p_s.at[half], tile),
                    meanwhile=during_read,
                )
                plgpu.barrier_arrive(p_free.at[half])
                du = du + later * cm.per_col(cm.load_col(table.at[TO_END]), tile)
                du = du.astype(dtype)
                dx, (state, do_q, decay) = cm.product(du, t_s.at[slot], tile, during_solve)
                dx_k = (dx * cm.per_col(decay, tile)).astype(dtype)

                def during_write():
                    mine.T[...] = dx.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(mine, saved[1].at[b, rows(m), h, cols])

                state = cm.accumulate(
                    state,
                    (do_q, q_s.at[slot]),
                    (dx_k, k_s.at[slot]),
                    meanwhile=during_write if save else None,
                )
                if not save:
                    plgpu.barrier_arrive(free.at[slot])
                return state

            state = cm.zeros((C, key_dim))
            if d_final is not None:
                state = plgpu.load(final_ref.at[bp, h, cols], layout=cm.WGMMA, optimized=False)
            state = lax.fori_loop(0, count, step, state)
            if save:
                release_previous(count)
                plgpu.wait_smem_to_gmem(0)
            start_ref.at[bp, h, cols][...] = state

        @pl.when(wg == states)
        def _scores():
            if states == 2:
                plgpu.set_max_registers(72, action="decrease")
            cm.write_positions(place_s)

            @pl.loop(0, count)
            def _(m):
                slot, half = lax.rem(m, stages), lax.rem(m, 2)
                table = table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])
                p = cm.product(q_s.at[slot], k_s.at[slot].T, tile)
                p = p * cm.causal_decay(
                    cm.load_row(table.at[GQ]), cm.load_col(table.at[G_FROM]), place_s, strict=False
                )

                @pl.when(m >= 2)
                def _():
                    plgpu.barrier_wait(p_free.at[half])

                p_s.at[half][...] = p.astype(dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(p_ready.at[half])
                plgpu.barrier_arrive(free.at[slot])

            cm.drain(p_free, count, 2)

        @pl.when(wg == states + 1)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(m):
                slot = lax.rem(m, stages)

                @pl.when(m >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                bar = full.at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[b, rows(m), hq], k_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows(m), hq], q_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(table_ref.at[b, h, chunk(m)], table_s.at[slot], bar)
                for c in range(states):
                    plgpu.copy_gmem_to_smem(
                        do_ref.at[b, rows(m), h, columns(c)], do_s.at[slot * states + c], bar
                    )
                plgpu.copy_gmem_to_smem(t_ref.at[b, h, chunk(m)], t_s.at[slot], bar)

            cm.drain(free, count, stages)

        cm.meet(done)

    out_type = [jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32)]
    if save:
        out_type += [
            jax.ShapeDtypeStruct((batch, heads, tables.shape[2], value_dim, key_dim), dtype),
            jax.ShapeDtypeStruct((batch, length, heads, value_dim), dtype),
        ]
    return cm.kernel(
        body,
        name="gdr_state_gradients",
        out_type=out_type,
        scratch=dict(
            q_s=cm.smem((stages, C, key_dim), dtype),
            k_s=cm.smem((stages, C, key_dim), dtype),
            do_s=cm.smem((stages * states, C, C), dtype),  # do, then dX
            t_s=cm.smem((stages, C, C), dtype),
            table_s=plgpu.SMEM((stages, ROWS, C), cm.F32),
            p_s=cm.smem((2, C, C), dtype),
            ds_s=cm.smem((width, key_dim), dtype),
            place_s=plgpu.SMEM((2, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=4 + states, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states + 1, num_barriers=stages),
            p_ready=plgpu.Barrier(num_barriers=2),
            p_free=plgpu.Barrier(num_arrivals=states, num_barriers=2),
            done=plgpu.Barrier(num_arrivals=states + 2),
        ),
        grid=(batch * pieces, heads, value_dim // width),
        grid_names=("b", "h", "part"),
        warpgroups=states + 2,
    )(q, k, do, inverses, tables, *extra)


@cm.traced_once("normalised")
def token_gradients(q, k, v, do, states, u, d_states, dx, tables, *, normalised=None):
    """dq, dk, dv and the row sums behind dg and dbeta; chunks independent, persistent blocks.

    A block walks chunks (heads fastest), of keys wider than 128 one part after another. The value
    columns come in tiles of 64 through a ring of two, because every product here contracts over
    values; q and k are double-buffered and replaced by dq and dk in place. Warpgroups: queries
    (dq, dP), errors (dA, dv, dbeta), keys (dk), loader.

    Args: q, k [B, T, Hq, K]; v, do, u, dx [B, T, H, V]; states (entering) and d_states (leaving)
      [B, H, N, V, K] 16-bit; tables; normalised: None, or the scale of the outputs where the
      tables hold inverse norms of q and k: then the parts along q and k leave the gradients
      (K <= 128; see ``along_shares`` for wider ones).
    Returns: dq, dk [B, T, H, K] (per value head), dv [B, T, H, V], sums float32 [B, H, N, 6, 64].
    """
    batch, length, _, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    chunks = tables.shape[2]
    dtype = q.dtype
    group = heads // q.shape[2]
    tiles = value_dim // C
    width = min(key_dim, cm.WIDEST)
    parts = key_dim // width
    items = batch * heads * chunks * parts
    blocks = min(cm.SMS, items)
    sq = (C, C)

    def body(q_ref, k_ref, v_ref, do_ref, s_ref, u_ref, ds_ref, dx_ref, table_ref, dq_ref, dk_ref,
             dv_ref, sum_ref, q_s, k_s, table_s, v_s, do_s, u_s, dx_s, s_s, ds_s, dp_s, da_s, dv_s,
             place_s, full, free, tile_full, tile_free, dp_ready, da_ready, d_free, k_done,
             done):  # fmt: skip
        block, wg = lax.axis_index("block"), lax.axis_index("wg")
        count = item_count(items, blocks, block)

        def place(m):
            item, part = lax.div(block + m * blocks, parts), lax.rem(block + m * blocks, parts)
            h = lax.rem(item, heads)
            n = lax.rem(lax.div(item, heads), chunks)
            return lax.div(item, heads * chunks), n, h, part

        def channels(part):  # of the keys
            return pl.ds(part * width, width)

        def ring(m, c):
            return lax.rem(m * tiles + c, 2)

        def over_tiles(tile):
            """``tile(c, sums)`` for every tile of values, with None as the first one's sums.

            Two tiles are written out; a loop over more keeps registers and tracing small.
            """
            first = tile(0, None)
            if tiles <= 2:
                return first if tiles == 1 else tile(1, first)
            return lax.fori_loop(1, tiles, tile, first)

        def put(m, row, vector):
            b, n, h, part = place(m)
            sum_ref.at[b, h, n, part, row][...] = vector

        def replace(tile, gradient, share):
            """Writes gradient - share * tile over the tile, in parts that fit in registers."""
            for c in range(width // C):
                part, cols = tile.at[:, pl.ds(c * C, C)], slice(c * C, (c + 1) * C)
                along = cm.load_tile(part) * cm.per_row(share, sq)
                part[...] = (gradient[:, cols] - along).astype(dtype)
                plgpu.commit_smem()

        def release_previous(m):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(free.at[lax.rem(m - 1, 2)])

        @pl.when(wg == 0)
        def _queries():
            plgpu.set_max_registers(184, action="increase")
            cm.write_positions(place_s.at[0])

            @pl.loop(0, count)
            def _(m):
                slot = lax.rem(m, 2)
                q_t, k_t, table = q_s.at[slot], k_s.at[slot], table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])

                def tile(c, sums):
                    r = ring(m, c)
                    plgpu.barrier_wait(tile_full.at[r])
                    key_grad = cm.product(k_t, ds_s.at[r].T, sq)
                    write = jnp.sum(key_grad * cm.load_tile(u_s.at[r]), axis=1)
                    if sums is None:
                        dp, dq = cm.products(
                            (do_s.at[r], u_s.at[r].T, sq), (do_s.at[r], s_s.at[r], (C, width))
                        )
                    else:
                        dp = cm.accumulate(sums[0], (do_s.at[r], u_s.at[r].T))
                        dq = cm.accumulate(sums[1], (do_s.at[r], s_s.at[r]))
                        write = sums[2] + write
                    plgpu.commit_smem()  # loads come before the copy that refills the slot
                    plgpu.barrier_arrive(tile_free.at[r])
                    if sums is None:
                        pl.when(m > 0)(lambda: release_previous(m))
                    return dp, dq, write

                dp, dq, write = over_tiles(tile)
                put(m, WRITE, write * cm.load_row(table.at[TO_END]))
                dp = dp * cm.causal_decay(
                    cm.load_row(table.at[GQ]),
                    cm.load_col(table.at[G_FROM]),
                    place_s.at[0],
                    strict=False,
                )
                dp = dp.astype(dtype)
                dp_s[...] = dp
                plgpu.commit_smem()
                plgpu.barrier_arrive(dp_ready)
                dq = dq * cm.per_row(cm.load_row(table.at[GAMMA_Q]), (C, width))
                dq = cm.accumulate(dq, (dp, k_t))
                plgpu.barrier_arrive(k_done.at[slot])
                along = jnp.sum(dq * cm.load_tile(q_t), axis=1)
                put(m, Q_DQ, along)
                plgpu.barrier_wait(d_free)  # the keys warpgroup has read q
                if normalised is not None:
                    from_start = cm.load_row(table.at[G]) + cm.load_row(table.at[G_FROM])
                    square = jnp.exp2(2.0 * cm.load_row(table.at[GQ]) - from_start)
                    replace(q_t, dq, along * square * (normalised**-2))
                else:
                    q_t[...] = dq.astype(dtype)
                plgpu.commit_smem()
                b, n, h, part = place(m)
                plgpu.copy_smem_to_gmem(q_t, dq_ref.at[b, pl.ds(n * C, C), h, channels(part)])

            release_previous(count)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 1)
        def _errors():
            plgpu.set_max_registers(144, action="increase")
            cm.write_positions(place_s.at[1])

            @pl.loop(0, count)
            def _(m):
                slot = lax.rem(m, 2)
                k_t, table = k_s.at[slot], table_s.at[slot]
                b, n, h, part = place(m)  # values and dv belong to the first part
                plgpu.barrier_wait(full.at[slot])
                beta = cm.load_row(table.at[BETA])
                gamma = jnp.exp2(cm.load_row(table.at[G]))

                def tile(c, sums):
                    r = ring(m, c)
                    plgpu.barrier_wait(tile_full.at[r])
                    read = cm.product(k_t, s_s.at[r].T, sq)
                    dx_t = cm.load_tile(dx_s.at[r])
                    seen, value = (
                        jnp.sum(dx_t * x, axis=1) for x in (read, cm.load_tile(v_s.at[r]))
                    )
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    dv_s[...] = (dx_t * cm.per_row(beta, sq)).astype(dtype)
                    plgpu.commit_smem()

                    @pl.when(part == 0)
                    def _():
                        target = dv_ref.at[b, pl.ds(n * C, C), h, pl.ds(c * C, C)]
                        plgpu.copy_smem_to_gmem(dv_s, target)

                    if sums is None:
                        da = cm.product(dx_s.at[r], u_s.at[r].T, sq)
                    else:
                        da = cm.accumulate(sums[0], (dx_s.at[r], u_s.at[r].T))
                        seen, value = sums[1] + seen, sums[2] + value
                    plgpu.barrier_arrive(tile_free.at[r])
                    return da, seen, value

                da, seen, value = over_tiles(tile)
                seen = seen * gamma
                da = da * cm.causal_decay(
                    cm.load_row(table.at[G]),
                    cm.load_col(table.at[G_FROM]),
                    place_s.at[1],
                    strict=True,
                )
                kk = cm.product(k_t, k_t.T, sq)
                plgpu.barrier_arrive(k_done.at[slot])
                value = value * jnp.where(part == 0, 1.0, 0.0)
                put(m, D_BETA, value - seen - jnp.sum(da * kk, axis=1))
                da = (da * cm.per_row(-beta, sq)).astype(dtype)

                @pl.when(m > 0)
                def _():
                    plgpu.barrier_wait(d_free)

                da_s[...] = da
                plgpu.commit_smem()
                plgpu.barrier_arrive(da_ready)
                put(m, READ, jnp.sum(da.astype(cm.F32) * kk, axis=1) - beta * seen)
                plgpu.barrier_arrive(free.at[slot])

            plgpu.barrier_wait(d_free)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 2)
        def _keys():
            plgpu.set_max_registers(144, action="increase")

            @pl.loop(0, count)
            def _(m):
                slot = lax.rem(m, 2)
                q_t, k_t, table = q_s.at[slot], k_s.at[slot], table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])
                to_end = cm.per_row(cm.load_row(table.at[TO_END]), sq)
                read = cm.per_row(-cm.load_row(table.at[BETA_GAMMA]), sq)

                def tile(c, sums):
                    dk = cm.zeros((C, width)) if sums is None else sums[0]
                    r = ring(m, c)
                    plgpu.barrier_wait(tile_full.at[r])
                    u_t = (cm.load_tile(u_s.at[r]) * to_end).astype(dtype)
                    dx_t = (cm.load_tile(dx_s.at[r]) * read).astype(dtype)
                    dk = cm.accumulate(dk, (u_t, ds_s.at[r]), (dx_t, s_s.at[r]))
                    state = jnp.sum(cm.load_tile(s_s.at[r]) * cm.load_tile(ds_s.at[r]), axis=1)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(tile_free.at[r])
                    if sums is None:
                        pl.when(m > 0)(lambda: release_previous(m))
                        return dk, state
                    return dk, sums[1] + state

                dk, state = over_tiles(tile)
                put(m, STATE, state)
                plgpu.barrier_wait(dp_ready)
                plgpu.barrier_wait(da_ready)
                dk = cm.accumulate(dk, (dp_s.T, q_t), (da_s, k_t), (da_s.T, k_t))
                plgpu.barrier_arrive(d_free)
                along = jnp.sum(dk * cm.load_tile(k_t), axis=1)
                put(m, K_DK, along)
                plgpu.barrier_wait(k_done.at[slot])
                plgpu.commit_smem()  # every warp of this group has finished its products with k
                if normalised is not None:
                    square = jnp.exp2(cm.load_row(table.at[G]) - cm.load_row(table.at[G_FROM]))
                    replace(k_t, dk, along * square)
                else:
                    k_t[...] = dk.astype(dtype)
                plgpu.commit_smem()
                b, n, h, part = place(m)
                plgpu.copy_smem_to_gmem(k_t, dk_ref.at[b, pl.ds(n * C, C), h, channels(part)])

            release_previous(count)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == 3)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, count)
            def _(m):
                slot = lax.rem(m, 2)
                b, n, h, part = place(m)
                rows, hq, keys = pl.ds(n * C, C), lax.div(h, group), channels(part)

                @pl.when(m >= 2)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                plgpu.copy_gmem_to_smem(k_ref.at[b, rows, hq, keys], k_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(table_ref.at[b, h, n], table_s.at[slot], full.at[slot])
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows, hq, keys], q_s.at[slot], full.at[slot])

                @pl.loop(0, tiles)
                def _(c):
                    r = ring(m, c)

                    @pl.when(m * tiles + c >= 2)
                    def _():
                        plgpu.barrier_wait(tile_free.at[r])

                    cols, bar = pl.ds(c * C, C), tile_full.at[r]
                    plgpu.copy_gmem_to_smem(s_ref.at[b, h, n, cols, keys], s_s.at[r], bar)
                    plgpu.copy_gmem_to_smem(ds_ref.at[b, h, n, cols, keys], ds_s.at[r], bar)
                    plgpu.copy_gmem_to_smem(u_ref.at[b, rows, h, cols], u_s.at[r], bar)
                    plgpu.copy_gmem_to_smem(dx_ref.at[b, rows, h, cols], dx_s.at[r], bar)
                    plgpu.copy_gmem_to_smem(do_ref.at[b, rows, h, cols], do_s.at[r], bar)
                    plgpu.copy_gmem_to_smem(v_ref.at[b, rows, h, cols], v_s.at[r], bar)

            cm.drain(free, count, 2)
            cm.drain(tile_free, count * tiles, 2)

        cm.meet(done)

    def tile_ring(rows, cols):
        return cm.smem((2, rows, cols), dtype)

    one = plgpu.Barrier
    dq, dk, dv, sums = cm.kernel(
        body,
        name="gdr_token_gradients",
        out_type=[
            jax.ShapeDtypeStruct((batch, length, heads, key_dim), dtype),
            jax.ShapeDtypeStruct((batch, length, heads, key_dim), dtype),
            jax.ShapeDtypeStruct((batch, length, heads, value_dim), dtype),
            jax.ShapeDtypeStruct((batch, heads, chunks, parts, 6, C), cm.F32),
        ],
        scratch=dict(
            q_s=tile_ring(C, width),  # q, then dq
            k_s=tile_ring(C, width),  # k, then dk
            table_s=plgpu.SMEM((2, ROWS, C), cm.F32),
            v_s=tile_ring(C, C),
            do_s=tile_ring(C, C),
            u_s=tile_ring(C, C),
            dx_s=tile_ring(C, C),
            s_s=tile_ring(C, width),
            ds_s=tile_ring(C, width),
            dp_s=cm.smem((C, C), dtype),
            da_s=cm.smem((C, C), dtype),
            dv_s=cm.smem((C, C), dtype),
            place_s=plgpu.SMEM((2, 2, C), cm.F32),
            full=one(num_arrivals=3, num_barriers=2),
            free=one(num_arrivals=3, num_barriers=2),
            tile_full=one(num_arrivals=6, num_barriers=2),
            tile_free=one(num_arrivals=3, num_barriers=2),
            dp_ready=one(),
            da_ready=one(),
            d_free=one(),
            k_done=one(num_arrivals=2, num_barriers=2),
            done=one(num_arrivals=4),
        ),
        grid=(blocks,),
        grid_names=("block",),
        warpgroups=4,
    )(q, k, v, do, states, u, d_states, dx, tables)
    return dq, dk, dv, jnp.sum(sums, axis=3) if parts > 1 else sums[:, :, :, 0]


def along_shares(sums, tables, scale):
    """How much of q and of k must leave dq and dk where the tables normalise; [B, H, N, 64] each.

    Of n = x / |x| the gradient dx = (dn - n (n . dn)) / |x|: its part along x.
    """
    from_start = tables[:, :, :, G] + tables[:, :, :, G_FROM]
    q_square = jnp.exp2(2.0 * tables[:, :, :, GQ] - from_start) * scale**-2
    k_square = jnp.exp2(tables[:, :, :, G] - tables[:, :, :, G_FROM])
    return sums[:, :, :, Q_DQ] * q_square, sums[:, :, :, K_DK] * k_square


@cm.traced_once()
def gate_gradients(sums, tables):
    """dg float32 [B, H, N, 64] from the sums of ``token_gradients``.

    A token's gate scales everything that later tokens of its chunk read from earlier ones, so dg
    is a sum over later tokens. Nothing crosses a reset, where the sum starts anew: the terms
    would cancel there, but only up to their rounding.
    """
    batch, heads, chunks = tables.shape[:3]
    items = batch * heads * chunks
    blocks = min(cm.SMS * 2, -(-items // 4))
    sq = (C, C)

    def body(sum_ref, table_ref, dg_ref, sum_s, table_s, run_s, place_s, bar, ready, done):
        wg = lax.axis_index("wg")
        worker = lax.axis_index("block") * 4 + wg
        count = item_count(items, blocks * 4, worker)
        run = run_s.at[wg]

        def place(m):
            item = worker + m * (blocks * 4)
            h, n = lax.rem(item, heads), lax.rem(lax.div(item, heads), chunks)
            return lax.div(item, heads * chunks), h, n

        def fetch(m):
            slot = wg * 2 + lax.rem(m, 2)
            plgpu.copy_gmem_to_smem(sum_ref.at[*place(m)], sum_s.at[slot], bar.at[slot])
            plgpu.copy_gmem_to_smem(table_ref.at[*place(m)], table_s.at[slot], bar.at[slot])

        @pl.when(count > 0)
        def _():
            fetch(0)

        @pl.when(wg == 0)
        def _():
            cm.write_positions(place_s)

        cm.meet(ready)

        @pl.loop(0, count)
        def _(m):
            slot = wg * 2 + lax.rem(m, 2)
            sums, table = sum_s.at[slot], table_s.at[slot]

            @pl.when(m + 1 < count)
            def _():
                fetch(m + 1)

            plgpu.barrier_wait(bar.at[slot])
            row = cm.per_row(cm.load_row(place_s.at[0]), sq)
            column = cm.per_col(cm.load_col(place_s.at[1]), sq)
            # Resets up to a token.
            cleared = cm.per_col(cm.load_col(table.at[STEP]), sq) < 0.97 * RESET * cm.LOG2E
            run_row = jnp.sum(jnp.where((row >= column) & cleared, 1.0, 0.0), axis=1)
            run[...] = run_row
            plgpu.commit_smem()
            run_row, run_col = cm.per_row(run_row, sq), cm.per_col(cm.load_col(run), sq)
            q_dq, read, k_dk, write, state = (
                cm.load_col(sums.at[row]) for row in (Q_DQ, READ, K_DK, WRITE, STATE)
            )
            change = cm.per_col(q_dq + 2.0 * read - k_dk, sq)  # reads minus writes
            total = jnp.where((row <= column) & (run_row == run_col), change, 0.0)
            end = cm.per_col(write + state * table_s[slot, TOTAL, 0], sq)
            total = total + jnp.where(run_row == run_s[wg, C - 1], end, 0.0)
            dg_ref.at[*place(m)][...] = jnp.sum(total, axis=1)
            plgpu.commit_smem()  # all warps have read this slot

        cm.meet(done)

    return cm.kernel(
        body,
        name="gdr_gate_gradients",
        out_type=jax.ShapeDtypeStruct((batch, heads, chunks, C), cm.F32),
        scratch=dict(
            sum_s=plgpu.SMEM((8, 6, C), cm.F32),
            table_s=plgpu.SMEM((8, ROWS, C), cm.F32),
            run_s=plgpu.SMEM((4, C), cm.F32),
            place_s=plgpu.SMEM((2, C), cm.F32),
            bar=plgpu.Barrier(num_arrivals=2, num_barriers=8),
            ready=plgpu.Barrier(num_arrivals=4),
            done=plgpu.Barrier(num_arrivals=4),
        ),
        grid=(blocks,),
        grid_names=("block",),
        warpgroups=4,
    )(sums, tables)
