"""Every form of flax attention mask: what a causal mixer honours, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HIDDEN
from flax import nnx
from helpers import assert_close, random

from jla.layers import TokenMixer
from jla.layers.masks import padding_from_mask
from jla.ops import segments

B, T = 3, 5
REAL = np.array([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 1, 0, 0]], bool)
TRIL = np.tril(np.ones((T, T), bool))
NONE = None  # causal and nothing more: no padding to tell


def padded_causal():
    return TRIL & REAL[:, None, None, :]


FORMS = {
    "causal": (TRIL, NONE),
    "causal of floats": (TRIL.astype(np.float32), NONE),
    "causal of a row": (TRIL[None, None], NONE),
    "causal of all heads": (np.broadcast_to(TRIL, (B, 4, T, T)), NONE),
    "nnx.make_causal_mask": (nnx.make_causal_mask(np.ones((B, T))), NONE),
    "padding": (REAL[:, None, None, :], REAL),
    "padding of the batch": (REAL[1][None, None, None], [REAL[1]] * B),
    "padding without axes": (REAL[2][None], [REAL[2]] * B),
    "causal with padding": (padded_causal(), REAL),
    "causal with padded queries off": (padded_causal() & REAL[:, None, :, None], REAL),
    "combined by flax": (
        nnx.combine_masks(
            nnx.make_attention_mask(REAL, REAL), nnx.make_causal_mask(np.ones((B, T)))
        ),
        REAL,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_padding_of_a_mask(form):
    mask, real = FORMS[form]
    got = padding_from_mask(mask, B, T)
    if real is NONE:
        assert got is NONE
        return
    assert got.dtype == jnp.int32 and np.array_equal(got, real)


@pytest.mark.parametrize("form", ["padding", "padding without axes"])
def test_key_padding_may_be_traced(form):
    mask, real = FORMS[form]
    assert np.array_equal(jax.jit(padding_from_mask, static_argnums=(1, 2))(mask, B, T), real)


REFUSED = {
    "everything": (np.ones((T, T)), "mask is not causal.*segment_ids"),
    "a window": (TRIL & ~np.tril(TRIL, -3), "mask is not causal"),
    "the future": (np.triu(np.ones((T, T))), "mask is not causal"),
    "one cell": (np.where(np.arange(T * T).reshape(T, T) == 5, 0, TRIL), "mask is not causal"),
    "heads apart": (np.stack([TRIL, TRIL & REAL[2]]), "mask must not differ between heads"),
    "padding per head": (np.ones((B, 2, 1, T)), "mask must not differ between heads"),
    "length": (np.tril(np.ones((4, 4))), r"mask must be .* with T=5, got \(4, 4\)"),
    "queries": (np.ones((B, 1, 2, T)), r"mask must be .* with T=5, got \(3, 1, 2, 5\)"),
    "one axis": (np.ones(T), r"mask must be .* with T=5, got \(5,\)"),
    "batch": (REAL[:2, None, None], "mask has 2 rows, the inputs have a batch of 3"),
}


@pytest.mark.parametrize("form", REFUSED)
def test_refused_masks(form):
    mask, message = REFUSED[form]
    with pytest.raises(ValueError, match=message):
        padding_from_mask(mask, B, T)


def test_a_traced_square_mask_names_segment_ids():
    with pytest.raises(ValueError, match="is traced, so it cannot be checked.*segment_ids"):
        jax.jit(padding_from_mask, static_argnums=(1, 2))(TRIL, B, T)


# Masks whose last token is padding, so that there is something to read.
LAST = np.arange(T) < T - 1
CONSTANTS = {
    "tril": lambda: jnp.tril(jnp.ones((T, T))) * LAST,
    "comparison": lambda: (jnp.arange(T)[:, None] >= jnp.arange(T)[None]) & LAST,
    "flax": lambda: nnx.make_causal_mask(jnp.ones((1, T))) * LAST,
}


@pytest.mark.parametrize("wrap", ["jit", "grad", "vmap", "scan", "remat", "nested jit"])
@pytest.mark.parametrize("form", CONSTANTS)
def test_a_mask_made_of_constants_is_known_inside_transformations(form, wrap):
    def masked(x):
        return x * padding_from_mask(CONSTANTS[form](), B, T)

    x = jnp.ones((B, T))
    wrapped = {
        "jit": jax.jit(masked),
        "grad": jax.jit(jax.grad(lambda x: jnp.sum(masked(x)))),
        "vmap": lambda x: jax.jit(jax.vmap(masked))(x[None])[0],
        "scan": lambda x: jax.jit(lambda x: jax.lax.scan(lambda c, _: (masked(c), 0), x, None, 2))(
            x
        )[0],
        "remat": jax.jit(jax.grad(jax.checkpoint(lambda x: jnp.sum(masked(x))))),
        "nested jit": jax.jit(lambda x: jax.jit(masked)(x)),
    }[wrap]
    assert np.array_equal(wrapped(x), np.broadcast_to(LAST, (B, T)))


def test_a_non_causal_constant_is_refused_inside_jit():
    with pytest.raises(ValueError, match="mask is not causal"):
        jax.jit(lambda: padding_from_mask(jnp.ones((T, T)), B, T))()


class RunningSum(TokenMixer):
    """The least mixer: sums the real tokens of the document so far."""

    def __init__(self):
        self.hidden_size = HIDDEN

    def mix(self, x, *, segment_ids, positions, cache):
        if segment_ids is None:
            return jnp.cumsum(x, axis=1), None
        document = segments.document_index(segment_ids)
        seen = (document[:, :, None] == document[:, None]) & np.tril(np.ones((T, T), bool))
        return jnp.einsum("bts,bsd->btd", seen & (segment_ids != 0)[:, None], x), None

    def new_state(self, batch_size, max_length, dtype):
        return {}


def test_masks_and_ids_of_a_call():
    """A mask pads, ids tell documents apart, and neither weakens the other (S01)."""
    mixer, x = RunningSum(), random(0, (B, T, HIDDEN))
    ids = np.array([[1, 1, 2, 2, 2]] * B, np.int32)
    want = mixer(x, segment_ids=np.where(REAL, ids, 0))
    for mask in (REAL[:, None, None, :], TRIL & REAL[:, None, None, :]):
        assert_close(mixer(x, segment_ids=ids, mask=mask), want)
        traced = jax.jit(lambda x, ids: mixer(x, segment_ids=ids, mask=mask))  # noqa: B023
        assert_close(traced(x, ids), want)
    packed, plain = mixer(x, segment_ids=ids), mixer(x)
    for mask in (np.ones((B, 1, 1, T)), TRIL):
        assert_close(mixer(x, segment_ids=ids, mask=mask), packed, what="a mask of ones")
        assert_close(mixer(x, mask=mask), plain)
    whole = nnx.jit(lambda m, x: m(x, x, x, mask=jnp.tril(jnp.ones((T, T))), is_causal=True))
    assert_close(whole(mixer, x), plain, what="flax's whole call")
    assert not np.allclose(plain, packed, atol=1e-3)


def test_masks_of_several_batch_axes():
    mixer, x = RunningSum(), random(0, (2, B, T, HIDDEN))
    mask = np.stack([REAL, REAL[::-1]])
    want = mixer(x, segment_ids=mask.astype(np.int32))
    assert_close(mixer(x, mask=mask[:, :, None, None, :]), want)
    assert_close(mixer(x, mask=(TRIL & mask[:, :, None, None, :])), want)
