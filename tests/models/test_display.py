"""Models, mixers and caches in ``nnx.tabulate`` and ``nnx.display``."""

import jax.numpy as jnp
import pytest
import treescope
from flax import nnx

from jla.layers import Attention, GatedDeltaNet
from jla.models import AutoModelForCausalLM, GatedDeltaNetConfig, HGRNConfig

SIZES = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, vocab_size=11)
CONFIGS = [
    GatedDeltaNetConfig(num_heads=2, head_dim=8, expand_v=1, **SIZES),
    HGRNConfig(use_lower_bound=True, **SIZES),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.model_type)
def test_a_tabulated_model_names_its_parts_and_can_be_built_again(config):
    """`nnx.tabulate` leaves plain functions where the classes had static methods."""
    model = AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    table = nnx.tabulate(model, jnp.zeros((1, 3), jnp.int32), console_kwargs={"width": 200})
    for name in ("model/layers/0/attn/o_proj", "model/layers/0/mlp", type(model).__name__):
        assert name in table
    again = AutoModelForCausalLM.from_config(config, rngs=nnx.Rngs(0))
    assert nnx.graphdef(again) == nnx.graphdef(model)


# treescope 0.1.10 asks numpy for every type that it has.
@pytest.mark.filterwarnings("ignore:The chararray class:DeprecationWarning")
@pytest.mark.parametrize(
    "mixer",
    [
        GatedDeltaNet(16, num_heads=2, head_dim=8, expand_v=1, rngs=nnx.Rngs(0)),
        Attention(16, num_heads=2, rngs=nnx.Rngs(0)),
    ],
    ids=lambda mixer: type(mixer).__name__,
)
def test_mixers_and_caches_show_names_and_shapes(mixer):
    cache = mixer.new_cache(batch_size=3, max_length=5)
    for value, names in ((mixer, vars(mixer)), (cache, cache)):
        shown = treescope.render_to_text(value)
        for name in names:
            assert name.startswith("_") or name in shown
    assert "float32(3, " in treescope.render_to_text(cache)
    assert len(repr(mixer)) < 10_000
