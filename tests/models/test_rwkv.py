"""RWKV models: initial values, first values across layers, checkpoints of the first version."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import assert_close, assert_trees_close

from jla import convert
from jla.layers import RWKV7Attention
from jla.layers.channel_mixing import RWKV6FeedForward, RWKV7FeedForward
from jla.models import AutoModelForCausalLM, RWKV6Config, RWKV7Config, RWKV7ForCausalLM
from jla.ops import rwkv7
from models.cases import BATCH, LENGTH, MODELS, build, tokens

SMALL = dict(hidden_size=24, head_dim=8, intermediate_size=32, vocab_size=61)
DEEP = RWKV7Config(num_hidden_layers=4, **SMALL)


@pytest.fixture(scope="module")
def fresh():
    return RWKV7ForCausalLM(DEEP, rngs=nnx.Rngs(0))


def test_s30_initial_values(fresh):
    """A block starts as the identity; scales and mixes grow with depth as RWKV-7's do."""
    for i, block in enumerate(fresh.model.layers):
        assert not np.any(block.attn.o_proj.kernel[...]) and not np.any(block.mlp.value.kernel[...])
        assert_close(block.attn.g_norm.scale[...], np.full(24, ((i + 1) / 4) ** 0.7))
        r = np.asarray(block.attn.r_proj.kernel[...])
        assert_close(r @ r.T, np.eye(24), tol=1e-5)
        k = np.asarray(block.attn.k_proj.kernel[...])
        assert_close(k @ k.T, 0.01 * np.eye(24), tol=1e-5)
        shares = 1 - (np.arange(24) / 24) ** (0.7 * (1 - i / 4))
        assert_close(block.attn.x_k[...], shares)
    first = fresh.model.layers[0].attn
    assert_close(first.g_norm.scale[0], 0.378929, tol=1e-5)
    assert first.v_lora is None and fresh.model.layers[1].attn.v_lora is not None
    # The slowest channel of the first head and the fastest of the last.
    bias = np.asarray(first.w_lora.up.bias[...])
    assert_close(bias[[0, -1]], [-6 + 0.5 - 2.5, 0 + 0.5 + 2.5])
    head = np.asarray(fresh.lm_head.kernel[...])
    assert_close(head @ head.T, 0.25 * 61 / 24 * np.eye(24), tol=1e-5)
    assert np.abs(fresh.model.embeddings.embedding[...]).max() <= 1e-4


@pytest.mark.parametrize("config_class", [RWKV6Config, RWKV7Config])
def test_attention_of_a_hybrid_starts_small(config_class):
    """GPT-2's scheme: ``o_proj`` is torch's default over the root of two sums per layer; what
    stands beside it is the models' normal."""
    config = config_class(
        num_hidden_layers=3,
        hidden_size=128,
        vocab_size=61,
        initializer_range=0.3,
        attn={"layers": [1], "num_heads": 2},
    )
    mixer = AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0)).model.layers[1].attn
    bound = (128 * 2 * 3) ** -0.5
    assert 0.99 * bound < np.abs(mixer.o_proj.kernel[...]).max() <= bound
    assert_close(np.std(mixer.q_proj.kernel[...]), 0.3, tol=0.02)


