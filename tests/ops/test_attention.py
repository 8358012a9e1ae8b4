"""Softmax attention against a loop over queries: groups, windows, documents, blocks, past keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla.ops import attention
from jla.ops.softmax import QUERY_BLOCK, Past
from ops import oracle

HEADS, GROUPS, K, V = 6, 3, 4, 5
LENGTH = 20
IMPLS = ("reference", "chunk")


def inputs(length=LENGTH, batch=2):
    return {
        "q": random(0, (batch, length, HEADS, K)),
        "k": random(1, (batch, length, GROUPS, K)),
        "v": random(2, (batch, length, GROUPS, V)),
    }


def ids(length=LENGTH):
    first = np.repeat([0, 1, 0, 1, 3, 0], [2, 4, 1, 3, 1, length - 11])
    second = np.repeat([2, 1, 2], [1, 7, length - 8])
    return np.stack([first, second]).astype(np.int32)


def run(args, weights, segment_ids, **options):
    def loss(args):
        o = attention(**args, segment_ids=segment_ids, **options)
        return jnp.sum(o * weights), o

    return jax.grad(loss, has_aux=True)(args)


compiled = jax.jit(run, static_argnames=("impl", "window_size", "scale"))


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("impl", IMPLS)
def test_matches_the_loop(impl, packed, window):
    args = inputs()
    segment_ids = ids() if packed else None
    shown = ids() if packed else np.ones((2, LENGTH))
    weights = random(3, (2, LENGTH, HEADS, V))
    grads, o = compiled(args, weights, segment_ids, impl=impl, window_size=window)
    loop = functools.partial(oracle.attention, scale=K**-0.5, window=window, segment_ids=shown)
    assert_close(o, loop(**args))
    for name in args:
        step = random(4, args[name].shape, np.float64, scale=1e-5)
        ahead, behind = (dict(args, **{name: args[name] + s}) for s in (step, -step))
        slope = np.sum((loop(**ahead) - loop(**behind)) * weights) / 2
        got = np.sum(np.asarray(grads[name], np.float64) * step)
        # A sum over all entries of both signs: its scale is that of the step, not of the sum.
        assert_close(got * 1e5, slope * 1e5, tol=1e-4, what=name)


def test_golden_numbers():
    """G6, S17: a window counts its own token."""
    zeros = np.zeros((1, 5, 1, 2), np.float32)
    v = np.arange(1.0, 6.0, dtype=np.float32)[None, :, None, None]
    for impl in IMPLS:
        o = attention(zeros, zeros, v, window_size=3, impl=impl)
        assert_close(o[0, :, 0, 0], [1, 1.5, 2, 3, 4])
    # A padding token on the left takes no place in the window.
    padded = [np.concatenate([9 + 0 * x[:, :1], x], axis=1) for x in (zeros, zeros, v)]
    o = attention(*padded, window_size=3, segment_ids=np.array([[0, 1, 1, 1, 1, 1]]))
    assert_close(o[0, :, 0, 0], [0, 1, 1.5, 2, 3, 4])


def test_blocks_of_queries_are_all_queries():
    """Rows longer than a block, with a document edge on it, and a ragged last block."""
    length = QUERY_BLOCK + 3
    args, weights = inputs(length, 1), random(3, (1, length, HEADS, V))
    segment_ids = np.repeat([1, 2, 1], [QUERY_BLOCK - 60, 61, 2])[None].astype(np.int32)
    got = compiled(args, weights, segment_ids, impl="chunk", window_size=70)
    want = compiled(args, weights, segment_ids, impl="reference", window_size=70)
    assert_trees_close(got, want)


def test_past_keys_are_earlier_tokens():
    """Slots may be empty, and belong to the first document of the piece only."""
    args = inputs(12, 2)
    segment_ids = np.stack([np.repeat([1, 2], [9, 3]), np.repeat(1, 12)]).astype(np.int32)
    cut, slots = 5, 8
    empty = np.full((2, slots - cut, GROUPS, 1), 1e4, np.float32)

    def filled(x):
        rest = np.broadcast_to(empty, (2, slots - cut, GROUPS, x.shape[-1]))
        return np.concatenate([x[:, :cut], rest], axis=1)

    positions = np.where(np.arange(slots) < cut, np.arange(slots), -1)
    past = Past(
        filled(args["k"]),
        filled(args["v"]),
        np.broadcast_to(positions, (2, slots)).astype(np.int32),
        np.full((2,), cut, np.int32),
    )
    for window in (None, 3):
        want = oracle.attention(**args, scale=1.0, window=window, segment_ids=segment_ids)
        for impl in IMPLS:
            got = attention(
                **{name: x[:, cut:] for name, x in args.items()},
                scale=1.0,
                window_size=window,
                segment_ids=segment_ids[:, cut:],
                past=past,
                impl=impl,
            )
            assert_close(got, want[:, cut:])


def test_large_scores_and_dtypes():
    args = {name: 30 * x for name, x in inputs().items()}
    o = attention(**args)
    want = oracle.attention(**args, scale=K**-0.5, window=None, segment_ids=np.ones((2, LENGTH)))
    # Scores near 1e3 in float32 are known to 1e-4, and the weights with them.
    assert_close(o, want, tol=1e-3)
    narrow = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs().items()}
    o = attention(**narrow)
    assert o.dtype == jnp.bfloat16
    want = oracle.attention(
        **{n: np.asarray(x, np.float32) for n, x in narrow.items()},
        scale=K**-0.5,
        window=None,
        segment_ids=np.ones((2, LENGTH)),
    )
    assert_close(o, want, dtype="bfloat16")


def test_padding_has_finite_gradients_of_zero():
    args, weights = inputs(), random(3, (2, LENGTH, HEADS, V))
    for impl in IMPLS:
        grads, o = compiled(args, weights, np.zeros((2, LENGTH), np.int32), impl=impl)
        assert not o.any()
        assert all(np.all(leaf == 0) for leaf in grads.values())


def test_memory_of_the_backward_is_linear_in_queries():
    """Scores of one block of queries at a time: bytes grow with T, not with T squared."""
    sizes = {}
    for length in (1024, 2048, 4096):
        args = jax.eval_shape(lambda: inputs(length, 1))  # noqa: B023
        weights = jax.ShapeDtypeStruct((1, length, HEADS, V), jnp.float32)
        program = compiled.lower(args, weights, None, impl="chunk").compile()
        sizes[length] = program.memory_analysis().temp_size_in_bytes
    assert sizes[4096] - sizes[2048] < 2.2 * (sizes[2048] - sizes[1024])
    assert sizes[4096] < 4096 * 4096 * HEADS * 4 / 2, "as much as half the scores at once"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": np.ones((2, LENGTH, K))}, r"q must be \[B, T, H, D\], got shape \(2, 20, 4\)"),
        ({"k": np.ones((2, 9, GROUPS, K))}, r"q, k, v must be .*\(2, 9, 3, 4\)"),
        ({"q": np.ones((2, LENGTH, 4, K))}, r"q's 4 heads must be a multiple of k's 3"),
        (dict.fromkeys("qkv", np.ones((2, 0, 3, K))), "q, k, v must not be empty"),
        ({"window_size": 0}, r"window_size must be at least 1 .*got 0"),
        ({"impl": "fast"}, r"impl of attention must be 'auto' or one of .*got 'fast'"),
        ({"segment_ids": np.ones((2, 3), int)}, r"segment_ids must have shape \(2, 20\)"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        attention(**{**inputs(), **change})
