"""Recurrences whose state is not one matrix per head: a vector, two memories, a normaliser."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla import ops
from ops import oracle
from ops.test_recurrences import (
    BATCH,
    GROUPS,
    HEADS,
    LENGTH,
    PIECES,
    POSITIONS,
    REGIMES,
    K,
    V,
    fade,
    gate,
    headed,
    ids,
    keyed,
    qkv,
    strength,
)

SLOTS, WIDTH = 3, 7


@dataclass(frozen=True)
class Row:
    """``inputs(length)`` by name, shapes of a row's states, and the numpy step of one row's token:
    ``(states, inputs) -> (what is read [H, V] or [D], states)``."""

    op: Any
    inputs: Any
    states: Any
    step: Any


def heads(*shared):
    return (np.repeat(x, HEADS // GROUPS, axis=0) for x in shared)


def hgrn_step(S, x, g):
    S = np.where(np.isfinite(g), np.exp(g), 0.0) * S + x
    return S, S


def gsa_step(S, q, k, v, s, g):
    read, after = [], []
    q, k = heads(q, k)
    for h in range(HEADS):
        P = fade(g[h], S[0][h]) + np.outer(s[h], k[h])
        R = fade(g[h], S[1][h]) + np.outer(s[h], v[h])
        logits = 0.7 * P @ q[h]
        weights = np.exp(logits - logits.max())
        read.append(R.T @ (weights / weights.sum()))
        after.append((P, R))
    return np.stack(read), tuple(np.stack(each) for each in zip(*after, strict=True))


def linear_attn_step(S, q, k, v):
    q, k = heads(q, k)
    S = S + k[..., :, None] * np.concatenate([v, np.ones((HEADS, 1))], axis=-1)[..., None, :]
    read = 0.7 * np.einsum("hkv,hk->hv", S, q)
    return read[:, :-1] / (read[:, -1:] + 1e-10), S


ROWS = {
    "hgrn": Row(
        ops.hgrn,
        lambda t: dict(x=random(0, (BATCH, t, WIDTH)), g=gate(1, (BATCH, t, WIDTH))),
        (WIDTH,),
        hgrn_step,
    ),
    "gsa": Row(
        functools.partial(ops.gsa, scale=0.7),
        lambda t: qkv(t) | dict(s=strength(3, headed(t, SLOTS)), g=gate(4, headed(t, SLOTS))),
        ((HEADS, SLOTS, K), (HEADS, SLOTS, V)),
        gsa_step,
    ),
    # Features at least 0, so that the sum it divides by is not near 0.
    "linear_attn": Row(
        functools.partial(ops.linear_attn, scale=0.7),
        lambda t: dict(
            q=strength(0, keyed(t)) + 0.1, k=strength(1, keyed(t)), v=random(2, headed(t, V))
        ),
        (HEADS, K, V + 1),
        linear_attn_step,
    ),
}
row_names = pytest.mark.parametrize("row", ROWS)


def is_shape(shape):
    return all(isinstance(size, int) for size in shape)


def setting(row):
    """An initial state, and weights of outputs, final states and states by position."""
    shapes = ROWS[row].states

    def draw(seed, *lead):
        if is_shape(shapes):
            return np.abs(random(seed, (BATCH, *lead, *shapes)))
        return tuple(random(seed + i, (BATCH, *lead, *shape)) for i, shape in enumerate(shapes))

    inputs = ROWS[row].inputs(LENGTH)
    last = inputs["x" if "x" in inputs else "v"]
    return inputs, draw(20), (random(30, last.shape), draw(40), draw(50, POSITIONS.shape[1]))


def loop(row, inputs, state):
    """Outputs and the states after every token, in float64."""
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    outputs, states = [], []
    for b in range(BATCH):
        real, starts = oracle.documents(ids()[b])
        S = jax.tree.map(lambda x: np.asarray(x[b], np.float64), state)  # noqa: B023
        for t in range(LENGTH):
            if starts[t]:
                S = jax.tree.map(np.zeros_like, S)
            read = None
            if real[t]:
                read, S = ROWS[row].step(S, *(x[b, t] for x in wide.values()))
            outputs.append(read)
            states.append(S)
    zeros = np.zeros_like(next(x for x in outputs if x is not None))
    outputs = np.stack([zeros if x is None else x for x in outputs])
    states = jax.tree.map(lambda *x: np.stack(x).reshape(BATCH, LENGTH, *x[0].shape), *states)
    return outputs.reshape(BATCH, LENGTH, *zeros.shape), states


def call(inputs, state, weigh, row, impl):
    def loss(inputs, state):
        out = ROWS[row].op(
            **inputs,
            initial_state=state,
            output_final_state=True,
            state_positions=POSITIONS,
            segment_ids=ids(),
            chunk_size=None if impl == "reference" else 16,
            impl=impl,
        )
        parts = zip(jax.tree.leaves(out), jax.tree.leaves(weigh), strict=True)
        return sum(jnp.sum(x * w) for x, w in parts), out

    grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, state)
    return dict(o=out[0], final=out[1], states=out[2], d_inputs=grads[0], d_state=grads[1])


compiled = jax.jit(call, static_argnames=("row", "impl"))


@functools.cache
def exact(row):
    """Gradients of the float64 reference, once its outputs and states are the loop's."""
    inputs, state, weigh = setting(row)
    outputs, states = loop(row, inputs, state)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, state, weigh))
        got = jax.device_get(compiled(*wide, row=row, impl="reference"))
    assert_close(got["o"], outputs, dtype="float64", what="o")
    final = jax.tree.map(lambda x: x[:, -1], states)
    assert_trees_close(got["final"], final, dtype="float64", what="final state")
    chosen = jax.tree.map(lambda x: np.stack([x[b, at] for b, at in enumerate(POSITIONS)]), states)
    assert_trees_close(got["states"], chosen, dtype="float64", what="states")
    return got


