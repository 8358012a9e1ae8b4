"""What JAX and Flax do to a module, asked of every mixer of the table.

Compilation, batching, scanning, rematerialisation, splitting, both of Flax's object modes, narrow
dtypes, sharding, decoding, and saving: each must leave the numbers alone.
"""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from cases import HIDDEN, rows
from flax import nnx
from helpers import (
    assert_close,
    assert_trees_close,
    assert_trees_equal,
    collectives,
    count_compiles,
    host_mesh,
    random,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jla
from jla.nn.param import is_float32_param
from layers.contract import BATCH, probe

LENGTH = 5
asked = functools.partial(rows, variants=False)
# What goes through the base class and JAX alone is asked of a sample in the fast slice.
sampled = functools.partial(rows, sample=True)


def inputs(*lead, seed=0):
    return random(seed, (*lead, LENGTH, HIDDEN))


def documents(*lead):
    ids = np.ones((*lead, LENGTH), np.int32)
    ids[..., 3:] = 2
    ids.reshape(-1, LENGTH)[0, 1] = 0
    return ids


@sampled("jit")
def test_a_second_call_compiles_nothing(row):
    """Other values, and the cache that the first call returned, fit the same program."""
    p = probe(row)
    step = jax.jit(p.pure)
    x, ids = inputs(BATCH), documents(BATCH)
    _, cache = step(p.params, x, ids, p.new_cache())
    with count_compiles() as compiled:
        _, cache = step(p.params, x + 1, ids + 1, cache)
        step(jax.tree.map(jnp.asarray, p.params), x, ids, cache)
    assert step._cache_size() == 1, compiled


@sampled("vmap")
def test_vmap_and_leading_axes_are_a_loop(row):
    p = probe(row)
    x, ids = inputs(2, BATCH), documents(2, BATCH)
    one = jax.jit(p.pure)
    want = np.stack([one(p.params, x[i], ids[i]) for i in range(2)])
    assert_close(jax.jit(jax.vmap(p.pure, (None, 0, 0)))(p.params, x, ids), want)
    x, ids = x[..., :1, :], ids[..., :1]
    want = want[..., :1, :]
    assert_close(one(p.params, x, ids), want, what="leading axes")
    assert_close(one(p.params, x[0, 1], ids[0, 1]), want[0, 1], what="no leading axis")


@sampled("scan and remat")
def test_scanned_and_rematerialised_layers_are_a_loop(row):
    p = probe(row)
    moved = jax.tree.map(lambda leaf: 0.9 * leaf, p.params)
    stacked = jax.tree.map(lambda a, b: jnp.stack([a, b]), p.params, moved)
    x, ids, weights = inputs(BATCH), documents(BATCH), inputs(BATCH, seed=1)

    def scanned(stacked, x):
        layer = jax.checkpoint(lambda x, params: (x + p.pure(params, x, ids), None))
        return jnp.sum(jax.lax.scan(layer, x, stacked)[0] * weights)

    @jax.jit
    def layer_back(params, x, d_y):
        y, back = jax.vjp(lambda params, x: x + p.pure(params, x, ids), params, x)
        return y, *back(d_y)

    middle, *_ = layer_back(p.params, x, weights)
    last, d_second, d_middle = layer_back(moved, middle, weights)
    _, d_first, d_x = layer_back(p.params, x, d_middle)
    got = jax.jit(jax.value_and_grad(scanned, (0, 1)))(stacked, x)
    d_stacked = jax.tree.map(lambda a, b: np.stack([a, b]), d_first, d_second)
    assert_trees_close(got, (jnp.sum(last * weights), (d_stacked, d_x)), times=2)


@sampled("objects")
def test_split_merge_and_both_object_modes(row):
    """Graph mode and tree mode (``graph=False``) of Flax give the pure function's gradients."""
    mixer = cases.build(row)
    x = inputs(BATCH)[:, :1]

    def loss(mixer, x):
        return jnp.sum(mixer(x) ** 2)

    def gradients(graph):
        return nnx.jit(nnx.grad(loss, graph=graph), graph=graph)(mixer, x)

    graphdef, state = nnx.split(mixer)
    pure = jax.jit(jax.grad(lambda state, x: loss(nnx.merge(graphdef, state), x)))(state, x)
    want = nnx.to_pure_dict(pure)
    assert_trees_close(nnx.to_pure_dict(nnx.state(gradients(True), nnx.Param)), want, what="graph")
    assert_trees_close(nnx.to_pure_dict(nnx.state(gradients(False), nnx.Param)), want, what="tree")
    assert_trees_equal(nnx.state(mixer), state, what="the module itself")
    # A mixer is a pytree whose leaves are its parameters: plain JAX takes it as it is.
    plain = jax.jit(jax.grad(loss))(mixer, x)
    assert_trees_close(nnx.to_pure_dict(nnx.state(plain, nnx.Param)), want, what="plain jax")


@asked("bfloat16")
def test_bfloat16_keeps_decays_and_states_in_float32(row):
    """S12: rates of decay, step size biases and recurrent states are float32 end to end."""
    narrow = cases.build(row, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)
    graphdef, state = nnx.split(narrow)
    x = jnp.asarray(inputs(BATCH), jnp.bfloat16)

    def loss(state, x):
        mixer = nnx.merge(graphdef, state)
        y, cache = mixer(x, segment_ids=documents(BATCH), cache=mixer.new_cache(BATCH, 8))
        return jnp.sum(y.astype(jnp.float32) ** 2), (y, cache)

    grads, (y, cache) = jax.jit(jax.grad(loss, has_aux=True))(state, x)
    assert y.dtype == jnp.bfloat16
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        name = jax.tree_util.keystr(path)
        wide = "recurrent" in name
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == (jnp.float32 if wide else jnp.bfloat16), name
    for tree in (state, grads):
        for path, variable in nnx.to_flat_state(tree):
            wide = is_float32_param(variable)
            assert wide or path[-1] not in ("A_log", "dt_bias"), path
            assert variable.dtype == (jnp.float32 if wide else jnp.bfloat16), path
    wide = nnx.merge(graphdef, jax.tree.map(lambda leaf: leaf.astype(jnp.float32), state))
    for module in [wide, *(m for _, m in nnx.iter_modules(wide))]:
        if getattr(module, "dtype", None) == jnp.bfloat16:
            module.dtype = jnp.float32
    exact = nnx.jit(lambda m, x: m(x, segment_ids=documents(BATCH)))(wide, x.astype(jnp.float32))
    assert_close(y, exact, dtype="bfloat16")


@asked("64 bit")
def test_64_bit_mode_changes_nothing(row, x64):
    mixer = cases.build(row)
    x = inputs(BATCH)
    y, cache = nnx.jit(lambda m, x, c: m(x, segment_ids=documents(BATCH), cache=c))(
        mixer, x, mixer.new_cache(BATCH, 8)
    )
    assert y.dtype == jnp.float32
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(cache)}
    assert dtypes <= {jnp.dtype(jnp.float32), jnp.dtype(jnp.int32)}


