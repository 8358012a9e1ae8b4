"""Every recurrence with a matrix state, one row each, asked the same questions.

The delta rule with a gate per head has a file of its own, with sizes and memory on top.
"""

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

BATCH, LENGTH, GROUPS, HEADS, K, V = 2, 37, 2, 4, 6, 5
PIECES = (slice(0, 16), slice(16, 17), slice(17, 19), slice(19, LENGTH))


def unit(seed, shape):
    x = random(seed, shape)
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def strength(seed, shape):
    return np.random.default_rng(seed).uniform(0, 1, shape).astype(np.float32)


def gate(seed, shape):
    """Log decays from faint to 80 a step, some exactly 0, some hard resets."""
    rng = np.random.default_rng(seed)
    g = -np.exp(rng.uniform(np.log(1e-4), np.log(80.0), shape))
    g = np.where(rng.random(shape) < 0.2, 0.0, g)
    return np.where(rng.random(shape) < 0.05, -np.inf, g).astype(np.float32)


def keyed(length):
    return (BATCH, length, GROUPS, K)


def headed(length, *rest):
    return (BATCH, length, HEADS, *rest)


def qkv(length, writes=1):
    return {
        "q": random(0, keyed(length)),
        "k": unit(1, keyed(length * writes)),
        "v": random(2, headed(length * writes, V)),
    }


# One token of one head in numpy: S [K, V] and the token's operands to (read before scaling, S).
def simple_gla_step(S, q, k, v, g):
    S = fade(g, S) + np.outer(k, v)
    return S.T @ q, S


def delta_step(S, q, k, v, g, erase, write):
    S = fade(g, S)
    S = S + np.outer(k, write * v - S.T @ (erase * k))
    return S.T @ q, S


def dplr_step(S, q, k, v, a, b, g):
    S = fade(g, S) + np.outer(b, S.T @ a) + np.outer(k, v)
    return S.T @ q, S


def rwkv6_step(S, r, k, v, w, u):
    return (S + np.outer(u * k, v)).T @ r, fade(w, S) + np.outer(k, v)


def fade(g, S):
    return np.where(np.isfinite(g), np.exp(g), 0.0).reshape(-1, 1) * S


@dataclass(frozen=True)
class Row:
    """``inputs(length)`` by name, in the op's order, and the numpy step on them."""

    op: Any
    inputs: Any
    step: Any
    writes: int = 1


ROWS = {
    "simple_gla": Row(
        ops.simple_gla, lambda t: qkv(t) | {"g": gate(3, headed(t))}, simple_gla_step
    ),
    "gla": Row(ops.gla, lambda t: qkv(t) | {"g": gate(3, headed(t, K))}, simple_gla_step),
    "gated_delta_rule": Row(
        ops.gated_delta_rule,
        lambda t: qkv(t) | {"g": gate(3, headed(t)), "beta": strength(4, headed(t))},
        lambda S, q, k, v, g, beta: delta_step(S, q, k, v, g, beta, beta),
    ),
    "kda": Row(
        ops.kda,
        lambda t: qkv(t) | {"g": gate(3, headed(t, K)), "beta": strength(4, headed(t))},
        lambda S, q, k, v, g, beta: delta_step(S, q, k, v, g, beta, beta),
    ),
    "gdn2": Row(
        ops.gdn2,
        lambda t: (
            qkv(t)
            | {
                "g": gate(3, headed(t, K)),
                "b": strength(4, headed(t, K)),
                "w": strength(5, headed(t, V)),
            }
        ),
        delta_step,
    ),
    "dplr_delta_rule": Row(
        ops.dplr_delta_rule,
        lambda t: (
            qkv(t)
            | {
                "a": -unit(3, headed(t, K)),
                "b": unit(3, headed(t, K)) * strength(4, headed(t, 1)),
                "g": -strength(5, headed(t, K)),
            }
        ),
        dplr_step,
    ),
    "iplr_delta_rule": Row(
        ops.iplr_delta_rule,
        lambda t: (
            qkv(t)
            | {
                "a": -unit(3, headed(t, K)),
                "b": unit(3, headed(t, K)) * strength(4, headed(t, 1)),
            }
        ),
        lambda S, q, k, v, a, b: dplr_step(S, q, k, v, a, b, 0.0),
    ),
    "rwkv7": Row(
        ops.rwkv7,
        lambda t: dict(
            r=random(0, keyed(t)),
            w=-strength(5, headed(t, K)),
            k=unit(1, keyed(t)),
            v=random(2, headed(t, V)),
            a=-unit(3, headed(t, K)),
            b=unit(3, headed(t, K)) * strength(4, headed(t, 1)),
        ),
        lambda S, r, w, k, v, a, b: dplr_step(S, r, k, v, a, b, w),
    ),
    "rwkv6": Row(
        ops.rwkv6,
        lambda t: dict(
            r=random(0, keyed(t)),
            k=unit(1, keyed(t)),
            v=random(2, headed(t, V)),
            w=gate(3, headed(t, K)),
            u=random(4, (HEADS, K)),
        ),
        rwkv6_step,
    ),
}
row_names = pytest.mark.parametrize("row", ROWS)


