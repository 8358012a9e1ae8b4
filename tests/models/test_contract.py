"""The contract, asked of every row of the table of models: P1 to P5 and what holds for JAX code.

P1 padding is an identity step, P2 packed documents equal separate ones, P3 any split with the cache
carried equals one call, P4 nothing sees the future, P5 implementations agree.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import (
    TOLERANCE,
    assert_close,
    assert_trees_close,
    assert_trees_equal,
    count_compiles,
    host_mesh,
)
from jax.sharding import NamedSharding, PartitionSpec

from jla import cache as caches
from jla import convert
from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig
from jla.models.layout import Run
from jla.nn.param import is_float32_param
from jla.ops import use_impl
from models.cases import (
    BATCH,
    FAST,
    LENGTH,
    MODELS,
    SAMPLE,
    VOCAB,
    Runner,
    build,
    fill,
    forward,
    noise,
    place,
    read,
    runner,
    tokens,
)

# Document lengths that show bugs: 1, W - 1, W, longer than the window, more than a chunk of 16.
DOCUMENTS = (1, 12, 20, 3, 4, 26, 17)
APART = [(i, slice(0, n)) for i, n in enumerate(DOCUMENTS[:4])]


@pytest.fixture(params=list(MODELS), scope="module")
def row(request):
    return request.param


@pytest.fixture
def run(row):
    return runner(row)


def slow_unless(fast):
    return [pytest.param(name, marks=() if name in fast else pytest.mark.slow) for name in MODELS]


def content(run, lengths):
    """Ids and embeddings of documents."""
    ids = [tokens(10 + i, (n,)) for i, n in enumerate(lengths)]
    return ids, [run.embed(each) for each in ids]


def ask(run, lengths, spans, labels=None):
    """Loss, each document's logits and input gradients, and parameter gradients of a layout."""
    ids, embeds = content(run, lengths)
    segment_ids, where = place(spans)
    x = fill(embeds, where, noise((BATCH, LENGTH, run.config.hidden_size)))
    # Labels on padding are real ids: the model must ignore them by itself.
    y = fill(labels or ids, where, tokens(9, (BATCH, LENGTH)))
    (loss, logits), (params, inputs) = run.probe(run.state, x, segment_ids, y)
    return loss, read(logits, where), read(inputs, where), params, np.asarray(inputs), segment_ids


def check_same(given, expected):
    assert_close(given[0], expected[0], what="loss")
    assert_trees_close(given[1], expected[1], what="logits")
    assert_trees_close(given[2], expected[2], what="gradient of inputs", times=2)
    assert_trees_close(given[3], expected[3], what="gradient of", times=3)


LENGTHS = DOCUMENTS[:4]
LAYOUTS = {
    "left": [(i, slice(LENGTH - n, None)) for i, n in enumerate(LENGTHS)],
    "inside": [
        (i, np.sort(np.random.default_rng(i).permutation(LENGTH)[:n]))
        for i, n in enumerate(LENGTHS)
    ],
    "other rows": [(3 - i, slice(2, 2 + n)) for i, n in enumerate(LENGTHS)],
}
PACKED = [(0, slice(0, 1)), (0, slice(1, 13)), (0, slice(13, 33)), (2, slice(4, 7))]


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_padding_is_an_identity_step(row, run):
    """P1: wherever padding stands and whatever it holds, at real positions nothing changes."""
    expected = ask(run, LENGTHS, APART)
    for layout in LAYOUTS.values():
        given = ask(run, LENGTHS, layout)
        check_same(given, expected)
        padding = given[5] == 0
        assert not np.any(given[4][padding]), "padding has a gradient"


def test_a_batch_of_padding_is_nothing(row, run):
    """S28: a loss of 0 and gradients of 0, whatever the padding holds."""
    x = noise((BATCH, LENGTH, run.config.hidden_size))
    nothing, labels = np.zeros((BATCH, LENGTH), np.int32), tokens(9, (BATCH, LENGTH))
    (loss, logits), gradients = run.probe(run.state, x, nothing, labels)
    assert loss == 0 and np.all(np.isfinite(logits))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_packed_documents_equal_separate_ones(row, run):
    """P2, with a document of length 1 and one that fills the row; S02."""
    check_same(ask(run, LENGTHS, PACKED), ask(run, LENGTHS, APART))


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_rows_without_segment_ids(row, run):
    """The plain call, without segment_ids, is the oracle of the two tests above."""
    ids, _ = content(run, LENGTHS)
    logits = ask(run, LENGTHS, PACKED)[1][2]
    out = forward(run.model, ids[2][None])
    assert out.loss is None and out.cache is None and out.hidden_states is None
    assert out.logits.shape == (1, LENGTHS[2], VOCAB)
    assert_close(logits, out.logits[0])


