"""What the RWKV models share: layer norms, one more in front, and feed-forwards with a cache."""

from __future__ import annotations

from typing import Any, ClassVar

from jla.models.block import Block
from jla.models.config import Config, HybridConfig
from jla.models.decoder import Decoder
from jla.nn import LayerNorm, init
from jla.ops.activation import ACTIVATIONS


class RWKVConfig(HybridConfig):
    """Fields that the RWKV configs share."""

    lacking: ClassVar[frozenset[str]] = frozenset({"attnres_block_size", "fuse_swiglu"})

    attn_mode: str = "chunk"
    hidden_act: str = "sqrelu"
    norm_first: bool = True
    norm_bias: bool = True
    norm_eps: float = 1e-5

    def problems(self) -> list[str]:
        found = super().problems()
        if self.hidden_act not in ACTIVATIONS:
            allowed = f"one of {sorted(ACTIVATIONS)}"
            found.append(f"hidden_act must be {allowed}, got {self.hidden_act!r}")
        return found


class RWKVBlock(Block):
    """Mixer and channel mixing behind layer norms; layer 0 may normalise its input."""

    checkpoint_names = {"mlp": "ffn", "mlp_norm": "ffn_norm"}  # noqa: RUF012

    @staticmethod
    def make_norm(config: Config, param_dtype) -> LayerNorm:
        options: dict[str, Any] = dict(eps=config.norm_eps, param_dtype=param_dtype)
        return LayerNorm(config.hidden_size, bias=getattr(config, "norm_bias", True), **options)


class RWKVModel(Decoder):
    """The stack of RWKV blocks."""

    @classmethod
    def attention_out_init(cls, config: Config) -> init.Initializer:
        """Smaller with depth, counting two sums per layer into the residual. In FLA only softmax
        attention starts so: RWKV's own mixers have initial values of their own."""
        return init.into_residual(2 * config.num_hidden_layers)
