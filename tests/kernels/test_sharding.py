"""Kernels on a mesh: every device is handed its own rows and heads, and nothing is gathered.

No kernel runs here: stand-ins of the same signatures, saved arrays included, do the mathematics in
plain JAX on what one device is handed.
"""

import functools
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_trees_close, collectives, count_compiles, host_mesh, random
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).parent))

import offline  # noqa: E402

from jla import ops  # noqa: E402
from jla.kernels import (  # noqa: E402
    gated_delta_rule,
    gated_norm,
    limits,
    linear_attention,
    sharding,
    short_conv,
    short_conv_kernels,
)
from jla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM  # noqa: E402

B, T, GROUPS, H, K, V = 4, 20, 2, 4, 8, 6
MESHES = {
    "rows": ({"data": 4}, "data", None),
    "rows and heads": ({"data": 2, "model": 2}, "data", "model"),
    "more heads than groups": ({"model": 4}, None, "model"),
}
BF16 = jnp.bfloat16
shapes = []


# --------------------------------------------------------------------------------------- stand-ins


def ids_of(marks):
    if marks is None:
        return None
    return jnp.where(marks == 0, 0, jnp.cumsum(marks == 2, axis=1) + 1).astype(jnp.int32)


def delta_outputs(q, k, v, g, beta, state, marks, options):
    shapes.append((q.shape, v.shape))
    more = [(0, 0), (0, q.shape[1] - g.shape[1])]  # tokens of whole tiles, which q, k and v have
    g, beta = (jnp.pad(x, [*more, (0, 0)]) for x in (g, beta))
    return ops.gated_delta_rule(
        q, k, v, g, beta, scale=options.scale, initial_state=state,
        segment_ids=None if marks is None else ids_of(jnp.pad(marks, more)),
        output_final_state=options.final, use_qk_l2norm=options.normalised, impl="chunk",
    )  # fmt: skip


def delta_saving(q, k, v, g, beta, state, marks, options):
    out = delta_outputs(q, k, v, g, beta, state, marks, options)
    g, beta = (jnp.swapaxes(x, 1, 2) for x in (g, beta))
    return out, (g, beta, None, None, state, None)


def delta_gradients(q, k, v, g, beta, marks, gs, betas, _m, _d, state, _u, do, dend, options):
    del g, beta
    operands = (q, k, v, *(jnp.swapaxes(x, 1, 2) for x in (gs, betas)), state)
    pull = jax.vjp(lambda *x: delta_outputs(*x, marks, options), *operands)[1]
    return pull((do, dend))


def simple_gla(q, k, v, g, weights, state, marks, scale):
    shapes.append((q.shape, v.shape))
    v = v if weights is None else (v * weights[..., None]).astype(v.dtype)
    more = dict(initial_state=state, output_final_state=True, segment_ids=ids_of(marks))
    return ops.simple_gla(q, k, v, g, scale=scale, impl="chunk", **more)


def with_skip(q, k, v, g, weights, skip, state, marks, scale):
    o, state = simple_gla(q, k, v, g, weights, state, marks, scale)
    return (o if skip is None else (o + v * skip[:, None]).astype(o.dtype)), state


def linear_forward(q, k, v, g, weights, skip, state, marks, options):
    out = with_skip(q, k, v, g, weights, skip, state, marks, options.scale)
    by_head = None if weights is None else jnp.swapaxes(weights, 1, 2)[:, :, None]
    starts = None if state is None else jnp.swapaxes(state, 2, 3)[:, None]
    return out, (jnp.swapaxes(g, 1, 2)[:, :, None], by_head, starts)


def linear_backward(q, k, v, g, skip, marks, gates, weights, starts, do, dend, options):
    del g
    operands = (
        q, k, v, jnp.swapaxes(gates[:, :, 0], 1, 2),
        None if weights is None else jnp.swapaxes(weights[:, :, 0], 1, 2),
        skip,
        None if starts is None else jnp.swapaxes(starts[:, 0], 2, 3),
    )  # fmt: skip
    pull = jax.vjp(lambda *x: with_skip(*x, marks, options.scale), *operands)[1]
    return pull((do, dend))


def conv_forward(x, kernel, bias, state, ids, *, silu):
    shapes.append(x.shape)
    activation = "silu" if silu else None
    return ops.causal_conv1d(
        x, kernel, bias, activation=activation, segment_ids=ids, initial_state=state,
        impl="reference",
    )[0]  # fmt: skip


