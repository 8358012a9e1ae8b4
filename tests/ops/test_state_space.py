"""State space models: Mamba's scan, Mamba-2's SSD and Mamba-3 against loops in float64."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla import ops
from jla.ops import Mamba3State
from ops import oracle

BATCH, LENGTH, HEADS, GROUPS, RANKS, N, P = 2, 37, 4, 2, 3, 6, 5
PIECES = (slice(0, 16), slice(16, 17), slice(17, 19), slice(19, LENGTH))
POSITIONS = np.array([[1, 3, 11, 36], [15, 16, 17, 30]], np.int32)


def steps(seed, shape, largest=30.0):
    """Step sizes from nothing to so large that the state is forgotten."""
    return np.exp(np.random.default_rng(seed).uniform(-9, np.log(largest), shape)).astype("f")


def rates(seed, shape):
    """Decay rates from faint to 80, some exactly 0."""
    rng = np.random.default_rng(seed)
    rate = -np.exp(rng.uniform(np.log(1e-3), np.log(80.0), shape))
    return np.where(rng.random(shape) < 0.2, 0.0, rate).astype(np.float32)


def scan_inputs(length):
    return dict(
        x=random(0, (BATCH, length, P)),
        dt=steps(1, (BATCH, length, P)),
        A=rates(2, (P, N)),
        B=random(3, (BATCH, length, N)),
        C=random(4, (BATCH, length, N)),
        D=random(5, (P,)),
    )


def ssd_inputs(length):
    return dict(
        x=random(0, (BATCH, length, HEADS, P)),
        dt=steps(1, (BATCH, length, HEADS)),
        A=rates(2, (HEADS,)),
        B=random(3, (BATCH, length, GROUPS, N)),
        C=random(4, (BATCH, length, GROUPS, N)),
        D=random(5, (HEADS,)),
    )


def mamba3_inputs(length, ranks):
    tokens = (BATCH, length, HEADS)
    return dict(
        x=random(0, (*tokens, P)),
        # Float32 knows an angle of 10 radians to 1e-6.
        dt=steps(1, tokens, 2.0),
        A=rates(2, tokens),
        B=random(3, (*tokens, ranks, N)),
        C=random(4, (*tokens, ranks, N)),
        trap=random(5, tokens, scale=4.0),
        angles=random(6, (BATCH, length, 2)),
        D=random(7, (HEADS,)),
        mimo_x=random(8, (HEADS, ranks, P)),
    )


def mamba3_state(ranks):
    return Mamba3State(
        random(10, (BATCH, HEADS, 2)),
        random(11, (BATCH, HEADS, N, P)),
        random(12, (BATCH, HEADS, ranks, N)),
        random(13, (BATCH, HEADS, P)),
    )


@dataclass(frozen=True)
class Row:
    """An op, its inputs by name, a state to start from, and the loop in float64."""

    op: Any
    inputs: Any
    state: Any
    loop: Any


ROWS = {
    "selective_scan": Row(
        ops.selective_scan, scan_inputs, random(9, (BATCH, P, N)), oracle.selective_scan
    ),
    "ssd": Row(ops.ssd, ssd_inputs, random(9, (BATCH, HEADS, N, P)), oracle.ssd),
    "mamba3": Row(
        ops.mamba3,
        functools.partial(mamba3_inputs, ranks=1),
        mamba3_state(1),
        functools.partial(oracle.mamba3, interleaved=True),
    ),
    "mamba3-ranks": Row(
        functools.partial(ops.mamba3, interleaved=False),
        functools.partial(mamba3_inputs, ranks=RANKS),
        mamba3_state(RANKS),
        functools.partial(oracle.mamba3, interleaved=False),
    ),
}
row_names = pytest.mark.parametrize("row", ROWS)


def ids():
    """Padding left, inside and right, a one-token document; and an id used again."""
    first = np.repeat([0, 1, 0, 2, 3, 0], [2, 9, 2, LENGTH - 17, 1, 3])
    second = np.repeat([5, 4, 5], [16, 1, LENGTH - 17])
    return np.stack([first, second]).astype(np.int32)


def seen(state):
    """A state as it acts: an angle and the same one a turn further are equal."""
    if isinstance(state, Mamba3State):
        angle = np.asarray(state.angle)
        return (np.cos(angle), np.sin(angle), *state[1:])
    return state


def call(inputs, state, weigh, segment_ids, positions, name, impl):
    """Outputs, states and all gradients of a weighted sum of them."""

    def loss(inputs, state):
        out = ROWS[name].op(
            **inputs,
            initial_state=state,
            output_final_state=True,
            state_positions=positions,
            segment_ids=segment_ids,
            chunk_size=None if impl == "reference" else 16,
            impl=impl,
        )
        return sum(jnp.sum(x * w) for x, w in zip(jax.tree.leaves(out), weigh, strict=True)), out

    grads, out = jax.grad(loss, argnums=(0, 1), has_aux=True)(inputs, state)
    return dict(o=out[0], final=out[1], states=out[2], d_inputs=grads[0], d_state=grads[1])


compiled = jax.jit(call, static_argnames=("name", "impl"))


def weights(name):
    row = ROWS[name]
    out = jax.eval_shape(
        functools.partial(row.op, output_final_state=True),
        **row.inputs(LENGTH),
        initial_state=row.state,
        state_positions=POSITIONS,
    )
    return [random(20 + i, leaf.shape) for i, leaf in enumerate(jax.tree.leaves(out))]


@functools.cache
def exact(name):
    """The loop's numbers, and gradients of the float64 reference where it agrees with the loop."""
    row = ROWS[name]
    outputs, states = row.loop(*row.inputs(LENGTH).values(), row.state, ids())
    if isinstance(row.state, Mamba3State):
        states = Mamba3State(*states)
    with jax.enable_x64(True):
        wide = jax.tree.map(
            lambda x: jnp.asarray(x, jnp.float64), (row.inputs(LENGTH), row.state, weights(name))
        )
        got = jax.device_get(compiled(*wide, ids(), POSITIONS, name=name, impl="reference"))
    assert_close(got["o"], outputs, dtype="float64", what="o of the float64 reference")
    chosen = jax.tree.map(lambda x: np.stack([x[b, at] for b, at in enumerate(POSITIONS)]), states)
    final = jax.tree.map(lambda x: x[:, -1], states)
    assert_trees_close(seen(got["states"]), seen(chosen), dtype="float64", what="states")
    assert_trees_close(seen(got["final"]), seen(final), dtype="float64", what="final state")
    return got


