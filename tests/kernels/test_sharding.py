"""Kernels on a mesh: every device is handed its own rows and heads, and nothing is gathered.

No kernel runs here: a stand-in of the same signature does the mathematics in plain JAX.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_trees_close, collectives, host_mesh, random
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jla import ops
from jla.kernels import gated_delta_rule, limits, linear_attention

B, T, GROUPS, H, K, V = 4, 20, 2, 4, 8, 6
MESHES = {
    "rows": ({"data": 4}, "data", None),
    "rows and heads": ({"data": 2, "model": 2}, "data", "model"),
    "more heads than groups": ({"model": 4}, None, "model"),
}
shapes = []


def stand_in(op, rename):
    """A kernel: the chunk form of an op, on what one device is handed."""

    def kernel(q, k, v, g, *gates, marks, initial_state=None, output_final_state=True, **options):
        shapes.append((q.shape, v.shape))
        ids = None if marks is None else jnp.cumsum(marks == 2, axis=1) + 1
        ids = None if ids is None else jnp.where(marks == 0, 0, ids).astype(jnp.int32)
        options = {rename.get(name, name): x for name, x in options.items()}
        weights = options.pop("weights", None)
        v = v if weights is None else v * weights[..., None]
        return op(
            q, k, v, g, *gates, initial_state=initial_state, segment_ids=ids, impl="chunk",
            output_final_state=output_final_state, **options,
        )  # fmt: skip

    return kernel


@pytest.fixture
def several_gpus(monkeypatch):
    monkeypatch.setattr(limits, "hopper", lambda: None)
    monkeypatch.setattr(limits, "_heads", lambda *_: None)
    rule = stand_in(ops.gated_delta_rule, {})
    monkeypatch.setattr(gated_delta_rule, "gated_delta_rule", rule)
    simple = stand_in(ops.simple_gla, {"v_scale": "weights"})
    monkeypatch.setattr(linear_attention, "linear_attention", simple)
    shapes.clear()


def delta(x, ids, impl):
    g, beta = -jax.nn.softplus(x["gate"]), jax.nn.sigmoid(x["beta"])
    more = dict(initial_state=x["state"], output_final_state=True, segment_ids=ids, impl=impl)
    return ops.gated_delta_rule(x["q"], x["k"], x["v"], g, beta, **more)


def mamba2(x, ids, impl):
    dt = jax.nn.softplus(x["gate"])
    more = dict(initial_state=x["state"], output_final_state=True, segment_ids=ids, impl=impl)
    return ops.ssd(x["v"], dt, -jnp.ones(H), x["k"], x["q"], **more)


INPUTS = {
    "q": (B, T, GROUPS, K),
    "k": (B, T, GROUPS, K),
    "v": (B, T, H, V),
    "gate": (B, T, H),
    "beta": (B, T, H),
    "state": (B, H, K, V),
}
IDS = np.stack([np.repeat([0, 1, 2], [n, 12 - n, 8]) for n in range(B)]).astype(np.int32)


def gradients(op, impl, x, ids):
    def loss(x):
        out = op(x, ids, impl)
        return sum(jnp.sum(leaf**2) for leaf in out), out

    return jax.grad(loss, has_aux=True)(x)


@pytest.mark.parametrize("over", MESHES)
@pytest.mark.parametrize("op", [delta, mamba2], ids=["delta", "mamba2"])
def test_a_device_runs_its_rows_and_heads(several_gpus, op, over):
    axes, rows, heads = MESHES[over]
    x = {name: random(i, shape) for i, (name, shape) in enumerate(INPUTS.items())}
    want = jax.device_get(jax.jit(functools.partial(gradients, op, "chunk"))(x, IDS))
    mesh = host_mesh(axes, explicit=True)

    def place(name, value):
        at = 1 if name == "state" else 2
        split = heads if heads is None or value.shape[at] % axes[heads] == 0 else None
        spec = P(rows, split) if at == 1 else P(rows, None, split)
        return jax.device_put(value, NamedSharding(mesh, spec))

    placed = {name: place(name, value) for name, value in x.items()}
    ids = jax.device_put(IDS, NamedSharding(mesh, P(rows)))
    with jax.set_mesh(mesh):
        run = functools.partial(gradients, op, "mosaic")
        program = jax.jit(run).lower(placed, ids).compile()
        got = program(placed, ids)
    assert_trees_close(jax.device_get(got), want)
    share = H // (axes[heads] if heads else 1)
    assert {v for _, v in shapes} == {(B // (axes[rows] if rows else 1), T, share, V)}
    if over != "more heads than groups":  # there keys are repeated, and their gradients summed
        assert not collectives(program)


def test_a_mesh_that_says_too_little_is_refused(several_gpus):
    q, v = jnp.zeros((B, T, H, K), jnp.bfloat16), jnp.zeros((B, T, H, V), jnp.bfloat16)
    reason = ops.explain("simple_gla", q, q, v).refused["mosaic"]
    assert "4 devices are visible" in reason and "Explicit" in reason
    mesh = host_mesh({"data": 4}, explicit=True)
    with jax.set_mesh(mesh):
        split = jax.device_put(v, NamedSharding(mesh, P(None, "data")))
        assert "only rows and heads" in ops.explain("simple_gla", q, q, split).refused["mosaic"]
        spec = jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, P("data")))
        assert ops.explain("simple_gla", q, q, spec).impl == "mosaic"