def conv_backward(x, dy, kernel, bias, state, ids, *, silu):
    def row(x, kernel, bias, state, ids):
        one = (each if each is None else each[None] for each in (state, ids))
        return conv_forward(x[None], kernel, bias, *one, silu=silu)[0]

    bias = jnp.zeros(x.shape[2]) if bias is None else bias
    filters = (jnp.broadcast_to(f, (len(x), *f.shape)) for f in (kernel, bias))
    pull = jax.vjp(lambda *a: jax.vmap(row)(*a, ids), x, *filters, state)[1]
    dx, dkernel, dbias, dstate = pull(dy)
    sums = jnp.concatenate([dkernel, dbias[:, None]], 1)[:, None]
    return (dx, sums) if state is None else (dx, sums, dstate)


def norm_forward(x, scale, gate, options):
    shapes.append(x.shape)
    activation = "swish" if options.swish else "sigmoid"
    facts = dict(activation=activation, eps=options.eps, impl="reference")
    return ops.rms_norm(x, scale, gate=gate, **facts)


def norm_backward(x, scale, gate, dy, options):
    pull = jax.vjp(lambda *a: norm_forward(*a, options), x, scale, gate)[1]
    dx, dscale, dgate = pull(dy)
    return dx, dgate, jnp.stack([dscale, jnp.zeros_like(dscale)])


@pytest.fixture(autouse=True)
def several_gpus(monkeypatch):
    def alone():
        return jax.sharding.get_abstract_mesh().are_all_axes_manual

    monkeypatch.setattr(limits, "hopper", lambda: None)
    monkeypatch.setattr(sharding, "alone", alone)
    monkeypatch.setattr(gated_delta_rule, "_outputs", delta_outputs)
    monkeypatch.setattr(gated_delta_rule, "_outputs_and_saved", delta_saving)
    monkeypatch.setattr(gated_delta_rule, "_gradients", delta_gradients)
    monkeypatch.setattr(linear_attention, "_forward", linear_forward)
    monkeypatch.setattr(linear_attention, "_backward", linear_backward)
    monkeypatch.setattr(short_conv_kernels, "forward", conv_forward)
    monkeypatch.setattr(short_conv_kernels, "backward", conv_backward)
    monkeypatch.setattr(gated_norm, "forward", norm_forward)
    monkeypatch.setattr(gated_norm, "backward", norm_backward)
    sharding._divided.cache_clear()
    shapes.clear()
    yield
    sharding._divided.cache_clear()


# ------------------------------------------------------------------------------------------- calls


def delta(x, ids, impl):
    g, beta = -jax.nn.softplus(x["gate"]), jax.nn.sigmoid(x["beta"])
    more = dict(initial_state=x["state"], output_final_state=True, segment_ids=ids, impl=impl)
    return ops.gated_delta_rule(x["q"], x["k"], x["v"], g, beta, **more)


def mamba2(x, ids, impl):
    dt = jax.nn.softplus(x["gate"])
    more = dict(initial_state=x["state"], output_final_state=True, segment_ids=ids, impl=impl)
    return ops.ssd(x["v"], dt, -jnp.ones(H), x["k"], x["q"], jnp.arange(1.0, H + 1), **more)


INPUTS = {
    "q": (B, T, GROUPS, K),
    "k": (B, T, GROUPS, K),
    "v": (B, T, H, V),
    "gate": (B, T, H),
    "beta": (B, T, H),
    "state": (B, H, K, V),
}
IDS = np.stack([np.repeat([0, 1, 2], [n, 12 - n, 8]) for n in range(B)]).astype(np.int32)


def inputs():
    x = {name: random(i, shape) for i, (name, shape) in enumerate(INPUTS.items())}
    return x | {name: x[name].astype(BF16) for name in "qkv"}


def place(mesh, x, rows, heads):
    """The inputs on a mesh, heads divided where the mesh divides them evenly."""

    def put(name, value):
        at = 1 if name == "state" else 2
        split = heads if heads is None or value.shape[at] % mesh.shape[heads] == 0 else None
        spec = P(rows, split) if at == 1 else P(rows, None, split)
        return jax.device_put(value, NamedSharding(mesh, spec))

    return {name: put(name, value) for name, value in x.items()}


