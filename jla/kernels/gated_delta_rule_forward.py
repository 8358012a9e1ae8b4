"""Forward kernels of the gated delta rule: chunk inverses, piece maps, states with outputs.

Shapes: chunk C = 64 tokens, N chunks a row, ``tables`` float32 ``[B, H, N, 10, 64]`` (from
``chunk_inverses``, rows named below). Queries and keys are normalised by factors in these tables:
a product with k_i, times r_i, is one with the normalised key. Serial kernels keep the state
transposed, ``[V, K]`` float32 in registers, 64 value columns (rows of the transpose) a warpgroup;
wider values are divided among blocks.
"""

import math
from typing import NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm

C = 64
# Rows of a gate table. With r the inverse norm of a key (1 where keys are taken as they are):
# decay from the chunk's start times r, the same for reading (output scale, the query's inverse
# norm and padding in it), beta, beta r exp(G), decay to the chunk's end times r, exp(GQ), decay of
# the chunk, decay from the chunk's start over r, a token's own decay, and how much of a state it
# lets pass at most. G, GQ, the one over r and the last two are log2.
G, GQ, BETA, BETA_GAMMA, TO_END, GAMMA_Q, TOTAL, G_FROM, STEP, BOUND = range(10)
ROWS = 10
RESET = -111.0  # log decay whose exponential is zero in float32
UNREAD = -1e30  # log2 of what a padding token reads
EPS = 1e-6  # in the norms of queries and keys


def _write_masks(mask_s):
    """Tiles of ones and zeros in shared memory.

    Tile n - 1, n = 1 .. 4: M_b, the lower-left b x b part of every 2b x 2b diagonal block,
    b = 2 ** n; tile 4: the 16 x 16 diagonal blocks. As predicates they would be hoisted into more
    registers than a thread has; made of smaller tiles they take more instructions.
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


def _diagonal_blocks(x):
    """The 16 x 16 blocks on the diagonal of ``x`` [C, C], stacked [C, 16]."""
    i, stack = cm.iota((C, 16), 0), x[:, :16]
    for block in range(1, 4):
        stack = jnp.where((i >> 4) == block, x[:, 16 * block : 16 * block + 16], stack)
    return stack


def _diagonal(stack):
    """The diagonal of what is stacked, one value a row."""
    own = (cm.iota(stack.shape, 0) & 15) == cm.iota(stack.shape, 1)
    return jnp.sum(jnp.where(own, stack, 0.0), axis=1)


def _unit_lower_inverse(a, stack, mask_s, t16_s, x16_s, t32_s, x32_s):
    """(I + tril(a, -1))^-1 for ``a`` float32 [C, C] and its ``_diagonal_blocks``.

    The block size doubles: T_2b = T_b - T_b (a * M_b) T_b, M_b the lower-left blocks. No powers
    of ``a`` appear, so that equal keys with beta = 1 stay accurate. Diagonal blocks are kept
    stacked, [C, 16] then [C, 32], which makes the products a quarter and half as wide.
    """
    dtype = mask_s.dtype
    i, j = cm.iota((C, 16), 0), cm.iota((C, 16), 1)
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


def value_width(key_dim, value_dim):
    """Value columns of a block of a serial kernel; their states stay in registers."""
    return 2 * C if key_dim <= cm.WIDEST and value_dim >= 2 * C else C


def item_count(items, workers, worker):
    """How many of ``items`` fall to ``worker`` when dealt out in turn."""
    return lax.div(items - worker + workers - 1, workers)


class Gates(NamedTuple):
    """What the kernels are told about tokens, float32: whole chunks of them, and heads by 4 or 8.

    Attributes:
        decay: ``[B, T, H]`` natural log decay, None for none.
        beta: ``[B, T, H]``.
        marks: ``[B, T]``, 0 padding, 1 a token, 2 the first token of a document that is not the
            row's first; None for tokens only.
        q_norm: ``[B, T, Hq]`` inverse norms of the queries, None where q and k are taken as they
            are (those of the keys fall off the products of the inverse).
    """

    decay: jax.Array | None
    beta: jax.Array
    marks: jax.Array | None = None
    q_norm: jax.Array | None = None


GATE_HEADS = 8  # heads whose gates one copy brings: 32 bytes a token


def _gate_head(name, h, group):
    return lax.div(h, group) if name == "q_norm" else h


def _fetch_gates(refs: Gates, to: Gates, bar, b, n, h, group):
    """Starts the copies of a chunk's gates, of the heads around h."""
    rows = pl.ds(n * C, C)
    for name, ref, target in zip(Gates._fields, refs, to, strict=True):
        if ref is None:
            continue
        if name == "marks":
            source = ref.at[b, rows]
        else:
            first = lax.div(_gate_head(name, h, group), GATE_HEADS) * GATE_HEADS
            source = ref.at[b, rows, pl.ds(first, GATE_HEADS)]
        plgpu.copy_gmem_to_smem(source, target, bar)


