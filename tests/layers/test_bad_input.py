"""Mixers name the argument, what was given and what is accepted; nothing is half done."""

import functools

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import HIDDEN, rows
from flax import nnx
from helpers import random

from jla.layers import (
    KDA,
    Attention,
    DeltaNet,
    GatedDeltaNet,
    GatedDeltaProduct,
    GatedLinearAttention,
    GatedSlotAttention,
    HGRN2Attention,
    HGRNAttention,
    LinearAttention,
    MultiScaleRetention,
)

B, T = 3, 5

CALLS = {
    "width": (lambda x: ((x[..., :7],), {}), r"inputs_q must be \[..., T, 24\], got .*5, 7\)"),
    "rank": (lambda x: ((x[0, 0],), {}), r"inputs_q must be \[..., T, 24\], got shape \(24,\)"),
    "no token": (lambda x: ((x[:, :0],), {}), r"inputs_q must not be empty, got .*\(3, 0, 24\)"),
    "no row": (lambda x: ((x[:0],), {}), r"inputs_q must not be empty, got shape \(0, 5, 24\)"),
    "other keys": (lambda x: ((x, x + 0), {}), "inputs_k must be inputs_q itself or None"),
    "other values": (lambda x: ((x, x, x + 0), {}), "inputs_v must be inputs_q itself or None"),
    "future": (lambda x: ((x,), {"mask": np.ones((T, T))}), "mask is not causal"),
    "weights": (lambda x: ((x,), {"sow_weights": True}), "sow_weights=True: .*no attention weig"),
    "positions twice": (
        lambda x: ((x,), {"positions": np.arange(T), "input_positions": np.arange(T)}),
        "give positions or input_positions, not both",
    ),
    "shape of ids": (
        lambda x: ((x,), {"segment_ids": np.ones((B, 4), int)}),
        r"segment_ids must be \(3, 5\), got \(3, 4\)",
    ),
    "ids of one row": (
        lambda x: ((x,), {"segment_ids": np.ones(T, int)}),
        r"segment_ids must be \(3, 5\), got \(5,\)",
    ),
    "negative ids": (
        lambda x: ((x,), {"segment_ids": np.full((B, T), -2)}),
        r"segment_ids must be >= 0 .*got a smallest id of -2",
    ),
}


@rows("bad calls", variants=False)
def test_a_bad_call_is_named(row):
    mixer = cases.build(row)
    x = random(0, (B, T, HIDDEN))
    for name, (make, message) in CALLS.items():
        args, options = make(x)
        with pytest.raises(ValueError, match=message):
            mixer(*args, **options)
            pytest.fail(name)
    with pytest.raises(TypeError, match="segment_ids must be integers .*float32"):
        mixer(x, segment_ids=np.ones((B, T), np.float32))


@functools.cache
def new_caches():
    return {name: new_cache(cases.build(name)) for name in cases.MIXERS}


def new_cache(mixer, batch=B):
    return jax.eval_shape(lambda: mixer.new_cache(batch, 8))


def test_an_input_that_a_mixer_does_not_take_is_named():
    x, bound = random(0, (B, T, HIDDEN)), np.full((2 * HIDDEN,), 0.5, np.float32)
    assert cases.build("hgrn")(x, lower_bound=bound).shape == x.shape
    with pytest.raises(TypeError, match="GatedDeltaNet takes nothing besides, got .'lower_bound'"):
        cases.build("gdn")(x, lower_bound=bound)
    with pytest.raises(TypeError, match="HGRNAttention takes .'lower_bound'. besides, got .'mode'"):
        cases.build("hgrn")(x, mode=bound)


@rows("bad calls", variants=False)
def test_a_cache_of_another_mixer_or_batch_is_named(row):
    mixer = cases.build(row)
    x = random(0, (B, T, HIDDEN))
    cache = new_cache(mixer)

    def call(cache):
        jax.eval_shape(lambda x, cache: mixer(x, cache=cache), x, cache)

    call(cache)
    for batch in (1, 2, 6):
        with pytest.raises(ValueError, match=f"with a batch of {B} needs"):
            call(new_cache(mixer, batch))
    with pytest.raises(ValueError, match="cache does not belong to .*its entries are"):
        call({**cache, "more": np.zeros(B)})
    with pytest.raises(ValueError, match="cache does not belong to .*its entries are tuple"):
        call((cache,))
    for name, stranger in new_caches().items():
        same = jax.tree.map(jnp.shape, stranger) == jax.tree.map(jnp.shape, cache)
        growing = name.startswith("attention") and row.startswith("attention")
        if same or growing:
            continue
        with pytest.raises(ValueError, match="cache"):
            call(stranger)


@rows("bad calls", variants=False)
def test_a_refused_call_leaves_the_decoding_cache_alone(row):
    mixer = cases.build(row)
    x = random(0, (B, T, HIDDEN))
    mixer.init_cache((B, 8, HIDDEN))
    nnx.jit(lambda m, x: m(x, decode=True))(mixer, x[:, :1])
    before = jax.tree.map(np.asarray, nnx.state(mixer, nnx.Cache))
    with pytest.raises(ValueError, match="with a batch of 2 needs"):
        mixer(x[:2], decode=True)
    with pytest.raises(ValueError, match="segment_ids"):
        mixer(x, decode=True, segment_ids=np.full((B, T), -1))
    after = nnx.state(mixer, nnx.Cache)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, after))