@row_names
def test_the_reference_is_the_loop(row):
    exact(row)


@row_names
def test_the_chunk_form_is_the_reference(row):
    """Outputs, states and every gradient, packed and padded, over all kinds of steps and rates: a
    token may keep all or fade by 2400 (S09, S10)."""
    inputs, state, weigh = ROWS[row].inputs(LENGTH), ROWS[row].state, weights(row)
    got = jax.device_get(compiled(inputs, state, weigh, ids(), POSITIONS, name=row, impl="chunk"))
    want = dict(exact(row))
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))
    for name in ("final", "states"):
        got[name], want[name] = seen(got[name]), seen(want[name])
    assert_trees_close(got, want, times=3)


@row_names
def test_the_past_is_bit_identical(row):
    inputs, state, weigh = ROWS[row].inputs(LENGTH), ROWS[row].state, weights(row)
    run = functools.partial(compiled, name=row, impl="chunk")
    before = run(inputs, state, weigh, ids(), POSITIONS)["o"]
    for place in (1, 15, 16, 17, 33):
        changed = {name: x.copy() for name, x in inputs.items()}
        moving = [name for name, x in inputs.items() if x.shape[:2] == (BATCH, LENGTH)]
        for name in moving:
            changed[name][:, place:] = np.roll(inputs[name], 1, axis=1)[:, place:]
        lost = [np.zeros_like(w) for w in weigh]
        lost[0][:, :place] = weigh[0][:, :place]
        got = run(changed, state, lost, ids(), POSITIONS)
        assert np.array_equal(got["o"][:, :place], before[:, :place])
        for name in moving:
            assert not np.any(got["d_inputs"][name][:, place:]), f"{name} from {place} on"


