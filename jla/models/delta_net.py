"""DeltaNet models (FLA's ``delta_net``)."""

from __future__ import annotations

from jla.layers import DeltaNet
from jla.layers.delta_net import QK_ACTIVATIONS, QK_NORMS
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig, choice_problems
from jla.models.decoder import Decoder


class DeltaNetConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.DeltaNet` for the mixer's fields.

    ``use_output_norm`` is kept and, as in FLA, without effect.
    """

    model_type = "delta_net"

    attn_mode: str = "chunk"
    expand_k: float = 1.0
    expand_v: float = 1.0
    use_gate: bool = False
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    conv_size: int = 4
    use_beta: bool = True
    use_output_norm: bool = True
    num_heads: int = 16
    qk_norm: str = "l2"
    qk_activation: str = "silu"

    def problems(self) -> list[str]:
        choices = {"qk_norm": QK_NORMS, "qk_activation": QK_ACTIVATIONS}
        return super().problems() + choice_problems(self, choices)


def delta_net_mixer(config: DeltaNetConfig, layer_idx: int, **options) -> DeltaNet:
    """The mixer of one layer."""
    return DeltaNet(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        use_gate=config.use_gate,
        use_beta=config.use_beta,
        use_short_conv=config.use_short_conv,
        allow_neg_eigval=config.allow_neg_eigval,
        conv_size=config.conv_size,
        qk_norm=config.qk_norm,
        qk_activation=config.qk_activation,
        norm_eps=config.norm_eps,
        **options,
    )


class DeltaNetModel(Decoder):
    """The stack without a head."""

    config_class = DeltaNetConfig
    make_mixer = staticmethod(delta_net_mixer)


class DeltaNetForCausalLM(CausalLM):
    """The language model."""

    model_class = DeltaNetModel