def gradients(op, impl, x, ids):
    def loss(x):
        out = op(x, ids, impl)
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in out), out

    return jax.grad(loss, has_aux=True)(x)


def run_on(mesh, run, *args):
    """(compiled program, its results); the mesh is set if its axes are Explicit."""
    if mesh.axis_types[0] == AxisType.Auto:
        program = jax.jit(run).lower(*args).compile()
        return program, jax.device_get(program(*args))
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(*args).compile()
        return program, jax.device_get(program(*args))


BOTH = pytest.mark.parametrize("explicit", [True, False], ids=["explicit", "auto"])


@BOTH
@pytest.mark.parametrize("over", MESHES)
@pytest.mark.parametrize("op", [delta, mamba2], ids=["delta", "mamba2"])
def test_a_device_runs_its_rows_and_heads(op, over, explicit):
    axes, rows, heads = MESHES[over]
    x = inputs()
    want = jax.device_get(jax.jit(functools.partial(gradients, op, "chunk"))(x, IDS))
    shapes.clear()
    mesh = host_mesh(axes, explicit=explicit)
    ids = jax.device_put(IDS, NamedSharding(mesh, P(rows)))
    run = functools.partial(gradients, op, "mosaic")
    program, got = run_on(mesh, run, place(mesh, x, rows, heads), ids)
    assert_trees_close(got, want, dtype=BF16)
    share = B // (axes[rows] if rows else 1), H // (axes[heads] if heads else 1)
    assert {v[::2] for _, v in shapes[-2:]} == {share}
    if over != "more heads than groups":  # there devices share keys, and sum their gradients
        assert not collectives(program)


@BOTH
def test_the_skip_s_gradient_is_summed_over_devices(explicit):
    x, mesh = inputs(), host_mesh({"data": 2, "model": 2}, explicit=explicit)
    ids = jax.device_put(IDS, NamedSharding(mesh, P("data")))

    def gradient(impl, x, ids, skip):
        def loss(skip):
            more = dict(segment_ids=ids, impl=impl)
            dt = jax.nn.softplus(x["gate"])
            o = ops.ssd(x["v"], dt, -jnp.ones(H), x["k"], x["q"], skip, **more)[0]
            return jnp.sum(o.astype(jnp.float32) ** 2)

        return jax.grad(loss)(skip)

    skip = jnp.arange(1.0, H + 1)
    want = jax.device_get(jax.jit(functools.partial(gradient, "chunk"))(x, IDS, skip))
    placed = place(mesh, x, "data", "model")
    skip = jax.device_put(skip, NamedSharding(mesh, P("model")))
    _, got = run_on(mesh, functools.partial(gradient, "mosaic"), placed, ids, skip)
    assert_trees_close(got, want, dtype=BF16)


def conv(x, ids, impl):
    y, window = ops.causal_conv1d(
        x["x"], x["kernel"], x["bias"], activation="silu", segment_ids=ids,
        initial_state=x["state"], output_final_state=True, impl=impl,
    )  # fmt: skip
    return y, window


def norm(x, ids, impl):
    return (ops.rms_norm(x["x"], x["kernel"][0, :64], gate=x["gate"], impl=impl),)


CALLS = {
    "conv": (conv, dict(x=(B, T, 512), kernel=(4, 512), bias=(512,), state=(B, 3, 512))),
    "norm": (norm, dict(x=(B, T, 8, 64), kernel=(4, 512), gate=(B, T, 8, 64))),
}