def _load_gates(refs: Gates, h, group) -> Gates:
    """The gates of head h that came, one value a row."""

    def load(name, ref):
        if ref is None:
            return None
        if name == "marks":
            return cm.load_row(ref)
        near = plgpu.load(ref, layout=cm.WGMMA, optimized=False)
        own = cm.iota(near.shape, 1) == lax.rem(_gate_head(name, h, group), GATE_HEADS)
        return jnp.sum(jnp.where(own, near, 0.0), axis=1)

    return Gates(*map(load, Gates._fields, refs))


class _Token(NamedTuple):
    """A chunk's gates with the masks applied, one value a row; log2."""

    step: jax.Array
    beta: jax.Array
    reads: jax.Array


def _apply_marks(gates: Gates, scale) -> _Token:
    beta = gates.beta
    step = 0.0 * beta if gates.decay is None else gates.decay
    step = jnp.maximum(step, RESET) * cm.LOG2E
    reads = 0.0 * beta + math.log2(scale)
    if gates.q_norm is not None:
        reads = reads + jnp.log2(gates.q_norm)
    if gates.marks is not None:
        mark = gates.marks
        step = jnp.where(mark == 1.0, step, jnp.where(mark == 0.0, 0.0, RESET * cm.LOG2E))
        beta = jnp.where(mark == 0.0, 0.0, beta)
        reads = jnp.where(mark == 0.0, UNREAD, reads)
    return _Token(step, beta, reads)


def _write_table(table_s, token: _Token, k_norm, sums_s, place_s):
    """Fills a chunk's gate table; returns G as one value a row.

    ``sums_s`` keeps by the way: the steps, their sums, and the inverse norms of the keys.
    """
    sums_s.at[0][...] = token.step
    plgpu.commit_smem()
    shape = (C, C)
    keep = cm.per_row(cm.load_row(place_s.at[0]), shape) >= cm.per_col(
        cm.load_col(place_s.at[1]), shape
    )
    step = cm.per_col(cm.load_col(sums_s.at[0]), shape)
    total = jnp.sum(jnp.where(keep, step, 0.0), axis=1)
    sums_s.at[1][...] = total
    if k_norm is not None:
        sums_s.at[2][...] = k_norm
    plgpu.commit_smem()
    last = sums_s[1, C - 1]
    reads = total + token.reads
    norm, log_norm = (1.0, 0.0) if k_norm is None else (k_norm, jnp.log2(k_norm))
    rows = {
        G: total + log_norm,
        GQ: reads,
        BETA: token.beta,
        BETA_GAMMA: token.beta * norm * jnp.exp2(total),
        TO_END: norm * jnp.exp2(last - total),
        GAMMA_Q: jnp.exp2(reads),
        TOTAL: jnp.exp2(last + 0.0 * total),
        G_FROM: total - log_norm,
        STEP: token.step,
    }
    for row, value in rows.items():
        table_s.at[row][...] = value
    plgpu.commit_smem()
    return total


