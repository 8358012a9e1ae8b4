"""Exact split of long rows of the gated delta rule into pieces that run in parallel.

A piece has one or more sections. A section is an affine map of the state that enters it,
S_out = M S_in + E. ``section_maps`` runs the chain without outputs from the identity (M) and from
zero with values (E), ``scan_sections`` chains the sections, and the full kernels then start every
piece from its true state. Gradients go the other way through the same M: dS_in = M^T dS_out + E',
E' from ``state_gradients`` started at zero. A document boundary inside a section makes its M zero
by itself.
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
    STEP,
    TO_END,
    TOTAL,
    C,
    value_width,
)

MIN_STEPS = 4  # chunks of a piece below which the scan over pieces costs more than it saves
MAX_PIECES = 16


def piece_count(rows, chunks):
    """Pieces a row (a power of two, 1 for no split) for ``rows`` blocks of the serial kernels.

    The pieces of all rows should just fill the chip. The maps cost about as much as the pass
    itself, so that two pieces gain nothing.
    """
    pieces = 1
    while pieces < MAX_PIECES and rows * pieces * 2 <= cm.SMS and chunks >= MIN_STEPS * pieces * 2:
        pieces *= 2
    return pieces if pieces > 2 else 1


def sections(chunks):
    """Sections of a piece of so many chunks, where gates fade.

    Heads that forget within a few chunks need few steps for their maps; the others would leave
    most of the chip idle for as long as a piece is.
    """
    return 2 if chunks >= 48 else 1


DEAD = -150.0  # log2 of a factor that leaves nothing of a float32


def closed(tables, sections):
    """How many chunks of a section pass nothing of what enters them to its end; int32 [B, H, P].

    If there are any, M is zero, and E begins with the last of them. If the next section begins with
    a reset, which nothing of E survives, all chunks and one more: none is left for E.
    """
    passes = _passes(tables, sections, lambda chunk, other: other >= chunk)
    count = jnp.sum(passes < DEAD, axis=-1, dtype=jnp.int32)
    ends = jnp.pad(_cleared(tables, sections)[..., 1:], ((0, 0), (0, 0), (0, 1)))
    return jnp.where(ends, passes.shape[-1] + 1, count)


def reaching(tables, sections):
    """How many chunks of a section have gradients that reach its start; int32 [B, H, P]."""
    passes = _passes(tables, sections, lambda chunk, other: other < chunk)
    count = jnp.sum(passes >= DEAD, axis=-1, dtype=jnp.int32)
    return jnp.where(_cleared(tables, sections), 0, count)


def _cleared(tables, sections):
    """Whether a section's first token clears the state that enters the section; [B, H, P]."""
    return tables[:, :, :: tables.shape[2] // sections, STEP, 0] < DEAD


def _passes(tables, sections, which):
    """log2 of how much of a state some chunks of each section let pass at most, [B, H, P, steps].

    ``which(chunk, other)`` of the section count for a chunk. One sum, which is one kernel.
    """
    bounds = tables[:, :, :, BOUND]
    steps = bounds.shape[2] // sections
    bounds = bounds.reshape(*bounds.shape[:2], sections, 1, steps, C)
    chunk, other = np.ogrid[:steps, :steps]
    return jnp.sum(jnp.where(which(chunk, other)[..., None], bounds, 0.0), axis=(-2, -1))


def _wanted(section, sections, ends):
    """Whether a section's M is wanted; ``ends`` as in ``section_maps``."""
    first, last = ends
    return (first | (section > 0)) & (last | (section < sections - 1))


@cm.traced_once("sections", "ends")
def section_maps(k, v, inverses, tables, closed=None, *, sections, ends):
    """M^T and E^T of every section, S_out = M S_in + E.

    Args: k [B, T, Hq, K]; v [B, T, H, V]; inverses; tables; closed: see above, or None for none;
      ends: whether M of the first and of the last section are wanted, too.
    Returns: M^T without its diagonal [B * sections, H, K, K] in v's dtype, the diagonal float32
      [B * sections, H, K], and E^T float32 [B * sections, H, V, K]; E of the last section, which
      starts no other, is left unwritten. What a section keeps of a state is on the diagonal,
      exact; the rest has passed through 16-bit products anyway.
    One block a (section, head, rows of a transposed map): 64 rows a warpgroup, and a loader.
    """
    batch, _, _, key_dim = k.shape
    heads, value_dim = v.shape[2:]
    dtype = v.dtype
    steps = tables.shape[2] // sections
    group = heads // k.shape[2]
    width = value_width(key_dim, value_dim)
    states = width // C
    maps = -(-key_dim // width)  # blocks of M; those of E follow
    stages = 4
    tile = (C, C)

    def body(k_ref, v_ref, t_ref, table_ref, *refs, k_s, v_s, t_s, table_s, full, free, done):
        *closed_ref, rest_ref, diagonal_ref, add_ref = refs
        bp, h, kind, wg = (lax.axis_index(x) for x in ("b", "h", "kind", "wg"))
        b, section = lax.div(bp, sections), lax.rem(bp, sections)
        blocked = closed_ref[0][b, h, section] if closed_ref else jnp.int32(0)
        begin = jnp.maximum(blocked - 1, 0)
        adds = kind >= maps
        wanted = jnp.where(adds, section < sections - 1, _wanted(section, sections, ends))
        count = jnp.where(wanted & (adds | (blocked == 0)), steps - begin, 0)
        first = section * steps + begin
        row = jnp.where(adds, kind - maps, kind) * width  # the block's first

        @pl.when(wg < states)
        def _state():
            if states == 2:
                plgpu.set_max_registers(216, action="increase")
            value_factor = adds.astype(cm.F32)

            def step(n, state):
                slot = lax.rem(n, stages)
                table = table_s.at[slot]
                plgpu.barrier_wait(full.at[slot])

                def values():
                    value = cm.load_tile(v_s.at[slot * states + wg].T)
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

            own = row + wg * C
            i, j = (cm.iota((C, key_dim), axis) for axis in (0, 1))
            kept = jnp.where(adds | (blocked > 0), 0.0, 1.0)
            state = lax.fori_loop(0, count, step, jnp.where(i + own == j, kept, 0.0))
            rows = pl.ds(own, C)

            @pl.when(wanted & jnp.logical_not(adds) & (own < key_dim))
            def _():
                i, j = (cm.iota((C, key_dim), axis) for axis in (0, 1))
                diagonal = i + own == j
                diagonal_ref.at[bp, h, rows][...] = jnp.sum(jnp.where(diagonal, state, 0.0), axis=1)
                rest_ref.at[bp, h, rows][...] = jnp.where(diagonal, 0.0, state).astype(dtype)

            @pl.when(wanted & adds)
            def _():
                add_ref.at[bp, h, rows][...] = state

        @pl.when(wg == states)
        def _load():
            plgpu.set_max_registers(40, action="decrease")
            column = jnp.where(adds, row, 0)

            @pl.loop(0, count)
            def _(n):
                slot = lax.rem(n, stages)

                @pl.when(n >= stages)
                def _():
                    plgpu.barrier_wait(free.at[slot])

                rows, bar = pl.ds((first + n) * C, C), full.at[slot]
                plgpu.copy_gmem_to_smem(k_ref.at[b, rows, lax.div(h, group)], k_s.at[slot], bar)
                for c in range(states):
                    columns = pl.ds(column + c * C, C)
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[b, rows, h, columns], v_s.at[slot * states + c], bar
                    )
                plgpu.copy_gmem_to_smem(t_ref.at[b, h, first + n], t_s.at[slot], bar)
                plgpu.copy_gmem_to_smem(table_ref.at[b, h, first + n], table_s.at[slot], bar)

            cm.drain(free, count, stages)

        cm.meet(done)

    lead = (batch * sections, heads)
    return cm.kernel(
        body,
        name="gdr_section_maps",
        out_type=[
            jax.ShapeDtypeStruct((*lead, key_dim, key_dim), dtype),
            jax.ShapeDtypeStruct((*lead, key_dim), cm.F32),
            jax.ShapeDtypeStruct((*lead, value_dim, key_dim), cm.F32),
        ],
        scratch=dict(
            k_s=cm.smem((stages, C, key_dim), dtype),
            v_s=cm.smem((stages * states, C, C), dtype),
            t_s=cm.smem((stages, C, C), dtype),
            table_s=plgpu.SMEM((stages, ROWS, C), cm.F32),
            full=plgpu.Barrier(num_arrivals=3 + states, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=states, num_barriers=stages),
            done=plgpu.Barrier(num_arrivals=states + 1),
        ),
        grid=(*lead, maps + value_dim // width),
        grid_names=("b", "h", "kind"),
        warpgroups=states + 1,
    )(k, v, inverses, tables, *([] if closed is None else [closed]))


@cm.traced_once("sections", "pieces", "reverse")
def scan_sections(start, rest, diagonal, add, *, sections, pieces, reverse=False):
    """States at the pieces' starts (ends when ``reverse``) from the maps.

    Args: start [B, H, V, K] float32, the state entering the first section (leaving the last), or
      None for zeros (that section's M is then not read); rest, diagonal, add: of ``section_maps``.
    Returns: [B * pieces, H, V, K] float32. One block a (row, head, 64 value columns), one
    warpgroup: two took as long.
    """
    batch, heads, value_dim, key_dim = add.shape[0] // sections, *add.shape[1:]
    inputs = [rest, diagonal, add] + ([] if start is None else [start])
    every = sections // pieces
    steps, stages = sections - every, 3
    first = 1 if start is None else 0

    def body(rest_ref, diagonal_ref, add_ref, *refs, rest_s, diagonal_s, add_s, state_s, bar):
        *start_ref, out_ref = refs
        b, h, c = (lax.axis_index(x) for x in "bhc")
        rows = pl.ds(c * C, C)

        def nth(n, count):
            return b * count + (count - 1 - n if reverse else n)

        def fetch(n):
            slot = lax.rem(n, stages)
            for ref, to in ((rest_ref, rest_s), (diagonal_ref, diagonal_s)):
                plgpu.copy_gmem_to_smem(ref.at[nth(n, sections), h], to.at[slot], bar.at[slot])
            source = add_ref.at[nth(n, sections), h, rows]
            plgpu.copy_gmem_to_smem(source, add_s.at[slot], bar.at[slot])

        def publish(n, state):  # the state before a piece's first section
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # the waiting thread speaks for all warps
            state_s[...] = state
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                state_s, out_ref.at[nth(lax.div(jnp.int32(n), every), pieces), h, rows]
            )

        def step(n, state):
            slot = lax.rem(n, stages)
            plgpu.barrier_wait(bar.at[slot])

            def meanwhile():
                @pl.when(lax.rem(n, every) == 0)
                def _():
                    publish(n, state)

                kept = state * cm.per_col(cm.load_col(diagonal_s.at[slot]), state.shape)
                return kept + plgpu.load(add_s.at[slot], layout=cm.WGMMA)

            moves = rest_s.at[slot].T if reverse else rest_s.at[slot]
            moved, others = cm.product(state.astype(rest.dtype), moves, state.shape, meanwhile)
            plgpu.commit_smem()  # all warps have read this slot

            @pl.when(n + stages < steps)
            def _():
                fetch(n + stages)

            return moved + others

        for n in range(first, min(first + stages, steps)):
            fetch(jnp.int32(n))
        if start_ref:
            state = plgpu.load(start_ref[0].at[b, h, rows], layout=cm.WGMMA, optimized=False)
        else:  # the first step is known
            publish(0, cm.zeros((C, key_dim)))
            source = add_ref.at[nth(0, sections), h, rows]
            state = plgpu.load(source, layout=cm.WGMMA, optimized=False)
        state = lax.fori_loop(first, steps, step, state)
        publish(steps, state)
        plgpu.wait_smem_to_gmem(0)

    return cm.kernel(
        body,
        name="gdr_scan_sections",
        out_type=jax.ShapeDtypeStruct((batch * pieces, heads, value_dim, key_dim), cm.F32),
        scratch=dict(
            rest_s=cm.smem((stages, key_dim, key_dim), rest.dtype),
            diagonal_s=plgpu.SMEM((stages, key_dim), cm.F32),
            add_s=cm.smem((stages, C, key_dim), cm.F32),
            state_s=cm.smem((C, key_dim), cm.F32),
            bar=plgpu.Barrier(num_arrivals=3, num_barriers=stages),
        ),
        grid=(batch, heads, value_dim // C),
        grid_names=("b", "h", "c"),
    )(*inputs)
