"""Kimi Delta Attention models (FLA's ``kda``)."""

from __future__ import annotations

from typing import ClassVar

from jla.layers import KimiDeltaAttention
from jla.layers.kda import bound_problem
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.decoder import Decoder


class KDAConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.KimiDeltaAttention` for the mixer's fields."""

    model_type = "kda"
    lacking: ClassVar[frozenset[str]] = frozenset({"fuse_linear_cross_entropy"})

    attn_mode: str = "chunk"
    expand_v: float = 1.0
    use_short_conv: bool = True
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    lower_bound: float | None = None
    conv_size: int = 4
    head_dim: int = 128
    num_heads: int = 16
    num_v_heads: int | None = None

    def problems(self) -> list[str]:
        found = bound_problem(self.safe_gate, self.lower_bound)
        return super().problems() + ([found] if found else [])


def kda_mixer(config: KDAConfig, layer_idx: int, **options) -> KimiDeltaAttention:
    """The mixer of one layer."""
    return KimiDeltaAttention(
        config.hidden_size,
        expand_v=config.expand_v,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        num_v_heads=config.num_v_heads,
        mode=config.attn_mode,
        use_short_conv=config.use_short_conv,
        allow_neg_eigval=config.allow_neg_eigval,
        safe_gate=config.safe_gate,
        lower_bound=config.lower_bound,
        conv_size=config.conv_size,
        norm_eps=config.norm_eps,
        **options,
    )


class KDAModel(Decoder):
    """The stack without a head."""

    config_class = KDAConfig
    make_mixer = staticmethod(kda_mixer)


class KDAForCausalLM(CausalLM):
    """The language model."""

    model_class = KDAModel