@cm.traced_once("heads", "scale", "bounds")
def chunk_inverses(k, gates: Gates, heads, *, scale, bounds):
    """Gate tables, and T = (I + A)^-1 with A_ij = beta_i (k_i . k_j) exp(G_i - G_j) for j < i.

    Args: k [B, T, Hq, K] 16-bit; gates of ``heads`` heads; scale of the outputs, positive;
      bounds: whether the row BOUND of the tables is wanted, which costs a little.
    Returns: T [B, H, N, 64, 64] in k's dtype, tables float32 [B, H, N, 10, 64].
    The ten dependent products of an inverse are latency, so every block (one an SM) has several
    warpgroups that walk chunks of their own; four also hold each to 128 registers.
    """
    key_dim, dtype = k.shape[-1], k.dtype
    batch, length, _ = gates.beta.shape
    chunks = length // C
    group = heads // k.shape[2]
    items = batch * heads * chunks
    workers = 4 if key_dim <= cm.WIDEST else 2  # warpgroups whose keys fit into shared memory
    blocks = min(cm.SMS, -(-items // workers))
    given, structure = jax.tree.flatten(gates)
    normalised = gates.q_norm is not None

    def body(k_ref, *refs, k_s, t_s, gates_s, work, sums_s, table_s, mask_s, place_s,
             bar, ready, done):  # fmt: skip
        *gate_refs, t_ref, table_ref = refs
        gate_refs = jax.tree.unflatten(structure, gate_refs)
        wg = lax.axis_index("wg")
        worker = lax.axis_index("block") * workers + wg
        count = item_count(items, blocks * workers, worker)
        k_s, t_s, sums_s, table_s = (x.at[wg] for x in (k_s, t_s, sums_s, table_s))
        work = [x.at[wg] for x in work]
        gates_s = jax.tree.unflatten(structure, [x.at[wg] for x in gates_s])
        bar = bar.at[wg]

        def place(m):
            item = worker + m * (blocks * workers)
            h = lax.rem(item, heads)
            n = lax.rem(lax.div(item, heads), chunks)
            return lax.div(item, heads * chunks), n, h

        def fetch(m):
            b, n, h = place(m)
            plgpu.copy_gmem_to_smem(k_ref.at[b, pl.ds(n * C, C), lax.div(h, group)], k_s, bar)
            _fetch_gates(gate_refs, gates_s, bar, b, n, h, group)

        @pl.when(count > 0)
        def _():
            fetch(0)

        @pl.when(wg == 0)
        def _():
            _write_masks(mask_s)
            cm.write_positions(place_s)

        cm.meet(ready)

        @pl.loop(0, count)
        def _(m):
            b, n, h = place(m)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last table and inverse
            plgpu.barrier_wait(bar)
            token = _apply_marks(_load_gates(gates_s, h, group), scale)
            k_norm = None
            if normalised:
                squares = _diagonal(_diagonal_blocks(cm.product(k_s, k_s.T, (C, C))))
                k_norm = lax.rsqrt(squares + EPS)
            total = _write_table(table_s, token, k_norm, sums_s, place_s)
            # No mask here: the inverse only reads below the diagonal, but above it the
            # exponential must not overflow.
            gap = cm.per_row(total, (C, C)) - cm.per_col(cm.load_col(sums_s.at[1]), (C, C))
            weight = token.beta if k_norm is None else token.beta * k_norm
            a = jnp.exp2(jnp.minimum(gap, 0.0)) * cm.per_row(weight, (C, C))
            if k_norm is not None:
                a = a * cm.per_col(cm.load_col(sums_s.at[2]), (C, C))
            a = a * cm.product(k_s, k_s.T, (C, C))
            stack = _diagonal_blocks(a)
            if bounds:  # a token scales a state by 1 - beta |k|^2 along its key
                growth = jnp.maximum(jnp.abs(1.0 - _diagonal(stack)), 1.0)
                table_s.at[BOUND][...] = token.step + jnp.log2(growth)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(table_s, table_ref.at[b, h, n])

            @pl.when(m + 1 < count)
            def _():
                fetch(m + 1)

            _stage(t_s, _unit_lower_inverse(a, stack, mask_s, *work).astype(dtype))
            plgpu.copy_smem_to_gmem(t_s, t_ref.at[b, h, n])

        plgpu.wait_smem_to_gmem(0)
        cm.meet(done)

    return cm.kernel(
        body,
        name="gdr_inverse",
        out_type=[
            jax.ShapeDtypeStruct((batch, heads, chunks, C, C), dtype),
            jax.ShapeDtypeStruct((batch, heads, chunks, ROWS, C), cm.F32),
        ],
        scratch=dict(
            k_s=cm.smem((workers, C, key_dim), dtype),
            t_s=cm.smem((workers, C, C), dtype),
            gates_s=[
                plgpu.SMEM((workers, C) if x.ndim == 2 else (workers, C, GATE_HEADS), cm.F32)
                for x in given
            ],
            work=[cm.smem((workers, C, n), dtype) for n in (16, 16, 32, 32)],
            sums_s=plgpu.SMEM((workers, 3, C), cm.F32),
            table_s=plgpu.SMEM((workers, ROWS, C), cm.F32),
            mask_s=cm.smem((5, C, C), dtype),
            place_s=plgpu.SMEM((2, C), cm.F32),
            bar=plgpu.Barrier(num_arrivals=1 + len(given), num_barriers=workers),
            ready=plgpu.Barrier(num_arrivals=workers),
            done=plgpu.Barrier(num_arrivals=workers),
        ),
        grid=(blocks,),
        grid_names=("block",),
        warpgroups=workers,
    )(k, *given)


@cm.traced_once("pieces", "save")
def outputs(q, k, v, inverses, tables, start, *, pieces=1, save=False):
    """Chunk-to-chunk states and outputs.

    One block a (row, piece, head, width of values): a state warpgroup for each 64 value columns,
    one output warpgroup, one loader.
    Per chunk, with S the state entering it (transposed quantities in the state warpgroups):
        X = beta (v - Gamma k S),  U = T X,  S' = gamma S + (Gamma_end k)^T U,
        o = Gamma_q q S + P U,     P = (q k^T) exp(Gq_i - G_j) for j <= i.

    Args: q, k [B, T, Hq, K]; v [B, T, H, V]; inverses [B, H, N, 64, 64]; tables;
      start [B * pieces, H, V, K] float32 states entering each piece, None for zeros.
    Returns: o [B, T, H, V], final states [B * pieces, H, V, K] float32 and, with ``save``, the
      states entering each chunk [B, H, N, V, K] and U [B, T, H, V] in the input dtype.
    """
    batch, length, _, key_dim = q.shape
    heads, value_dim = v.shape[2:]
    dtype = v.dtype
    steps = tables.shape[2] // pieces
    group = heads // q.shape[2]
    width = value_width(key_dim, value_dim)
    states = width // C
    wide = key_dim > cm.WIDEST  # an entering state is read from shared memory, not from registers
    stages = 2 if wide else 3
    tile = (C, C)

    def body(q_ref, k_ref, v_ref, t_ref, table_ref, *refs, q_s, k_s, v_s, t_s, table_s,
             s_s, o_s, place_s, full, free, state_ready, state_free, u_ready, done):  # fmt: skip
        start_ref = None if start is None else refs[0]
        o_ref, final_ref, *saved = refs if start is None else refs[1:]
        bp, h, part, wg = (lax.axis_index(x) for x in ("b", "h", "part", "wg"))
        b, first = lax.div(bp, pieces), lax.rem(bp, pieces) * steps
        hq = lax.div(h, group)

        def columns(c):  # of the values
            return pl.ds(part * width + c * C, C)

        def rows(n):
            return pl.ds((first + n) * C, C)

        @pl.when(wg < states)
        def _state():
            plgpu.set_max_registers(240 if wide else 160 if states == 2 else 208, action="increase")
            mine, cols = s_s.at[pl.ds(wg * C, C)], columns(wg)

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

                mine[...] = s_lo
                plgpu.commit_smem()
                plgpu.barrier_arrive(state_ready)
                if save:
                    plgpu.copy_smem_to_gmem(mine, saved[0].at[b, h, first + n, cols])

            def step(n, state):
                slot = lax.rem(n, stages)
                table, v_t = table_s.at[slot], v_s.at[slot * states + wg]
                plgpu.barrier_wait(full.at[slot])
                s_lo = state.astype(dtype)
                if wide:
                    publish(n, s_lo)

                def during_read():
                    if not wide:
                        publish(n, s_lo)
                    return plgpu.load(v_t.T, layout=cm.WGMMA)

                def during_solve():
                    return state * table_s[slot, TOTAL, 0], cm.load_col(table.at[TO_END])

                entering = mine if wide else s_lo
                read, value = cm.product(entering, k_s.at[slot].T, tile, during_read)
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

            state = cm.zeros((C, key_dim))
            if start is not None:
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
            shape = (C, width)

            def step(n, carry):
                slot = lax.rem(n, stages)
                table = table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])

                def decay():
                    return cm.causal_decay(
                        cm.load_row(table.at[GQ]),
                        cm.load_col(table.at[G_FROM]),
                        place_s,
                        strict=False,
                    )

                p, decay = cm.product(q_s.at[slot], k_s.at[slot].T, tile, decay)
                p = (p * decay).astype(dtype)
                plgpu.barrier_wait(state_ready)
                o, gamma_q = cm.product(
                    q_s.at[slot], s_s.T, shape, lambda: cm.load_row(table.at[GAMMA_Q])
                )
                plgpu.barrier_arrive(state_free)
                o = o * cm.per_row(gamma_q, shape)
                plgpu.barrier_wait(u_ready.at[slot])
                o = cm.accumulate_columns(o, p, [v_s.at[slot * states + c] for c in range(states)])
                plgpu.barrier_arrive(free.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s[...] = o.astype(dtype)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(o_s, o_ref.at[b, rows(n), h, pl.ds(part * width, width)])
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
                        v_ref.at[b, rows(n), h, columns(c)], v_s.at[slot * states + c], bar
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
            table_s=plgpu.SMEM((stages, ROWS, C), cm.F32),
            s_s=cm.smem((width, key_dim), dtype),
            o_s=cm.smem((C, width), dtype),
            place_s=plgpu.SMEM((2, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=4 + states, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states + 1, num_barriers=stages),
            state_ready=plgpu.Barrier(num_arrivals=states),
            state_free=plgpu.Barrier(),
            u_ready=plgpu.Barrier(num_arrivals=states, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=states + 2),
        ),
        grid=(batch * pieces, heads, value_dim // width),
        grid_names=("b", "h", "part"),
        warpgroups=states + 2,
    )(q, k, v, inverses, tables, *([] if start is None else [start]))
