"""A cache per document: the states at the documents' ends, as if each had been read alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HIDDEN, MIXERS
from flax import nnx
from helpers import assert_close, assert_trees_close, random

from jla.ops.segments import Ends
from layers.contract import BATCH, probe
from layers.test_masks import RunningSum

# Padding everywhere, a document of one token, a row without any.
IDS = np.array(
    [
        [0, 1, 1, 0, 1, 2, 0, 3, 3, 3, 3, 3],
        [0] * 12,
        [2, 2, 2, 0, 0, 2, 2, 2, 2, 3, 0, 0],
    ]
)
DOCUMENTS = [(0, 1), (0, 2), (0, 3), (2, 2), (2, 3)]  # row and id
ENDS = Ends(np.array([[4, 5, 11], [0, 0, 0], [8, 9, 0]]), np.array([0, 1, 2, 6, 7]))


FAST = ("gdn", "attention-window")


@pytest.mark.parametrize(
    "row", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MIXERS]
)
def test_caches_at_the_ends_of_documents(row):
    """On caches that have seen a document of id 1, which the first row goes on with. Alone, a
    document has the others as padding."""
    p = probe(row)
    x, before = random(0, (BATCH, 12, HIDDEN)), np.repeat([[1, 0]], [5, 7], axis=1)
    before = np.broadcast_to(before, IDS.shape)
    _, cache = p.forward(p.params, x[:, ::-1], before, p.new_cache())
    read = jax.jit(functools.partial(_read, p.graphdef))
    y, after = read(p.params, x, IDS, cache, ENDS)
    assert_close(y, p.forward(p.params, x, IDS, cache)[0], what="y")
    assert after["segment_id"].tolist() == [1] * len(DOCUMENTS)
    for i, (at, segment_id) in enumerate(DOCUMENTS):
        own = np.zeros_like(IDS)
        own[at] = np.where(IDS[at] == segment_id, segment_id, 0)
        _, alone = p.forward(p.params, x, own, cache)
        given = jax.tree.map(lambda leaf: leaf[i], p.seen(after))  # noqa: B023
        want = jax.tree.map(lambda leaf: leaf[at], p.seen(alone))  # noqa: B023
        assert_trees_close(given, want, what=f"cache of document {i}")


def _read(graphdef, params, x, ids, cache, ends):
    return nnx.merge(graphdef, params)(x, segment_ids=ids, cache=cache, ends=ends)


class Forgetful(RunningSum):
    """Keeps the row's sum, whatever tokens are chosen."""

    def mix(self, x, *, segment_ids, positions, cache):
        return x, {"sum": cache["sum"] + jnp.sum(x, axis=1)}

    def new_state(self, batch_size, max_length, dtype):
        return {"sum": jnp.zeros((batch_size, self.hidden_size), dtype)}


def test_what_ends_refuse():
    mixer, x = Forgetful(), np.ones((BATCH, 12, Forgetful().hidden_size), np.float32)
    cache = mixer.new_cache(BATCH)
    with pytest.raises(ValueError, match="ends needs a cache"):
        mixer(x, segment_ids=IDS, ends=ENDS)
    with pytest.raises(ValueError, match=r"ends.time must be \[B, S\] .* 3 rows, got \(2, 3\)"):
        mixer(x, segment_ids=IDS, cache=cache, ends=ENDS._replace(time=ENDS.time[:2]))
    with pytest.raises(ValueError, match="Forgetful gives no states after chosen tokens"):
        mixer(x, segment_ids=IDS, cache=cache, ends=ENDS)
