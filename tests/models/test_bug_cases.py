"""Public bug reports against other libraries, asked of whole models; the numbers are S01 to S30 of
the project's collection. Many more are answered by the contract, which names them."""

import copy
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, assert_trees_close, count_compiles

from jla.models import GatedDeltaNetConfig, GatedDeltaNetForCausalLM, TransformerConfig
from jla.models.causal_lm import documents
from jla.ops import cross_entropy, shift_labels
from models.cases import BATCH, MODELS, VOCAB, Runner, build, forward, runner, tokens

HYBRID = "gated_deltanet-hybrid"


def test_s01_a_mask_of_ones_does_not_merge_documents():
    run, ids = runner(HYBRID), tokens(5, (1, 33))
    segment_ids = np.array([[1] * 14 + [2] * 19])
    graphdef, state = run.graphdef, run.state

    @jax.jit
    def both(state, ids, segment_ids, mask):
        call = nnx.merge(graphdef, state)
        masked = call(ids, segment_ids=segment_ids, attention_mask=mask).logits
        return masked, call(ids, segment_ids=segment_ids).logits, call(ids[:, 14:]).logits

    masked, packed, alone = both(state, ids, segment_ids, np.ones((1, 33), np.int32))
    np.testing.assert_array_equal(masked, packed)
    assert_close(masked[:, 14:], alone)