@BOTH
@pytest.mark.parametrize("over", MESHES)
@pytest.mark.parametrize("call", CALLS)
def test_a_device_runs_its_rows_and_channels(call, over, explicit):
    op, sizes = CALLS[call]
    axes, rows, heads = MESHES[over]
    specs = dict.fromkeys(("x", "gate", "state"), P(rows, None, heads))
    x = {name: random(i, shape) for i, (name, shape) in enumerate(sizes.items())}
    x = {name: value.astype(BF16) if name in specs else value for name, value in x.items()}
    if op is conv:
        specs |= dict(kernel=P(None, heads), bias=P(heads))
    want = jax.device_get(jax.jit(functools.partial(gradients, op, "reference"))(x, IDS))
    shapes.clear()
    mesh = host_mesh(axes, explicit=explicit)
    placed = {n: jax.device_put(v, NamedSharding(mesh, specs.get(n, P()))) for n, v in x.items()}
    ids = jax.device_put(IDS, NamedSharding(mesh, P(rows)))
    run = functools.partial(gradients, op, "mosaic")
    program, got = run_on(mesh, run, placed, ids)
    assert_trees_close(got, want, dtype=BF16)
    shares = axes.get(rows, 1), axes.get(heads, 1)
    share = (B // shares[0], 32, 512 // shares[1])  # tokens in whole tiles
    if op is norm:
        share = (B * T * 8 // (shares[0] * shares[1]), 64)
    assert share in shapes[-2:]
    assert collectives(program) <= {"all-reduce"}  # the filter's gradient, or the scale's


# ------------------------------------------------------------------------------ on Auto axes alone


def test_scanned_and_rematerialised():
    mesh = host_mesh({"data": 2, "model": 2}, explicit=False)
    x = inputs()

    def two_layers(x, ids, impl):
        @jax.checkpoint
        def layer(v, _):
            return mamba2(x | {"v": v}, ids, impl)[0], None

        return (jax.lax.scan(layer, x["v"], None, length=2)[0],)

    want = jax.device_get(jax.jit(functools.partial(gradients, two_layers, "chunk"))(x, IDS))
    ids = jax.device_put(IDS, NamedSharding(mesh, P("data")))
    run = functools.partial(gradients, two_layers, "mosaic")
    program, got = run_on(mesh, run, place(mesh, x, "data", "model"), ids)
    assert_trees_close(got, want, dtype=BF16)
    assert not collectives(program)


@pytest.mark.slow
def test_a_model_gathers_nothing():
    """Data parallel, layers scanned and rematerialised, packed rows; every kernel takes part."""
    sizes = dict(hidden_size=256, num_heads=4, head_dim=64, num_hidden_layers=2, vocab_size=64)
    config = GatedDeltaNetConfig(**sizes, expand_v=1)
    options = dict(dtype=BF16, scan_layers=True, remat=True, rngs=nnx.Rngs(0))
    graph, state = nnx.split(GatedDeltaNetForCausalLM(config, **options))
    ids = np.random.default_rng(0).integers(1, 64, (8, 256))
    documents = np.repeat([[1] * 100 + [2] * 150 + [0] * 6], 8, axis=0)

    def step(state, ids, documents):
        loss = lambda state: nnx.merge(graph, state)(ids, documents, labels=ids).loss  # noqa: E731
        return jax.value_and_grad(loss)(state)

    want = jax.device_get(jax.jit(step)(state, ids, documents))
    whole = set(map(str, shapes))
    sharding._divided.cache_clear()
    shapes.clear()
    mesh = host_mesh({"data": 4}, explicit=False)
    rows, everywhere = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    args = jax.device_put((state, ids, documents), (everywhere, rows, rows))
    program, got = run_on(mesh, step, *args)
    assert_trees_close(got, want, dtype=BF16)
    shares = {"((2, 256, 4, 64), (2, 256, 4, 64))", "(2, 256, 256)", "(2048, 64)"}
    assert set(map(str, shapes)) - whole >= shares
    assert collectives(program) == {"all-reduce"}


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")], ids=["mapped", "rows"])
def test_mapped_over_an_axis(spec):
    """vmap is one call a device, whichever axis is divided; unmapped operands stay whole."""
    mesh = host_mesh({"data": 2, "model": 2}, explicit=False)
    x, scale = random(0, (2, 4, 6, 64)).astype(BF16), random(1, (64,))

    def run(impl, x, scale):
        one = functools.partial(ops.rms_norm, impl=impl)

        def loss(x, scale):
            y = jax.vmap(lambda x: one(x, scale, gate=x))(x)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1))(x, scale)

    want = jax.device_get(jax.jit(functools.partial(run, "reference"))(x, scale))
    args = jax.device_put((x, scale), (NamedSharding(mesh, spec), NamedSharding(mesh, P())))
    shapes.clear()
    program, got = run_on(mesh, functools.partial(run, "mosaic"), *args)
    assert_trees_close(got, want, dtype=BF16)
    assert shapes[-1] == ((24, 64) if spec == P("data") else (16, 64))  # 12 rows in whole tiles
    assert collectives(program) == {"all-reduce"}


