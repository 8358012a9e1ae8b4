"""Mosaic GPU kernels of scalar-decay linear attention on Hopper: forward, chunk states, gradients.

One chunk is ``CHUNK`` = 64 tokens. With G the cumulated log2 decay inside a chunk and S the state
entering it (`[K, V]`, kept transposed as `[V, K]` in float32 registers), the kernels compute

    P   = (q k^T) * exp2(G_i - G_j) * w_j        for j <= i
    o   = scale * (exp2(G) (q S) + P v) + d v
    S'  = exp2(G_last) S + (exp2(G_last - G_j) w_j k)^T v

where w is an optional weight of every value row and d an optional factor per head of the values
as they come. G arrives as one float32 per token and head,
`[B, H, chunks, 64]`, in which a document start is a decay whose exp2 is exactly zero. G is never
positive, so a padded token is marked by 1 - G; its row exponent becomes -inf and its column
exponent +inf, and all its products vanish.

Tensors are read from `[B, T, H, D]` by strided TMA; head h reads q/k head h // (H // Hq).
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jla.kernels import common as cm

F32 = jnp.float32
CHUNK = 64
SMEM_BYTES = 232448  # per block on sm_90
LOG2E = math.log2(math.e)
# Four warpgroups start with 128 registers a thread; more than 4 * 128 in total is a deadlock.
LOADER_REGISTERS, WORKER_REGISTERS = 40, 152

# Rows of the gradient statistics, `[B, H, chunks, rows, CHUNK]` float32. With M_ij the share of the
# pair (i, j) in <o, do>, and the gate gradients made of what crosses a token:
PAIR_QUERY = 0  # sum of M_ij over j < i
PAIR_KEY = 1  # sum of M_ij over i > j, by j
STATE_QUERY = 2  # share of the state entering the chunk in output i
STATE_KEY = 3  # share of token j in the state leaving the chunk
THROUGH = 4  # exp2(G_last) <S, dS>, in parts: their total counts
WEIGHT_GRAD = 5  # gradient of w_j, only with weights
SKIP_GRAD = 6  # token j's part of the gradient of d, only with a skip

WGMMA = plgpu.Layout.WGMMA
PER_ROW = plgpu.Layout.WGMMA.reduce(1)
PER_COL = plgpu.Layout.WGMMA.reduce(0)


class Shapes(NamedTuple):
    """Static sizes shared by the kernels."""

    batch: int
    length: int
    heads: int
    groups: int  # q/k heads
    key: int
    value: int
    chunks: int

    @property
    def heads_per_group(self):
        return self.heads // self.groups


def shapes_of(q, v) -> Shapes:
    """Sizes from q `[B, T, Hq, K]` and v `[B, T, H, V]`."""
    batch, length, groups, key = q.shape
    return Shapes(batch, length, v.shape[2], groups, key, v.shape[3], -(-length // CHUNK))


def _tile(shape, dtype):
    """SMEM tile, swizzled for TMA and wgmma if 16 bits wide."""
    dtype = jnp.dtype(dtype)
    if dtype.itemsize != 2:
        return plgpu.SMEM(shape, dtype)
    swizzle = plgpu.find_swizzle(shape[-1] * dtype.itemsize * 8)
    transforms = (
        plgpu.TilingTransform((8, swizzle // dtype.itemsize)),
        plgpu.SwizzleTransform(swizzle),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def _out(like, shape, dtype):
    """Output type that varies over the same mesh axes as `like`."""
    return jax.typeof(like).update(shape=tuple(shape), dtype=jnp.dtype(dtype), weak_type=False)


def _product(a, b, shape, init=None):
    """init + a @ b in float32.

    Without the barrier LLVM may move arithmetic on the result in front of the wgmma wait.
    """
    if init is None:

        def scope(acc):
            plgpu.wgmma(acc, a, b)
            return acc[...]

        return lax.optimization_barrier(pl.run_scoped(scope, plgpu.ACC(shape, F32)))

    def state(acc):
        plgpu.wgmma(acc, a, b)

    return lax.optimization_barrier(pl.run_state(state)(plgpu.ACC.init(init)))


def _load(ref):
    return plgpu.load(ref, layout=WGMMA).astype(F32)


def _row_vector(ref):
    return plgpu.load(ref, layout=PER_ROW, optimized=False)


def _col_vector(ref):
    return plgpu.load(ref, layout=PER_COL, optimized=False)


def _by_row(vec, cols):
    return lax.broadcast_in_dim(vec, (CHUNK, cols), (0,))


def _by_col(vec, rows=CHUNK):
    return lax.broadcast_in_dim(vec, (rows, vec.shape[0]), (1,))


def _iota(dim):
    """Row (0) or column (1) numbers of a `[64, 64]` tile.

    Broadcast from one dimension: 18 distinct registers a thread, where a two-dimensional iota
    keeps all its elements across loop steps.
    """
    vec = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=PER_COL if dim else PER_ROW)
    return _by_col(vec) if dim else _by_row(vec, CHUNK)


def _zeros(rows, cols):
    return plgpu.layout_cast(jnp.zeros((rows, cols), F32), WGMMA)


def _decay(rows, cols, keep):
    """exp2(rows_i + cols_j) where `keep`, else 0; masked before the exponential."""
    return jnp.exp2(jnp.where(keep, _by_row(rows, CHUNK) + _by_col(cols), -jnp.inf))


class Gates:
    """Views of a chunk's G in SMEM (`[64]` float32), each from a copy of its own.

    Two loads of one buffer in two layouts would be merged and then fail to get a layout.
    """

    def __init__(self, rows, cols, marked):
        self.rows, self.cols, self.marked = rows, cols, marked

    def _masked(self, g, value):
        """`value` with -inf where the vector g marks padding."""
        return jnp.where(g > 0.5, -jnp.inf, value) if self.marked else value

    def by_row(self, sign, shift=0.0):
        """sign * G + shift by row, -inf on padding."""
        g = _row_vector(self.rows)
        return self._masked(g, (g if sign > 0 else -g) + shift)

    def by_col(self, sign, shift=0.0):
        """sign * G + shift by column, -inf on padding."""
        g = _col_vector(self.cols)
        return self._masked(g, (g if sign > 0 else -g) + shift)

    def shifted(self, shift, sign, rows):
        """exp2(shift + sign * G) for scalars shift and sign, 0 on padding."""
        g = _row_vector(self.rows) if rows else _col_vector(self.cols)
        return jnp.exp2(self._masked(g, shift + sign * g))

    def last(self):
        """G of the chunk's last token."""
        g = self.cols[CHUNK - 1]
        return jnp.where(g > 0.5, 1 - g, g) if self.marked else g