def ids():
    """Padding left, inside and right, a one-token document; and an id used again."""
    first = np.repeat([0, 1, 0, 2, 3, 0], [2, 9, 2, LENGTH - 17, 1, 3])
    second = np.repeat([5, 4, 5], [16, 1, LENGTH - 17])
    return np.stack([first, second]).astype(np.int32)


def loop(row, inputs, state, scale, segment_ids):
    """Outputs ``[B, T, H, V]`` and the states after every token, in float64."""
    wide = {name: np.asarray(x, np.float64) for name, x in inputs.items()}
    outputs = np.zeros((BATCH, LENGTH, HEADS, V))
    states = np.zeros((BATCH, LENGTH, HEADS, K, V))
    for b in range(BATCH):
        real, starts = oracle.documents(segment_ids[b])
        for h in range(HEADS):
            S = np.asarray(state[b, h], np.float64)
            for t in range(LENGTH):
                if starts[t]:
                    S = np.zeros_like(S)
                if real[t]:
                    read, S = row.step(S, *(token(x, b, t, h) for x in wide.values()))
                    outputs[b, t, h] = scale * read
                states[b, t, h] = S
    return outputs, states


def token(x, b, t, h):
    if x.ndim == 2:
        return x[h]
    return x[b, t, h // (HEADS // x.shape[2])]


def call(inputs, state, weigh, segment_ids, positions, name, impl):
    """Outputs, states and all gradients of a weighted sum of them."""

    def loss(inputs, state):
        out = ROWS[name].op(
            **inputs,
            scale=0.7,
            initial_state=state,
            output_final_state=True,
            state_positions=positions,
            segment_ids=segment_ids,
            chunk_size=None if impl == "reference" else 16,
            impl=impl,
        )
        return sum(jnp.sum(x * w) for x, w in zip(out, weigh, strict=True)), out

    grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, state)
    return dict(o=out[0], final=out[1], states=out[2], d_inputs=grads[0], d_state=grads[1])


compiled = jax.jit(call, static_argnames=("name", "impl"))
POSITIONS = np.array([[0, 3, 11, 36], [15, 16, 17, 30]], np.int32)


def setting():
    state = random(7, (BATCH, HEADS, K, V))
    shapes = (BATCH, LENGTH, HEADS, V), state.shape, (BATCH, 4, *state.shape[1:])
    return state, tuple(random(8 + i, shape) for i, shape in enumerate(shapes))


@functools.cache
def exact(name):
    """The loop's numbers, and gradients of the float64 reference where it agrees with the loop."""
    inputs, (state, weigh) = ROWS[name].inputs(LENGTH), setting()
    outputs, states = loop(ROWS[name], inputs, state, 0.7, ids())
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, state, weigh))
        got = jax.device_get(compiled(*wide, ids(), POSITIONS, name=name, impl="reference"))
    assert_close(got["o"], outputs, dtype="float64", what="o of the float64 reference")
    chosen = np.stack([states[b, at] for b, at in enumerate(POSITIONS)])
    assert_close(got["states"], chosen, dtype="float64", what="states of the float64 reference")
    assert_close(got["final"], states[:, -1], dtype="float64", what="its final state")
    return got


@row_names
def test_the_reference_is_the_loop(row):
    exact(row)


@row_names
def test_the_chunk_form_is_the_reference(row):
    """Outputs, states and every gradient, packed and padded, over all kinds of gates."""
    inputs, (state, weigh) = ROWS[row].inputs(LENGTH), setting()
    got = jax.device_get(compiled(inputs, state, weigh, ids(), POSITIONS, name=row, impl="chunk"))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
    assert_trees_close(got, exact(row), times=3)


@pytest.mark.parametrize("row", ["gated_delta_rule", "dplr_delta_rule"])
def test_chunks_prepared_side_by_side(row, monkeypatch):
    """As on devices that are not CPUs."""
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    inputs, (state, weigh) = ROWS[row].inputs(LENGTH), setting()
    fn = jax.jit(functools.partial(call, name=row, impl="chunk"))
    got = jax.device_get(fn(inputs, state, weigh, ids(), POSITIONS))
    assert_trees_close(got, exact(row), times=3)


