"""HGRN2 models (FLA's ``hgrn2``)."""

from __future__ import annotations

from jla.layers import HGRN2Attention
from jla.models.causal_lm import CausalLM
from jla.models.config import HybridConfig
from jla.models.lower_bounds import BoundedDecoder


class HGRN2Config(HybridConfig):
    """FLA's config; see :class:`jla.layers.HGRN2Attention` for the mixer's fields.

    Of ``num_heads`` and ``expand_ratio`` one follows from the other. ``use_lower_bound`` gives the
    model a table of lower bounds of the forget gates.
    """

    model_type = "hgrn2"

    attn_mode: str = "chunk"
    num_heads: int | None = None
    expand_ratio: int | None = 128
    use_short_conv: bool = False
    conv_size: int = 4
    use_lower_bound: bool = True
    elementwise_affine: bool | None = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.expand_ratio is None and self.num_heads is not None:
            self.expand_ratio = self.hidden_size // self.num_heads
        elif self.num_heads is None and self.expand_ratio is not None:
            self.num_heads = self.hidden_size // self.expand_ratio

    def problems(self) -> list[str]:
        found = super().problems()
        if self.num_heads is None and self.expand_ratio is None:
            found.append("num_heads or expand_ratio must be given, got None for both")
        return found


def hgrn2_mixer(config: HGRN2Config, layer_idx: int, **options) -> HGRN2Attention:
    """The mixer of one layer."""
    return HGRN2Attention(
        mode=config.attn_mode,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        expand_ratio=config.expand_ratio,
        use_short_conv=config.use_short_conv,
        conv_size=config.conv_size,
        elementwise_affine=config.elementwise_affine,
        norm_eps=config.norm_eps,
        **options,
    )


class HGRN2Model(BoundedDecoder):
    """The stack without a head."""

    config_class = HGRN2Config
    make_mixer = staticmethod(hgrn2_mixer)


class HGRN2ForCausalLM(CausalLM):
    """The language model."""

    model_class = HGRN2Model