@pytest.mark.parametrize("p", [1, 17])
def test_nothing_sees_the_future(row, run, p):
    """P4: logits before p stay bit-identical; a loss on what is before p has no gradient after."""
    spans = [(i, slice(0, LENGTH)) for i in range(BATCH)]
    ids, embeds = content(run, (LENGTH,) * BATCH)
    segment_ids, _ = place(spans)
    x = np.stack(embeds)
    changed = np.concatenate([x[:, :p], noise(x.shape)[:, p:]], axis=1)
    # Label p is the target of position p - 1: the last one that counts.
    labels = np.where(np.arange(LENGTH) <= p, np.stack(ids), -100)
    (_, logits), (_, inputs) = run.probe(run.state, x, segment_ids, labels)
    (_, other), _ = run.probe(run.state, changed, segment_ids, labels)
    assert_trees_equal(other[:, :p], logits[:, :p])
    assert np.all(np.asarray(other)[:, p:] != np.asarray(logits)[:, p:])
    assert np.any(inputs[:, :p]) and not np.any(inputs[:, p:])


# The splits cut inside documents and between them, and inside the padding.
TOTAL = 17
SPLITS = {"pieces": [5, 1, 2, 9], "ones": [1] * TOTAL, "last one": [16, 1]}
SPLIT_ROWS = np.array(
    [
        [1] * TOTAL,
        [1] * 5 + [2] * 1 + [3] * 11,
        [0] * 3 + [1] * 3 + [2] * 8 + [0] * 3,
        [0, 1, 0, 1, 1, 0, 0, 2, 2, 0, 2, 1, 1, 1, 1, 1, 0],
    ],
    np.int32,
)


def in_pieces(run, pieces, ids, segment_ids, cache):
    seen, start = [], 0
    for size in pieces:
        at = slice(start, start + size)
        logits, cache = run.step(run.state, ids[:, at], segment_ids[:, at], cache)
        seen.append(logits)
        start += size
    return jnp.concatenate(seen, axis=1), cache


def meaningful(cache):
    """A cache without what no later token can see: attention's empty slots keep old keys."""

    def attention(node):
        return isinstance(node, dict) and {"k", "length"} <= node.keys()

    def clean(node):
        if not attention(node):
            return node
        slots = jnp.arange(node["k"].shape[-3])
        filled = (slots < node["length"][..., None])[..., None, None]
        return {**node, "k": jnp.where(filled, node["k"], 0), "v": jnp.where(filled, node["v"], 0)}

    return jax.tree.map(clean, cache, is_leaf=attention)


def check_split(run, pieces):
    ids = tokens(3, (BATCH, TOTAL))
    # Room for a full attention row; the window's ring needs none.
    whole, expected = run.step(run.state, ids, SPLIT_ROWS, run.model.new_cache(BATCH, TOTAL))
    logits, cache = in_pieces(run, pieces, ids, SPLIT_ROWS, run.model.new_cache(BATCH, TOTAL))
    real = SPLIT_ROWS[..., None] != 0
    assert_close(np.where(real, logits, 0), np.where(real, whole, 0), what="logits")
    assert_trees_close(meaningful(cache), meaningful(expected), what="cache", times=3)


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_splits_with_the_cache_carried(row, run):
    """P3; S15: pieces of more than one token on a live cache."""
    check_split(run, SPLITS["pieces"])
    check_split(run, SPLITS["ones"])


# A row of padding only, one of one token, one shorter than every window, one without padding.
PROMPTS, ROOM, AHEAD = (0, 1, 3, 9), 9, 4