@row_names
def test_the_reference_is_the_loop(row):
    exact(row)


@row_names
def test_the_chunk_form_is_the_reference(row):
    """Outputs, states and every gradient, packed and padded, over all kinds of gates."""
    got = jax.device_get(compiled(*setting(row), row=row, impl="chunk"))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
    assert_trees_close(got, exact(row), times=3)


@pytest.mark.parametrize("row", ["hgrn", "gsa"])
def test_one_gate_for_all_tokens(row):
    """S09, S10, as for the other recurrences."""
    inputs, state, weigh = setting(row)
    for regime, decay in REGIMES.items():
        gates = np.full_like(inputs["g"], decay)
        if decay < 0:
            gates[:, 20] = -80.0
        inputs["g"] = gates
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, state, weigh))
            want = jax.device_get(compiled(*wide, row=row, impl="reference"))
        got = jax.device_get(compiled(inputs, state, weigh, row=row, impl="chunk"))
        assert_trees_close(got, want, times=3, what=regime)


@row_names
def test_the_past_is_bit_identical(row):
    inputs, state, weigh = setting(row)
    before = compiled(inputs, state, weigh, row=row, impl="chunk")["o"]
    for place in (1, 15, 16, 17, 33):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name, x in changed.items():
            x[:, place:] = np.roll(inputs[name], 1, axis=1)[:, place:]
        lost = jax.tree.map(np.zeros_like, weigh)
        lost[0][:, :place] = weigh[0][:, :place]
        got = compiled(changed, state, lost, row=row, impl="chunk")
        assert np.array_equal(got["o"][:, :place], before[:, :place])
        for name, x in got["d_inputs"].items():
            assert not np.any(x[:, place:]), f"{name} from {place} on"


