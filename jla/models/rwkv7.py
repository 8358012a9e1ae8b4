"""RWKV-7 models (FLA's ``rwkv7``)."""

from __future__ import annotations

from flax import nnx

from jla.layers import RWKV7Attention
from jla.layers.channel_mixing import RWKV7FeedForward
from jla.models.causal_lm import CausalLM
from jla.models.rwkv import RWKVBlock, RWKVConfig, RWKVModel
from jla.nn import init


class RWKV7Config(RWKVConfig):
    """FLA's config; see :class:`jla.layers.RWKV7Attention` for the mixer's fields.

    ``value_dim`` is one width or one per layer; it is kept as a list. ``use_l2warp`` is on.
    """

    model_type = "rwkv7"

    head_dim: int | None = 64
    num_heads: int | None = None
    decay_low_rank_dim: int | None = 64
    gate_low_rank_dim: int | None = 128
    a_low_rank_dim: int | None = 64
    v_low_rank_dim: int | None = 16
    value_dim: int | list[int] | None = None
    use_l2warp: bool = True

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.head_dim is None and self.num_heads:
            self.head_dim = self.hidden_size // self.num_heads
        elif self.num_heads is None and self.head_dim:
            self.num_heads = self.hidden_size // self.head_dim
        self.value_dim = self._value_dims()

    def problems(self) -> list[str]:
        found, widths = super().problems(), self._value_dims()
        if self.head_dim is None and self.num_heads is None:
            found.append("give head_dim or num_heads, both are None")
        if len(widths) != self.num_hidden_layers:
            found.append(f"value_dim must have an entry per layer, got {self.value_dim!r}")
        if any(width < 1 or width % self.hidden_size for width in widths):
            found.append(f"value_dim must be a multiple of hidden_size, got {self.value_dim!r}")
        return found

    def _value_dims(self) -> list[int]:
        if isinstance(self.value_dim, list | tuple):
            return list(self.value_dim)
        return [self.value_dim or self.hidden_size] * self.num_hidden_layers


def rwkv7_mixer(config: RWKV7Config, layer_idx: int, *, kernel_init, **options) -> RWKV7Attention:
    """The mixer of one layer, with RWKV-7's own initial values."""
    mixers = (i for i in range(config.num_hidden_layers) if config.attention_at(i) is None)
    return RWKV7Attention(
        config.attn_mode,
        config.hidden_size,
        head_dim=config.head_dim,
        num_heads=config.num_heads,
        decay_low_rank_dim=config.decay_low_rank_dim,
        gate_low_rank_dim=config.gate_low_rank_dim,
        a_low_rank_dim=config.a_low_rank_dim,
        v_low_rank_dim=config.v_low_rank_dim,
        norm_eps=config.norm_eps,
        fuse_norm=config.fuse_norm,
        layer_idx=layer_idx,
        value_dim=config._value_dims()[layer_idx],
        num_hidden_layers=config.num_hidden_layers,
        first=layer_idx == next(mixers),
        **options,
    )


class RWKV7Block(RWKVBlock):
    """The layer of RWKV-7."""

    @staticmethod
    def make_mlp(
        config: RWKV7Config, layer_idx: int, *, kernel_init, **options
    ) -> RWKV7FeedForward:
        return RWKV7FeedForward(
            config.hidden_size,
            config.hidden_ratio,
            config.intermediate_size,
            config.hidden_act,
            layer_idx,
            config.num_hidden_layers,
            **options,
        )


class RWKV7Model(RWKVModel):
    """The stack without a head."""

    config_class = RWKV7Config
    make_mixer = staticmethod(rwkv7_mixer)
    block_class = RWKV7Block

    @classmethod
    def embedding_init(cls, config: RWKV7Config) -> nnx.Initializer:
        """Nearly 0: the first norm scales it up."""
        return init.uniform(1e-4)

    @classmethod
    def head_init(cls, config: RWKV7Config) -> nnx.Initializer:
        """Orthogonal, larger for large vocabularies."""
        return init.orthogonal(0.5 * max(config.vocab_size / config.hidden_size, 1) ** 0.5)


class RWKV7ForCausalLM(CausalLM):
    """The language model."""

    model_class = RWKV7Model
