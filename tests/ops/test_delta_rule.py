"""The delta rule against a float64 loop: gates, documents, groups, states, gradients, memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_close, assert_trees_close, random

from jla.ops import delta_rule, gated_delta_rule, l2_norm
from ops import oracle

IMPLS = ("reference", "chunk")
BATCH, LENGTH, GROUPS, HEADS, K, V = 2, 70, 3, 6, 8, 5
NAMES = ("q", "k", "v", "g", "beta", "initial_state")

# Log decays per step; with one token of -80, or hard resets, where the name says so.
GATES = {
    "none": 0.0,
    "faint": -1e-4,
    "mild": -0.1,
    "strong": -1.0,
    "very strong": -5.0,
    "near total": -20.0,
    "one of -80": -0.1,
    "mix": None,
    "resets": None,
}


def gates(regime, shape, seed=0):
    rng = np.random.default_rng(seed)
    if regime == "mix":
        g = -np.exp(rng.uniform(np.log(1e-4), np.log(80.0), shape))
        g = np.where(rng.random(shape) < 0.2, 0.0, g)
    elif regime == "resets":
        g = np.where(rng.random(shape) < 0.1, -np.inf, -0.3 * rng.random(shape))
    else:
        g = GATES[regime] * (1 + 0.1 * rng.random(shape))
    if regime == "one of -80":
        g[:, shape[1] // 2] = -80.0
    return g.astype(np.float32)


def inputs(regime="mild", length=LENGTH, batch=BATCH, groups=GROUPS, heads=HEADS, k=K, v=V):
    """Arguments by name; keys of norm 1, as every layer feeds them, strengths in (0, 2)."""
    keys = random(1, (batch, length, groups, k))
    return {
        "q": random(0, (batch, length, groups, k)),
        "k": keys / np.linalg.norm(keys, axis=-1, keepdims=True),
        "v": random(2, (batch, length, heads, v)),
        "g": gates(regime, (batch, length, heads)),
        "beta": np.random.default_rng(3).uniform(0, 2, (batch, length, heads)).astype(np.float32),
        "initial_state": random(4, (batch, heads, k, v)),
    }


def ids(length=LENGTH):
    """A row with padding everywhere and a one-token document; a row with an edge at 63, 64, 65."""
    first = np.repeat([0, 1, 0, 2, 3, 0], [3, 20, 2, length - 29, 1, 3])
    second = np.repeat([5, 4, 5, 6], [63, 1, 1, length - 65])
    return np.stack([first, second]).astype(np.int32)


def weights(length=LENGTH, heads=HEADS, v=V, k=K):
    return random(5, (BATCH, length, heads, v)), random(6, (BATCH, heads, k, v))


def run(args, weigh, segment_ids, **options):
    """Outputs, final state and all gradients of their weighted sum."""

    def loss(args):
        o, state = gated_delta_rule(
            **args, segment_ids=segment_ids, output_final_state=True, **options
        )
        return jnp.sum(o * weigh[0]) + jnp.sum(state * weigh[1]), (o, state)

    grads, (o, state) = jax.grad(loss, has_aux=True)(args)
    return {"o": o, "final_state": state} | {f"d_{name}": d for name, d in grads.items()}


STATIC = ("scale", "impl", "output_final_state")
rule, plain_rule = (jax.jit(op, static_argnames=STATIC) for op in (gated_delta_rule, delta_rule))
compiled = jax.jit(run, static_argnames=("scale", "impl", "chunk_size", "use_qk_l2norm"))


@functools.cache
def oracle_run(regime, packed):
    """The loop's outputs, and the float64 reference's gradients (shown right by the first test)."""
    args, weigh = inputs(regime), weights()
    segment_ids = ids() if packed else np.ones((BATCH, LENGTH), np.int32)
    o, states = oracle.gated_delta_rule(*args.values(), K**-0.5, segment_ids)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in args.items()}
        grads = compiled(wide, weigh, jnp.asarray(segment_ids), impl="reference")
        grads = jax.device_get(grads)
    assert_close(grads["o"], o, dtype="float64", what="float64 reference against the loop")
    return {**grads, "o": o, "final_state": states[:, -1]}


def test_gradients_of_the_float64_reference_are_finite_differences_of_the_loop(x64):
    """The oracle of every gradient below, checked along random directions of every argument."""
    shape = dict(length=9, batch=BATCH, groups=1, heads=2, k=3, v=2)
    args = {n: x.astype(np.float64) for n, x in inputs("mild", **shape).items()}
    weigh = random(5, (BATCH, 9, 2, 2)), random(6, (BATCH, 2, 3, 2))
    segment_ids = np.array([[0, 1, 1, 0, 2, 2, 3, 3, 0], [1, 1, 1, 1, 1, 1, 1, 2, 1]], np.int32)

    def loop(args):
        o, states = oracle.gated_delta_rule(*args.values(), 0.7, segment_ids)
        return np.sum(o * weigh[0]) + np.sum(states[:, -1] * weigh[1])

    got = compiled(args, weigh, segment_ids, scale=0.7, impl="reference")
    for name in NAMES:
        for seed in range(4):
            step = 1e-6 * random(seed, args[name].shape, np.float64)
            ahead, behind = ({**args, name: args[name] + s} for s in (step, -step))
            difference = (loop(ahead) - loop(behind)) / 2
            assert_close(jnp.sum(got[f"d_{name}"] * step), difference, tol=1e-6, what=name)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("regime", GATES)
@pytest.mark.parametrize("impl", IMPLS)
def test_every_gate_matches_the_loop(regime, impl, packed):
    """S09, S10: all regimes, finite forward and backward where sums of gates reach -320 and -80."""
    args, weigh = inputs(regime), weights()
    segment_ids = ids() if packed else np.ones((BATCH, LENGTH), np.int32)
    got = compiled(args, weigh, segment_ids, impl=impl)
    for name, want in oracle_run(regime, packed).items():
        assert np.all(np.isfinite(got[name])), f"{name} is not finite"
        # beta up to 2 makes the state oscillate: errors of early tokens live on undamped.
        assert_close(got[name], want, what=name, times=3)


def test_no_gate_is_gate_zero_and_is_the_delta_rule():
    args = inputs("none")
    args.pop("g")
    want, _ = oracle.gated_delta_rule(
        args["q"],
        args["k"],
        args["v"],
        np.zeros((BATCH, LENGTH, HEADS)),
        args["beta"],
        args["initial_state"],
        1.0,
        np.ones((BATCH, LENGTH)),
    )
    for impl in IMPLS:
        o, state = plain_rule(**args, scale=1.0, impl=impl)
        assert_close(o, want, times=3)
        assert state is None


def golden(q, k, log_decay):
    heads_last = lambda x: np.asarray(x, np.float32)[None, :, None]  # noqa: E731
    v, beta = [[1, 2], [3, 4]], [1, 0.5]
    g = np.log(np.asarray([1, log_decay], np.float32))
    return [heads_last(x) for x in (q, k, v, g, beta)]


@pytest.mark.parametrize("impl", IMPLS)
def test_golden_numbers(impl):
    # G1: orthogonal keys, the second token halves what the first wrote.
    args = golden([[1, 0], [1, 1]], [[1, 0], [0, 1]], 0.5)
    o, state = rule(*args, scale=1.0, output_final_state=True, impl=impl)
    assert_close(o[0, :, 0], [[1, 2], [2, 3]])
    assert_close(state[0, 0], [[0.5, 1], [1.5, 2]])
    # G2, S11: the decay comes before the error; after it would give [1.5, 2.0].
    args = golden([[1, 0], [1, 0]], [[1, 0], [1, 0]], 0.5)
    o, _ = rule(*args, scale=1.0, impl=impl)
    assert_close(o[0, 1, 0], [1.75, 2.5])
    # S09: with gate 0 it is DeltaNet.
    args = golden([[1, 0], [1, 0]], [[1, 0], [1, 0]], 1.0)
    o, _ = rule(*args, scale=1.0, impl=impl)
    plain, _ = plain_rule(*args[:3], args[4], scale=1.0, impl=impl)
    assert_close(o[0, 1, 0], [2, 3])
    assert_close(plain, o)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 17, 31, 33])
def test_short_rows_match_the_loop(length):
    args = inputs("mix", length)
    o, states = oracle.gated_delta_rule(*args.values(), K**-0.5, np.ones((BATCH, length)))
    got, state = jax.jit(
        functools.partial(gated_delta_rule, output_final_state=True, impl="chunk")
    )(**args)
    assert_close(got, o, times=3)
    assert_close(state, states[:, -1], times=3)


@pytest.mark.slow
@pytest.mark.parametrize("chunk_size", [16, 32, 64, 128])
@pytest.mark.parametrize("length", [1, 2, 3, 15, 63, 64, 65, 70, 127, 128, 129, 200])
@pytest.mark.parametrize("regime", ["faint", "mix", "resets"])
def test_every_length_and_chunk_match_the_reference(regime, length, chunk_size):
    args, weigh = inputs(regime, length), weights(length)
    segment_ids = np.ones((BATCH, length), np.int32)
    segment_ids[0, length // 2 :] = 2
    got = compiled(args, weigh, segment_ids, impl="chunk", chunk_size=chunk_size)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in args.items()}
        want = jax.device_get(compiled(wide, weigh, jnp.asarray(segment_ids), impl="reference"))
    assert_trees_close(got, want, times=5)


@pytest.mark.parametrize("groups", [1, 2, 6])
def test_value_heads_share_key_heads_by_repeating(groups):
    """Head h reads group ``h // (H // groups)``, the gradient of a group is its heads' sum."""
    args = inputs(groups=groups, length=5)
    spread = {n: np.repeat(args[n], HEADS // groups, axis=2) for n in ("q", "k")}
    got = compiled(args, weights(5), None, impl="chunk")
    want = jax.device_get(compiled({**args, **spread}, weights(5), None, impl="chunk"))
    for name in ("d_q", "d_k"):
        want[name] = want[name].reshape(BATCH, 5, groups, -1, K).sum(axis=3)
    assert_trees_close(jax.device_get(got), want)


@pytest.mark.parametrize("impl", IMPLS)
def test_states_after_chosen_tokens(impl):
    """Padding included: there the state is that of the last real token, and gradients flow."""
    args = inputs("resets")
    positions = np.array([[0, 2, 22, 23, 66, 69], [62, 63, 64, 65, 31, 32]], np.int32)
    _, states = oracle.gated_delta_rule(*args.values(), K**-0.5, ids())
    want = np.stack([states[b, at] for b, at in enumerate(positions)])
    weigh = random(7, want.shape)

    def chosen(args, impl):
        out = gated_delta_rule(
            **args, segment_ids=ids(), state_positions=positions, output_final_state=True, impl=impl
        )
        return jnp.sum(out[2] * weigh), out

    grads, (_, final, got) = jax.jit(jax.grad(functools.partial(chosen, impl=impl), has_aux=True))(
        args
    )
    assert got.dtype == jnp.float32
    assert_close(got, want, times=3)
    assert_close(final, states[:, -1], times=3)
    if impl == "reference":
        return
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in args.items()}
        exact, _ = jax.jit(jax.grad(functools.partial(chosen, impl="reference"), has_aux=True))(
            wide
        )
    assert_trees_close(grads, jax.device_get(exact), times=3)


def test_a_row_in_pieces_is_one_row():
    args, weigh = inputs("mix"), weights()
    got, want = [], compiled(args, weigh, None, impl="chunk")
    state = args.pop("initial_state")
    step = jax.jit(functools.partial(gated_delta_rule, output_final_state=True))
    for part in (slice(0, 64), slice(64, 65), slice(65, 70)):
        o, state = step(**{n: x[:, part] for n, x in args.items()}, initial_state=state)
        got.append(o)
    assert_close(np.concatenate(got, axis=1), want["o"])
    assert_close(state, want["final_state"])


def test_normalising_inside_is_normalising_before():
    """S07: queries and keys of zero have finite gradients."""
    args, weigh = inputs(), weights()
    args["k"] = 3 * args["k"]
    args["q"][:, 4], args["k"][:, 5] = 0, 0
    got = compiled(args, weigh, ids(), impl="chunk", use_qk_l2norm=True)
    before = {**args, "q": l2_norm(args["q"]), "k": l2_norm(args["k"])}
    want = compiled(before, weigh, ids(), impl="chunk")
    assert_close(got["o"], want["o"])
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(got))


