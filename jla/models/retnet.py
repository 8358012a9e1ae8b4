"""RetNet models (FLA's ``retnet``)."""

from __future__ import annotations

from jla.layers import MultiScaleRetention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class RetNetConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.MultiScaleRetention` for the mixer's fields.

    The output gate's activation is ``hidden_act``. ``use_short_conv`` and ``conv_size`` are kept
    and, as in FLA, whose models do not pass them on, without effect.
    """

    model_type = "retnet"

    attn_mode: str = "chunk"
    expand_k: float = 1.0
    expand_v: float = 2.0
    hidden_ratio: int | float | None = 2
    num_heads: int = 8
    num_kv_heads: int | None = None
    feature_map: str | None = None
    use_short_conv: bool = False
    conv_size: int = 4
    use_output_gate: bool = True
    elementwise_affine: bool | None = True


def retnet_mixer(config: RetNetConfig, layer_idx: int, **options) -> MultiScaleRetention:
    """The mixer of one layer."""
    return MultiScaleRetention(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        feature_map=config.feature_map,
        use_output_gate=config.use_output_gate,
        gate_fn=config.hidden_act,
        elementwise_affine=config.elementwise_affine,
        norm_eps=config.norm_eps,
        fuse_norm=config.fuse_norm,
        **options,
    )


class RetNetModel(Decoder):
    """The stack without a head."""

    config_class = RetNetConfig
    make_mixer = staticmethod(retnet_mixer)


class RetNetForCausalLM(CausalLM):
    """The language model."""

    model_class = RetNetModel