def test_padded_prompts_are_decoded_as_their_rows_alone(row, run):
    """S03, S04, S08: after a prompt that is padded right or left, the cache is that of its row
    alone, and so are the logits of the tokens after it."""
    ids, new = tokens(5, (BATCH, ROOM)), tokens(6, (BATCH, AHEAD))
    rows = [np.concatenate([ids[b, :n], new[b]]) for b, n in enumerate(PROMPTS)]
    segment_ids, where = place([(b, slice(0, len(each))) for b, each in enumerate(rows)])
    rest = noise((BATCH, LENGTH, run.config.hidden_size))
    embeds = fill([run.embed(each) for each in rows], where, rest)
    labels = np.full((BATCH, LENGTH), -100)
    (_, alone), _ = run.probe(run.state, embeds, segment_ids, labels)
    expected = np.stack([x[-AHEAD:] for x in read(alone, where)])
    caches = []
    for start in (0, ROOM):
        prompt, mask = tokens(7, (BATCH, ROOM)), np.zeros((BATCH, ROOM), np.int32)
        for b, n in enumerate(PROMPTS):
            at = slice(0, n) if start == 0 else slice(ROOM - n, ROOM)
            prompt[b, at], mask[b, at] = ids[b, :n], 1
        _, cache = run.step(run.state, prompt, mask, run.model.new_cache(BATCH, TOTAL))
        caches.append(meaningful(cache))
        ones = np.ones((BATCH, AHEAD), np.int32)
        decoded, _ = in_pieces(run, [1] * AHEAD, new, ones, cache)
        assert_close(decoded, expected, what="logits", times=2)
    assert_trees_close(*caches, what="cache", times=3)


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_one_call_with_a_cache_equals_one_without(row, run):
    ids, _ = content(run, (TOTAL,) * BATCH)
    embeds = np.stack([run.embed(each) for each in ids])
    x = np.concatenate([embeds, noise((BATCH, LENGTH - TOTAL, embeds.shape[-1]))], axis=1)
    segment_ids = np.pad(SPLIT_ROWS, ((0, 0), (0, LENGTH - TOTAL)))
    labels = np.full((BATCH, LENGTH), -100)
    (_, whole), _ = run.probe(run.state, x, segment_ids, labels)
    cache = run.model.new_cache(BATCH, TOTAL)
    logits, _ = run.step(run.state, np.stack(ids), SPLIT_ROWS, cache)
    real = SPLIT_ROWS[..., None] != 0
    assert_close(np.where(real, logits, 0), np.where(real, whole[:, :TOTAL], 0))