def test_dtypes():
    args = {name: jnp.asarray(x, jnp.bfloat16) for name, x in inputs().items()}
    args["g"] = jnp.asarray(inputs()["g"])
    want = {name: np.asarray(x, np.float32) for name, x in args.items()}
    exact, states = oracle.gated_delta_rule(*want.values(), K**-0.5, np.ones((BATCH, LENGTH)))
    for impl in IMPLS:
        o, state = rule(**args, output_final_state=True, impl=impl)
        assert o.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        assert_close(o, exact, dtype="bfloat16")
        assert_close(state, states[:, -1], dtype="bfloat16")


def test_64_bit_inputs_give_64_bit_numbers(x64):
    args = {name: jnp.asarray(x, jnp.float64) for name, x in inputs("mix").items()}
    got = compiled(args, weights(), ids(), impl="chunk")
    want = compiled(args, weights(), ids(), impl="reference")
    assert got["final_state"].dtype == jnp.float64
    assert_trees_close(got, want)


def test_32_bit_inputs_stay_32_bit_with_64_bit_on(x64):
    args = inputs("mix")
    got = compiled(args, weights(), ids(), impl="chunk")
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(got))


def test_vmap_and_remat_and_scan():
    args = {name: np.stack([x, x[::-1]]) for name, x in inputs("mix", 20).items()}
    weigh = tuple(np.stack([w, w]) for w in weights(20))
    call = functools.partial(run, segment_ids=None, impl="chunk")
    one = jax.jit(call)
    loop = [one({n: x[i] for n, x in args.items()}, weights(20)) for i in range(2)]
    want = jax.tree.map(lambda *xs: np.stack(xs), *loop)
    assert_trees_close(jax.jit(jax.vmap(call))(args, weigh), want)
    kept = jax.checkpoint(call)
    _, scanned = jax.lax.scan(lambda _, xs: (None, kept(*xs)), None, (args, weigh))
    assert_trees_close(scanned, want)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_the_past_is_bit_identical(packed):
    args, weigh = inputs("mix"), weights()
    segment_ids = ids() if packed else None
    before = compiled(args, weigh, segment_ids, impl="chunk")["o"]
    for place in (1, 15, 16, 31, 32, 63, 64, 65, 69):
        noise = inputs("strong")
        changed = {n: x.copy() for n, x in args.items()}
        for name in set(NAMES) - {"initial_state"}:
            changed[name][:, place:] = 3 * noise[name][:, place:]
        lost = weigh[0].copy(), np.zeros_like(weigh[1])
        lost[0][:, place:] = 0
        got = compiled(changed, lost, segment_ids, impl="chunk")
        assert np.array_equal(got["o"][:, :place], before[:, :place])
        for name in set(NAMES) - {"initial_state"}:
            assert not got[f"d_{name}"][:, place:].any(), f"{name} from {place} on has a gradient"


def test_memory_of_the_backward_is_linear_in_length():
    """Temporary bytes, once per-chunk constants are off: doubling T doubles them."""
    sizes = {}
    for length in (1024, 2048, 4096):
        shape = dict(batch=1, groups=2, heads=2, k=64, v=64)
        args = jax.eval_shape(lambda: inputs(length=length, **shape))  # noqa: B023
        weigh = jax.eval_shape(
            lambda: (jnp.zeros((1, length, 2, 64)), jnp.zeros((1, 2, 64, 64)))  # noqa: B023
        )
        program = compiled.lower(args, weigh, None, impl="chunk").compile()
        sizes[length] = program.memory_analysis().temp_size_in_bytes
    assert sizes[4096] - sizes[2048] < 2.1 * (sizes[2048] - sizes[1024])
    # q, k, v, o and their gradients are 512 numbers a token and head, a chunk's matrices and states
    # a small multiple of that; a state kept per token would be 4096 more.
    per_token = (sizes[4096] - sizes[2048]) / (2048 * 2 * 4)
    assert per_token < 2048, f"{per_token:.0f} numbers per token and head"
