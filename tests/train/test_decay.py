"""Weight decay touches kernels and embeddings only (bug case S29)."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from models.cases import MODELS

from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig, GatedDeltaNetForCausalLM
from jla.nn.param import is_float32_param
from jla.train import decay_mask


def small_model(**options):
    config = GatedDeltaNetConfig(
        hidden_size=16, num_hidden_layers=2, vocab_size=11, intermediate_size=16, head_dim=8,
        num_heads=2, attn=dict(layers=[1], num_heads=2, qkv_bias=True),
    )  # fmt: skip
    return GatedDeltaNetForCausalLM(config, rngs=nnx.Rngs(0), **options)


def leaf_name(path):
    return [str(entry.key) for entry in path if hasattr(entry, "key")][-1]


def test_s29_a_step_without_gradient_shrinks_kernels_alone():
    params = nnx.state(small_model(), nnx.Param)
    # Away from 0 and 1, so that any pull shows.
    params = jax.tree.map(lambda x: jnp.full_like(x, 0.7), params)
    optimizer = optax.adamw(0.1, weight_decay=0.1, mask=decay_mask)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, _ = optimizer.update(zeros, optimizer.init(params), params)
    after = optax.apply_updates(params, updates)
    names = set()
    for (path, old), new in zip(
        jax.tree_util.tree_leaves_with_path(params), jax.tree.leaves(after), strict=True
    ):
        name = leaf_name(path)
        names.add(name)
        if name in ("kernel", "embedding"):
            assert jnp.allclose(new, old * (1 - 0.1 * 0.1)), path
        else:
            assert jnp.array_equal(new, old), path
    assert names == {"kernel", "embedding", "bias", "scale", "A_log", "dt_bias"}


@pytest.mark.parametrize("row", MODELS)
def test_s29_rates_of_every_family_are_left_alone(row):
    """What stays float32 is never decayed, nor a norm, a bias or a share of the token shift."""
    config = MODELS[row].config
    make = AutoModelForCausalLM.from_config
    params = nnx.state(nnx.eval_shape(lambda: make(config, rngs=nnx.Rngs(0))), nnx.Param)
    kept = dict(nnx.to_flat_state(decay_mask(params)))
    for path, leaf in nnx.to_flat_state(params):
        decayed = kept[path].get_value()
        assert decayed == (path[-1] in ("kernel", "embedding")), path
        assert not (decayed and is_float32_param(leaf)), path


def test_scanned_layers_are_masked_like_single_ones():
    masks = [
        decay_mask(nnx.state(small_model(scan_layers=scan), nnx.Param)) for scan in (False, True)
    ]
    single, scanned = (
        {leaf_name(path): kept for path, kept in jax.tree_util.tree_leaves_with_path(mask)}
        for mask in masks
    )
    assert single == scanned