def test_what_else_is_divided_is_gathered():
    mesh = host_mesh({"data": 4}, explicit=False)
    x = inputs()
    want = jax.device_get(jax.jit(functools.partial(gradients, mamba2, "chunk"))(x, IDS))
    over_time = {n: P() if n == "state" else P(None, "data") for n in x}
    placed = {n: jax.device_put(v, NamedSharding(mesh, over_time[n])) for n, v in x.items()}
    program, got = run_on(mesh, functools.partial(gradients, mamba2, "mosaic"), placed, IDS)
    assert_trees_close(got, want, dtype=BF16)
    assert "all-gather" in collectives(program)


def test_calls_outside_of_jit_are_compiled_once():
    mesh = host_mesh({"data": 4}, explicit=False)
    x = jax.device_put(random(0, (B, T, 64)).astype(BF16), NamedSharding(mesh, P("data")))

    def call():
        return ops.rms_norm(x, gate=x, impl="mosaic")

    first = call()
    assert shapes[-1] == (24, 64) and first.sharding.spec == P("data")
    with count_compiles() as compiled:
        call()
    assert not compiled


def test_one_device_of_several_runs_the_kernel_as_it_is():
    x = random(0, (B, T, 64)).astype(BF16)
    program = jax.jit(lambda x: ops.rms_norm(x, gate=x, impl="mosaic")).lower(x).compile()
    assert "CustomSPMDPartitioning" not in program.as_text()
    assert shapes == [(80, 64)]


def manual(x, mesh, axes):
    one = lambda x: ops.rms_norm(x, gate=x, impl="mosaic")  # noqa: E731
    specs = dict(mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False)
    return jax.jit(jax.shard_map(one, axis_names=axes, **specs))(x)


def test_inside_of_shard_map():
    mesh = host_mesh({"data": 2, "model": 2}, explicit=False)
    x = random(0, (B, T, 64)).astype(BF16)
    jaxpr = str(jax.make_jaxpr(lambda x: manual(x, mesh, {"data", "model"}))(x))
    assert shapes == [(40, 64)] and "custom_partitioning" not in jaxpr
    with pytest.raises(ops.ImplUnavailable, match="all Manual, got Manual, Auto"):
        manual(x, mesh, {"data"})


@pytest.mark.parametrize("groups, devices", [(2, 4), (3, 2), (1, 4), (6, 2)])
def test_heads_find_the_keys_that_they_read(groups, devices):
    """Shares of heads that are parts of a group, straddle groups, or are whole groups."""
    heads = 12
    k, v = random(0, (2, 3, groups, 4)), random(1, (2, 3, heads, 4))
    layout = sharding.Layout(("b.g", "b.h"), ("b.h", "b.g", "h", ""))

    def function(k, v, options):
        del options
        shapes.append((k.shape[2], v.shape[2]))
        group = v.shape[2] // k.shape[2]
        o = v * jnp.repeat(k, group, axis=2)
        return o, o.reshape(*k.shape[:3], group, 4).sum(3), o.sum((0, 1, 3)), o.sum((0, 1, 2))[:3]

    want = function(k, v, None)
    mesh = host_mesh({"model": devices}, explicit=False)
    v = jax.device_put(v, NamedSharding(mesh, P(None, None, "model")))
    k = jax.device_put(k, NamedSharding(mesh, P()))
    got = jax.jit(lambda k, v: sharding.partitioned(function, layout, None, k, v))(k, v)
    assert_trees_close(jax.device_get(got), want)
    local = shapes[-1]
    assert local[1] == heads // devices and local[0] <= min(groups, local[1])


# ---------------------------------------------------------------------------------------- refusals


