"""The call of tunix' trainers, whose masks and positions are made here as tunix makes them."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_close
from models.resume import CONFIG

from jla.models import GatedDeltaNetForCausalLM
from jla.train.tunix import TunixModel, segment_ids_from_mask

IDS = np.random.default_rng(0).integers(1, 31, (4, 9))
# Padding in front, behind, inside and nowhere.
REAL = np.array(
    [
        [0, 0, 0, 1, 1, 1, 1, 1, 1],
        [1, 1, 1, 1, 1, 1, 1, 0, 0],
        [1, 1, 0, 0, 1, 1, 1, 0, 1],
        [1, 1, 1, 1, 1, 1, 1, 1, 1],
    ]
)
PACKED = np.array([[1, 1, 1, 2, 2, 2, 2, 0, 0], [3, 0, 3, 3, 1, 3, 3, 3, 3]]).repeat(2, axis=0)


@pytest.fixture(scope="module")
def model():
    return TunixModel(GatedDeltaNetForCausalLM(CONFIG, rngs=nnx.Rngs(0)))


@nnx.jit
def call(model, *args, **options):
    return model(*args, **options)[0]


@nnx.jit
def direct(model, ids, segment_ids):
    return model.model(ids, segment_ids).logits


def causal_mask(real):
    return np.tril(np.ones((real.shape[1], real.shape[1]), bool)) & real[:, None, :].astype(bool)


def document_mask(segment_ids):
    """Of packed rows: a document ends where the id of the next real token differs."""
    rows = []
    for row in segment_ids:
        starts = np.zeros(len(row), int)
        for i in range(1, len(row)):
            before = [j for j in range(i) if row[j]]
            starts[i] = starts[i - 1] + bool(row[i] and before and row[before[-1]] != row[i])
        rows.append(starts[:, None] == starts)
    return causal_mask(segment_ids != 0) & np.array(rows)


def positions(real):
    counted = np.cumsum(real, axis=1)
    return counted - (counted >= 1)


@pytest.mark.parametrize("ids", [REAL, PACKED], ids=["padded", "packed"])
def test_a_mask_is_read_as_segment_ids(model, ids):
    mask = document_mask(ids) if ids is PACKED else causal_mask(ids)
    expected = direct(model, IDS, ids)
    real = (ids != 0)[..., None]
    assert_close(call(model, IDS, None, None, mask) * real, expected * real)
    both = call(model, IDS, attention_mask=mask, segment_ids=ids)
    assert_close(both * real, expected * real)
    assert_close(call(model, IDS, segment_ids=ids), expected)
    found = segment_ids_from_mask(jnp.asarray(mask))
    np.testing.assert_array_equal(found == 0, ids == 0)


def test_positions_are_passed_on(model):
    mask, given = causal_mask(REAL), positions(REAL)
    real = REAL[..., None]
    found = call(model, IDS, given, None, mask)
    assert_close(found * real, direct(model, IDS, REAL) * real)
    moved = call(model, IDS, given * 2, None, mask)
    assert float(jnp.abs((moved - found) * real).max()) > 1e-4, "layer 1 rotates by position"


def test_without_a_mask_rows_are_causal(model):
    assert_close(call(model, IDS), direct(model, IDS, np.ones_like(IDS)))


def future(mask):
    mask[1, 2, 5] = True


def hole(mask):
    mask[1, 5, 2] = False


def everything(mask):
    mask[1] = True


def two_at_once(mask):
    """Documents that take turns."""
    mask[1] = np.tril(np.arange(9)[:, None] % 2 == np.arange(9) % 2)


@pytest.mark.parametrize("spoil", [future, hole, everything, two_at_once])
def test_masks_that_no_causal_model_of_documents_has(model, spoil):
    mask = causal_mask(np.ones((4, 9), int))
    spoil(mask)
    with pytest.raises(ValueError, match=r"attention_mask of rows \[1\] is not that of a causal"):
        model(IDS, None, None, mask)
    logits = np.asarray(call(model, IDS, None, None, mask))  # traced, it cannot raise
    assert np.isnan(logits[1]).all() and np.isfinite(logits[[0, 2, 3]]).all()


def test_a_mask_and_segment_ids_that_disagree(model):
    with pytest.raises(ValueError, match=r"attention_mask of rows \[0, 1, 2, 3\] is not that"):
        model(IDS, attention_mask=causal_mask(np.ones((4, 9), int)), segment_ids=PACKED)


def test_bad_calls(model):
    with pytest.raises(ValueError, match="cache must be None: this call is for training"):
        model(IDS, None, {}, None)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, T, T\] = \(4, 9, 9\), got"):
        model(IDS, None, None, REAL)


def test_a_training_step_lowers_the_loss(model):
    """The step of a trainer: the loss of its own, gradients with respect to the wrapper."""
    model = nnx.clone(model)
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, ids, mask, positions, real):
        def loss(model):
            logits, _ = model(ids, positions, None, mask)
            each = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], ids[:, 1:])
            return jnp.sum(each * real[:, 1:]) / jnp.sum(real[:, 1:])

        value, gradients = nnx.value_and_grad(loss)(model)
        optimizer.update(model, gradients)
        return value

    args = (IDS, causal_mask(REAL), positions(REAL), REAL)
    losses = [float(step(model, optimizer, *args)) for _ in range(5)]
    assert losses[-1] < losses[0]
