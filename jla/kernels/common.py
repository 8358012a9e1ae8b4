"""Helpers shared by the Mosaic GPU kernels (Hopper, one "thread" = one warpgroup).

The register layouts are named after what a vector holds for a ``[m, n]`` tile in the WGMMA
layout: ``ROWS`` has one value per row, ``COLS`` one per column.
"""

import functools
import math

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

F32 = jnp.float32
LOG2E = math.log2(math.e)
WIDEST = 128  # head size that a tile holds
SMS = 132  # streaming multiprocessors of an H100 or H200 SXM: blocks of a persistent kernel

WGMMA = plgpu.Layout.WGMMA
ROWS = plgpu.Layout.WGMMA.reduce(1)
COLS = plgpu.Layout.WGMMA.reduce(0)


def lengthen(x, multiple):
    """``x [B, T, ...]`` with zeros up to a multiple of tokens (8: the rows of a TMA tile)."""
    extra = -x.shape[1] % multiple
    return jnp.pad(x, [(0, 0), (0, extra)] + [(0, 0)] * (x.ndim - 2)) if extra else x


def widen(x, axis=-1):
    """``x`` with zeros up to a head size that the kernels have: 64, or a multiple of 128."""
    size = x.shape[axis]
    extra = -size % (64 if size <= 64 else 128)
    if not extra:
        return x
    pads = [(0, 0)] * x.ndim
    pads[axis] = (0, extra)
    return jnp.pad(x, pads)


def value_parts(x):
    """``x [..., H, V]`` with V in parts of the widest head size as heads: ``[..., H * n, V / n]``.

    Columns of values never meet in these recurrences, so parts of a head are heads of their own.
    """
    size = x.shape[-1]
    if size <= WIDEST:
        return x
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -size % WIDEST)])
    return x.reshape(*x.shape[:-2], -1, WIDEST)


def state_parts(state):
    """A state ``[B, H, K, V]`` of the heads that ``value_parts`` makes."""
    if state.shape[-1] <= WIDEST:
        return state
    return jnp.swapaxes(value_parts(jnp.moveaxis(state, 1, 2)), 1, 2)


