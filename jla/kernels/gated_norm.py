"""Gated RMS norm on Hopper, forward and backward: ``x rsqrt(mean(x^2) + eps) scale act(gate)``.

Rows that are gated first have kernels of their own (``gated_norm_wide``). Here there is one kernel
each way over the inputs as rows [N, D]: a block is one warpgroup that walks over tiles
of 64 rows, loaded ahead by TMA; results take the place of the inputs in shared memory and leave
from there. There are as many blocks as are resident at a time. The backward saves the inputs only;
bytes per element in 16 bits: forward 6, backward 10.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm
from jla.kernels import gated_norm_wide as wide
from jla.kernels import sharding

DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
DIMS = (64, 128, 256)
ROWS = 64  # of a tile
SMEM = 220 * 1024  # of a multiprocessor, less what blocks and their small buffers take
BLOCKS = 2  # a multiprocessor has registers for


class Options(NamedTuple):
    """Static choices of a call."""

    swish: bool
    eps: float
    group: int | None  # channels normalised together after gating; None: all, before gating


def gated_norm(x, scale, gate, *, activation, eps, norm_before_gate=True, group_size=None):
    """Normalised, scaled and gated x.

    Args:
      x, gate: [..., D] in one dtype, bfloat16 or float16; D in 64, 128, 256; gated
        first, in groups of a multiple of 256 channels, at most 4096.
      scale: [D] or None.
      activation: "swish", "silu" (the same) or "sigmoid".
      eps: positive.
      norm_before_gate: else x is gated first.
      group_size: channels that are normalised together, a divisor of D; D if None.
    Returns: [..., D] in x's dtype.
    """
    group = group_size or x.shape[-1]
    if jnp.dtype(x.dtype) not in DTYPES or gate.dtype != x.dtype:
        raise NotImplementedError(
            f"x and gate must share bfloat16 or float16, got {x.dtype}, {gate.dtype}"
        )
    if not fits(x.shape[-1], group, norm_before_gate):
        raise NotImplementedError(
            f"no kernel for D={x.shape[-1]} in groups of {group}, {norm_before_gate=}"
        )
    if x.size == 0 or gate.shape != x.shape:
        raise ValueError(f"x and gate must agree and not be empty, got {x.shape}, {gate.shape}")
    if not eps > 0:
        raise NotImplementedError("eps must be positive: rows that fill up a tile are zero")
    first = None if norm_before_gate else group
    options = Options(activation != "sigmoid", float(eps), first)
    scale = None if scale is None else scale.astype(cm.F32)
    return _core(x, scale, gate, options)


def fits(dim, group, norm_before_gate):
    """Whether there is a kernel for D channels that are normalised in groups."""
    if norm_before_gate:
        return group == dim and dim in DIMS
    return dim % group == 0 and group % wide.STEP == 0 and group <= wide.WIDEST


def layout(ndim, gradients=False):
    """Several devices may divide every axis of ``[..., D]`` but the last."""
    labels, scale = "abcdefijklmn"[: ndim - 1], ""
    if gradients:
        return sharding.Layout((labels, scale, labels, labels), (labels, scale, labels))
    return sharding.Layout((labels, scale, labels), labels)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _core(x, scale, gate, options):
    return sharding.partitioned(_forward, layout(x.ndim), options, x, scale, gate)


def _core_forward(x, scale, gate, options):
    return _core(x, scale, gate, options), (x, scale, gate)


def _core_backward(options, saved, dy):
    x = saved[0]
    run, parts = _backward, layout(x.ndim, gradients=True)
    return sharding.partitioned(run, parts, options, *saved, dy.astype(x.dtype))


_core.defvjp(_core_forward, _core_backward)


@cm.traced_once("options")
def _forward(x, scale, gate, options):
    if options.group:
        x_rows, scales, gates = _groups(options.group, x, scale, gate)
        return wide.forward(x_rows, scales, gates, options).reshape(x.shape)
    y: Any = forward(_rows(x), scale, _rows(gate), options)
    return _unrows(y, x.shape)


@cm.traced_once("options")
def _backward(x, scale, gate, dy, options):
    if options.group:
        rows = _groups(options.group, x, scale, gate, dy)
        dx, dgate, *sums = wide.backward(*rows, options)
        dscale = jnp.sum(sums[0], 0).ravel() if sums else None
        return dx.reshape(x.shape), dscale, dgate.reshape(x.shape)
    dx, dgate, *sums = backward(_rows(x), scale, _rows(gate), _rows(dy), options)
    dscale = jnp.sum(sums[0], 0) if sums else None
    return _unrows(dx, x.shape), dscale, _unrows(dgate, x.shape)


def _groups(size, *arrays):
    """[..., D] as [N, size]; None stays."""
    return [None if x is None else x.reshape(-1, size) for x in arrays]


def _rows(x):
    """[..., D] as [N, D], N a multiple of 8 as TMA wants it."""
    return cm.lengthen(x.reshape(1, -1, x.shape[-1]), 8)[0]


def _unrows(x, shape):
    return x[: math.prod(shape[:-1])].reshape(shape)


def forward(x, scale, gate, options):
    """y [N, D] of ``x, gate [N, D]``, N a multiple of 8."""
    (rows, dim), dtype = x.shape, x.dtype
    plan = _plan(rows, dim, ("x_s", "gate_s"), BLOCKS)

    def body(x_ref, gate_ref, *refs, x_s, gate_s, full):
        *scale_ref, y_ref = refs
        walk = _Walk(rows, plan)

        def fetch(n):
            walk.load(n, (x_ref, gate_ref), (x_s, gate_s), full)

        def step(n, _):
            slot = walk.arrive(n, full, fetch)
            squares = [jnp.square(cm.load_tile(x_s.at[slot, :, part])) for part in _parts(dim)]
            inverse = _inverse_norm(_row_sum(squares), dim, options.eps)
            plgpu.commit_smem()  # load again rather than keep
            for part in _parts(dim):
                x, gate = (cm.load_tile(ref.at[slot, :, part]) for ref in (x_s, gate_s))
                act, _ = cm.activated(gate, options.swish)
                y = _scaled(x * cm.per_row(inverse, x.shape), _scale(scale_ref, part)) * act
                x_s.at[slot, :, part][...] = y.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s.at[slot], y_ref.at[walk.rows(n)])
            return ()

        walk.run(fetch, step, ())

    inputs = [x, gate] + ([] if scale is None else [scale])
    out = jax.ShapeDtypeStruct(x.shape, dtype)
    return _launch(body, "gated_norm_forward", out, plan, inputs)


def backward(x, scale, gate, dy, options):
    """dx, dgate and, with a scale, its gradient's partial sums float32 [blocks, D]."""
    (rows, dim), dtype = x.shape, x.dtype
    parts = _parts(dim)
    plan = _plan(rows, dim, ("x_s", "gate_s", "dy_s"), BLOCKS)
    outputs = 2 + (scale is not None)

    def body(x_ref, gate_ref, dy_ref, *refs, x_s, gate_s, dy_s, full):
        scale_ref, refs = refs[:-outputs], refs[-outputs:]
        dx_ref, dgate_ref, *sums_ref = refs
        walk = _Walk(rows, plan)

        def fetch(n):
            walk.load(n, (x_ref, gate_ref, dy_ref), (x_s, gate_s, dy_s), full)

        def folded(x):
            """Sums over rows wait for the end where registers can hold them."""
            return jnp.sum(x, axis=0) if dim > 128 else x

        def step(n, sums):
            slot = walk.arrive(n, full, fetch)

            def load(part):
                tiles = (cm.load_tile(ref.at[slot, :, part]) for ref in (x_s, gate_s, dy_s))
                return *tiles, _scale(scale_ref, part)

            squares, dots = [], []
            for part in parts:
                x, gate, dy, factor = load(part)
                squares.append(x * x)
                dots.append(x * _scaled(dy * cm.activated(gate, options.swish)[0], factor))
            inverse = _inverse_norm(_row_sum(squares), dim, options.eps)
            # dx = inverse (dn - n mean(dn n)) for n = inverse x.
            along = _row_sum(dots) * inverse * inverse * inverse * (1.0 / dim)
            plgpu.commit_smem()  # load again rather than keep
            new = []
            for part, total in zip(parts, sums or [None] * len(parts), strict=True):
                x, gate, dy, factor = load(part)
                act, slope = cm.activated(gate, options.swish)
                shape = x.shape
                normed = x * cm.per_row(inverse, shape)
                dgate = dy * slope * _scaled(normed, factor)
                dn = dy * act
                if total is not None:
                    new.append(total + folded(dn * normed))
                dx = _scaled(dn, factor) * cm.per_row(inverse, shape)
                dx = dx - x * cm.per_row(along, shape)
                x_s.at[slot, :, part][...] = dx.astype(dtype)
                gate_s.at[slot, :, part][...] = dgate.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s.at[slot], dx_ref.at[walk.rows(n)])
            plgpu.copy_smem_to_gmem(gate_s.at[slot], dgate_ref.at[walk.rows(n)])
            return tuple(new)

        zeros = [folded(cm.zeros((ROWS, part.size))) for part in parts] if sums_ref else []
        sums = walk.run(fetch, step, tuple(zeros))
        for part, total in zip(parts, sums, strict=False):
            total = total if total.ndim == 1 else jnp.sum(total, axis=0)
            sums_ref[0].at[walk.block, part][...] = total

    inputs = [x, gate, dy] + ([] if scale is None else [scale])
    out = [jax.ShapeDtypeStruct(x.shape, dtype)] * 2
    if scale is not None:
        out.append(jax.ShapeDtypeStruct((plan.blocks, dim), cm.F32))
    return _launch(body, "gated_norm_backward", tuple(out), plan, inputs)


