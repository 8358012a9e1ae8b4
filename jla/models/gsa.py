"""Gated slot attention models (FLA's ``gsa``)."""

from __future__ import annotations

from typing import ClassVar

from jla.layers import GatedSlotAttention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class GSAConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.GatedSlotAttention` for the mixer's fields.

    FLA's constructor spells ``expand_k`` and ``expand_v`` as ``exapnd_k`` and ``exapnd_v``: both
    are read. ``clamp_min`` and ``clamp_max`` are kept and, as in FLA, without effect.
    """

    model_type = "gsa"
    deprecated: ClassVar[dict[str, str]] = {"exapnd_k": "expand_k", "exapnd_v": "expand_v"}

    gate_logit_normalizer: int = 8
    clamp_min: float | None = None
    clamp_max: float | None = None
    num_heads: int = 4
    num_kv_heads: int | None = None
    num_slots: int | None = 64
    use_short_conv: bool = False
    conv_size: int = 4
    expand_k: float = 1
    expand_v: float = 1
    feature_map: str = "swish"
    use_output_gate: bool = False
    use_norm: bool = True
    elementwise_affine: bool | None = True


def gsa_mixer(config: GSAConfig, layer_idx: int, **options) -> GatedSlotAttention:
    """The mixer of one layer."""
    return GatedSlotAttention(
        hidden_size=config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        num_slots=config.num_slots,
        elementwise_affine=config.elementwise_affine,
        norm_eps=config.norm_eps,
        gate_logit_normalizer=config.gate_logit_normalizer,
        feature_map=config.feature_map,
        use_output_gate=config.use_output_gate,
        use_norm=config.use_norm,
        **options,
    )


class GSAModel(Decoder):
    """The stack without a head."""

    config_class = GSAConfig
    make_mixer = staticmethod(gsa_mixer)


class GSAForCausalLM(CausalLM):
    """The language model."""

    model_class = GSAModel