@row_names
@pytest.mark.parametrize("packed", [False, True])
def test_a_row_in_pieces_is_one_row(row, packed):
    """Cut anywhere, with the state carried; packed pieces begin inside of a document."""
    inputs, state = ROWS[row].inputs(LENGTH), ROWS[row].state
    segment_ids = np.where(np.arange(LENGTH) % 5 == 3, 0, 1)[None].repeat(BATCH, 0)
    run = jax.jit(functools.partial(ROWS[row].op, output_final_state=True))
    want, final = run(**inputs, initial_state=state, segment_ids=segment_ids if packed else None)
    got = []
    for piece in PIECES:
        part = {k: x[:, piece] if x.shape[:2] == (BATCH, LENGTH) else x for k, x in inputs.items()}
        labels = segment_ids[:, piece] if packed else None
        o, state = run(**part, initial_state=state, segment_ids=labels)
        got.append(o)
    assert_close(np.concatenate(got, axis=1), want, times=3)
    assert_trees_close(seen(state), seen(final), times=3)


@row_names
def test_a_row_of_padding_keeps_the_state(row):
    inputs, state = ROWS[row].inputs(3), ROWS[row].state
    o, final = jax.jit(functools.partial(ROWS[row].op, output_final_state=True))(
        **inputs, initial_state=state, segment_ids=np.zeros((BATCH, 3), np.int32)
    )
    assert not np.any(o)
    assert_trees_close(seen(final), seen(state))


def test_ssd_is_simple_gla_with_other_names():
    inputs = ssd_inputs(LENGTH)
    x, dt, A, B, C, D = inputs.values()
    bias = random(6, (HEADS,))
    got, _ = ops.ssd(**inputs, dt_bias=bias, dt_softplus=True, dt_limit=(0.1, 2.0))
    step = np.clip(np.log1p(np.exp(dt + bias)), 0.1, 2.0)
    want, _ = ops.simple_gla(C, B, step[..., None] * x, step * A, scale=1.0)
    assert_close(got, want + x * D[:, None])
    # S16: a skip per channel.
    each, _ = ops.ssd(x, dt, A, B, C, np.repeat(D[:, None], P, axis=1))
    shared, _ = ops.ssd(x, dt, A, B, C, D)
    assert_close(each, shared)
    assert ops.explain("ssd", *inputs.values()).impl == "chunk"


@pytest.mark.parametrize(
    ("op", "wrong", "named"),
    [
        (ops.ssd, dict(x=np.zeros(3)), "x must be [B, T, H, P]"),
        (ops.ssd, dict(B=np.zeros((BATCH, LENGTH, HEADS + 1, N))), "B must be [B, T, G, N]"),
        (ops.ssd, dict(C=np.zeros((BATCH, LENGTH, 1, N + 1))), "C must be [B, T, G, N]"),
        (ops.ssd, dict(A=np.zeros(HEADS + 1)), "A must be [H]"),
        (ops.ssd, dict(D=np.zeros((HEADS, P + 1))), "D must be [H] or [H, P]"),
        (ops.selective_scan, dict(A=np.zeros(N)), "A must be [D, N]"),
        (ops.selective_scan, dict(B=np.zeros(3)), "B must be [B, T, N]"),
        (ops.selective_scan, dict(initial_state=np.zeros(3)), "initial_state must be [B, D, N]"),
        (ops.selective_scan, dict(chunk_size=5), "chunk_size of selective_scan"),
        (ops.mamba3, dict(B=np.zeros((2, 3))), "B must be [B, T, H, R, N]"),
        (ops.mamba3, dict(angles=np.zeros((BATCH, LENGTH, N))), "angles must be"),
        (ops.mamba3, dict(mimo_x=None), "mimo_x must be given"),
        (ops.mamba3, dict(trap=np.zeros(3)), "trap must be [B, T, H]"),
    ],
)
def test_a_wrong_operand_is_named(op, wrong, named):
    inputs = {
        ops.ssd: ssd_inputs,
        ops.selective_scan: scan_inputs,
        ops.mamba3: functools.partial(mamba3_inputs, ranks=RANKS),
    }[op](LENGTH)
    with pytest.raises(ValueError) as error:
        op(**(inputs | wrong))
    assert named in str(error.value)