def test_bfloat16_parameters_start_alike(fresh):
    """Orthogonal matrices are made in float32, whatever the parameters' dtype."""
    narrow = RWKV7ForCausalLM(DEEP, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert all(x.dtype == jnp.bfloat16 for x in jax.tree.leaves(nnx.state(narrow, nnx.Param)))
    wide = fresh.model.layers[1].attn.r_proj.kernel[...]
    assert_close(narrow.model.layers[1].attn.r_proj.kernel[...], wide, tol=1e-2)


def test_s25_every_decay_keeps_more_than_half(monkeypatch):
    """The layer's decays lie in (e^-0.6065, 1) = (0.545239, 1) however large its projections."""
    seen = []

    def spy(r, w, *args, **options):
        seen.append(w)
        return rwkv7(r, w, *args, **options)

    monkeypatch.setattr("jla.layers.rwkv7.rwkv7", spy)
    layer = RWKV7Attention(hidden_size=24, head_dim=8, rngs=nnx.Rngs(0))
    layer.w_lora.down.kernel[...] += 3.0
    layer.w_lora.up.kernel[...] *= 30
    layer(np.random.default_rng(0).standard_normal((2, 9, 24), np.float32))
    decay = np.exp(np.asarray(seen[0], np.float64))
    assert decay.min() >= 0.545238 and decay.max() <= 1
    assert decay.min() < 0.55 and decay.max() > 0.99


@pytest.mark.parametrize(
    "options",
    [
        {"remat": True, "scan_layers": True},
        pytest.param({"remat": True}, marks=pytest.mark.slow),
        pytest.param({"scan_layers": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("row", ["rwkv7", "rwkv7-hybrid"], scope="module")
def test_s18_first_values_survive_recomputing_and_scanning(row, options):
    """Loss and gradients as without; in the hybrid they come from layer 1."""
    loss, gradients = loss_and_gradients(row)
    given = loss_and_gradients(row, **options)
    assert_close(given[0], loss)
    assert_trees_close(given[1], gradients, what="gradient of", times=3)


@functools.cache
def loss_and_gradients(row, **options):
    """Of the row's plain weights, under FLA's names."""
    config, ids = MODELS[row].config, tokens(1, (BATCH, LENGTH))
    graphdef, state = nnx.split(build(config, **options))
    weights = convert.to_state_dict(build(config))

    @jax.jit
    def run(state):
        return jax.value_and_grad(lambda s: nnx.merge(graphdef, s)(ids, labels=ids).loss)(state)

    loss, gradients = run(convert_into(graphdef, state, weights))
    return loss, convert.to_state_dict(nnx.merge(graphdef, gradients))


def convert_into(graphdef, state, weights):
    model = nnx.merge(graphdef, state)
    convert.load_state_dict(model, weights)
    return nnx.state(model)


def test_s18_values_of_the_first_layer_reach_all_others():
    """They are handed on unchanged, whatever the leading axes, and make a difference."""
    mixers = [
        RWKV7Attention(
            hidden_size=24, head_dim=8, layer_idx=i, num_hidden_layers=3, rngs=nnx.Rngs(i)
        )
        for i in range(3)
    ]
    x = np.random.default_rng(0).standard_normal((1, 5, 24), np.float32)
    _, shared = mixers[0](x, shared={})
    for mixer in mixers[1:]:
        mixer.o_proj.kernel[...] += np.eye(24)
        y, after = mixer(x, shared=shared)
        np.testing.assert_array_equal(after["v_first"], shared["v_first"])
        alone, own = mixer(x, shared={})
        assert np.max(np.abs(y - alone)) > 1e-3 and np.any(own["v_first"] != after["v_first"])
    # Any leading axes, and a plain call shares nothing.
    lead = {"v_first": shared["v_first"][None]}
    y, after = mixers[1](x[None], shared=lead)
    assert y.shape == (1, 1, 5, 24) and after["v_first"].shape == (1, 1, 5, 24)
    assert mixers[0](x).shape == x.shape


@pytest.mark.parametrize("scan_layers", [False, True])
def test_s23_mixes_of_the_first_version(scan_layers):
    """One matrix ``x_x [6, D]`` became six vectors, in the order r, w, k, v, a, g."""
    config = MODELS["rwkv7"].config
    tensors = convert.to_state_dict(build(config))
    old = {k: v for k, v in tensors.items() if ".attn.x_" not in k}
    for i in range(3):
        x_x = np.arange(6, dtype=np.float32)[:, None] + np.zeros((6, 24), np.float32)
        old[f"model.layers.{i}.attn.x_x"] = x_x + 10 * i
    model = build(config, scan_layers=scan_layers)
    convert.load_state_dict(model, old)
    after = convert.to_state_dict(model)
    assert after.keys() == tensors.keys()
    for i in range(3):
        for j, name in enumerate("rwkvag"):
            given = after[f"model.layers.{i}.attn.x_{name}"]
            np.testing.assert_array_equal(given, np.full((1, 1, 24), j + 10 * i))
    both = old | {"model.layers.0.attn.x_r": np.zeros((1, 1, 24), np.float32)}
    with pytest.raises(convert.CheckpointError, match="surplus.*layers.0.attn.x_x"):
        convert.load_state_dict(model, both)


def test_config_derives_heads_and_widths():
    config = RWKV7Config(num_hidden_layers=2, **SMALL)
    assert (config.num_heads, config.value_dim) == (3, [24, 24])
    by_heads = RWKV7Config(num_hidden_layers=2, **SMALL | {"head_dim": None, "num_heads": 6})
    assert (by_heads.head_dim, by_heads.num_heads) == (4, 6)
    for change, message in (
        ({"head_dim": None}, "give head_dim or num_heads"),
        ({"value_dim": [24]}, r"value_dim must have an entry per layer, got \[24\]"),
        ({"value_dim": 36}, "value_dim must be a multiple of hidden_size, got 36"),
        ({"hidden_act": "tanh"}, "hidden_act must be one of .*got 'tanh'"),
    ):
        with pytest.raises(ValueError, match=message):
            RWKV7Config(num_hidden_layers=2, **SMALL | change)


def test_what_the_mixers_refuse():
    for options, message in (
        ({"head_dim": 7}, "hidden_size=24 must be a multiple"),
        ({"head_dim": None}, "give head_dim or num_heads"),
        ({"value_dim": 25}, "value_dim=25 must be a multiple of num_heads=3"),
        ({"mode": "fast"}, "mode must be 'chunk' or 'fused_recurrent', got 'fast'"),
    ):
        with pytest.raises(ValueError, match=message):
            RWKV7Attention(**{"hidden_size": 24, "head_dim": 8, "rngs": nnx.Rngs(0), **options})
    for make in (RWKV6FeedForward, RWKV7FeedForward):
        with pytest.raises(ValueError, match="hidden_act must be one of"):
            make(24, hidden_act="tanh", rngs=nnx.Rngs(0))