def test_s01_a_mask_only_adds_padding():
    segment_ids, mask = np.array([[1, 1, 2, 2, 0]]), np.array([[0, 1, 1, 0, 1]])
    both = documents(segment_ids, mask, (1, 5))
    np.testing.assert_array_equal(both, [[0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(documents(None, mask, (1, 5)), mask)
    np.testing.assert_array_equal(documents(None, mask.astype(bool), (1, 5)), mask)
    np.testing.assert_array_equal(documents(segment_ids, None, (1, 5)), segment_ids)
    assert documents(None, None, (1, 5)) is None


@pytest.mark.parametrize("taps", ["convolution", "recurrence", "both"])
def test_s02_a_boundary_reaches_convolution_and_recurrence(taps):
    """Each alone: with taps [0, 0, 0, 1] the convolution has nothing to reset, with beta = 0 the
    recurrence has not."""
    run = runner("gated_deltanet")
    flat = dict(nnx.to_flat_state(run.state))
    for path, leaf in flat.items():
        if taps == "recurrence" and "conv1d" in path[-2]:
            flat[path] = leaf.replace(jnp.zeros_like(leaf[...]).at[-1].set(1.0))
        if taps == "convolution" and path[-2] == "b_proj":
            flat[path] = leaf.replace(jnp.full_like(leaf[...], -100.0))
    state = nnx.from_flat_state(list(flat.items()))
    ids = tokens(6, (1, 33))
    x, labels = np.tile(run.embed(ids), (BATCH, 1, 1)), np.tile(ids, (BATCH, 1))
    segment_ids = np.zeros((BATCH, 33), np.int32)
    bounds = [(0, 1), (1, 14), (14, 33)]
    for i, (start, stop) in enumerate(bounds):
        segment_ids[0, start:stop] = i + 1  # packed
        segment_ids[i + 1, start:stop] = 1  # alone
    (_, logits), _ = run.probe(state, x, segment_ids, labels)
    for i, (start, stop) in enumerate(bounds):
        assert_close(logits[0, start:stop], logits[i + 1, start:stop])


def alone(run, ids, new=0):
    """Logits of one row without padding, the last ``new + 1`` of them."""
    return forward(run.model, jnp.asarray(ids)[None]).logits[0, -new - 1 :]


def test_s03_left_padding_with_a_batch_of_one():
    run, real = runner(HYBRID), tokens(7, (7,))
    ids = np.concatenate([tokens(8, (5,)), real])[None]
    mask = np.array([[0] * 5 + [1] * 7])
    one = forward(run.model, ids, attention_mask=mask).logits
    two = forward(run.model, np.tile(ids, (2, 1)), attention_mask=np.tile(mask, (2, 1))).logits
    assert_close(one[0, 5:], forward(run.model, real[None]).logits[0])
    assert_close(one[0, 5:], two[1, 5:])


def decode(run, ids, segment_ids, new):
    """Prefill, then one call per token of ``new [B, n]``: the logits after each, and the cache."""
    cache = run.model.new_cache(BATCH, ids.shape[1] + new.shape[1])
    logits, prefilled = run.step(run.state, ids, segment_ids, cache)
    seen, cache = [], prefilled
    for t in range(new.shape[1]):
        out, cache = run.step(run.state, new[:, t : t + 1], np.ones((BATCH, 1), np.int32), cache)
        seen.append(out[:, 0])
    return logits, jnp.stack(seen, axis=1), prefilled


def test_s04_right_padded_prefill_does_not_poison_the_cache():
    run, lengths = runner(HYBRID), (3, 7, 12, 12)
    ids, new = tokens(11, (BATCH, 12)), tokens(12, (BATCH, 4))
    mask = (np.arange(12) < np.array(lengths)[:, None]).astype(np.int32)
    _, decoded, cache = decode(run, ids, mask, new)
    for row in (0, 1, 2):
        n = lengths[row]
        whole = alone(run, np.concatenate([ids[row, :n], new[row]]), new=3)
        assert_close(decoded[row], whole, what=f"row of {n}")
    # The cache itself: the state and the last W - 1 real inputs, zeros where the row is shorter.
    moved = np.stack([np.roll(r, 12 - n) for r, n in zip(ids, lengths, strict=True)])
    left = (np.arange(12) >= 12 - np.array(lengths)[:, None]).astype(np.int32)
    _, _, other = decode(run, moved, left, new)
    assert_trees_close(cache[0], other[0], what="cache", times=3)
    window = cache[0]["attn"]["conv_state"]["q"]
    single = build(MODELS[HYBRID].config)
    out = forward(single, ids[:1, :3], cache=single.new_cache(1, 16))
    assert_close(window[0], out.cache[0]["attn"]["conv_state"]["q"][0])
    state = out.cache[0]["attn"]["recurrent_state"][0]
    assert_close(cache[0]["attn"]["recurrent_state"][0], state, times=3)


def test_s08_positions_count_from_the_first_real_token():
    run, new = runner(HYBRID), tokens(14, (BATCH, 3))
    ids = tokens(13, (BATCH, 12))
    mask = np.array([[0] * 6 + [1] * 6, [1] * 12, [0] * 1 + [1] * 11, [0] * 11 + [1]], np.int32)
    _, decoded, _ = decode(run, ids, mask, new)
    for row in (0, 3):
        real = ids[row, mask[row] != 0]
        whole = alone(run, np.concatenate([real, new[row]]), new=2)
        assert_close(decoded[row], whole)


def test_s15_pieces_on_a_live_cache():
    """As the contract's splits, without segment_ids."""
    run, ids = runner(HYBRID), tokens(15, (2, 17))

    @jax.jit
    def step(state, ids, cache):
        out = nnx.merge(run.graphdef, state)(ids, cache=cache)
        return out.logits, out.cache

    whole, _ = step(run.state, ids, run.model.new_cache(2, 17))
    for pieces in ([5, 1, 1, 5, 5], [1] * 17):
        cache, seen, start = run.model.new_cache(2, 17), [], 0
        for size in pieces:
            logits, cache = step(run.state, ids[:, start : start + size], cache)
            seen.append(logits)
            start += size
        assert_close(jnp.concatenate(seen, axis=1), whole)


def test_s17_a_window_counts_the_query_itself():
    """Whole, token by token, and prefill 2 + a piece of 3, with a left-padded row."""
    run, ids = runner("transformer-window"), tokens(16, (BATCH, 12))
    mask = np.ones((BATCH, 12), np.int32)
    mask[1, :4] = 0
    whole, _ = run.step(run.state, ids, mask, run.model.new_cache(BATCH, 12))
    for pieces in ([1] * 12, [2, 3, 3, 3, 1]):
        cache, seen, start = run.model.new_cache(BATCH, 12), [], 0
        for size in pieces:
            at = slice(start, start + size)
            logits, cache = run.step(run.state, ids[:, at], mask[:, at], cache)
            seen.append(logits)
            start += size
        got = jnp.concatenate(seen, axis=1)
        assert_close(np.where(mask[..., None], got, 0), np.where(mask[..., None], whole, 0))
    # Two layers with windows of 5 see 8 tokens back, and not one more.
    for first, same in {3: True, 4: False}.items():
        other = ids.copy()
        other[:, first - 1] = (other[:, first - 1] + 1) % VOCAB
        logits, _ = run.step(run.state, other, mask, run.model.new_cache(BATCH, 12))
        assert np.array_equal(logits[0, 11], whole[0, 11]) == same
    assert run.model.new_cache(BATCH, 100)[0]["attn"]["k"].shape[1] == 5, "window + 1 keys are kept"


def test_s19_a_stateful_view_decodes_or_is_refused():
    """nnx.view(model, decode=True, ...), then steps under nnx.jit, equals the whole pass."""
    run, ids = runner("gated_deltanet"), tokens(17, (2, 4))
    view = nnx.view(run.model, decode=True, batch_size=2, max_length=4)
    step = nnx.jit(lambda model, ids: model(ids).logits)
    seen = [step(view, ids[:, t : t + 1]) for t in range(4)]
    whole = forward(run.model, ids).logits
    assert_close(jnp.concatenate(seen, axis=1), whole)
    with pytest.raises(ValueError, match="decode=True needs a cache"):
        nnx.view(run.model, decode=True)(ids[:, :1])


def test_s20_a_decoding_loop_is_one_program():
    """24 layers, 200 tokens: a second call compiles nothing and is one device call, so that a token
    takes far less than the 17 ms that flattening a model in every step once cost."""
    config = GatedDeltaNetConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=24,
        num_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
    )
    model = build(config, scan_layers=True)
    prompt = tokens(18, (1, 3))
    model.generate(prompt, max_new_tokens=200, eos_token_id=())
    prompt = jnp.asarray(prompt + 1)
    with count_compiles() as compiled:
        start = time.perf_counter()
        jax.block_until_ready(model.generate(prompt, max_new_tokens=200, eos_token_id=()))
        seconds = time.perf_counter() - start
    assert not compiled
    assert seconds / 200 < 5e-3


def test_s28_labels_are_shifted_once():
    """4 tokens with labels [-100, 2, 3, -100]: the loss is over two targets, by hand."""
    logits = np.random.default_rng(0).standard_normal((1, 4, 5)).astype(np.float32)
    labels = jnp.array([[-100, 2, 3, -100]])
    loss = cross_entropy(logits, shift_labels(labels))
    log_p = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    assert_close(loss, -(log_p[0, 0, 2] + log_p[0, 1, 3]) / 2)


def test_s28_nothing_to_learn_gives_zero_and_no_gradient():
    run, ids = runner(HYBRID), tokens(19, (BATCH, 33))
    one = np.ones((BATCH, 33), np.int32)
    given = run.probe(run.state, run.embed(ids), one, np.full((BATCH, 33), -100))
    (loss, _), gradients = given
    assert loss == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradients))