def join_state(state, heads):
    """The way back from ``state_parts``; columns that were added stay."""
    batch, parts, key_dim, width = state.shape
    if parts == heads:
        return state
    state = state.reshape(batch, heads, parts // heads, key_dim, width)
    return jnp.moveaxis(state, 2, 3).reshape(batch, heads, key_dim, -1)


def smem(shape, dtype):
    """Shared-memory tile(s), tiled and swizzled for TMA and (16-bit dtypes) wgmma."""
    bits = jnp.dtype(dtype).itemsize * 8
    swizzle = plgpu.find_swizzle(shape[-1] * bits)
    tiling = plgpu.TilingTransform((8, 8 * swizzle // bits))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(swizzle)))


def kernel(body, *, name, out_type, scratch, grid, grid_names, warpgroups=1):
    """``plgpu.kernel`` with single-instruction exp; warpgroup index under the name ``wg``.

    No automatic barriers around shared-memory stores, so a body must itself make sure that the
    four warps of a warpgroup agree: ``commit_smem`` (fence and barrier) after every store that
    others read, and before a store over what another warp of the same group may still read.
    """
    threads = dict(num_threads=warpgroups, thread_name="wg") if warpgroups > 1 else {}
    params = plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True)
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=grid_names,
        compiler_params=params,
        kernel_name=name,
        **threads,
    )


def traced_once(*static):
    """For functions that launch kernels: a program that calls one several times (forward, forward
    for the backward, layers of one shape) traces and lowers it once, which takes seconds.

    ``static`` are its arguments that are not arrays.
    """
    return functools.partial(jax.jit, static_argnames=static)


def iota(shape, axis):
    """Index along ``axis`` of a tile in the WGMMA layout, int32."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def per_row(vector, shape):
    """``vector[i]`` along row i (``vector`` in the ROWS layout)."""
    return lax.broadcast_in_dim(vector, shape, (0,))


def per_col(vector, shape):
    """``vector[j]`` along column j (``vector`` in the COLS layout)."""
    return lax.broadcast_in_dim(vector, shape, (1,))


def load_row(ref):
    """A vector in shared memory as one value per tile row."""
    return plgpu.load(ref, layout=ROWS, optimized=False)


def load_col(ref):
    """A vector in shared memory as one value per tile column."""
    return plgpu.load(ref, layout=COLS, optimized=False)


def load_tile(ref):
    """A 16-bit tile in shared memory as float32 registers in the WGMMA layout."""
    return plgpu.load(ref, layout=WGMMA).astype(F32)


def sigmoid(x):
    """1 / (1 + exp(-x)) from fast instructions: the reciprocal as a squared inverse root."""
    root = lax.rsqrt(1.0 + jnp.exp2(x * -LOG2E))
    return root * root


def activated(gate, swish):
    """The gate's activation, swish or sigmoid, and its derivative."""
    s = sigmoid(gate)
    slope = s * (1.0 - s)
    return (gate * s, s + gate * slope) if swish else (s, slope)


def zeros(shape):
    return plgpu.layout_cast(jnp.zeros(shape, F32), WGMMA)


def write_positions(ref):
    """Fills ``ref`` float32 [2, n] with 0 .. n - 1 twice (see ``causal_decay``)."""
    for row, layout in enumerate((ROWS, COLS)):
        index = plgpu.broadcasted_iota(jnp.int32, ref.shape[1:], 0, layout=layout)
        ref.at[row][...] = index.astype(F32)
    plgpu.commit_smem()


def causal_decay(to_row, from_col, positions, *, strict):
    """``exp2(to_row[i] - from_col[j])`` for j <= i (j < i when strict), zero elsewhere.

    The exponent is masked before the exponential: entries above the diagonal would overflow.
    ``positions`` (shared memory, from ``write_positions``) are loaded anew each time: indices
    from an iota would be hoisted out of a loop, spilled, and read back one by one.
    """
    shape = (to_row.shape[0], from_col.shape[0])
    i = per_row(load_row(positions.at[0]), shape)
    j = per_col(load_col(positions.at[1]), shape)
    keep = i > j if strict else i >= j
    gap = per_row(to_row, shape) - per_col(from_col, shape)
    return jnp.exp2(jnp.where(keep, gap, -jnp.inf))


def products(*specs, meanwhile=None):
    """Independent float32 products ``a @ b`` in flight together; specs are (a, b, shape).

    ``a`` is a shared-memory ref or 16-bit registers, ``b`` a shared-memory ref. ``meanwhile``
    runs between issue and wait; with it the result is (products, its value). Reading an
    accumulator emits a wait that the value does not depend on, so that the compiler may move
    arithmetic in front of it: the barrier pins the order.
    """

    def scope(*accs):
        for acc, (a, b, _) in zip(accs, specs, strict=True):
            plgpu.wgmma(acc, a, b)
        extra = None if meanwhile is None else meanwhile()
        return lax.optimization_barrier(tuple(acc[...] for acc in accs)), extra

    out, extra = pl.run_scoped(scope, *(plgpu.ACC(shape, F32) for _, _, shape in specs))
    return out if meanwhile is None else (out, extra)


def product(a, b, shape, meanwhile=None):
    """``a @ b`` in float32; with ``meanwhile`` as in ``products``."""
    if meanwhile is None:
        return products((a, b, shape))[0]
    (out,), extra = products((a, b, shape), meanwhile=meanwhile)
    return out, extra


def accumulate(init, *pairs, meanwhile=None):
    """``init + sum of a @ b over pairs``, one accumulator, one wait; ``meanwhile`` for effects."""

    def scope(acc):
        acc[...] = init
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        if meanwhile is not None:
            meanwhile()
        return lax.optimization_barrier(acc[...])

    return pl.run_scoped(scope, plgpu.ACC(init.shape, F32))


def product_sum(pairs, shape, meanwhile):
    """(sum of a @ b over pairs, value of ``meanwhile``, run between issue and wait)."""

    def scope(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        extra = meanwhile()
        return lax.optimization_barrier(acc[...]), extra

    return pl.run_scoped(scope, plgpu.ACC(shape, F32))


def accumulate_columns(init, a, parts):
    """``init + a @ [parts side by side]``."""

    def scope(acc):
        acc[...] = init
        width = init.shape[1] // len(parts)
        for place, b in enumerate(parts):
            target = acc.at[:, pl.ds(place * width, width)] if len(parts) > 1 else acc
            plgpu.wgmma(target, a, b)
        return lax.optimization_barrier(acc[...])

    return pl.run_scoped(scope, plgpu.ACC(init.shape, F32))


def drain(barriers, count, slots):
    """Waits for the last releases of a ring of ``slots`` barriers after ``count`` uses."""
    for back in range(slots, 0, -1):

        @pl.when(count >= back)
        def _(back=back):
            plgpu.barrier_wait(barriers.at[lax.rem(count - back, slots)])


def meet(barrier):
    """All warpgroups of the block wait for each other (one arrival a warpgroup).

    A warpgroup that exits while another one still issues wgmma can end in an illegal
    instruction on sm_90, so every kernel with several warpgroups ends with this.
    """
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
