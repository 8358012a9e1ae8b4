"""Losses by hand: shifted once, padding and document ends ignored (S28); fused with the head."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla.ops import (
    cross_entropy,
    fused_linear_cross_entropy,
    kl_divergence,
    l2_warp,
    shift_labels,
)


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


OPTIONS = {
    "plain": {},
    "all": dict(
        label_smoothing=0.2,
        logit_scale=1.7,
        logit_softcapping=2.5,
        lse_square_scale=0.01,
        ignore_index=3,
        reduction="sum",
    ),
}


def head_inputs(dtype=np.float32):
    hidden, kernel, bias = random(0, (2, 7, 6)), random(1, (6, 11)), random(2, (11,))
    targets = np.random.default_rng(3).integers(0, 11, (2, 7))
    targets[0, :3], targets[1, 4] = -100, 3
    return tuple(jnp.asarray(x, dtype) for x in (hidden, kernel, bias)), targets


@pytest.mark.parametrize("options", OPTIONS)
def test_cross_entropy_options_by_hand(options):
    (hidden, kernel, bias), targets = head_inputs()
    options = OPTIONS[options]
    logits = np.asarray(hidden @ kernel + bias, np.float64)
    z = logits * options.get("logit_scale", 1)
    if cap := options.get("logit_softcapping"):
        z = cap * np.tanh(z / cap)
    lse = np.log(np.exp(z).sum(-1))
    smooth, ignore = options.get("label_smoothing", 0), options.get("ignore_index", -100)
    targets = np.where(targets == -100, ignore, targets)
    target = (1 - smooth) * np.eye(11)[np.maximum(targets, 0)] + smooth / 11
    losses = lse - (target * z).sum(-1) + options.get("lse_square_scale", 0) * lse**2
    want = losses[targets != ignore]
    want = want.sum() if options.get("reduction") == "sum" else want.mean()
    assert_close(cross_entropy(logits.astype(np.float32), targets, **options), want)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chunk_size", [1, 4, 1000])
def test_fused_cross_entropy_is_the_plain_one(options, chunk_size):
    """Loss and the gradients of hidden states, kernel and bias, with the warp and padding."""
    args, targets = head_inputs()
    targets = np.where(targets == -100, OPTIONS[options].get("ignore_index", -100), targets)
    segment_ids = np.repeat([[1, 2, 0]], [3, 3, 1], axis=1).repeat(2, axis=0)

    def plain(hidden, kernel, bias):
        logits = hidden @ kernel + bias
        return 3 * l2_warp(cross_entropy(logits, targets, **OPTIONS[options]), logits, segment_ids)

    def fused(hidden, kernel, bias):
        return 3 * fused_linear_cross_entropy(
            hidden,
            kernel,
            targets,
            bias,
            use_l2warp=True,
            segment_ids=segment_ids,
            chunk_size=chunk_size,
            **OPTIONS[options],
        )

    want, given = (jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*args) for f in (plain, fused))
    assert_trees_close(given, want)
    hidden, kernel, _ = args
    without = fused_linear_cross_entropy(hidden, kernel, targets, chunk_size=chunk_size)
    assert_close(without, cross_entropy(hidden @ kernel, targets))


def test_fused_cross_entropy_of_nothing_and_of_narrow_inputs():
    (hidden, kernel, _), targets = head_inputs(jnp.bfloat16)
    grad = jax.value_and_grad(fused_linear_cross_entropy, argnums=(0, 1))
    value, slopes = grad(hidden, kernel, np.full_like(targets, -100))
    assert value == 0 and not any(np.any(slope) for slope in slopes)
    value, slopes = grad(hidden, kernel, targets)
    assert value.dtype == jnp.float32 and all(s.dtype == jnp.bfloat16 for s in slopes)
    wide = grad(*(x.astype(jnp.float32) for x in (hidden, kernel)), targets)
    assert_trees_close((value, slopes), wide, tol=1e-2)


@pytest.mark.parametrize("chunk_size", [3, 1000])
def test_kl_divergence_by_softmax(chunk_size):
    (hidden, kernel, _), _ = head_inputs()
    teacher, theirs = jnp.asarray(random(5, (2, 7, 4))), jnp.asarray(random(6, (4, 11)))
    real = np.array([[1, 1, 0, 1, 1, 1, 0], [1] * 7], bool)

    def plain(hidden, kernel):
        p, q = (jax.nn.log_softmax(x, -1) for x in (teacher @ theirs, hidden @ kernel))
        return jnp.sum(jnp.sum(jnp.exp(p) * (p - q), -1) * real) / real.sum()

    def fused(hidden, kernel):
        options = dict(real=real, chunk_size=chunk_size)
        return kl_divergence(hidden, kernel, teacher, theirs, **options)

    want, given = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(hidden, kernel) for f in (plain, fused)
    )
    assert_trees_close(given, want)
    assert_close(kl_divergence(teacher, theirs, teacher, theirs), 0.0, tol=1e-6)


def test_fused_losses_never_hold_the_logits():
    """Forward and backward stay below the size of ``[B, T, V]``; the plain loss does not."""
    tokens, width, vocabulary = (2, 2048), 16, 4096
    hidden = jax.ShapeDtypeStruct((*tokens, width), jnp.float32)
    kernel = jax.ShapeDtypeStruct((width, vocabulary), jnp.float32)
    targets = jax.ShapeDtypeStruct(tokens, jnp.int32)

    def peak(loss, *args):
        grad = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
        return grad.lower(hidden, kernel, *args).compile().memory_analysis().temp_size_in_bytes

    logits = 4 * tokens[0] * tokens[1] * vocabulary
    assert peak(lambda h, k, t: cross_entropy(h @ k, t), targets) > logits
    fused = partial(fused_linear_cross_entropy, chunk_size=256, use_l2warp=True)
    assert peak(fused, targets) < logits / 2
    assert peak(partial(kl_divergence, chunk_size=256), hidden, kernel) < logits / 2


def test_what_the_fused_losses_refuse():
    (hidden, kernel, bias), targets = head_inputs()
    for args, message in (
        ((hidden[0], kernel, targets), "hidden must be"),
        ((hidden, kernel.T, targets), r"kernel must be \[D, V\] with D=6"),
        ((hidden, kernel, targets[:, :3]), r"targets must start with \(2, 7\)"),
        ((hidden, kernel, targets, bias[:3]), r"bias must start with \(11,\)"),
    ):
        with pytest.raises(ValueError, match=message):
            fused_linear_cross_entropy(*args)
    with pytest.raises(ValueError, match="reduction must be 'mean' or 'sum', got 'max'"):
        fused_linear_cross_entropy(hidden, kernel, targets, reduction="max")
    with pytest.raises(ValueError, match=r"teacher_kernel must start with \(6, 11\)"):
        kl_divergence(hidden, kernel, hidden, kernel[:, :5])
    with pytest.raises(ValueError, match=r"teacher_hidden must start with \(2, 7\)"):
        kl_divergence(hidden, kernel, hidden[:, :3], kernel)
