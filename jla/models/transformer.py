"""Softmax-attention models (FLA's ``transformer``)."""

from __future__ import annotations

from jla.layers import Attention
from jla.models.causal_lm import CausalLM
from jla.models.config import Config
from jla.models.decoder import Decoder


class TransformerConfig(Config):
    """FLA's ``TransformerConfig``; see :class:`jla.layers.Attention` for the mixer's fields.

    ``elementwise_affine`` is kept and, as in FLA, without effect.
    """

    model_type = "transformer"

    num_heads: int = 32
    num_kv_heads: int | None = None
    qkv_bias: bool = False
    qk_norm: bool = False
    window_size: int | None = None
    rope_theta: float | None = 10000.0
    elementwise_affine: bool | None = True


def transformer_mixer(config: TransformerConfig, layer_idx: int, **options) -> Attention:
    """The mixer of one layer."""
    return Attention(
        config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        qkv_bias=config.qkv_bias,
        qk_norm=config.qk_norm,
        window_size=config.window_size,
        rope_theta=config.rope_theta,
        max_position_embeddings=config.max_position_embeddings,
        **options,
    )


class TransformerModel(Decoder):
    """The stack without a head."""

    config_class = TransformerConfig
    make_mixer = staticmethod(transformer_mixer)


class TransformerForCausalLM(CausalLM):
    """The language model."""

    model_class = TransformerModel
