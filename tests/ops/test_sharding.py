"""Ops over four host devices: the numbers of one device, and nothing gathered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, collectives, host_mesh, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jla.ops import attention, causal_conv1d, gated_delta_rule

B, T, H, K, V = 4, 37, 4, 8, 6

MESHES = {"batch": ({"data": 4}, "data", None), "heads": ({"model": 4}, None, "model")}
MESHES["batch and heads"] = ({"data": 2, "model": 2}, "data", "model")


def gated(x, ids):
    return gated_delta_rule(
        x["q"],
        x["k"],
        x["v"],
        -jax.nn.softplus(x["gate"]),
        jax.nn.sigmoid(x["beta"]),
        initial_state=x["state"],
        output_final_state=True,
        segment_ids=ids,
        use_qk_l2norm=True,
        impl="chunk",
    )


def softmax(impl, x, ids):
    return attention(x["q"], x["k"], x["v"], segment_ids=ids, window_size=9, impl=impl)


def convolution(x, ids):
    width = (B, T, H * K)  # channels are heads times K, split like heads
    return causal_conv1d(
        x["q"].reshape(width),
        x["taps"],
        initial_state=x["window"],
        output_final_state=True,
        segment_ids=ids,
        activation="silu",
    )


OPS = {
    "gated_delta_rule": (gated, ("q", "k", "v", "gate", "beta", "state")),
    "attention": (functools.partial(softmax, "reference"), ("q", "k", "v")),
    "attention in blocks": (functools.partial(softmax, "chunk"), ("q", "k", "v")),
    "causal_conv1d": (convolution, ("q", "taps", "window")),
}
# Inputs, and where their heads (or channels) stand.
INPUTS = {
    "q": ((B, T, H, K), 2),
    "k": ((B, T, H, K), 2),
    "v": ((B, T, H, V), 2),
    "gate": ((B, T, H), 2),
    "beta": ((B, T, H), 2),
    "state": ((B, H, K, V), 1),
    "taps": ((3, H * K), 1),
    "window": ((B, 2, H * K), 2),
}
IDS = np.stack([np.repeat([0, 1, 2, 1], [n, 16 - n, 18, 3]) for n in range(B)]).astype(np.int32)


def spec(name, data, model):
    shape, heads = INPUTS[name]
    axes = [None] * len(shape)
    axes[heads] = model
    if name != "taps":
        axes[0] = data
    return P(*axes)


def gradients(op, x, ids):
    def loss(x):
        out = op(x, ids)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(out)), out

    return jax.grad(loss, has_aux=True)(x)


@functools.cache
def unsharded(name, packed):
    op, names = OPS[name]
    x = {n: random(i, INPUTS[n][0]) for i, n in enumerate(names)}
    ids = IDS if packed else None
    return x, jax.device_get(jax.jit(functools.partial(gradients, op))(x, ids))


# The fast slice splits both at once; each alone is left to the whole table.
SLICE = [
    over if over == "batch and heads" else pytest.param(over, marks=pytest.mark.slow)
    for over in MESHES
]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("over", SLICE)
@pytest.mark.parametrize("name", OPS)
def test_sharded_is_unsharded_and_gathers_nothing(name, over, explicit, packed):
    x, want = unsharded(name, packed)
    axes, data, model = MESHES[over]
    mesh = host_mesh(axes, explicit=explicit)
    placed = {n: jax.device_put(a, NamedSharding(mesh, spec(n, data, model))) for n, a in x.items()}
    ids = jax.device_put(IDS, NamedSharding(mesh, P(data))) if packed else None
    with jax.set_mesh(mesh):
        program = jax.jit(functools.partial(gradients, OPS[name][0])).lower(placed, ids).compile()
        got = program(placed, ids)
    assert_trees_close(jax.device_get(got), want)
    # The gradient of taps that all rows share is a sum over rows; nothing else is exchanged.
    shared = {"all-reduce"} if name == "causal_conv1d" and data else set()
    assert collectives(program) <= shared
    o = got[1][0] if isinstance(got[1], tuple) else got[1]
    assert o.sharding.spec[0] == data and (o.sharding.spec + (None,) * 4)[2] == model
