"""Gated DeltaProduct models (FLA's ``gated_deltaproduct``)."""

from __future__ import annotations

from jla.layers import GatedDeltaProduct
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class GatedDeltaProductConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.GatedDeltaProduct` for the mixer's fields."""

    model_type = "gated_deltaproduct"

    attn_mode: str = "chunk"
    conv_size: int = 4
    head_dim: int = 256
    num_heads: int = 6
    expand_v: float = 2.0
    use_output_gate: bool = True
    use_short_conv: bool = True
    num_hidden_layers: int = 21
    use_forget_gate: bool = False
    allow_neg_eigval: bool = False
    num_householder: int = 1

    def problems(self) -> list[str]:
        found = super().problems()
        if self.num_householder < 1:
            found.append(f"num_householder must be at least 1, got {self.num_householder}")
        return found


def gated_deltaproduct_mixer(
    config: GatedDeltaProductConfig, layer_idx: int, **options
) -> GatedDeltaProduct:
    """The mixer of one layer."""
    return GatedDeltaProduct(
        config.hidden_size,
        expand_v=config.expand_v,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        mode=config.attn_mode,
        use_output_gate=config.use_output_gate,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        norm_eps=config.norm_eps,
        use_forget_gate=config.use_forget_gate,
        allow_neg_eigval=config.allow_neg_eigval,
        num_householder=config.num_householder,
        **options,
    )


class GatedDeltaProductModel(Decoder):
    """The stack without a head."""

    config_class = GatedDeltaProductConfig
    make_mixer = staticmethod(gated_deltaproduct_mixer)


class GatedDeltaProductForCausalLM(CausalLM):
    """The language model."""

    model_class = GatedDeltaProductModel