def sharded_run(p, mesh, x, ids, param_spec, *, gradients=True):
    """Outputs, cache and gradients with the batch over ``data`` and kernels placed by the spec."""
    place = lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec))  # noqa: E731
    params = jax.tree.map(lambda leaf: place(leaf, param_spec(leaf)), p.params)
    cache = jax.tree.map(lambda leaf: place(leaf, P("data")), p.new_cache(len(x)))
    x = place(x, P("data"))
    ids = None if ids is None else place(ids, P("data"))

    def forward(params, x, ids, cache):
        return p.pure(params, x, ids, cache)

    def loss(params, x, ids, cache):
        y, after = forward(params, x, ids, cache)
        return jnp.sum(y**2), (y, after)

    with jax.set_mesh(mesh):
        program = jax.jit(forward).lower(params, x, ids, cache).compile()
        out, grads = program(params, x, ids, cache), None
        if gradients:
            grads, _ = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(params, x, ids, cache)
    return jax.device_get((out, grads)), collectives(program)


@functools.cache
def unsharded(row, packed):
    p = probe(row)
    x, ids = inputs(4), documents(4) if packed else None

    def loss(params, x):
        y, after = p.pure(params, x, ids, p.new_cache(4))
        return jnp.sum(y**2), (y, after)

    grads, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(p.params, x)
    return jax.device_get((out, grads))


@asked("sharding")
@pytest.mark.parametrize(
    "packed",
    [pytest.param(False, marks=pytest.mark.slow, id="dense"), pytest.param(True, id="packed")],
)
@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_batch_over_four_devices(row, explicit, packed):
    x, ids = inputs(4), documents(4) if packed else None
    mesh = host_mesh({"data": 4}, explicit=explicit)
    # Gradients of the packed rows only: compiling them is most of this file's time.
    got, moved = sharded_run(probe(row), mesh, x, ids, lambda leaf: P(), gradients=packed)
    out, grads = unsharded(row, packed)
    assert_trees_close(got, (out, grads if packed else None))
    assert not moved, f"a forward over the batch moves data: {moved}"


@asked("sharding")
def test_ids_and_caches_follow_the_inputs_onto_an_explicit_mesh(row):
    """A new cache and ids from a data loader know no mesh: the inputs' placement decides."""
    p = probe(row)
    x, ids = inputs(4), documents(4)
    mesh = host_mesh({"data": 4}, explicit=True)
    placed = jax.device_put(x, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        params = jax.device_put(p.params, NamedSharding(mesh, P()))
        y, cache = jax.jit(p.pure)(params, placed, ids, p.new_cache(4))
    assert y.sharding.spec[0] == "data"
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(cache))
    assert_trees_close(jax.device_get((y, cache)), unsharded(row, True)[0])


@sampled("tensor parallel")
def test_batch_and_kernels_over_two_by_two_devices(row):
    """Kernels split over their outputs, as the compiler is free to use them (Auto axes)."""

    def spec(leaf):
        even = leaf.ndim == 2 and leaf.shape[1] % 2 == 0
        return P(None, "model") if even else P()

    mesh = host_mesh({"data": 2, "model": 2}, explicit=False)
    got, _ = sharded_run(probe(row), mesh, inputs(4), documents(4), spec)
    assert_trees_close(got, unsharded(row, True))


