"""One small step of every Hopper kernel, forward and backward, for NVIDIA's compute-sanitizer.

    XLA_PYTHON_CLIENT_ALLOCATOR=platform compute-sanitizer --tool memcheck \
        --error-exitcode 1 python -m tools.sanitize
    ... --tool racecheck ...

With that allocator every array is an allocation of its own, so that memcheck sees where one ends.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jla import ops
from jla.kernels.gated_norm import gated_norm
from jla.kernels.short_conv import short_conv

IDS = jnp.asarray(np.repeat([[1, 2, 0, 3]], [70, 63, 5, 62], axis=1), jnp.int32)  # 200 tokens
B, T, HEADS, GROUPS, SIZE = 1, IDS.shape[1], 4, 2, 128


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def heads():
    """q, k, v, g of one packed row."""
    q, k = (0.1 * normal(i, B, T, GROUPS, SIZE) for i in range(2))
    gates = -jax.nn.softplus(normal(3, B, T, HEADS, dtype=jnp.float32))
    return q, k, normal(2, B, T, HEADS, SIZE), gates


def delta_rule():
    q, k, v, g = heads()
    return lambda *x: ops.gated_delta_rule(*x, segment_ids=IDS, impl="mosaic")[0], (
        q, k, v, g, jax.nn.sigmoid(g),
    )  # fmt: skip


def scalar_decay():
    return lambda *x: ops.simple_gla(*x, segment_ids=IDS, impl="mosaic")[0], heads()


def state_space():
    b, c, x, dt = heads()
    rates, skip = -jnp.ones(HEADS), jnp.ones(HEADS)

    def run(x, dt, b, c, skip):
        return ops.ssd(x, -dt, rates, b, c, skip, segment_ids=IDS, impl="mosaic")[0]

    return run, (x, dt, b, c, skip)


def convolution():
    x, taps = normal(0, B, T, 512), normal(1, 4, 512, dtype=jnp.float32)
    return lambda x, w: short_conv(x, w, silu=True, segment_ids=IDS), (x, taps)


def norm():
    x, gate = normal(0, B, T, HEADS, SIZE), normal(1, B, T, HEADS, SIZE)
    return lambda *x: gated_norm(*x, activation="swish", eps=1e-5), (x, jnp.ones(SIZE), gate)


def norm_after_gate():
    x, gate = normal(0, B, T, 512), normal(1, B, T, 512)
    order = dict(norm_before_gate=False, group_size=256)
    return lambda *x: gated_norm(*x, activation="swish", eps=1e-5, **order), (
        x, jnp.ones(512), gate,
    )  # fmt: skip


CASES: dict[str, Callable] = {
    f.__name__: f
    for f in (delta_rule, scalar_decay, state_space, convolution, norm, norm_after_gate)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=list(CASES))
    chosen = parser.parse_args().only
    for name, make in CASES.items():
        if chosen in (None, name):
            run, operands = make()
            o, pull = jax.vjp(jax.jit(run), *operands)
            jax.block_until_ready(pull(jnp.ones_like(o)))
            print(name, "ran", flush=True)


if __name__ == "__main__":
    main()