def test_s28_the_model_s_loss_by_hand():
    """Of a packed, padded batch: no target at -100, at padding, and across a document's end."""
    run, ids = runner(HYBRID), tokens(20, (BATCH, 33))
    segment_ids = np.ones((BATCH, 33), np.int32)
    segment_ids[0, 10:] = 2
    segment_ids[1, 5:8] = 0
    segment_ids[2] = 0
    labels = ids.copy()
    labels[3, 4:9] = -100
    (loss, logits), _ = run.probe(run.state, run.embed(ids), segment_ids, labels)
    log_p = np.asarray(jax.nn.log_softmax(np.asarray(logits)))
    losses = []
    for b in range(BATCH):
        real = np.flatnonzero(segment_ids[b])
        for now, after in zip(real[:-1], real[1:], strict=True):
            if segment_ids[b, now] == segment_ids[b, after] and labels[b, after] != -100:
                losses.append(-log_p[b, now, labels[b, after]])
    assert len(losses) == 31 + 29 + 27
    assert_close(loss, np.mean(losses))


def test_the_warp_of_the_largest_logits_acts_on_gradients_alone():
    """use_l2warp adds 1e-4 / (B T) times each position's largest logit to that logit's gradient."""
    config = MODELS["transformer"].config.to_dict()
    plain, warped = (
        Runner(TransformerConfig.from_dict(config | {"use_l2warp": on})) for on in (False, True)
    )
    ids = tokens(22, (BATCH, 33))
    asked = (plain.embed(ids), np.ones((BATCH, 33), np.int32), ids)
    (loss, logits), (gradients, _) = plain.probe(plain.state, *asked)
    (same_loss, same_logits), (given, _) = warped.probe(warped.state, *asked)
    assert_close(same_loss, loss)
    assert_close(same_logits, logits)
    hidden = forward_hidden(plain, ids)
    top = np.max(np.asarray(logits), axis=-1, keepdims=True)
    pull = np.where(np.asarray(logits) == top, 1e-4 / ids.size * top, 0)
    by_hand = np.einsum("btd,btv->dv", hidden, pull)
    difference = given["lm_head"]["kernel"][...] - gradients["lm_head"]["kernel"][...]
    assert np.max(np.abs(by_hand)) > 1e-6
    assert_close(difference, by_hand, tol=1e-2)