def _stages(per_stage, fixed, most, multiple=1):
    """Deepest ring of at most `most` stages that fits beside `fixed` bytes."""
    room = SMEM_BYTES - fixed - 4096  # barriers, reduction scratch, alignment
    count = min(most, room // per_stage) // multiple * multiple
    if count < 1:
        raise NotImplementedError(f"needs {fixed + per_stage} bytes of shared memory")
    return count


def _kernel(body, *, name, out_type, scratch, grid, threads=1, interpret=None):
    """`plgpu.kernel` over a grid of (axis name, size) pairs."""
    more = dict(num_threads=threads, thread_name="wg") if threads > 1 else {}
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=tuple(n for _, n in grid),
        grid_names=tuple(a for a, _ in grid),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        interpret=interpret,
        **more,
    )


def _meet(barrier):
    """All warpgroups leave together: one that exits under another's wgmma can fault the kernel."""
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)


# ---------------------------------------------------------------------------------------- forward


@cm.traced_once("scale", "per_piece", "marked", "interpret")
def forward(q, k, v, gates, weights, skip, starts, *, scale, per_piece, marked, interpret=None):
    """Outputs and final states; one block walks one piece of a row's chunks.

    Per block: V / 64 warpgroups own 64 value rows of the transposed state each and run the serial
    chain; one or two warpgroups turn the published states into outputs; one fills the input ring.

    Args:
      q, k: `[B, T, Hq, K]`; v: `[B, T, H, V]`; gates: `[B, H, chunks, 64]` float32, `marked` if
        padding may be in them; weights: of the value rows, like gates, or None.
      skip: `[H]` float32, what of v is added to the outputs, or None.
      starts: `[B, pieces, H, V, K]` float32 state entering every piece, or None for zero.
      per_piece: chunks of a piece (of the last one: at most).

    Returns:
      o `[B, T, H, V]` in v's dtype, final state `[B, H, V, K]` float32.
    """
    s = shapes_of(q, v)
    pieces = -(-s.chunks // per_piece)
    states = s.value // CHUNK
    outs = 2 if states == 1 else 1
    item = jnp.dtype(v.dtype).itemsize
    weighted = weights is not None
    publish = CHUNK * states * s.key * item
    per_stage = CHUNK * (2 * s.key + s.value) * item + 3 * CHUNK * 4
    staging = outs * CHUNK * s.value * item
    slots = 2 if outs == 2 or 3 * per_stage + 2 * publish + staging < SMEM_BYTES - 4096 else 1
    stages = _stages(per_stage, slots * publish + staging, 4, outs)
    scratch = dict(
        q_s=_tile((stages, CHUNK, s.key), q.dtype),
        k_s=_tile((stages, CHUNK, s.key), k.dtype),
        v_s=_tile((stages, CHUNK, s.value), v.dtype),
        gr_s=plgpu.SMEM((stages, CHUNK), F32),
        gc_s=plgpu.SMEM((stages, CHUNK), F32),
        s_s=_tile((slots, s.value, s.key), v.dtype),
        o_s=_tile((outs, CHUNK, s.value), v.dtype),
        full=plgpu.Barrier(num_arrivals=5 + weighted, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=states + 1, num_barriers=stages),
        s_full=plgpu.Barrier(num_arrivals=states, num_barriers=slots),
        s_free=plgpu.Barrier(num_barriers=slots),
        done=plgpu.Barrier(num_arrivals=states + outs + 1),
    )

    if weighted:
        scratch.update(w_s=plgpu.SMEM((stages, CHUNK), F32))

    def body(
        q_ref,
        k_ref,
        v_ref,
        g_ref,
        *refs,
        q_s,
        k_s,
        v_s,
        gr_s,
        gc_s,
        s_s,
        o_s,
        full,
        free,
        s_full,
        s_free,
        done,
        w_s=None,
    ):
        refs = list(refs)
        w_ref = refs.pop(0) if weighted else None
        skip_ref = refs.pop(0) if skip is not None else None
        start_ref = refs.pop(0) if starts is not None else None
        o_ref, end_ref = refs
        piece_row, h = lax.axis_index("p"), lax.axis_index("h")
        b, piece = (
            (piece_row, 0)
            if pieces == 1
            else (lax.div(piece_row, pieces), lax.rem(piece_row, pieces))
        )
        piece, first, count = _piece(piece, per_piece, s.chunks)
        wg = lax.axis_index("wg")

        def load_inputs():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            group = lax.div(h, s.heads_per_group)

            def issue(n):
                slot = lax.rem(n, stages)
                tokens = pl.ds((first + n) * CHUNK, CHUNK)
                bar = full.at[slot]
                plgpu.copy_gmem_to_smem(q_ref.at[b, tokens, group], q_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(k_ref.at[b, tokens, group], k_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(v_ref.at[b, tokens, h], v_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(g_ref.at[b, h, first + n], gr_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(g_ref.at[b, h, first + n], gc_s.at[slot], bar)
                if weighted:
                    plgpu.copy_gmem_to_smem(w_ref.at[b, h, first + n], w_s.at[slot], bar)

            _ring_fill(issue, free, count, stages)

        def chain():
            plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
            mine = pl.ds(wg * CHUNK, CHUNK)
            if start_ref is None:
                state = _zeros(CHUNK, s.key)
            else:
                state = plgpu.load(start_ref.at[b, piece, h, mine], layout=WGMMA, optimized=False)

            def step(n, state):
                slot, pub = lax.rem(n, stages), lax.rem(n, slots)
                plgpu.barrier_wait(full.at[slot])

                @pl.when(n >= slots)
                def _():
                    plgpu.barrier_wait(s_free.at[pub])

                s_s[pub, mine] = state.astype(v.dtype)
                plgpu.commit_smem()
                plgpu.barrier_arrive(s_full.at[pub])
                gates = Gates(gr_s.at[slot], gc_s.at[slot], marked)
                factor = _col_vector(w_s.at[slot]) if weighted else None
                reach = gates.shifted(gates.last(), -1, rows=False)
                state = _advance(
                    state, v_s.at[slot, :, mine], k_s.at[slot], gates.last(), reach, factor
                )
                plgpu.barrier_arrive(free.at[slot])
                return state

            state = lax.fori_loop(0, count, step, state)

            @pl.loop(jnp.maximum(count - slots, 0), count)
            def _(n):
                plgpu.barrier_wait(s_free.at[lax.rem(n, slots)])

            def store_end():
                end_ref[b, h, mine] = state

            if pieces == 1:
                store_end()
            else:
                pl.when(piece == pieces - 1)(store_end)

        def output():
            plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
            lane = wg - states
            causal = _iota(0) >= _iota(1)

            def step(i, carry):
                n = i * outs + lane
                slot, pub = lax.rem(n, stages), lax.rem(n, slots)
                plgpu.barrier_wait(full.at[slot])
                gates = Gates(gr_s.at[slot], gc_s.at[slot], marked)
                row, col = gates.by_row(1), gates.by_col(-1)
                scores = _product(q_s.at[slot], k_s.at[slot].T, (CHUNK, CHUNK))
                scores = scores * _decay(row, col, causal)
                if weighted:
                    scores = scores * _by_col(_col_vector(w_s.at[slot]))
                scores = scores.astype(v.dtype)
                plgpu.barrier_wait(s_full.at[pub])
                inter = _product(q_s.at[slot], s_s.at[pub].T, (CHUNK, s.value))
                plgpu.barrier_arrive(s_free.at[pub])
                inter = inter * _by_row(jnp.exp2(row), s.value)
                out = _product(scores, v_s.at[slot], (CHUNK, s.value), inter) * scale
                if skip_ref is not None:
                    out = out + _load(v_s.at[slot]) * skip_ref[h]
                plgpu.barrier_arrive(free.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                o_s[lane] = out.astype(v.dtype)
                plgpu.commit_smem()
                tokens = pl.ds((first + n) * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(o_s.at[lane], o_ref.at[b, tokens, h])
                return carry

            lax.fori_loop(0, lax.div(count - lane + outs - 1, outs), step, ())
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg < states)(chain)
        pl.when((wg >= states) & (wg < states + outs))(output)
        pl.when(wg == states + outs)(load_inputs)
        _meet(done)

    args = [x for x in (q, k, v, gates, weights, skip, starts) if x is not None]
    return _kernel(
        body,
        name="jla_la_forward",
        out_type=(_out(v, v.shape, v.dtype), _out(v, (s.batch, s.heads, s.value, s.key), F32)),
        scratch=scratch,
        grid=(("p", s.batch * pieces), ("h", s.heads)),
        threads=states + outs + 1,
        interpret=interpret,
    )(*args)


def _piece(piece, per_piece, chunks):
    """(piece, its first chunk, its number of chunks)."""
    if isinstance(piece, int):
        return piece, piece * per_piece, min(per_piece, chunks - piece * per_piece)
    return piece, piece * per_piece, jnp.minimum(per_piece, chunks - piece * per_piece)


def _ring_fill(issue, free, count, stages):
    """Runs `issue(n)` for n < count, at most `stages` ahead of the consumers' `free` arrivals."""

    @pl.loop(0, jnp.minimum(count, stages))
    def _(n):
        issue(n)

    @pl.loop(stages, jnp.maximum(count, stages))
    def _(n):
        plgpu.barrier_wait(free.at[lax.rem(n, stages)])
        issue(n)

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _(n):
        plgpu.barrier_wait(free.at[lax.rem(n, stages)])


def _advance(state, values, keys, last, reach, factor):
    """State after a chunk: exp2(last) * state + (reach * factor * values)^T keys, `[64, K]`.

    values: `[CHUNK, 64]` and keys `[CHUNK, K]` in SMEM; reach and factor (or None) by column.
    """
    weights = reach if factor is None else reach * factor
    left = (_load(values.T) * _by_col(weights)).astype(keys.dtype)
    return _product(left, keys, state.shape, state * jnp.exp2(last))


# ----------------------------------------------------------------------------------- chunk states


def walk(
    sources, gates, weights, starts, live, sizes, *, scale, per_piece, store, marked, interpret=None
):
    """Runs the state recurrence over every piece, in one or both directions of time.

    A source (x `[B, T, Hx, K]`, y `[B, T, H, V]`, reverse) steps S^T <- decay S^T + (c y)^T x. With
    (k, v), c is exp2(G_last - G) w and S the state; backwards in time with (q, do), c is
    scale * exp2(G) and S the state's gradient. One warpgroup a block owns 64 value rows.

    Args:
      starts: for every source `[B, pieces, H, V, K]` float32 before the first step, or None for
        zero.
      live: int32 `[B, pieces - 1, H]`, how many of the last steps of a run leave a trace in its
        end, or None for all; only without `store`.
      per_piece: chunks of a piece (of the last one: at most).
      store: also write the state before every step, rounded to the inputs' dtype. Otherwise the
        piece that comes last in time order of the (single) source is left out: no piece follows.

    Returns:
      (`[sources, B, H, chunks, V, K]` or None, `[sources, B, pieces, H, V, K]` float32 ends;
      pieces - 1 of them without `store`).
    """
    pieces = -(-sizes.chunks // per_piece)
    runs = pieces if store else pieces - 1
    skipped = 1 if sources[0][2] and not store else 0
    s = sizes
    dtype = sources[0][0].dtype
    weighted = weights is not None
    item = jnp.dtype(dtype).itemsize
    per_stage = CHUNK * (s.key + CHUNK) * item + 2 * CHUNK * 4
    stages = min(3, _stages(per_stage, 2 * CHUNK * s.key * item, 4))
    scratch = dict(
        x_s=_tile((stages, CHUNK, s.key), dtype),
        y_s=_tile((stages, CHUNK, CHUNK), dtype),
        g_s=plgpu.SMEM((stages, CHUNK), F32),
        full=plgpu.Barrier(num_arrivals=3 + weighted, num_barriers=stages),
    )
    if weighted:
        scratch.update(w_s=plgpu.SMEM((stages, CHUNK), F32))
    if store:
        scratch.update(out_s=_tile((2, CHUNK, s.key), dtype))
    many = len(sources)

    def body(*refs, x_s, y_s, g_s, full, w_s=None, out_s=None):
        refs = list(refs)
        inputs = [(refs.pop(0), refs.pop(0)) for _ in range(many)]
        g_ref = refs.pop(0)
        w_ref = refs.pop(0) if weighted else None
        start_refs = [None if start is None else refs.pop(0) for start in starts]
        live_ref = None if live is None else refs.pop(0)
        states_ref = refs.pop(0) if store else None
        (end_ref,) = refs
        which, piece_row = lax.axis_index("d"), lax.axis_index("p")
        h, block = lax.axis_index("h"), lax.axis_index("v")
        b, run = (
            (piece_row, 0) if runs == 1 else (lax.div(piece_row, runs), lax.rem(piece_row, runs))
        )
        piece, first, count = _piece(run + skipped, per_piece, s.chunks)
        mine = pl.ds(block * CHUNK, CHUNK)
        flags = [reverse for _, _, reverse in sources]
        backward = (
            flags[0]
            if all(f == flags[0] for f in flags)
            else (which == 0 if flags[0] else which == 1)
        )

        if live_ref is not None:
            steps = jnp.minimum(live_ref[b, run, h], count)
            if not skipped:
                first = first + count - steps
            count = steps

        def chunk_of(i):
            return first + jnp.where(backward, count - 1 - i, i)

        def issue(i):
            n, slot = chunk_of(i), lax.rem(i, stages)
            tokens, bar = pl.ds(n * CHUNK, CHUNK), full.at[slot]
            for d, (x_ref, y_ref) in enumerate(inputs):
                x_head = lax.div(h, s.heads // x_ref.shape[2])

                @pl.when(which == d)
                def _(x_ref=x_ref, y_ref=y_ref, x_head=x_head):
                    plgpu.copy_gmem_to_smem(x_ref.at[b, tokens, x_head], x_s.at[slot], bar)
                    plgpu.copy_gmem_to_smem(y_ref.at[b, tokens, h, mine], y_s.at[slot], bar)

            plgpu.copy_gmem_to_smem(g_ref.at[b, h, n], g_s.at[slot], bar)
            if weighted:
                plgpu.copy_gmem_to_smem(w_ref.at[b, h, n], w_s.at[slot], bar)

        @pl.loop(0, jnp.minimum(count, stages))
        def _(i):
            issue(i)

        def entering():
            def load(ref):
                if ref is None:
                    return _zeros(CHUNK, s.key)
                return plgpu.load(ref.at[b, piece, h, mine], layout=WGMMA, optimized=False)

            if many == 1:
                return load(start_refs[0])
            return lax.cond(which == 0, lambda: load(start_refs[0]), lambda: load(start_refs[1]))

        state = entering()
        sign = jnp.where(backward, 1.0, -1.0)

        def coefficients(slot, last):
            gates = Gates(None, g_s.at[slot], marked)
            reach = gates.shifted(jnp.where(backward, 0.0, last), sign, rows=False)
            if not weighted:
                return reach * jnp.where(backward, scale, 1.0)
            away = jnp.where(backward, 1.0, 0.0)
            return reach * (away * scale + (1 - away) * _col_vector(w_s.at[slot]))

        def step(i, state):
            slot = lax.rem(i, stages)
            plgpu.barrier_wait(full.at[slot])
            if store:
                half = lax.rem(i, 2)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                out_s[half] = state.astype(dtype)
                plgpu.commit_smem()
                target = states_ref.at[which, b, h, chunk_of(i), mine]
                plgpu.copy_smem_to_gmem(out_s.at[half], target)
            last = Gates(None, g_s.at[slot], marked).last()
            state = _advance(
                state, y_s.at[slot], x_s.at[slot], last, coefficients(slot, last), None
            )
            plgpu.commit_smem()

            @pl.when(i + stages < count)
            def _():
                issue(i + stages)

            return state

        state = lax.fori_loop(0, count, step, state)
        end_ref[which, b, run, h, mine] = state
        plgpu.wait_smem_to_gmem(0)

    out_type = [_out(gates, (many, s.batch, runs, s.heads, s.value, s.key), F32)]
    if store:
        shape = (many, s.batch, s.heads, s.chunks, s.value, s.key)
        out_type.insert(0, _out(gates, shape, dtype))
    args = [x for source in sources for x in source[:2]]
    args += [x for x in (gates, weights, *starts, live) if x is not None]
    results = _kernel(
        body,
        name="jla_la_states" if store else "jla_la_maps",
        out_type=tuple(out_type),
        scratch=scratch,
        grid=(("d", many), ("p", s.batch * runs), ("h", s.heads), ("v", s.value // CHUNK)),
        interpret=interpret,
    )(*args)
    return (results[0] if store else None), results[-1]


# -------------------------------------------------------------------------------------- gradients


@cm.traced_once("scale", "splits", "per_block", "marked", "interpret")
def gradients(
    q, k, v, do, states, gates, weights, skip, *, scale, splits, per_block, marked, interpret=None
):
    """Gradients of every chunk from its entering state and the gradient of its leaving state.

    Three warpgroups make dq, dk and dv, a fourth fills the input ring. A block walks `per_block`
    chunks of a head; with grouped heads it walks one chunk of `H / Hq / splits` heads and keeps
    the sums of dq and dk over them in float32 registers.

    Args:
      q, k: `[B, T, Hq, K]`; v, do: `[B, T, H, V]`.
      states: `[2, B, H, chunks, V, K]`, entering states and gradients of leaving states.
      skip: as in `forward`; only with weights.

    Returns:
      dq, dk `[B, T, Hq * splits, K]` (float32 if splits > 1), dv `[B, T, H, V]`, statistics
      `[B, H, chunks, rows, 64]` float32.
    """
    s = shapes_of(q, v)
    dtype, item = v.dtype, jnp.dtype(v.dtype).itemsize
    grouped = s.heads_per_group > 1
    shift, factor = (math.log2(scale), None) if scale > 0 else (0.0, scale)
    stats = WEIGHT_GRAD + (weights is not None) + (skip is not None)
    sum_dtype = F32 if splits > 1 else dtype
    weighted = weights is not None
    shared = 2 * CHUNK * s.key * item
    per_stage = 2 * (CHUNK + s.key) * s.value * item + 3 * CHUNK * 4
    sums = CHUNK * s.key * jnp.dtype(sum_dtype).itemsize
    staging = 2 * sums + CHUNK * (s.value * item + stats * 4)
    if grouped:
        stages = _stages(per_stage, shared + staging, 3)
    else:
        stages = _stages(per_stage + shared, staging, 3)
    qk_slots = 1 if grouped else stages
    scratch = dict(
        q_s=_tile((qk_slots, CHUNK, s.key), dtype),
        k_s=_tile((qk_slots, CHUNK, s.key), dtype),
        v_s=_tile((stages, CHUNK, s.value), dtype),
        do_s=_tile((stages, CHUNK, s.value), dtype),
        h_s=_tile((stages, s.value, s.key), dtype),
        dh_s=_tile((stages, s.value, s.key), dtype),
        gr_s=plgpu.SMEM((stages, CHUNK), F32),
        gc_s=plgpu.SMEM((stages, CHUNK), F32),
        dq_s=_tile((CHUNK, s.key), sum_dtype),
        dk_s=_tile((CHUNK, s.key), sum_dtype),
        dv_s=_tile((CHUNK, s.value), dtype),
        stat_s=plgpu.SMEM((stats, CHUNK), F32),
        full=plgpu.Barrier(num_arrivals=(6 if grouped else 8) + weighted, num_barriers=stages),
        free=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        qk_full=plgpu.Barrier(num_arrivals=2),
        done=plgpu.Barrier(num_arrivals=4),
    )

    if weighted:
        scratch.update(w_s=plgpu.SMEM((stages, CHUNK), F32))

    def body(
        q_ref,
        k_ref,
        v_ref,
        do_ref,
        h_ref,
        g_ref,
        *refs,
        q_s,
        k_s,
        v_s,
        do_s,
        h_s,
        dh_s,
        gr_s,
        gc_s,
        dq_s,
        dk_s,
        dv_s,
        stat_s,
        full,
        free,
        qk_full,
        done,
        w_s=None,
    ):
        w_ref = refs[0] if weighted else None
        skip_ref = refs[1] if skip is not None else None
        dq_ref, dk_ref, dv_ref, stat_ref = refs[-4:]
        b, line, x = lax.axis_index("b"), lax.axis_index("h"), lax.axis_index("n")
        wg = lax.axis_index("wg")
        if grouped:
            group = lax.div(line, splits)
            per_line = s.heads_per_group // splits
            head0 = group * s.heads_per_group + lax.rem(line, splits) * per_line
            count = per_line
        else:
            count = jnp.minimum(per_block, s.chunks - x * per_block)

        def place(t):
            """(chunk, head) of item t."""
            return (x, head0 + t) if grouped else (x * per_block + t, line)

        def tokens(n):
            return pl.ds(n * CHUNK, CHUNK)

        def load_inputs():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            def copy_qk(n, group, slot, bar):
                plgpu.copy_gmem_to_smem(q_ref.at[b, tokens(n), group], q_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(k_ref.at[b, tokens(n), group], k_s.at[slot], bar)

            def issue(t):
                n, h = place(t)
                slot = lax.rem(t, stages)
                bar = full.at[slot]
                if not grouped:
                    copy_qk(n, h, slot, bar)
                plgpu.copy_gmem_to_smem(do_ref.at[b, tokens(n), h], do_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(v_ref.at[b, tokens(n), h], v_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(h_ref.at[0, b, h, n], h_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(h_ref.at[1, b, h, n], dh_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(g_ref.at[b, h, n], gr_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(g_ref.at[b, h, n], gc_s.at[slot], bar)
                if weighted:
                    plgpu.copy_gmem_to_smem(w_ref.at[b, h, n], w_s.at[slot], bar)

            if grouped:
                copy_qk(x, group, 0, qk_full)
            _ring_fill(issue, free, count, stages)

        def walk_items(step, total):
            """Folds `step(t, slot, q, k, gates, total) -> total` over the items."""
            plgpu.set_max_registers(WORKER_REGISTERS, action="increase")
            if grouped:
                plgpu.barrier_wait(qk_full)

            def one(t, total):
                slot = lax.rem(t, stages)
                plgpu.barrier_wait(full.at[slot])
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last item's staging
                # A zero that only the data shows to be one. Without it every address is kept
                # across the loop, in registers that spill to L2.
                zero = (gc_s[slot, 0] > 1e30).astype(jnp.int32)
                slot = slot + zero
                shared = zero if grouped else slot
                gates = Gates(gr_s.at[slot], gc_s.at[slot], marked)
                return step(t, slot, q_s.at[shared], k_s.at[shared], gates, total)

            return lax.fori_loop(0, count, one, total)

        def parts_of(width):
            """64 columns at a time: whole tiles would not fit in the registers."""
            return [pl.ds(at, CHUNK) for at in range(0, width, CHUNK)]

        def send(staging, out_ref, n, head):
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staging, out_ref.at[b, tokens(n), head])

        def send_stat(vec, stat, n, h):
            stat_s[stat] = vec
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(stat_s.at[stat], stat_ref.at[b, h, n, stat])

        def scores(a, b, gates, queries_by_row):
            """(a @ b) * scale * decay, float32, 0 for pairs against time."""
            sign = 1 if queries_by_row else -1
            row, col = _iota(0), _iota(1)
            keep = row >= col if queries_by_row else row <= col
            decay = _decay(gates.by_row(sign, shift), gates.by_col(-sign), keep)
            return _product(a, b, (CHUNK, CHUNK)) * (decay * factor if factor else decay)

        def pair_sum(x, a, b, gates):
            """Sums over columns of x * (a @ b), without the diagonal."""
            pairs = x * _product(a, b, (CHUNK, CHUNK))
            return jnp.sum(jnp.where(_iota(0) != _iota(1), pairs, 0.0), axis=1)

        def query_grads():
            def step(t, slot, query, key, gates, totals):
                n, h = place(t)
                ds = scores(do_s.at[slot], v_s.at[slot].T, gates, True)
                if weighted:
                    ds = ds * _by_col(_col_vector(w_s.at[slot]))
                send_stat(pair_sum(ds, query, key.T, gates), PAIR_QUERY, n, h)
                ds = ds.astype(dtype)
                dot, reach = 0.0, gates.shifted(0.0, 1, rows=True) * scale
                for index, part in enumerate(parts_of(s.key)):
                    dq = _product(do_s.at[slot], h_s.at[slot, :, part], (CHUNK, CHUNK))
                    dq = dq * _by_row(reach, CHUNK)
                    dot = dot + jnp.sum(dq * _load(query.at[:, part]), axis=1)
                    dq = _product(ds, key.at[:, part], (CHUNK, CHUNK), dq)
                    totals = collect(dq, index, totals, dq_s)
                plgpu.barrier_arrive(free.at[slot])
                send_stat(dot, STATE_QUERY, n, h)
                if not grouped:
                    send(dq_s, dq_ref, n, h)
                return totals

            finish(walk_items(step, no_sums()), dq_s, dq_ref)

        def key_grads():
            def step(t, slot, query, key, gates, totals):
                n, h = place(t)
                ds = scores(v_s.at[slot], do_s.at[slot].T, gates, False)
                reach = gates.shifted(gates.last(), -1, rows=True)
                if weighted:
                    weight = _row_vector(w_s.at[slot])
                    ds, reach = ds * _by_row(weight, CHUNK), reach * weight
                ds = ds.astype(dtype)
                dot = 0.0
                for index, part in enumerate(parts_of(s.key)):
                    dk = _product(v_s.at[slot], dh_s.at[slot, :, part], (CHUNK, CHUNK))
                    dk = dk * _by_row(reach, CHUNK)
                    dot = dot + jnp.sum(dk * _load(key.at[:, part]), axis=1)
                    dk = _product(ds, query.at[:, part], (CHUNK, CHUNK), dk)
                    totals = collect(dk, index, totals, dk_s)
                # <S, dS> is a trace: one product is cheaper than loading both.
                through = 0.0
                for part in parts_of(s.value):
                    both = _product(h_s.at[slot, part], dh_s.at[slot, part].T, (CHUNK, CHUNK))
                    diagonal = _iota(0) == _iota(1)
                    through = through + jnp.sum(jnp.where(diagonal, both, 0.0), axis=1)
                through = through * jnp.exp2(gates.last())
                plgpu.barrier_arrive(free.at[slot])
                send_stat(dot, STATE_KEY, n, h)
                send_stat(through, THROUGH, n, h)
                if not grouped:
                    send(dk_s, dk_ref, n, h)
                return totals

            finish(walk_items(step, no_sums()), dk_s, dk_ref)

        def collect(value, index, totals, staging):
            """Adds a block of 64 columns to the sums over heads, or stages it."""
            if grouped:
                return (*totals[:index], totals[index] + value, *totals[index + 1 :])
            staging[:, parts_of(s.key)[index]] = value.astype(staging.dtype)
            return totals

        def no_sums():
            return tuple(_zeros(CHUNK, CHUNK) for _ in parts_of(s.key)) if grouped else ()

        def finish(totals, staging, out_ref):
            if grouped:
                for part, value in zip(parts_of(s.key), totals, strict=True):
                    staging[:, part] = value.astype(staging.dtype)
                send(staging, out_ref, x, line)
            plgpu.wait_smem_to_gmem(0)

        def value_grads():
            def step(t, slot, query, key, gates, total):
                n, h = place(t)
                p = scores(key, query.T, gates, False)
                pairs = pair_sum(p, v_s.at[slot], do_s.at[slot].T, gates)
                p = p.astype(dtype)
                if weighted:
                    weight = _row_vector(w_s.at[slot])
                    pairs = pairs * weight
                send_stat(pairs, PAIR_KEY, n, h)
                weight_grad, skip_grad = 0.0, 0.0
                reach = gates.shifted(gates.last(), -1, rows=True)
                for part in parts_of(s.value):
                    dv = _product(key, dh_s.at[slot, part].T, (CHUNK, CHUNK))
                    dv = dv * _by_row(reach, CHUNK)
                    dv = _product(p, do_s.at[slot, :, part], (CHUNK, CHUNK), dv)
                    if weighted:
                        weight_grad = weight_grad + jnp.sum(
                            dv * _load(v_s.at[slot, :, part]), axis=1
                        )
                        dv = dv * _by_row(weight, CHUNK)
                    if skip_ref is not None:
                        do = _load(do_s.at[slot, :, part])
                        skip_grad = skip_grad + jnp.sum(do * _load(v_s.at[slot, :, part]), axis=1)
                        dv = dv + do * skip_ref[h]
                    dv_s[:, part] = dv.astype(dtype)
                plgpu.barrier_arrive(free.at[slot])
                if weighted:
                    send_stat(weight_grad, WEIGHT_GRAD, n, h)
                if skip_ref is not None:
                    send_stat(skip_grad, SKIP_GRAD, n, h)
                send(dv_s, dv_ref, n, h)
                return total

            walk_items(step, ())
            plgpu.wait_smem_to_gmem(0)

        pl.when(wg == 0)(query_grads)
        pl.when(wg == 1)(key_grads)
        pl.when(wg == 2)(value_grads)
        pl.when(wg == 3)(load_inputs)
        _meet(done)

    sum_shape = (s.batch, s.length, s.groups * splits, s.key)
    lines = s.groups * splits if grouped else s.heads
    blocks = s.chunks if grouped else -(-s.chunks // per_block)
    return _kernel(
        body,
        name="jla_la_gradients",
        out_type=(
            _out(q, sum_shape, sum_dtype),
            _out(q, sum_shape, sum_dtype),
            _out(v, v.shape, dtype),
            _out(v, (s.batch, s.heads, s.chunks, stats, CHUNK), F32),
        ),
        scratch=scratch,
        grid=(("b", s.batch), ("h", lines), ("n", blocks)),
        threads=4,
        interpret=interpret,
    )(*(x for x in (q, k, v, do, states, gates, weights, skip) if x is not None))
