"""Forward kernels of the gated delta rule: chunk inverses, piece maps, states with outputs.

Shapes: chunk C = 64 tokens, N chunks a row, ``tables`` float32 ``[B, H, N, 8, 64]`` (see
``gated_delta_rule.gate_tables``). Serial kernels keep the state transposed, ``[V, K]`` float32 in
registers, 64 value columns (rows of the transpose) a warpgroup.
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm

C = 64
# Rows of a gate table.
G, GQ, BETA, BETA_GAMMA, TO_END, GAMMA_Q, TOTAL, G_COPY = range(8)


def _write_masks(mask_s):
    """Tiles of ones and zeros in shared memory.

    Tile n - 1, n = 1 .. 4: the lower-left b x b part of every 2b x 2b diagonal block, b = 2 ** n;
    tile 4: the 16 x 16 diagonal blocks. As predicates they would be hoisted into more registers
    than a thread has.
    """
    i, j = cm.iota((C, C), 0), cm.iota((C, C), 1)
    for n in range(1, 5):
        same = (i >> (n + 1)) == (j >> (n + 1))
        mask = same & (((i >> n) & 1) == 1) & (((j >> n) & 1) == 0)
        mask_s.at[n - 1][...] = jnp.where(mask, 1.0, 0.0).astype(mask_s.dtype)
    mask_s.at[4][...] = jnp.where((i >> 4) == (j >> 4), 1.0, 0.0).astype(mask_s.dtype)
    plgpu.commit_smem()


def _stage(ref, x):
    ref[...] = x
    plgpu.commit_smem()
    return ref


def _unit_lower_inverse(a, mask_s, t16_s, x16_s, t32_s, x32_s):
    """(I + tril(a, -1))^-1 for ``a`` float32 [C, C].

    The block size doubles: T_2b = T_b - T_b (a * M_b) T_b, M_b the lower-left blocks. No powers
    of ``a`` appear, so that equal keys with beta = 1 stay accurate. Diagonal blocks are kept
    stacked, [C, 16] then [C, 32], which makes the products a quarter and half as wide.
    """
    dtype = mask_s.dtype
    i, j = cm.iota((C, 16), 0), cm.iota((C, 16), 1)
    stack = a[:, :16]
    for block in range(1, 4):
        stack = jnp.where((i >> 4) == block, a[:, 16 * block : 16 * block + 16], stack)
    local = i & 15
    t = jnp.where(local == j, 1.0, 0.0)
    t = t - jnp.where((local == j + 1) & ((j & 1) == 0), stack, 0.0)
    a = a.astype(dtype)

    def masked(n):
        return a * plgpu.load(mask_s.at[n - 1], layout=cm.WGMMA)

    def spread(t):  # stacked 16 x 16 blocks to a block diagonal
        return jnp.concatenate([t] * 4, 1) * plgpu.load(mask_s.at[4], layout=cm.WGMMA)

    for n in range(1, 4):
        low = t.astype(dtype)
        x = cm.product(masked(n), _stage(t16_s, low), (C, 16))
        t = cm.accumulate(t, (spread(low), _stage(x16_s, (-x).astype(dtype))))
    i, j = cm.iota((C, 32), 0), cm.iota((C, 32), 1)
    low = t.astype(dtype)
    t = jnp.where(((i >> 4) & 1) == (j >> 4), jnp.concatenate([t, t], 1), 0.0)
    x = cm.product(masked(4), _stage(t32_s, t.astype(dtype)), (C, 32))
    t = cm.accumulate(t, (spread(low), _stage(x32_s, (-x).astype(dtype))))
    # The last level has one block, rows 32 .. 63 of columns 0 .. 31.
    low, lower = t.astype(dtype), i >= 32
    x = cm.product(a[:, :32], _stage(t32_s, low).at[pl.ds(0, 32)], (C, 32))
    _stage(x32_s, (-x).astype(dtype))
    low = jnp.where(lower, t, 0.0).astype(dtype)
    corner = cm.product(low, x32_s.at[pl.ds(32, 32)], (C, 32))
    return jnp.concatenate([jnp.where(lower, corner, t), jnp.where(lower, t, 0.0)], 1)


def item_count(items, workers, worker):
    """How many of ``items`` fall to ``worker`` when dealt out in turn."""
    return lax.div(items - worker + workers - 1, workers)


def chunk_inverses(k, tables):
    """T = (I + A)^-1 per chunk, A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i.

    Args: k [B, T, Hq, K] 16-bit; tables. Returns [B, H, N, 64, 64] in k's dtype.
    The ten dependent products of an inverse are latency, so every block (one an SM) has four
    warpgroups that walk chunks of their own; four also hold each to 128 registers.
    """
    key_dim, dtype = k.shape[-1], k.dtype
    batch, heads, chunks = tables.shape[:3]
    group = heads // k.shape[2]
    items = batch * heads * chunks
    blocks = min(cm.SMS, -(-items // 4))

    def body(k_ref, table_ref, t_ref, k_s, t_s, work, table_s, mask_s, bar, ready, done):
        wg = lax.axis_index("wg")
        worker = lax.axis_index("block") * 4 + wg
        count = item_count(items, blocks * 4, worker)
        k_s, t_s, table_s = (x.at[wg] for x in (k_s, t_s, table_s))
        work = [x.at[wg] for x in work]
        bar = bar.at[wg]

        def place(m):
            item = worker + m * (blocks * 4)
            h = lax.rem(item, heads)
            n = lax.rem(lax.div(item, heads), chunks)
            return lax.div(item, heads * chunks), n, h

        def fetch(m):
            b, n, h = place(m)
            rows = pl.ds(n * C, C)
            plgpu.copy_gmem_to_smem(k_ref.at[b, rows, lax.div(h, group)], k_s, bar)
            plgpu.copy_gmem_to_smem(table_ref.at[b, h, n], table_s, bar)

        @pl.when(count > 0)
        def _():
            fetch(0)

        @pl.when(wg == 0)
        def _():
            _write_masks(mask_s)

        cm.meet(ready)

        @pl.loop(0, count)
        def _(m):
            plgpu.barrier_wait(bar)
            # No mask here: the inverse only reads below the diagonal, but above it the
            # exponential must not overflow.
            gap = cm.per_row(cm.load_row(table_s.at[G]), (C, C)) - cm.per_col(
                cm.load_col(table_s.at[G_COPY]), (C, C)
            )
            a = jnp.exp2(jnp.minimum(gap, 0.0)) * cm.per_row(cm.load_row(table_s.at[BETA]), (C, C))
            a = a * cm.product(k_s, k_s.T, (C, C))
            plgpu.commit_smem()

            @pl.when(m + 1 < count)
            def _():
                fetch(m + 1)

            inverse = _unit_lower_inverse(a, mask_s, *work).astype(dtype)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            _stage(t_s, inverse)
            b, n, h = place(m)
            plgpu.copy_smem_to_gmem(t_s, t_ref.at[b, h, n])

        plgpu.wait_smem_to_gmem(0)
        cm.meet(done)

    return cm.kernel(
        body,
        name="gdr_inverse",
        out_type=jax.ShapeDtypeStruct((batch, heads, chunks, C, C), dtype),
        scratch=dict(
            k_s=cm.smem((4, C, key_dim), dtype),
            t_s=cm.smem((4, C, C), dtype),
            work=[cm.smem((4, C, n), dtype) for n in (16, 16, 32, 32)],
            table_s=plgpu.SMEM((4, 8, C), cm.F32),
            mask_s=cm.smem((5, C, C), dtype),
            bar=plgpu.Barrier(num_arrivals=2, num_barriers=4),
            ready=plgpu.Barrier(num_arrivals=4),
            done=plgpu.Barrier(num_arrivals=4),
        ),
        grid=(blocks,),
        grid_names=("block",),
        warpgroups=4,
    )(k, tables)


def outputs(q, k, v, inverses, tables, start, *, pieces=1, save=False):
    """Chunk-to-chunk states and outputs.

    One block a (row, head, piece): V / 64 state warpgroups, one output warpgroup, one loader.
    Per chunk, with S the state entering it (transposed quantities in the state warpgroups):
        X = beta (v - Gamma k S),  U = T X,  S' = gamma S + (Gamma_end k)^T U,
        o = Gamma_q q S + P U,     P = (q k^T) exp(Gq_i - G_j) for j <= i.

    Args: q, k [B, T, Hq, K]; v [B, T, H, V]; inverses [B, H, N, 64, 64]; tables;
      start [B * pieces, H, V, K] float32 states entering each piece.
    Returns: o [B, T, H, V], final states [B * pieces, H, V, K] float32 and, with ``save``, the
      states entering each chunk [B, H, N, V, K] and U [B, T, H, V] in the input dtype.
    """
    batch, length, _, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    dtype = v.dtype
    steps = tables.shape[2] // pieces
    group = heads // q.shape[2]
    states = value_dim // C
    stages = 3
    tile = (C, C)

    def body(q_ref, k_ref, v_ref, t_ref, table_ref, start_ref, *refs, q_s, k_s, v_s, t_s, table_s,
             s_s, o_s, place_s, full, free, state_ready, state_free, u_ready, done):  # fmt: skip
        o_ref, final_ref, *saved = refs
        bp, h, wg = lax.axis_index("b"), lax.axis_index("h"), lax.axis_index("wg")
        b, first = lax.div(bp, pieces), lax.rem(bp, pieces) * steps
        hq = lax.div(h, group)

        def rows(n):
            return pl.ds((first + n) * C, C)

        @pl.when(wg < states)
        def _state():
            plgpu.set_max_registers(160 if states == 2 else 208, action="increase")
            cols = pl.ds(wg * C, C)

            def release_previous(n):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(free.at[lax.rem(n - 1, stages)])

            def publish(n, s_lo):
                """Hands the entering state to the output warpgroup (and the saved states)."""

                @pl.when(n > 0)
                def _():
                    plgpu.barrier_wait(state_free)
                    if save:
                        release_previous(n)

                s_s.at[cols][...] = s_lo
                plgpu.commit_smem()
                plgpu.barrier_arrive(state_ready)
                if save:
                    plgpu.copy_smem_to_gmem(s_s.at[cols], saved[0].at[b, h, first + n, cols])

            def step(n, state):
                slot = lax.rem(n, stages)
                table, v_t = table_s.at[slot], v_s.at[slot * states + wg]
                plgpu.barrier_wait(full.at[slot])
                s_lo = state.astype(dtype)

                def during_read():
                    publish(n, s_lo)
                    return plgpu.load(v_t.T, layout=cm.WGMMA)

                def during_solve():
                    return state * table_s[slot, TOTAL, 0], cm.load_col(table.at[TO_END])

                read, value = cm.product(s_lo, k_s.at[slot].T, tile, during_read)
                read = read * cm.per_col(cm.load_col(table.at[BETA_GAMMA]), tile)
                x = value.astype(cm.F32) * cm.per_col(cm.load_col(table.at[BETA]), tile) - read
                x = x.astype(dtype)
                u, (state, decay) = cm.product(x, t_s.at[slot].T, tile, during_solve)

                def during_write():
                    v_t.T[...] = u.astype(dtype)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(u_ready.at[slot])
                    if save:
                        plgpu.copy_smem_to_gmem(v_t, saved[1].at[b, rows(n), h, cols])

                to_end = (u * cm.per_col(decay, tile)).astype(dtype)
                state = cm.accumulate(state, (to_end, k_s.at[slot]), meanwhile=during_write)
                if not save:
                    plgpu.barrier_arrive(free.at[slot])
                return state

            state = plgpu.load(start_ref.at[bp, h, cols], layout=cm.WGMMA, optimized=False)
            state = lax.fori_loop(0, steps, step, state)
            plgpu.barrier_wait(state_free)
            if save:
                release_previous(steps)
                plgpu.wait_smem_to_gmem(0)
            final_ref.at[bp, h, cols][...] = state

        @pl.when(wg == states)
        def _output():
            if states == 2:
                plgpu.set_max_registers(152, action="increase")
            cm.write_positions(place_s)

            def step(n, carry):
                slot = lax.rem(n, stages)
                table = table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])

                def decay():
                    return cm.causal_decay(
                        cm.load_row(table.at[GQ]), cm.load_col(table.at[G]), place_s, strict=False
                    )

                p, decay = cm.product(q_s.at[slot], k_s.at[slot].T, tile, decay)
                p = (p * decay).astype(dtype)
                plgpu.barrier_wait(state_ready)
                o, gamma_q = cm.product(
                    q_s.at[slot], s_s.T, (C, value_dim), lambda: cm.load_row(table.at[GAMMA_Q])
                )
                plgpu.barrier_arrive(state_free)
                o = o * cm.per_row(gamma_q, (C, value_dim))
                plgpu.barrier_wait(u_ready.at[slot])
                o = cm.accumulate_columns(o, p, [v_s.at[slot * states + c] for c in range(states)])
                plgpu.barrier_arrive(free.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s[...] = o.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, rows(n), h])
                return carry

            lax.fori_loop(0, steps, step, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(wg == states + 1)
        def _load():
            plgpu.set_max_registers(40, action="decrease")

            @pl.loop(0, steps)
            def _(n):
                slot = lax.rem(n, stages)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                bar = full.at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[b, rows(n), hq], k_s.at[slot], bar)
                for c in range(states):
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[b, rows(n), h, pl.ds(c * C, C)], v_s.at[slot * states + c], bar
                    )
                plgpu.copy_gmem_to_smem(t_ref.at[b, h, first + n], t_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(table_ref.at[b, h, first + n], table_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(q_ref.at[b, rows(n), hq], q_s.at[slot], bar)

            cm.drain(free, steps, stages)

        cm.meet(done)

    out_type = [
        jax.ShapeDtypeStruct((batch, length, heads, value_dim), dtype),
        jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32),
    ]
    if save:
        out_type += [
            jax.ShapeDtypeStruct((batch, heads, tables.shape[2], value_dim, key_dim), dtype),
            jax.ShapeDtypeStruct((batch, length, heads, value_dim), dtype),
        ]
    return cm.kernel(
        body,
        name="gdr_outputs",
        out_type=out_type,
        scratch=dict(
            q_s=cm.smem((stages, C, key_dim), dtype),
            k_s=cm.smem((stages, C, key_dim), dtype),
            v_s=cm.smem((stages * states, C, C), dtype),  # v, then U
            t_s=cm.smem((stages, C, C), dtype),
            table_s=plgpu.SMEM((stages, 8, C), cm.F32),
            s_s=cm.smem((value_dim, key_dim), dtype),
            o_s=cm.smem((C, value_dim), dtype),
            place_s=plgpu.SMEM((2, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=4 + states, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states + 1, num_barriers=stages),
            state_ready=plgpu.Barrier(num_arrivals=states),
            state_free=plgpu.Barrier(),
            u_ready=plgpu.Barrier(num_arrivals=states, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=states + 2),
        ),
        grid=(batch * pieces, heads),
        grid_names=("b", "h"),
        warpgroups=states + 2,
    )(q, k, v, inverses, tables, start)
