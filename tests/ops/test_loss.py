"""Losses by hand: shifted once, padding and document ends ignored (S28)."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import assert_close, random

from jla.ops import cross_entropy, l2_warp, shift_labels


def test_s28_labels_are_shifted_once_and_ignored_ones_count_nothing():
    logits = random(0, (1, 4, 5))
    labels = np.array([[-100, 2, 3, -100]])
    targets = shift_labels(labels)
    assert targets.tolist() == [[2, 3, -100, -100]]
    log_p = jax.nn.log_softmax(jnp.asarray(logits[0], jnp.float32))
    assert_close(cross_entropy(logits, targets), -(log_p[0, 2] + log_p[1, 3]) / 2)
    none = np.full((1, 4), -100)
    value, slope = jax.value_and_grad(cross_entropy)(logits, none)
    assert value == 0 and not np.any(slope)


def test_the_next_real_token_of_the_document_is_the_target():
    labels = np.array([[7, 1, 2, 9, 3, 4, 5, 9]])
    segment_ids = np.array([[0, 1, 1, 0, 1, 2, 2, 0]])
    want = [[-100, 2, 3, -100, -100, 5, -100, -100]]
    assert shift_labels(labels, segment_ids).tolist() == want


def test_a_target_outside_the_vocabulary_is_nan():
    logits = random(0, (1, 2, 5))
    for outside in (5, -1):
        assert np.isnan(cross_entropy(logits, np.array([[1, outside]])))


def test_padding_neither_feels_nor_weakens_the_warp():
    """A row's pull is the same with padding beside it, and the padding has none."""
    logits, weigh = random(1, (2, 5, 7)), 3.0
    pull = jax.grad(lambda x, ids: weigh * l2_warp(jnp.sum(x) * 0, x, ids))
    alone = pull(logits, None)
    top = np.max(logits, axis=-1, keepdims=True)
    assert_close(alone, np.where(logits == top, weigh * 1e-4 / 10 * top, 0), tol=1e-5)
    padded = np.concatenate([random(2, (2, 3, 7)), logits], axis=1)
    ids = np.repeat([[0, 1]], [3, 5], axis=1).repeat(2, axis=0)
    got = pull(padded, ids)
    assert_close(got[:, 3:], alone, tol=1e-5)
    assert not np.any(got[:, :3])