@pytest.mark.slow
def test_every_split_with_the_cache_carried(row, run):
    check_split(run, SPLITS["last one"])
    for size in (2, 3, 7):
        check_split(run, [size] * (TOTAL // size) + [TOTAL % size])


@pytest.mark.parametrize("row", slow_unless(FAST))
def test_gradients_through_a_split(row):
    """P3: of a loss over pieces, with the cache carried from one to the next."""
    run = runner(row)
    ids, weights = tokens(3, (BATCH, TOTAL)), tokens(4, (BATCH, TOTAL, VOCAB)) / VOCAB

    def loss(state, pieces):
        model = nnx.merge(run.graphdef, state)
        cache, total, start = model.new_cache(BATCH, TOTAL), 0.0, 0
        for size in pieces:
            at = slice(start, start + size)
            out = model(ids[:, at], segment_ids=SPLIT_ROWS[:, at], cache=cache)
            real = SPLIT_ROWS[:, at, None] != 0
            total, cache = (
                total + jnp.sum(jnp.where(real, out.logits * weights[:, at], 0)),
                out.cache,
            )
            start += size
        return total

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    expected = gradient(run.state, (TOTAL,))
    assert_trees_close(gradient(run.state, (16, 1)), expected, what="gradient of", times=3)


@pytest.mark.parametrize("row", slow_unless(FAST))
def test_implementations_agree(row):
    """P5: loss, logits and all gradients of the token-by-token reference."""
    expected = ask(runner(row), LENGTHS, PACKED)
    with use_impl("reference"):
        given = ask(Runner(MODELS[row].config), LENGTHS, PACKED)
    check_same(given, expected)


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_compiles_once(row, run):
    """Other values, documents and padding of the same shapes run the compiled functions again."""
    ask(run, LENGTHS, APART)
    check_split(run, SPLITS["ones"])
    with count_compiles() as compiled:
        x = noise((BATCH, LENGTH, run.config.hidden_size))
        for segment_ids, _ in (place(PACKED), place(APART)):
            jax.block_until_ready(run.probe(run.state, x, segment_ids, tokens(1, (BATCH, LENGTH))))
        cache = run.model.new_cache(BATCH, TOTAL)
        seen = len(compiled)
        for t in range(3):
            _, cache = run.step(run.state, tokens(t, (BATCH, 1)), SPLIT_ROWS[:, t : t + 1], cache)
    assert len(compiled) == seen, "recompiled"


@pytest.mark.parametrize("row", slow_unless(["gated_deltanet"]))
def test_scanned_and_rematerialised_layers(row):
    """The same weights, loss, logits and gradients; the gradients come stacked."""
    plain, scanned = runner(row), Runner(MODELS[row].config, scan_layers=True, remat=True)
    scans = scanned.model.model.run.repeats > 1
    # A hybrid's layers may differ and attention residuals never scan: there, remat is asked.
    config = MODELS[row].config
    if config.attnres_block_size is not None or not getattr(config, "attn", None):
        assert scans == (config.attnres_block_size is None and config.num_hidden_layers > 1)
    load_from(scanned, plain)
    given, expected = ask(scanned, LENGTHS, PACKED), ask(plain, LENGTHS, PACKED)
    unstacked = as_tensors(scanned, given[3])
    check_same((*given[:3], unstacked), (*expected[:3], as_tensors(plain, expected[3])))
    check_split(scanned, [5, 1, 2, 9])


def load_from(run, other):
    """Copies the weights of another runner's model, however its layers are stacked."""
    convert.load_state_dict(run.model, convert.to_state_dict(other.model))
    run.graphdef, run.state = nnx.split(run.model)


def as_tensors(run, state):
    return convert.to_state_dict(nnx.merge(run.graphdef, state))


def test_split_and_merge_in_both_modes(row, run):
    """nnx's graph mode and tree mode: a model is split, merged, cloned and jitted in either."""
    leaves = jax.tree.leaves(run.state)
    for graph in (True, False):
        with nnx.set_graph_mode(graph):
            graphdef, state = nnx.split(run.model)
            assert_trees_equal(jax.tree.leaves(state), leaves)
            merged = nnx.merge(graphdef, state)
            assert nnx.split(merged)[0] == graphdef and hash(graphdef) is not None
            assert_trees_equal(jax.tree.leaves(nnx.state(nnx.clone(merged))), leaves)
            ids = jax.ShapeDtypeStruct((2, 3), jnp.int32)
            out = nnx.eval_shape(lambda model, ids: model(ids).logits, merged, ids)
            assert out.shape == (2, 3, VOCAB)


def test_flax_transforms():
    """nnx.jit and nnx.value_and_grad in either mode give what the functional form gives."""
    run = runner("transformer")
    ids, labels = tokens(1, (2, 5)), tokens(2, (2, 5))

    def loss(model):
        return model(ids, labels=labels).loss

    pure = jax.jit(jax.value_and_grad(lambda state: loss(nnx.merge(run.graphdef, state))))
    expected, want = pure(run.state)
    for graph in (True, False):
        with nnx.set_graph_mode(graph):
            value, gradients = nnx.jit(nnx.value_and_grad(loss))(run.model)
        assert_close(value, expected)
        assert_trees_close(jax.tree.leaves(gradients), jax.tree.leaves(want))


def test_abstract_evaluation(row, run):
    """S12: eval_shape gives the shapes and dtypes of a model, its output and its cache; what must
    stay float32 does."""
    config = MODELS[row].config
    model = nnx.eval_shape(lambda: build_plain(config, param_dtype=jnp.bfloat16))
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        wide = is_float32_param(leaf)
        assert wide or path[-1] not in ("A_log", "dt_bias"), path
        wanted = jnp.float32 if wide else jnp.bfloat16
        assert leaf.dtype == wanted, path
    cache = nnx.eval_shape(lambda m: m.new_cache(BATCH, TOTAL), model)
    ids = jax.ShapeDtypeStruct((BATCH, 7), jnp.int32)
    out = nnx.eval_shape(lambda m, i, c: m(i, cache=c, labels=i), model, ids, cache)
    assert (out.logits.shape, out.logits.dtype) == ((BATCH, 7, VOCAB), jnp.bfloat16)
    assert (out.loss.shape, out.loss.dtype) == ((), jnp.float32)
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype), cache, out.cache)
    assert all(jax.tree.leaves(same)), "a call changes the cache's shapes or dtypes"
    # A cache may be wider or narrower than the arithmetic, and keeps its dtype.
    for dtype, length in itertools.product((jnp.float32, jnp.float16), (1, 7)):
        cache = nnx.eval_shape(lambda m, d=dtype: m.new_cache(BATCH, TOTAL, dtype=d), model)
        ids = jax.ShapeDtypeStruct((BATCH, length), jnp.int32)
        out = nnx.eval_shape(lambda m, i, c: m(i, cache=c), model, ids, cache)
        assert out.logits.dtype == jnp.bfloat16, (dtype, length)
        assert [x.dtype for x in jax.tree.leaves(out.cache)] == [
            x.dtype for x in jax.tree.leaves(cache)
        ]


