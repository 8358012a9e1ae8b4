"""Gated linear attention models (FLA's ``gla``)."""

from __future__ import annotations

from jla.layers import GatedLinearAttention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class GLAConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.GatedLinearAttention` for the mixer's fields.

    The output gate's activation is ``hidden_act``. ``use_gk`` and ``use_gv`` are kept and, as in
    FLA, without effect.
    """

    model_type = "gla"

    expand_k: float = 0.5
    expand_v: float = 1.0
    num_heads: int = 4
    num_kv_heads: int | None = None
    feature_map: str | None = None
    attn_mode: str = "chunk"
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    clamp_min: float | None = None
    elementwise_affine: bool | None = True
    use_gk: bool = True
    use_gv: bool = False


def gla_mixer(config: GLAConfig, layer_idx: int, **options) -> GatedLinearAttention:
    """The mixer of one layer."""
    return GatedLinearAttention(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        use_output_gate=config.use_output_gate,
        gate_fn=config.hidden_act,
        elementwise_affine=config.elementwise_affine,
        norm_eps=config.norm_eps,
        clamp_min=config.clamp_min,
        fuse_norm=config.fuse_norm,
        **options,
    )


class GLAModel(Decoder):
    """The stack without a head."""

    config_class = GLAConfig
    make_mixer = staticmethod(gla_mixer)


class GLAForCausalLM(CausalLM):
    """The language model."""

    model_class = GLAModel
