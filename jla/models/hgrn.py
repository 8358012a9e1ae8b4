"""HGRN models (FLA's ``hgrn``)."""

from __future__ import annotations

from jla.layers import HGRNAttention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.lower_bounds import BoundedDecoder


class HGRNConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.HGRNAttention` for the mixer's fields.

    ``use_lower_bound`` gives the model a table of lower bounds of the forget gates.
    """

    model_type = "hgrn"

    attn_mode: str = "fused_recurrent"
    expand_ratio: int | None = 1
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool | None = True


def hgrn_mixer(config: HGRNConfig, layer_idx: int, **options) -> HGRNAttention:
    """The mixer of one layer."""
    return HGRNAttention(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        expand_ratio=config.expand_ratio,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        elementwise_affine=config.elementwise_affine,
        norm_eps=config.norm_eps,
        **options,
    )


class HGRNModel(BoundedDecoder):
    """The stack without a head."""

    config_class = HGRNConfig
    make_mixer = staticmethod(hgrn_mixer)

    @staticmethod
    def gate_width(config: HGRNConfig) -> int:
        return int(config.hidden_size * (config.expand_ratio or 1))


class HGRNForCausalLM(CausalLM):
    """The language model."""

    model_class = HGRNModel