@row_names
def test_a_row_in_pieces_is_one_row(row):
    inputs, state, _ = setting(row)
    run = jax.jit(functools.partial(ROWS[row].op, output_final_state=True))
    want, final = run(**inputs, initial_state=state)
    got = []
    for piece in PIECES:
        part = {name: x[:, piece] for name, x in inputs.items()}
        o, state = run(**part, initial_state=state)
        got.append(o)
    assert_close(np.concatenate(got, axis=1), want, times=3)
    assert_trees_close(state, final, times=3)


@row_names
def test_no_state_is_a_state_of_zeros(row):
    inputs, state, _ = setting(row)
    run = jax.jit(ROWS[row].op)
    got, final = run(**inputs)
    assert final is None
    assert_close(got, run(**inputs, initial_state=jax.tree.map(np.zeros_like, state))[0])


@pytest.mark.parametrize("impl", ["reference", "chunk"])
def test_s06_padding_is_not_in_the_normaliser(impl):
    """elu + 1 of keys [0 (padding), 0, 1], values [7, 2, 4], query 0: 10 / 3."""
    one = lambda *x: np.array(x, np.float32).reshape(1, -1, 1, 1)  # noqa: E731
    o, state = ops.linear_attn(
        one(1, 1, 1),
        one(1, 1, 2),
        one(7, 2, 4),
        segment_ids=np.array([[0, 1, 1]]),
        output_final_state=True,
        impl=impl,
    )
    assert_close(o.ravel(), [0, 2, 10 / 3])
    assert_close(state.ravel(), [10, 3])


def test_without_a_normaliser_it_is_simple_gla_without_gates():
    inputs = qkv(LENGTH)
    got = ops.linear_attn(**inputs, normalize=False, output_final_state=True)
    assert_trees_close(got, ops.simple_gla(**inputs, output_final_state=True))


def test_constant_decays_per_head():
    """Retention: 1 - 2^(-5 - h); lightning attention: slopes that fade over the layers."""
    inputs, head = qkv(LENGTH), np.arange(HEADS)
    want, _ = ops.simple_gla(**inputs, g=np.log(1 - 2.0 ** (-5.0 - head)).astype(np.float32))
    assert_close(ops.retention(**inputs)[0], want)
    g = (-8 / HEADS * (1 - 3 / 12) * head).astype(np.float32)
    want, _ = ops.simple_gla(**inputs, g=g, scale=0.3)
    got, _ = ops.lightning_attention(**inputs, layer_idx=3, num_layers=12, scale=0.3)
    assert_close(got, want)


@pytest.mark.parametrize(
    "op, wrong, message",
    [
        (ops.hgrn, dict(x=np.zeros((2, 3))), r"x must be \[B, T, D\] .* got shape \(2, 3\)"),
        (ops.hgrn, dict(g=np.zeros((2, 3, 1))), "g must have x's shape"),
        (ops.hgrn, dict(initial_state=np.zeros(3)), r"initial_state must be \[B, D\] = \(2, 7\)"),
        (ops.hgrn, dict(impl="fast"), "impl of hgrn must be 'auto' or one of"),
        (ops.hgrn, dict(chunk_size=5), "chunk_size of hgrn must be 16, 32, 64 or 128, got 5"),
        (ops.gsa, dict(s=np.zeros((2, 37, 1, 3))), r"s must be \[B, T, H, M\] with"),
        (ops.gsa, dict(g=np.zeros(3)), "g must have s's shape"),
        (ops.gsa, dict(initial_state=(np.zeros(3), np.zeros(4))), "initial_state must be .keys"),
        (ops.linear_attn, dict(initial_state=np.zeros(3)), r"initial_state must be .*4, 6, 6\)"),
        (ops.retention, dict(v=np.zeros((2, 37, 4))), r"v must be \[B, T, H, D\]"),
    ],
)
def test_a_wrong_operand_is_named(op, wrong, message):
    rows = {ops.hgrn: "hgrn", ops.gsa: "gsa"}
    inputs = ROWS[rows.get(op, "linear_attn")].inputs(LENGTH)
    with pytest.raises(ValueError, match=message):
        op(**(inputs | wrong))