def _parts(dim):
    """Columns in pieces that fit into registers, and into the swizzle of a tile."""
    return [pl.ds(start, 64) for start in range(0, dim, 64)]


class _Plan(NamedTuple):
    """How a kernel is laid out: its tiles in shared memory by name, each a ring of stages."""

    tiles: tuple[str, ...]
    blocks: int
    stages: int


def _plan(rows, dim, tiles, resident):
    """Rings of at least two stages that fill the shared memory of ``resident`` or fewer blocks."""
    stage = len(tiles) * ROWS * dim * 2
    resident = max(1, min(resident, SMEM // (2 * stage)))
    blocks = min(cm.SMS * resident, -(-rows // ROWS))
    return _Plan(tiles, blocks, max(2, SMEM // (resident * stage)))


def _launch(body, name, out, plan, inputs):
    x = inputs[0]
    tile = cm.smem((plan.stages, ROWS, x.shape[1]), x.dtype)
    full = plgpu.Barrier(num_arrivals=len(plan.tiles), num_barriers=plan.stages)
    return cm.kernel(
        body,
        name=name,
        out_type=out,
        scratch=dict.fromkeys(plan.tiles, tile) | dict(full=full),
        grid=(plan.blocks,),
        grid_names=("n",),
    )(*inputs)


class _Walk:
    """A block's way over every ``blocks``-th tile of rows."""

    def __init__(self, rows, plan):
        self.block, self.blocks, self.stages = lax.axis_index("n"), plan.blocks, plan.stages
        self.count = lax.div(-(-rows // ROWS) - self.block + plan.blocks - 1, plan.blocks)

    def rows(self, n):
        return pl.ds((self.block + n * self.blocks) * ROWS, ROWS)

    def load(self, n, sources, targets, full):
        slot = lax.rem(n, self.stages)
        for ref, to in zip(sources, targets, strict=True):
            plgpu.copy_gmem_to_smem(ref.at[self.rows(n)], to.at[slot], full.at[slot])

    def arrive(self, n, full, fetch):
        """Slot of tile n, which is there; what is next in the slot before is on its way."""
        slot = lax.rem(n, self.stages)
        plgpu.barrier_wait(full.at[slot])

        @pl.when((n > 0) & (n - 1 + self.stages < self.count))
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            fetch(n - 1 + self.stages)

        return slot

    def run(self, fetch, step, carry):
        for n in range(self.stages):

            @pl.when(n < self.count)
            def _(n=n):
                fetch(jnp.int32(n))

        carry = lax.fori_loop(0, self.count, step, carry)
        plgpu.wait_smem_to_gmem(0)
        return carry


def _scale(scale_ref, part):
    """The scale of some columns from device memory, None without one."""
    if not scale_ref:
        return None
    return plgpu.load(scale_ref[0].at[part], layout=cm.COLS, optimized=False)


def _scaled(x, factor):
    return x if factor is None else x * cm.per_col(factor, x.shape)


def _row_sum(parts):
    return functools.reduce(jnp.add, (jnp.sum(x, axis=1) for x in parts))


def _inverse_norm(squares, dim, eps):
    return lax.rsqrt(squares * (1.0 / dim) + eps)