REGIMES = {
    "none": 0.0,
    "faint": -1e-4,
    "strong": -1.0,
    "very strong": -5.0,  # -80 in a chunk of 16
    "near total": -20.0,  # -320 in a chunk of 16
    "reset": -np.inf,
}
GATES = dict.fromkeys(
    ["simple_gla", "gla", "gated_delta_rule", "kda", "gdn2", "dplr_delta_rule"], "g"
) | dict.fromkeys(["rwkv6", "rwkv7"], "w")


@pytest.mark.parametrize("row", GATES)
def test_one_gate_for_all_tokens(row):
    """S09, S10: no sum of gates is too small or too large, forward and backward; one token forgets
    80 at once, and strengths are 0 or 1 exactly."""
    inputs, (state, weigh) = ROWS[row].inputs(LENGTH), setting()
    for name in {"beta", "b", "w"} & inputs.keys() - {GATES[row]}:
        if row in ("gated_delta_rule", "kda", "gdn2"):
            inputs[name] = np.round(inputs[name])
    for regime, decay in REGIMES.items():
        gates = np.full_like(inputs[GATES[row]], decay)
        if decay < 0:
            gates[:, 20] = -80.0
        inputs[GATES[row]] = gates
        with jax.enable_x64(True):
            wide = jax.tree.map(lambda x: jnp.asarray(x, jnp.float64), (inputs, state, weigh))
            want = jax.device_get(compiled(*wide, ids(), POSITIONS, name=row, impl="reference"))
        got = jax.device_get(
            compiled(inputs, state, weigh, ids(), POSITIONS, name=row, impl="chunk")
        )
        assert_trees_close(got, want, times=3, what=regime)


@row_names
def test_the_past_is_bit_identical(row):
    inputs, (state, weigh) = ROWS[row].inputs(LENGTH), setting()
    run = functools.partial(compiled, name=row, impl="chunk")
    before = run(inputs, state, weigh, ids(), POSITIONS)["o"]
    for place in (1, 15, 16, 17, 33):
        changed = {name: x.copy() for name, x in inputs.items()}
        for name, x in changed.items():
            if x.ndim > 2:
                x[:, place:] = np.roll(inputs[name], 1, axis=1)[:, place:]
        lost = tuple(np.zeros_like(w) for w in weigh)
        lost[0][:, :place] = weigh[0][:, :place]
        got = run(changed, state, lost, ids(), POSITIONS)
        assert np.array_equal(got["o"][:, :place], before[:, :place])
        for name, x in got["d_inputs"].items():
            assert x.ndim == 2 or not np.any(x[:, place:]), f"{name} from {place} on"


@row_names
def test_a_row_in_pieces_is_one_row(row):
    inputs, (state, _) = ROWS[row].inputs(LENGTH), setting()
    run = jax.jit(functools.partial(ROWS[row].op, scale=0.7, output_final_state=True))
    want, final = run(**inputs, initial_state=state)
    got = []
    for piece in PIECES:
        part = {name: x if x.ndim == 2 else x[:, piece] for name, x in inputs.items()}
        o, state = run(**part, initial_state=state)
        got.append(o)
    assert_close(np.concatenate(got, axis=1), want, times=3)
    assert_close(state, final, times=3)


@pytest.mark.parametrize(
    "row", [pytest.param(r, marks=() if r == "simple_gla" else pytest.mark.slow) for r in ROWS]
)
def test_s13_seventy_thousand_documents(row):
    """Of two tokens each, in one row or as rows: no count or index is a 16-bit one."""
    count = 70_000
    packed = {n: x if x.ndim == 2 else x[:1] for n, x in ROWS[row].inputs(2 * count).items()}
    rows = {n: x if x.ndim == 2 else x.reshape(count, 2, *x.shape[2:]) for n, x in packed.items()}
    run = jax.jit(ROWS[row].op, static_argnames="impl")
    segment_ids = np.arange(2 * count, dtype=np.int32)[None] // 2 + 1
    got, _ = run(**packed, segment_ids=segment_ids, impl="chunk")
    want, _ = run(**rows, impl="reference")
    assert_close(got.reshape(want.shape), want, times=3)


