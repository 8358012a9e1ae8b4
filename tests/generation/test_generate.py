"""Generation: padded prompts, where rows stop, how tokens are drawn, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close
from models.cases import BATCH, MODELS, VOCAB, build, forward, runner, tokens

from jla.generation import Sampling
from jla.generation.sampling import filter_logits

LENGTH, NEW = 9, 6
LENGTHS = (1, 3, 9, 6)  # of the prompts; the convolution and the window see 4 and 5 tokens


@pytest.fixture(scope="module")
def model():
    return runner("gated_deltanet-hybrid").model


def prompts(side):
    """Prompts of several lengths and their mask; what is padded is another token's id."""
    ids, mask = tokens(30, (BATCH, LENGTH)), np.zeros((BATCH, LENGTH), np.int32)
    for row, n in enumerate(LENGTHS):
        at = {
            "right": np.arange(n),
            "left": np.arange(LENGTH - n, LENGTH),
            "inside": np.sort(np.random.default_rng(row).permutation(LENGTH)[:n]),
        }[side]
        ids[row, at], mask[row, at] = tokens(40 + row, (n,)), 1
    return ids, mask


@pytest.fixture(scope="module")
def before_each(model):
    """``(rows, mask)`` to the logits ``[B, NEW, V]`` before each new token: one call without a
    cache on the whole rows."""
    graphdef, state = nnx.split(model)

    @jax.jit
    def call(state, rows, mask):
        mask = jnp.pad(mask, ((0, 0), (0, NEW)), constant_values=1)
        return nnx.merge(graphdef, state)(rows, segment_ids=mask).logits[:, LENGTH - 1 : -1]

    return lambda rows, mask: np.asarray(call(state, rows, mask))


@pytest.fixture(scope="module")
def greedy(model):
    ids, mask = prompts("left")
    return np.asarray(model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=()))[:, LENGTH:]


def test_every_token_is_the_likeliest(greedy, before_each):
    ids, mask = prompts("left")
    logits = before_each(np.concatenate([ids, greedy], axis=1), mask)
    np.testing.assert_array_equal(greedy, np.argmax(logits, axis=-1))


def test_a_repeated_token_is_made_less_likely(model, greedy, before_each):
    """By hand; padding is not among the tokens of a row."""
    ids, mask = prompts("left")
    out = np.asarray(
        model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=(), repetition_penalty=3.0)
    )
    logits = before_each(out, mask)
    for row, t in np.ndindex(BATCH, NEW):
        x = logits[row, t].copy()
        seen = np.union1d(ids[row][mask[row] != 0], out[row, LENGTH : LENGTH + t])
        x[seen] = np.where(x[seen] > 0, x[seen] / 3, x[seen] * 3)
        assert out[row, LENGTH + t] == np.argmax(x)
    assert np.any(out[:, LENGTH:] != greedy)


@pytest.mark.parametrize("side", ["left", "right", "inside"])
def test_padding_of_a_prompt_changes_nothing(model, greedy, side):
    """S03, S04, S08; new tokens stand behind the row, whichever side was padded."""
    ids, mask = prompts(side)
    options = dict(max_new_tokens=NEW, eos_token_id=())
    for given in (dict(segment_ids=5 * mask), dict(attention_mask=mask.astype(bool))):
        out = model.generate(ids, **given, **options)
        np.testing.assert_array_equal(out[:, :LENGTH], ids)
        np.testing.assert_array_equal(out[:, LENGTH:], greedy)


def test_a_packed_prompt_continues_its_last_document(model, greedy):
    ids, segment_ids = prompts("right")
    # Rows 0 to 2: other documents, then the one token of row 0.
    ids[:3, 8] = ids[0, 0]
    segment_ids[:3] = [[4] * 8 + [1], [7] * 5 + [0] * 3 + [9], [1, 2, 1, 2, 1, 2, 1, 2, 1]]
    out = model.generate(ids, segment_ids, max_new_tokens=NEW, eos_token_id=())
    for row, alone in enumerate((0, 0, 0, 3)):
        np.testing.assert_array_equal(out[row, LENGTH:], greedy[alone])


def stopped(new, eos, pad):
    """What rows of new tokens become where one of ``eos`` ends them."""
    ended = np.cumsum(np.isin(new, eos), axis=1)
    before = np.pad(ended, ((0, 0), (1, 0)))[:, :-1] > 0
    return np.where(before, pad, new)


@pytest.mark.parametrize("form", [list, np.array, jnp.array])
def test_a_row_stops_at_any_of_several_ids(model, greedy, form):
    ids, mask = prompts("left")
    new = greedy
    eos = [int(new[0, 1]), int(new[3, 3])]
    for pad, filled in ((None, eos[0]), (60, 60)):
        out = model.generate(
            ids, mask, max_new_tokens=NEW, eos_token_id=form(eos), pad_token_id=pad
        )
        np.testing.assert_array_equal(out[:, LENGTH:], stopped(new, eos, filled))


def test_one_id_stops_whatever_its_type(model, greedy):
    ids, mask = prompts("left")
    eos = greedy[1, 2]
    for one in (int(eos), np.int64(eos), jnp.asarray(eos)):
        out = model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=one, pad_token_id=0)
        np.testing.assert_array_equal(out[:, LENGTH:], stopped(greedy, [eos], 0))