def build_plain(config, **options):
    return AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0), **options)


@pytest.mark.parametrize("row", slow_unless(FAST))
def test_bfloat16(row):
    """Activations and parameters in bfloat16; decay rates, states and the loss stay float32."""
    full, narrow = runner(row), Runner(MODELS[row].config, param_dtype=jnp.bfloat16)
    load_from(narrow, full)
    ids, labels = tokens(1, (BATCH, LENGTH)), tokens(2, (BATCH, LENGTH))
    out = forward(narrow.model, ids, labels=labels, cache=narrow.model.new_cache(BATCH, LENGTH))
    x, one = full.embed(ids), np.ones((BATCH, LENGTH), np.int32)
    (loss, logits), _ = full.probe(full.state, x, one, labels)
    assert (out.logits.dtype, out.loss.dtype) == (jnp.bfloat16, jnp.float32)
    # Where a query hardly meets the memory, the norm behind it enlarges rounding without bound:
    # one position in ten may be off.
    errors = np.abs(np.asarray(out.logits, np.float32) - logits)
    assert np.quantile(errors, 0.9) <= TOLERANCE["bfloat16"] * np.max(np.abs(logits))
    assert_close(out.loss, loss, tol=1e-2)
    for path, leaf in jax.tree_util.tree_leaves_with_path(out.cache):
        state = "recurrent_state" in jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            assert leaf.dtype == (jnp.float32 if state else jnp.bfloat16), path
    # Made under dtype= alone, parameters stay float32 and only the arithmetic is narrow.
    mixed = nnx.eval_shape(lambda: build_plain(MODELS[row].config, dtype=jnp.bfloat16))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(nnx.state(mixed)))


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
@pytest.mark.parametrize("row", slow_unless(FAST))
def test_sharded_over_four_devices(row, explicit):
    """Batch over four devices, parameters everywhere: the same loss, logits and gradients."""
    run, mesh = runner(row), host_mesh({"data": 4}, explicit=explicit)
    ids, labels = tokens(1, (BATCH, LENGTH)), tokens(2, (BATCH, LENGTH))
    segment_ids, _ = place(PACKED)
    plain = (run.embed(ids), segment_ids, labels)
    expected = run.probe(run.state, *plain)
    with jax.set_mesh(mesh):
        batch, everywhere = PartitionSpec("data"), PartitionSpec()
        state = jax.device_put(run.state, NamedSharding(mesh, everywhere))
        inputs = [jax.device_put(x, NamedSharding(mesh, batch)) for x in plain]
        given = jax.jit(run._probe)(state, *inputs)
    assert given[0][1].sharding.spec[0] == "data", "the logits were gathered"
    assert_trees_close(jax.tree.map(np.asarray, given), jax.tree.map(np.asarray, expected), times=3)


@pytest.mark.parametrize("row", slow_unless(SAMPLE), scope="module")
def test_hidden_states_embeddings_and_kept_logits(row, run):
    """output_hidden_states, inputs_embeds and logits_to_keep, from one compiled function; S18:
    embeddings may be the prompt of a new cache."""
    ids = tokens(1, (2, 9))

    def calls(state, ids, embeds):
        model = nnx.merge(run.graphdef, state)
        whole = model(ids, output_hidden_states=True)
        kept = model(inputs_embeds=embeds, logits_to_keep=2, cache=model.new_cache(2, 9)).logits
        labelled = model(ids, labels=ids, logits_to_keep=2)
        return whole, kept, labelled, model.model.norm(whole.hidden_states[-2])

    whole, kept, labelled, last = jax.jit(calls)(run.state, ids, run.embed(ids))
    assert len(whole.hidden_states) == run.config.num_hidden_layers + 1
    assert_close(whole.hidden_states[0], run.embed(ids), tol=0)
    assert whole.hidden_states[-1].shape == last.shape
    assert_close(kept, whole.logits[:, -2:], what="logits_to_keep of inputs_embeds")
    assert labelled.logits.shape == whole.logits.shape, "labels need every position"
    log_p = jax.nn.log_softmax(np.asarray(whole.logits, np.float32))[:, :-1]
    picked = np.take_along_axis(np.asarray(log_p), ids[:, 1:, None], axis=-1)
    assert_close(labelled.loss, -np.mean(picked))