CONSTRUCTORS = {
    "v heads": (
        GatedDeltaNet,
        dict(num_heads=4, num_v_heads=6),
        "num_v_heads=6 must be a multiple of num_heads=4",
    ),
    "expansion": (
        GatedDeltaNet,
        dict(head_dim=8, expand_v=0.3),
        "expand_v=0.3 times head_dim=8 must be a whole number",
    ),
    "mode": (GatedDeltaNet, dict(mode="scan"), "mode must be 'chunk' or 'fused_recurrent', got"),
    "gate": (
        GatedDeltaNet,
        dict(output_gate_activation="relu"),
        r"activation must be one of \['sigmoid', 'silu', 'swish'\], got 'relu'",
    ),
    "share of the width": (
        GatedLinearAttention,
        dict(num_heads=5),
        "expand_k=0.5 times hidden_size=24 must be a positive multiple of num_heads=5, got 12.0",
    ),
    "fewer heads": (
        LinearAttention,
        dict(num_heads=3, num_kv_heads=2),
        "num_heads=3 must be a multiple of num_kv_heads=2",
    ),
    "gla's mode": (GatedLinearAttention, dict(mode="scan"), "mode must be one of .*got 'scan'"),
    "gate_fn": (
        GatedLinearAttention,
        dict(gate_fn="powlu"),
        r"gate_fn must be one of \['exact_gelu', .*got 'powlu'",
    ),
    "feature map of a number": (
        MultiScaleRetention,
        dict(feature_map="dpfp"),
        "feature_map must be one of .*got 'dpfp'",
    ),
    "odd keys": (
        MultiScaleRetention,
        dict(num_heads=8),
        "rotated keys of a head must be even and at most 256, got 3",
    ),
    "no heads": (
        HGRN2Attention,
        dict(expand_ratio=None),
        "hidden_size=24 must be a multiple of the heads .*got None",
    ),
    "no channels": (HGRNAttention, dict(expand_ratio=0), "must be at least 1, got expand_ratio=0"),
    "values of slots": (GatedSlotAttention, dict(expand_v=2), "expand_v must be 1, .*got 2"),
    "feature map": (
        LinearAttention,
        dict(feature_map="swish"),
        "feature_map must be one of .*got 'swish'",
    ),
    "output norm": (
        LinearAttention,
        dict(output_norm="layernorm"),
        "output_norm must be 'rmsnorm' or 'identity', got 'layernorm'",
    ),
    "taps": (GatedDeltaNet, dict(conv_size=0), "kernel_size must be at least 1, got 0"),
    "key width": (
        DeltaNet,
        dict(expand_k=0.3),
        r"expand_k=0.3 times hidden_size=24 must be a positive multiple of num_heads=4, got 7\.",
    ),
    "value width": (DeltaNet, dict(num_heads=5), "expand_k=1.0 times .*=24 must .* num_heads=5"),
    "qk activation": (DeltaNet, dict(qk_activation="gelu"), "qk_activation must be .*, got 'gelu'"),
    "qk norm": (DeltaNet, dict(qk_norm="l1"), "qk_norm must be 'l2' or 'sum', got 'l1'"),
    "no bound": (
        KDA,
        dict(safe_gate=True),
        "safe_gate=True needs a lower_bound in .* got None",
    ),
    "unsafe bound": (KDA, dict(safe_gate=True, lower_bound=-6), "safe_gate=True needs .* got -6"),
    "positive bound": (KDA, dict(lower_bound=1), "lower_bound must be below 0 .* got 1"),
    "writes": (GatedDeltaProduct, dict(num_householder=0), "num_householder must be at least 1"),
    "hidden size": (
        Attention,
        dict(hidden_size=25, num_heads=3),
        "hidden_size=25 must be a multiple of num_heads=3",
    ),
    "kv heads": (
        Attention,
        dict(num_heads=6, num_kv_heads=4),
        "num_heads=6 must be a multiple of num_kv_heads=4",
    ),
    "window": (Attention, dict(num_heads=3, window_size=0), "window_size must be at least 1"),
    "odd head": (
        Attention,
        dict(hidden_size=9, num_heads=3),
        "rotary positions need an even head size, got 3",
    ),
}


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_bad_constructor_is_named(name):
    cls, options, message = CONSTRUCTORS[name]
    with pytest.raises(ValueError, match=message):
        cls(**{"hidden_size": HIDDEN, **options}, rngs=nnx.Rngs(0))


@rows("unknown impl", variants=False)
def test_an_unknown_impl_is_named(row):
    mixer = cases.build(row, impl="triton")
    with pytest.raises(ValueError, match="impl of .* must be 'auto' or one of .*got 'triton'"):
        jax.eval_shape(mixer, random(0, (B, T, HIDDEN)))


def test_attention_needs_to_know_how_long_its_cache_is():
    with pytest.raises(ValueError, match="new_cache needs max_length"):
        cases.build("attention").new_cache(B)
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        cases.build("attention").new_cache(B, 0)


def test_a_document_beyond_the_cache_gives_nan_and_never_other_numbers():
    """Lengths are traced, so they cannot raise; the row that fits keeps its numbers."""
    mixer = cases.build("attention")
    x = random(0, (2, T, HIDDEN))
    ids = np.array([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]], np.int32)
    call = nnx.jit(lambda m, x, ids, cache: m(x, segment_ids=ids, cache=cache))
    y, cache = call(mixer, x, ids, mixer.new_cache(2, 4))
    want, _ = call(mixer, x, ids, mixer.new_cache(2, 8))
    assert np.all(np.isnan(y[0]))
    assert np.allclose(y[1], want[1], atol=1e-5)
    y, _ = call(mixer, x[:, :1], ids[:, :1], cache)
    assert np.all(np.isnan(y[0])) and np.all(np.isfinite(y[1]))
