"""Gated DeltaNet models (FLA's ``gated_deltanet``)."""

from __future__ import annotations

from typing import ClassVar

from jla.layers import GatedDeltaNet
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig, choice_problems
from jla.models.decoder import Decoder
from jla.ops.norm import GATES


class GatedDeltaNetConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.GatedDeltaNet` for the mixer's fields."""

    model_type = "gated_deltanet"
    deprecated: ClassVar[dict[str, str]] = {"use_output_gate": "use_gate"}

    attn_mode: str = "chunk"
    expand_v: float = 2.0
    use_gate: bool = True
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    conv_size: int = 4
    head_dim: int = 256
    num_heads: int = 6
    num_v_heads: int | None = None
    num_hidden_layers: int = 21
    output_gate_activation: str = "swish"

    def problems(self) -> list[str]:
        return super().problems() + choice_problems(self, {"output_gate_activation": GATES})


def gated_deltanet_mixer(config: GatedDeltaNetConfig, layer_idx: int, **options) -> GatedDeltaNet:
    """The mixer of one layer."""
    return GatedDeltaNet(
        config.hidden_size,
        expand_v=config.expand_v,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_v_heads=config.num_v_heads,
        mode=config.attn_mode,
        use_gate=config.use_gate,
        use_short_conv=config.use_short_conv,
        allow_neg_eigval=config.allow_neg_eigval,
        conv_size=config.conv_size,
        norm_eps=config.norm_eps,
        output_gate_activation=config.output_gate_activation,
        **options,
    )


class GatedDeltaNetModel(Decoder):
    """The stack without a head."""

    config_class = GatedDeltaNetConfig
    make_mixer = staticmethod(gated_deltanet_mixer)


class GatedDeltaNetForCausalLM(CausalLM):
    """The language model."""

    model_class = GatedDeltaNetModel