def test_scanned_hidden_states():
    """In the order of the layers, whatever is scanned."""
    config = MODELS["gated_deltanet-hybrid"].config.to_dict()
    config |= {"num_hidden_layers": 5, "attn": {**config["attn"], "layers": [1, 3]}}
    config = GatedDeltaNetConfig.from_dict(config)
    plain, scanned = Runner(config), Runner(config, scan_layers=True)
    assert scanned.model.model.run == Run(start=0, period=2, repeats=2)
    load_from(scanned, plain)
    ids = tokens(1, (2, 5))
    seen = [forward_hidden(each.model, ids) for each in (scanned, plain)]
    assert len(seen[0]) == plain.config.num_hidden_layers + 1
    assert_trees_close(*seen)


def forward_hidden(model, ids):
    graphdef, state = nnx.split(model)
    call = jax.jit(lambda s: nnx.merge(graphdef, s)(ids, output_hidden_states=True).hidden_states)
    return call(state)


@pytest.mark.parametrize("stacked", [False, True])
def test_rows_of_a_cache(stacked):
    """Rows are reordered, repeated and sliced by one function; each goes on as its source does."""
    run = runner("gated_deltanet", scan_layers=True) if stacked else runner(FAST[0])
    ids, order = tokens(3, (BATCH, TOTAL)), np.array([2, 2, 0, 3])
    _, cache = run.step(run.state, ids[:, :5], SPLIT_ROWS[:, :5], run.model.new_cache(BATCH, TOTAL))
    after = [run.step(run.state, ids[:, 5:6], SPLIT_ROWS[:, 5:6], cache)[0]]
    picked = caches.select(cache, order)
    after.append(run.step(run.state, ids[order, 5:6], SPLIT_ROWS[order, 5:6], picked)[0])
    assert_close(after[1], after[0][order])
    sliced, listed = caches.select(cache, slice(1, 3)), caches.select(cache, np.array([1, 2]))
    assert_trees_equal(sliced, listed)
    assert jax.tree.structure(sliced) == jax.tree.structure(cache)


def test_bad_input_is_refused(row, run):
    model, ids = run.model, tokens(1, (2, 3))
    wrong = {
        "one of the two": dict(),
        r"input_ids must be \[B, T\]": dict(input_ids=ids[0]),
        f"must be in 0..{VOCAB - 1}": dict(input_ids=ids + VOCAB),
        "got -1 to 3": dict(input_ids=np.array([[3, -1]])),
        r"segment_ids must have shape \(2, 3\)": dict(input_ids=ids, segment_ids=ids[:, :2]),
        "segment_ids must be >= 0": dict(input_ids=ids, segment_ids=-ids - 1),
        r"attention_mask must be \[B, T\]": dict(input_ids=ids, attention_mask=ids[0]),
        r"labels must be \[B, T\]": dict(input_ids=ids, labels=ids[:, 1:]),
        "made by another model": dict(input_ids=ids, cache=model.new_cache(2, 5)[:-1]),
        "has shape": dict(input_ids=ids, cache=model.new_cache(3, 5)),
    }
    for message, call in wrong.items():
        with pytest.raises(ValueError, match=message):
            model(**call)
    with pytest.raises(ValueError, match="one of the two"):
        model(ids, inputs_embeds=run.embed(ids))
    with pytest.raises(TypeError, match="input_ids must be integers, got dtype float32"):
        model(ids.astype(np.float32))
    with pytest.raises(TypeError, match="segment_ids must be integers"):
        model(ids, segment_ids=np.ones((2, 3), np.float32))


def test_a_traced_id_outside_the_vocabulary_gives_nan():
    run = runner("gated_deltanet")
    ids = tokens(3, (BATCH, TOTAL))
    ids[1, 4] = VOCAB
    logits, _ = run.step(run.state, ids, SPLIT_ROWS, run.model.new_cache(BATCH, TOTAL))
    assert np.isnan(logits[1, 4]).all() and np.isfinite(np.asarray(logits)[[0, 2, 3]]).all()


def test_build_moves_every_parameter():
    """The table's models hide nothing behind an initial 0 or 1."""
    for row in MODELS.values():
        for path, leaf in nnx.to_flat_state(nnx.state(build(row.config), nnx.Param)):
            assert np.unique(np.asarray(leaf[...])).size > 1, path
