"""Linear attention models (FLA's ``linear_attn``)."""

from __future__ import annotations

from jla.layers import LinearAttention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class LinearAttentionConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.LinearAttention` for the mixer's fields, of which
    ``do_feature_map_norm`` is called ``norm_feature_map`` here."""

    model_type = "linear_attn"

    attn_mode: str = "fused_chunk"
    expand_k: float = 1.0
    expand_v: float = 1.0
    num_heads: int = 4
    num_kv_heads: int | None = None
    feature_map: str = "elementwise_product"
    tie_feature_map_qk: bool = False
    norm_q: bool = False
    norm_k: bool = False
    norm_feature_map: bool = False
    elementwise_affine: bool | None = True


def linear_attn_mixer(config: LinearAttentionConfig, layer_idx: int, **options) -> LinearAttention:
    """The mixer of one layer."""
    return LinearAttention(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        tie_feature_map_qk=config.tie_feature_map_qk,
        norm_q=config.norm_q,
        norm_k=config.norm_k,
        do_feature_map_norm=config.norm_feature_map,
        elementwise_affine=bool(config.elementwise_affine),
        norm_eps=config.norm_eps,
        **options,
    )


class LinearAttentionModel(Decoder):
    """The stack without a head."""

    config_class = LinearAttentionConfig
    make_mixer = staticmethod(linear_attn_mixer)


class LinearAttentionForCausalLM(CausalLM):
    """The language model."""

    model_class = LinearAttentionModel
