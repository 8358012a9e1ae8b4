"""RMS norm of gated rows on Hopper: ``h rsqrt(mean(h^2) + eps) scale`` for ``h = x act(gate)``.

Mamba-2's norm, over thousands of channels. A block is one warpgroup that holds a row in registers
while its next one is on the way, and there are as many blocks as are resident at a time. The
backward saves the inputs only; bytes per element in 16 bits: forward 6, backward 10.
"""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jla.kernels import common as cm

THREADS = 128
STEP, WIDEST = 256, 4096  # channels of a row: multiples, and as many as registers hold


def forward(x, scale, gate, options):
    """y [N, D] of ``x, gate [N, D]``; row n is scaled by row n mod S of ``scale [S, D]``."""
    walk = _Walk(x.shape, scale, resident=4)

    def body(x_ref, gate_ref, *refs):
        *scale_ref, y_ref = refs

        def step(n, row):
            x, gate = (each.astype(cm.F32) for each in row)
            following = walk.load(n + 1, x_ref, gate_ref)
            h = x * cm.activated(gate, options.swish)[0]
            y = walk.scaled(h * _inverse_norm(h, options.eps), scale_ref)
            y_ref.at[walk.row(n)][...] = y.astype(y_ref.dtype)
            return following

        lax.fori_loop(0, walk.count(), step, walk.load(0, x_ref, gate_ref))

    inputs = [x, gate] + ([] if scale is None else [scale])
    return walk.launch(body, "gated_norm_wide_forward", x, inputs)


def backward(x, scale, gate, dy, options):
    """dx, dgate and, with a scale, its gradient's partial sums float32 [blocks / S, S, D]."""
    walk = _Walk(x.shape, scale, resident=2)
    outputs = 2 + (scale is not None)

    def body(x_ref, gate_ref, dy_ref, *refs):
        scale_ref, (dx_ref, dgate_ref, *sums_ref) = refs[:-outputs], refs[-outputs:]
        inputs = x_ref, gate_ref, dy_ref

        def step(n, carry):
            row, sums = carry
            x, gate, dy = (each.astype(cm.F32) for each in row)
            following = walk.load(n + 1, *inputs)
            act, slope = cm.activated(gate, options.swish)
            h = x * act
            inverse = _inverse_norm(h, options.eps)
            sums = tuple(total + dy * h * inverse for total in sums)
            dn = walk.scaled(dy, scale_ref)
            # dh = inverse (dn - n mean(dn n)) for n = inverse h.
            along = jnp.sum(dn * h) * (inverse * inverse * inverse * (1.0 / walk.dim))
            dh = dn * inverse - h * along
            dx_ref.at[walk.row(n)][...] = (dh * act).astype(dx_ref.dtype)
            dgate_ref.at[walk.row(n)][...] = (dh * x * slope).astype(dx_ref.dtype)
            return following, sums

        zeros = plgpu.layout_cast(jnp.zeros((walk.dim,), cm.F32), walk.layout)
        start = walk.load(0, *inputs), (zeros,) * len(sums_ref)
        _, sums = lax.fori_loop(0, walk.count(), step, start)
        for ref, total in zip(sums_ref, sums, strict=True):
            ref.at[lax.axis_index("n")][...] = total

    if scale is None:
        return walk.launch(body, "gated_norm_wide_backward", [x, x], [x, gate, dy])
    sums = jax.ShapeDtypeStruct((walk.blocks, walk.dim), cm.F32)
    inputs = [x, gate, dy, scale]
    dx, dgate, sums = walk.launch(body, "gated_norm_wide_backward", [x, x, sums], inputs)
    return dx, dgate, sums.reshape(-1, *scale.shape)


class _Walk:
    """A block's way over every ``blocks``-th row, all of which have the same scale."""

    def __init__(self, shape, scale, resident):
        self.rows, self.dim = shape
        self.scales = 1 if scale is None else scale.shape[0]
        self.blocks = min(cm.SMS * resident, self.rows) // self.scales * self.scales
        each = self.dim // THREADS
        vector = next(size for size in (8, 4, 2) if each % size == 0)
        self.layout = plgpu.Layout.WG_STRIDED((self.dim,), vec_size=vector)

    def row(self, n):
        return lax.axis_index("n") + n * self.blocks

    def count(self):
        return lax.div(self.rows - lax.axis_index("n") + self.blocks - 1, self.blocks)

    def load(self, n, *refs):
        """The n-th row of each; behind the last one some other."""
        row = jnp.minimum(self.row(n), self.rows - 1)
        return tuple(self._load(ref.at[row]) for ref in refs)

    def scaled(self, x, scale_ref):
        if not scale_ref:
            return x
        return x * self._load(scale_ref[0].at[lax.rem(lax.axis_index("n"), self.scales)])

    def _load(self, ref):
        return plgpu.load(ref, layout=self.layout, optimized=False)

    def launch(self, body, name, like, inputs):
        out = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), like)
        out = tuple(out) if isinstance(out, list) else out
        return cm.kernel(
            body, name=name, out_type=out, scratch={}, grid=(self.blocks,), grid_names=("n",)
        )(*inputs)


def _inverse_norm(h, eps):
    return lax.rsqrt(jnp.sum(h * h) * (1.0 / h.shape[0]) + eps)
