"""Rows of packed prompts become a cache per document, as if each were read alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close

from jla import cache as caches
from jla import convert
from jla.generation import prefill_packed
from models.cases import BATCH, MODELS, build, runner, tokens
from models.test_contract import meaningful, slow_unless

# Documents of 1 to 9 tokens in rows of three, none and one, padding before, between, inside and
# behind; an id comes again.
SEGMENT_IDS = np.zeros((3, 17), np.int32)
SEGMENT_IDS[0, 1:2], SEGMENT_IDS[0, 2:11], SEGMENT_IDS[0, 13:17] = 1, 2, 1
SEGMENT_IDS[2, 0:3], SEGMENT_IDS[2, 5:10] = 4, 4
LENGTHS = [1, 9, 4, 8]
AHEAD = 3


@pytest.mark.parametrize("row", slow_unless(["gated_deltanet-hybrid", "rwkv7"]))
def test_packed_prompts_become_a_row_each(row):
    """Logits, caches and the steps after them, of every family."""
    run, ids = runner(row), tokens(5, SEGMENT_IDS.shape)
    logits, cache = prefill_packed(run.model, ids, SEGMENT_IDS, max_length=9 + AHEAD)
    flat, step = ids[SEGMENT_IDS != 0], tokens(6, (BATCH, AHEAD))
    documents = np.split(flat, np.cumsum(LENGTHS)[:-1])
    after, stepped = run.step(run.state, step, np.ones_like(step), cache)
    for i, document in enumerate(documents):
        alone = run.model.new_cache(1, 9 + AHEAD)
        ones = np.ones((1, LENGTHS[i]), np.int32)
        want, alone = run.step(run.state, document[None], ones, alone)
        own = caches.select(cache, jnp.array([i]))
        assert_close(logits[i], want[0, -1], what="logits")
        assert_trees_close(meaningful(own), meaningful(alone), what="cache", times=3)
        want, alone = run.step(run.state, step[i : i + 1], np.ones((1, AHEAD), np.int32), alone)
        assert_close(after[i], want[0], what="logits after")
        own = caches.select(stepped, jnp.array([i]))
        assert_trees_close(meaningful(own), meaningful(alone), what="cache after", times=3)


def test_packed_rows_are_read_once_as_they_are(monkeypatch):
    """The stack sees the packed rows, not one for each document."""
    model, seen = runner("gated_deltanet").model, []
    whole = type(model.model).__call__

    def call(self, ids, **options):
        seen.append(ids.shape)
        return whole(self, ids, **options)

    monkeypatch.setattr(type(model.model), "__call__", call)
    model.prefill_packed(tokens(5, SEGMENT_IDS.shape), SEGMENT_IDS)
    assert seen == [SEGMENT_IDS.shape]


@pytest.mark.slow
def test_scanned_layers():
    """The caches of layers that are scanned are those of single layers, stacked."""
    config = MODELS["gated_deltanet"].config
    single, scanned = build(config), build(config, scan_layers=True)
    convert.load_state_dict(scanned, convert.to_state_dict(single))
    ids = tokens(5, SEGMENT_IDS.shape)
    single, scanned = (model.prefill_packed(ids, SEGMENT_IDS) for model in (single, scanned))
    assert_close(scanned.logits, single.logits)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *single.cache)
    assert_trees_close(scanned.cache[0].layers, stacked)


def test_what_packed_prefill_refuses():
    model, ids = runner("gated_deltanet").model, tokens(5, SEGMENT_IDS.shape)
    with pytest.raises(ValueError, match="max_length=8 is below the longest prompt's 9"):
        model.prefill_packed(ids, SEGMENT_IDS, max_length=8)
    with pytest.raises(ValueError, match="segment_ids has no document"):
        model.prefill_packed(ids, np.zeros_like(SEGMENT_IDS))
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(3, 17\)"):
        model.prefill_packed(ids, SEGMENT_IDS[:, :3])
    with pytest.raises(TypeError, match="segment_ids must be concrete"):
        jax.jit(lambda ids: model.prefill_packed(ids, ids).logits)(SEGMENT_IDS)