@sampled("flax decoding")
def test_flax_decoding_is_one_pass(row):
    """S19: ``nnx.view`` makes the cache, ``nnx.jit`` keeps its writes; so does ``init_cache``."""
    mixer = cases.build(row)
    x = inputs(BATCH)
    want = nnx.jit(lambda m, x: m(x))(mixer, x)
    step = nnx.jit(lambda m, x: m(x))
    view = nnx.view(mixer, decode=True, batch_size=BATCH, max_length=LENGTH)
    got = [step(view, x[:, t : t + 1]) for t in range(LENGTH)]
    assert_close(np.concatenate(got, axis=1), want, what="nnx.view")
    assert not hasattr(mixer, "cache") and not mixer.decode, "the module itself has changed"
    mixer.init_cache(x.shape)
    decode = nnx.jit(lambda m, x: m(x, decode=True))
    got = [decode(mixer, x[:, :2]), decode(mixer, x[:, 2:3]), decode(mixer, x[:, 3:])]
    assert_close(np.concatenate(got, axis=1), want, what="init_cache")
    mixer.init_cache(x.shape)
    assert_close(decode(mixer, x[:, :2]), want[:, :2], what="a new init_cache starts anew")


@sampled("flax decoding")
def test_decoding_with_two_batch_axes(row):
    mixer = cases.build(row)
    x = inputs(2, BATCH)
    view = nnx.view(mixer, decode=True, batch_size=(2, BATCH), max_length=LENGTH)
    step = nnx.jit(lambda m, x: m(x))
    got = [step(view, x[..., t : t + 1, :]) for t in range(2)]
    assert_close(np.concatenate(got, axis=-2), nnx.jit(lambda m, x: m(x))(mixer, x)[..., :2, :])


@sampled("flax decoding")
def test_decoding_without_a_cache_says_what_to_call(row):
    mixer = cases.build(row)
    with pytest.raises(ValueError, match="decode=True needs a cache: call init_cache"):
        mixer(inputs(BATCH), decode=True)
    with pytest.raises(ValueError, match="decode=True needs a cache"):
        nnx.view(mixer, decode=True)(inputs(BATCH))
    with pytest.raises(ValueError, match="batch_size needs max_length"):
        nnx.view(mixer, decode=True, batch_size=BATCH)


@asked("abstract")
def test_shapes_without_numbers(row):
    p = probe(row)
    x = jax.ShapeDtypeStruct((BATCH, LENGTH, HIDDEN), jnp.float32)
    y, after = jax.eval_shape(p.pure, p.params, x, None, p.new_cache())
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    shape_of = lambda leaf: (leaf.shape, leaf.dtype)  # noqa: E731
    assert jax.tree.map(shape_of, after) == jax.tree.map(shape_of, p.new_cache())
    narrow = p.mixer.new_cache(BATCH, LENGTH, dtype=jnp.bfloat16)
    _, after = jax.eval_shape(p.pure, p.params, x, None, narrow)
    assert jax.tree.map(shape_of, after) == jax.tree.map(shape_of, narrow), "the cache's own dtype"
    abstract = nnx.eval_shape(lambda: p.case.build(rngs=nnx.Rngs(0)))
    assert jax.tree.map(shape_of, nnx.state(abstract)) == jax.tree.map(shape_of, p.params)


@sampled("cache rows")
@pytest.mark.parametrize("picked", [[2, 0, 0, 1], slice(1, 3)], ids=str)
def test_chosen_rows_of_a_cache_go_on_alone(row, picked):
    p = probe(row)
    cache = p.warm()
    x = inputs(BATCH, seed=2)
    rows_of = np.arange(BATCH)[picked if isinstance(picked, slice) else np.array(picked)]
    chosen = jla.cache.select(cache, picked if isinstance(picked, slice) else jnp.asarray(picked))
    want, _ = p.forward(p.params, x, None, cache)
    got, _ = p.forward(p.params, x[rows_of], None, chosen)
    assert_close(got, np.asarray(want)[rows_of])


@asked("saving")
def test_saved_and_restored_bit_for_bit(row, tmp_path):
    mixer = cases.build(row)
    mixer.init_cache((BATCH, LENGTH, HIDDEN))
    step = nnx.jit(lambda m, x: m(x, decode=True))
    step(mixer, inputs(BATCH)[:, :1])
    state = nnx.state(mixer)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "state", state)
        saver.wait_until_finished()

        def make():
            fresh = cases.MIXERS[row].build(rngs=nnx.Rngs(5))
            fresh.init_cache((BATCH, LENGTH, HIDDEN))
            return fresh

        abstract = nnx.eval_shape(make)
        graphdef, shapes = nnx.split(abstract)
        restored = nnx.merge(graphdef, saver.restore(tmp_path / "state", shapes))
    assert_trees_equal(nnx.state(restored), state)
    x = inputs(BATCH)[:, 1:2]
    assert np.array_equal(step(restored, x), step(mixer, x))
