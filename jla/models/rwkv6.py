"""RWKV-6 models (FLA's ``rwkv6``)."""

from __future__ import annotations

from jla.layers import RWKV6Attention
from jla.layers.channel_mixing import RWKV6FeedForward
from jla.models.causal_lm import CausalLM
from jla.models.rwkv import RWKVBlock, RWKVConfig, RWKVModel


class RWKV6Config(RWKVConfig):
    """FLA's config; see :class:`jla.layers.RWKV6Attention` for the mixer's fields."""

    model_type = "rwkv6"

    expand_k: float = 0.5
    expand_v: float = 1.0
    hidden_ratio: int | float | None = 3.5
    num_heads: int = 4
    proj_low_rank_dim: int = 32
    gate_low_rank_dim: int = 64


def rwkv6_mixer(config: RWKV6Config, layer_idx: int, *, kernel_init, **options) -> RWKV6Attention:
    """The mixer of one layer, with its own initial values."""
    return RWKV6Attention(
        config.attn_mode,
        config.hidden_size,
        expand_k=config.expand_k,
        expand_v=config.expand_v,
        num_heads=config.num_heads,
        proj_low_rank_dim=config.proj_low_rank_dim,
        gate_low_rank_dim=config.gate_low_rank_dim,
        fuse_norm=config.fuse_norm,
        norm_eps=config.norm_eps,
        **options,
    )


class RWKV6Block(RWKVBlock):
    """The layer of RWKV-6."""

    @staticmethod
    def make_mlp(config: RWKV6Config, layer_idx: int, **options) -> RWKV6FeedForward:
        return RWKV6FeedForward(
            config.hidden_size,
            config.hidden_ratio,
            config.intermediate_size,
            config.hidden_act,
            **options,
        )


class RWKV6Model(RWKVModel):
    """The stack without a head."""

    config_class = RWKV6Config
    make_mixer = staticmethod(rwkv6_mixer)
    block_class = RWKV6Block


class RWKV6ForCausalLM(CausalLM):
    """The language model."""

    model_class = RWKV6Model