def test_sampling_without_a_choice_is_greedy(model, greedy):
    ids, mask = prompts("left")
    options = dict(max_new_tokens=np.int64(NEW), eos_token_id=None)
    for asked in (
        dict(temperature=0),
        dict(temperature=0.0, do_sample=True, top_k=3),
        dict(top_k=1, key=0),
        dict(top_p=1e-6, key=np.int64(1)),
        dict(min_p=1.0, key=jax.random.key(2)),
    ):
        out = model.generate(ids, mask, **asked, **options)
        np.testing.assert_array_equal(out[:, LENGTH:], greedy, err_msg=str(asked))


def test_a_filter_that_keeps_all_is_no_filter(model):
    ids, mask = prompts("left")
    options = dict(max_new_tokens=NEW, eos_token_id=(), key=3)
    free = model.generate(ids, mask, temperature=1.0, **options)
    wide = model.generate(ids, mask, temperature=1.0, top_k=10 * VOCAB, **options)
    np.testing.assert_array_equal(free, wide)
    assert np.all((free >= 0) & (free < VOCAB))


def test_a_row_s_draws_do_not_depend_on_the_batch(model):
    ids, mask = prompts("left")
    keys, order = jax.random.split(jax.random.key(4), BATCH), np.array([2, 0, 3, 1])
    options = dict(max_new_tokens=NEW, eos_token_id=(), temperature=1.5)
    drawn = model.generate(ids, mask, key=keys, **options)
    again = model.generate(ids[order], mask[order], key=keys[order], **options)
    np.testing.assert_array_equal(again, drawn[order])
    other = model.generate(ids, mask, key=5, **options)
    assert np.any(other != drawn), "keys make no difference"


def test_a_cache_is_a_prefix(model, greedy):
    """A prompt whose beginning is in the cache goes on as the whole prompt does."""
    ids, mask = prompts("left")
    cache = model.new_cache(BATCH, LENGTH + NEW)
    first = forward(model, ids[:, :6], segment_ids=mask[:, :6], cache=cache).cache
    rest = model.generate(ids[:, 6:], mask[:, 6:], max_new_tokens=NEW, eos_token_id=(), cache=first)
    np.testing.assert_array_equal(rest[:, 3:], greedy)


def test_a_prefix_that_leaves_too_little_room():
    full = build(MODELS["transformer"].config)
    with pytest.raises(ValueError, match="cache has room for 14 more tokens .* need 15"):
        full.generate(tokens(1, (1, LENGTH)), max_new_tokens=NEW, cache=full.new_cache(1, 14))


def test_tokens_are_streamed_in_order(model, greedy):
    ids, mask = prompts("left")
    seen = []
    model.generate(ids, mask, max_new_tokens=NEW, eos_token_id=(), stream=seen.append)
    np.testing.assert_array_equal(np.stack(seen, axis=1), greedy)


def kept(**filters):
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.2, 0.1]]))
    return np.flatnonzero(np.isfinite(filter_logits(logits, Sampling(**filters))[0])).tolist()


def test_filters_by_hand():
    """Of the probabilities [.1, .4, .2, .2, .1]."""
    assert kept() == kept(top_k=5) == kept(top_k=1000) == kept(top_p=1.0) == [0, 1, 2, 3, 4]
    assert kept(top_k=1) == kept(top_p=0.3) == kept(min_p=0.6) == [1]
    assert kept(top_k=2) == [1, 2, 3], "ties with the last one stay"
    assert kept(top_p=0.7) == kept(min_p=0.4) == [1, 2, 3]
    assert kept(top_k=3, top_p=0.5) == [1], "in this order: of three, .4 is half"
    warm = filter_logits(jnp.array([[2.0, 4.0]]), Sampling(temperature=2.0))
    assert_close(warm, [[1.0, 2.0]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(max_new_tokens=-1), "max_new_tokens must be an integer of at least 0, got -1"),
        (dict(max_new_tokens=2.5), "max_new_tokens must be an integer .* got 2.5"),
        (dict(max_new_tokens=True), "max_new_tokens must be an integer .* got True"),
        (dict(top_k=0, key=0), "top_k must be at least 1, got 0"),
        (dict(top_p=0.0, key=0), "top_p must be above 0 and at most 1"),
        (dict(min_p=1.5, key=0), "min_p must be between 0 and 1"),
        (dict(temperature=-1.0, key=0), "temperature must be at least 0"),
        (dict(top_k=5), "sampling needs key"),
        (dict(do_sample=False, top_k=5), "do_sample=False takes the likeliest"),
        (dict(top_k=5, key=jax.random.split(jax.random.key(0), 3)), "one per row"),
        (dict(repetition_penalty=0.0), "repetition_penalty must be above 0"),
        (
            dict(attention_mask=np.eye(BATCH, LENGTH, 1, int)[::-1] * [[1], [0], [1], [1]]),
            r"rows \[1\] are all",
        ),
    ],
)
def test_what_is_refused(model, options, message):
    with pytest.raises(ValueError, match=message):
        model.generate(tokens(1, (BATCH, LENGTH)), **options)


def test_prompts_that_are_none(model):
    for shape in ((2, 0), (0, 3)):
        with pytest.raises(ValueError, match="at least one token a row|must not be empty"):
            model.generate(np.zeros(shape, np.int32))
    with pytest.raises(TypeError, match="input_ids must be an array of integers, got list"):
        model.generate([[1, 2]])