def forward_hidden(run, ids):
    graphdef, state = nnx.split(run.model.model)
    return jax.jit(lambda s: nnx.merge(graphdef, s)(ids).last_hidden_state)(state)


def test_growing_past_the_room_gives_nan_not_a_clamp():
    run, ids = runner("transformer"), tokens(21, (BATCH, 12))
    one = np.ones((BATCH, 12), np.int32)
    fits, _ = run.step(run.state, ids, one, run.model.new_cache(BATCH, 12))
    assert np.all(np.isfinite(fits))
    cache = run.model.new_cache(BATCH, 13)
    _, cache = run.step(run.state, ids, one, cache)
    last, cache = run.step(run.state, ids[:, :1], one[:, :1], cache)
    assert np.all(np.isfinite(last))
    beyond, _ = run.step(run.state, ids[:, :1], one[:, :1], cache)
    assert np.all(np.isnan(beyond))


def test_a_model_of_another_family_is_refused():
    with pytest.raises(TypeError, match="needs a GatedDeltaNetConfig, got TransformerConfig"):
        GatedDeltaNetForCausalLM(MODELS["transformer"].config, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("row", ["transformer", "transformer-window"])
def test_a_loss_fused_with_the_head_is_the_same_without_logits(row):
    """``fuse_linear_cross_entropy``, with the warp, packed and padded; a tied head too."""
    switches = dict(use_l2warp=True, fuse_cross_entropy=False)
    ids = tokens(5, (2, 33))
    segment_ids = np.array([[1] * 14 + [2] * 19, [0] * 5 + [1] * 28])

    def measured(**more):
        config = copy.deepcopy(MODELS[row].config)
        for name, value in {**switches, **more}.items():
            setattr(config, name, value)
        graphdef, state = nnx.split(build(config))

        @jax.jit
        def run(state):
            def loss(state):
                out = nnx.merge(graphdef, state)(ids, segment_ids=segment_ids, labels=ids)
                return out.loss, out.logits

            return jax.value_and_grad(loss, has_aux=True)(state)

        (loss, logits), gradients = run(state)
        return loss, logits, jax.tree.leaves(gradients)

    plain, fused = measured(), measured(fuse_linear_cross_entropy=True)
    assert plain[1] is not None and fused[1] is None
    assert_close(fused[0], plain[0])
    assert_trees_close(fused[2], plain[2], times=3)