@pytest.mark.parametrize("householder", [1, 3])
def test_a_delta_product_is_several_delta_rules(householder):
    """Against the loop: one decay, n writes, one read a token, in packed rows."""
    inputs = qkv(LENGTH, householder)
    inputs |= dict(g=gate(3, headed(LENGTH)), beta=strength(4, headed(LENGTH * householder)))
    state, _ = setting()

    def step(S, q, k, v, g, beta):
        for i in range(householder):
            read, S = delta_step(S, q, k[i], v[i], g if i == 0 else 0.0, beta[i], beta[i])
        return read, S

    def grouped(name, x):
        x = np.asarray(x)
        if name not in ("k", "v", "beta"):
            return x
        return np.moveaxis(x.reshape(BATCH, LENGTH, householder, *x.shape[2:]), 2, 3)

    by_token = {name: grouped(name, x) for name, x in inputs.items()}
    outputs, states = loop(Row(None, None, step), by_token, state, 0.7, ids())
    product = functools.partial(
        ops.gated_delta_product, num_householder=householder, scale=0.7, output_final_state=True
    )
    got = jax.jit(product)(
        **inputs, initial_state=state, segment_ids=ids(), state_positions=POSITIONS
    )
    assert_close(got[0], outputs, times=3)
    assert_close(got[1], states[:, -1], times=3)
    chosen = np.stack([states[b, at] for b, at in enumerate(POSITIONS)])
    assert_close(got[2], chosen, times=3)


@pytest.mark.parametrize("impl", ["reference", "chunk"])
def test_golden_numbers(impl):
    one = lambda x, *last: np.asarray(x, np.float32).reshape(1, -1, 1, *last)  # noqa: E731
    # G3: KDA forgets per channel before it compares.
    o, state = ops.kda(
        one([[1, 1], [1, 1]], 2),
        one([[0.6, 0.8], [1, 0]], 2),
        one([5, 1], 1),
        np.log(one([[1, 1], [0.5, 0.25]], 2)),
        one([1, 1]),
        scale=1.0,
        output_final_state=True,
        impl=impl,
    )
    assert_close(o.ravel(), [7, 2])
    assert_close(state.ravel(), [1, 1])
    # G4: RWKV-7, whose published state is [V, K].
    state = np.array([[1, 2], [3, 4]], np.float32).T.reshape(1, 1, 2, 2)
    o, _ = ops.rwkv7(
        one([1, 1], 2),
        one([-0.6065306597 * 0.5] * 2, 2),
        one([0, 1], 2),
        one([2, 3], 2),
        one([-1, 0], 2),
        one([0.5, 0], 2),
        initial_state=state,
        impl=impl,
    )
    assert_close(o.ravel(), [3.7152091, 6.6688221])
    # S05: padding decays nothing.
    o, _ = ops.simple_gla(
        one([1, 1, 1], 1),
        one([1, 9, 1], 1),
        one([2, 9, 4], 1),
        np.log(one([0.5, 0.5, 0.5])),
        scale=1.0,
        segment_ids=np.array([[1, 0, 1]]),
        impl=impl,
    )
    assert_close(o.ravel(), [2, 0, 5])


def test_gates_that_never_change_are_given_per_head():
    inputs = qkv(LENGTH)
    g = -np.linspace(0.01, 0.5, HEADS, dtype=np.float32)
    got, _ = ops.simple_gla(*inputs.values(), g)
    want, _ = ops.simple_gla(*inputs.values(), np.broadcast_to(g, headed(LENGTH)))
    assert_close(got, want)
    ungated, _ = ops.simple_gla(*inputs.values())
    zeros, _ = ops.simple_gla(*inputs.values(), np.zeros(headed(LENGTH), np.float32))
    assert_close(ungated, zeros)


@pytest.mark.parametrize(
    "op, extra, named",
    [
        (ops.simple_gla, dict(g=np.zeros(HEADS + 1)), "g must be"),
        (ops.gla, dict(g=np.zeros(headed(LENGTH))), "g must be [B, T, H, K]"),
        (ops.kda, dict(g=np.zeros(headed(LENGTH, K)), beta=np.zeros(3)), "beta must be"),
        (
            ops.gdn2,
            dict(g=np.zeros(headed(LENGTH, K)), b=np.zeros(headed(LENGTH, K)), w=np.zeros(2)),
            "w must have v's shape",
        ),
        (ops.dplr_delta_rule, dict(a=np.zeros(3), b=np.zeros(3)), "a must be"),
        (ops.rwkv6, dict(w=np.zeros(headed(LENGTH, K)), u=np.zeros(K)), "u must be"),
        (
            ops.gated_delta_product,
            dict(g=None, beta=np.zeros(headed(LENGTH)), num_householder=2),
            "num_householder",
        ),
    ],
)
def test_a_wrong_operand_is_named(op, extra, named):
    q, k, v = qkv(LENGTH).values()
    with pytest.raises(ValueError) as error:
        op(q, k, v, **extra)
    assert named in str(error.value)