def test_a_mesh_that_divides_something_else_is_refused():
    q, v = jnp.zeros((B, T, H, K), BF16), jnp.zeros((B, T, H, V), BF16)
    assert ops.explain("simple_gla", q, q, v).impl == "mosaic"
    mesh = host_mesh({"data": 4}, explicit=True)
    with jax.set_mesh(mesh):
        split = jax.device_put(v, NamedSharding(mesh, P(None, "data")))
        refused = ops.explain("simple_gla", q, q, split).refused["mosaic"]
        assert "only axes with a letter in 'b.h' may be divided" in refused
        spec = jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, P("data")))
        assert ops.explain("simple_gla", q, q, spec).impl == "mosaic"
        x = jax.device_put(jnp.zeros((B, T, 256), BF16), NamedSharding(mesh, P(None, None, "data")))
        refused = ops.explain("causal_conv1d", x, jnp.zeros((4, 256))).refused["mosaic"]
        assert "a device needs a multiple of 128 channels" in refused
        x = jax.device_put(jnp.zeros((B, 2, T, 64), BF16), NamedSharding(mesh, P("data")))
        with pytest.raises(NotImplementedError, match="jax.vmap over an axis divided"):
            jax.jit(jax.vmap(lambda x: ops.rms_norm(x, gate=x, impl="mosaic")))(x)
    kinds = AxisType.Auto, AxisType.Explicit
    with jax.set_mesh(jax.make_mesh((2, 2), ("a", "b"), axis_types=kinds)):
        refused = ops.explain("simple_gla", q, q, v).refused["mosaic"]
        assert "all Auto, all Explicit or all Manual, got Auto, Explicit" in refused


# ----------------------------------------------------------------------------------- real kernels


def linear_step(q, k, v, g, state, marks):
    o, end = linear_attention.linear_attention(
        q, k, v, g, scale=1.0, initial_state=state, marks=marks
    )
    return jnp.sum(o.astype(jnp.float32)) + jnp.sum(end)


def delta_step(q, k, v, g, beta, state, marks):
    o, end = gated_delta_rule.gated_delta_rule(
        q, k, v, g, beta, scale=1.0, initial_state=state, marks=marks, use_qk_l2norm=True
    )
    return jnp.sum(o.astype(jnp.float32)) + jnp.sum(end)


def conv_step(x, kernel, bias, ids):
    y = short_conv.short_conv(x, kernel, bias, silu=True, segment_ids=ids)
    return jnp.sum(y.astype(jnp.float32))


def norm_step(x, scale, gate):
    y = gated_norm.gated_norm(x, scale, gate, activation="swish", eps=1e-5)
    return jnp.sum(y.astype(jnp.float32))


def step(rows, length, groups, heads):
    """(loss, specs, how many are differentiated, whether sums are) for every kernel."""
    q = (rows, length, groups, 128), BF16, P("data", None, "model" if groups > 1 else None)
    v = (rows, length, heads, 128), BF16, P("data", None, "model")
    gate = v[0][:3], "float32", v[2]
    state = (rows, heads, 128, 128), "float32", P("data", "model")
    marks = (rows, length), "float32", P("data")
    x = (rows, length, 128 * heads), BF16, v[2]
    taps, bias = ((4, x[0][2]), "float32", P(None, "model")), (x[0][2:], "float32", P("model"))
    ids = marks[0], "int32", marks[2]
    return {
        "gated_delta_rule": (delta_step, (q, q, v, gate, gate, state, marks), 6, groups == 1),
        "linear_attention": (linear_step, (q, q, v, gate, state, marks), 5, groups == 1),
        "short_conv": (conv_step, (x, taps, bias, ids), 3, True),
        "gated_norm": (norm_step, (v, ((128,), "float32", P()), v), 3, True),
    }


@pytest.mark.slow
@pytest.mark.skipif(not offline.available(), reason="needs the CUDA plugin wheels")
@pytest.mark.timeout(300, method="thread")
@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("name", step(2, 1, 1, 1))
def test_compiles_offline_for_four_gpus(name, groups, monkeypatch):
    """The kernels themselves: what is saved between the halves has the shapes that labels say."""
    monkeypatch.undo()
    monkeypatch.setattr(sharding, "alone", lambda: False)
    mesh = offline.mesh(data=2, model=2)
    loss, specs, floats, sums = step(2, 4096, groups, 8)[name]
    specs = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, p)) for s, d, p in specs]
    run = jax.grad(loss, argnums=tuple(range(floats)))
    program = jax.jit(run).trace(*specs).lower().compile()
    assert "mosaic_gpu" in program.as_text()
    assert collectives(program) == ({"all-reduce"} if sums else set())
    for placed, spec in zip(program.output_shardings, specs[:floats], strict=True):
        assert placed.is_equivalent_to(spec.sharding, len(spec.shape))
