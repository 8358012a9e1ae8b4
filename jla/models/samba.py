"""Samba models (FLA's ``samba``, arXiv:2406.07522): Mamba, attention in a window, and MLPs."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from jla.layers import Mamba
from jla.models.block import Block
from jla.models.config import AttentionPlan, HybridConfig
from jla.models.decoder import Decoder
from jla.models.mamba import StateSpaceForCausalLM
from jla.nn import GatedMLP, init

# Every other layer of FLA's default depth.
ATTENTION: dict[str, Any] = {
    "layers": [1, 3, 5, 7, 9, 11, 13, 15, 17],
    "num_heads": 18,
    "num_kv_heads": 18,
    "qkv_bias": False,
    "window_size": 2048,
    "rope_theta": 10000.0,
}


class SambaConfig(HybridConfig):
    """FLA's config; see :class:`jla.layers.Mamba` for the mixer's fields.

    ``attn="auto"`` is FLA's default, attention in every other layer. ``intermediate_size`` is
    Mamba's; the MLPs go by ``hidden_ratio``. ``use_conv_bias`` is kept and, as in FLA, without
    effect: the convolutions have a bias.
    """

    model_type = "samba"

    hidden_size: int = 2304
    num_hidden_layers: int = 18
    norm_eps: float = 1e-5
    pad_token_id: int | None = 0
    attn: AttentionPlan | str = "auto"
    state_size: int = 16
    expand: int | float = 2
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    residual_in_fp32: bool = False
    rescale_prenorm_residual: bool = False
    time_step_rank: int | str = "auto"
    time_step_scale: float = 1.0
    time_step_min: float = 0.001
    time_step_max: float = 0.1
    time_step_init_scheme: str = "random"
    time_step_floor: float = 1e-4

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """See Transformers; FLA once saved the plan of 18 layers with shallower models too."""
        if config_dict.get("attn") == ATTENTION:
            config_dict = {**config_dict, "attn": "auto"}
        return super().from_dict(config_dict, **kwargs)

    def __post_init__(self, **kwargs):
        if self.attn == "auto":
            depth = self.num_hidden_layers if isinstance(self.num_hidden_layers, int) else 0
            self.attn = {**ATTENTION, "layers": [i for i in ATTENTION["layers"] if i < depth]}
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = int(self.expand * self.hidden_size)
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)


class SambaBlock(Block):
    """The block, under Samba's names."""

    checkpoint_names: ClassVar[dict[str, str]] = {"attn_norm": "mixer_norm", "attn": "mixer"}

    @staticmethod
    def make_mlp(config: SambaConfig, layer_idx: int, **options) -> GatedMLP:
        """The MLP of a layer; ``intermediate_size`` is not its."""
        return GatedMLP(
            config.hidden_size,
            config.hidden_ratio,
            hidden_act=config.hidden_act,
            fuse_swiglu=config.fuse_swiglu,
            **options,
        )


def samba_mixer(config: SambaConfig, layer_idx: int, **options) -> Mamba:
    """The mixer of a layer without attention."""
    if config.rescale_prenorm_residual:
        options["out_init"] = init.into_residual(config.num_hidden_layers)
    return Mamba(
        config.hidden_size,
        state_size=config.state_size,
        conv_kernel=config.conv_kernel,
        intermediate_size=config.intermediate_size or int(config.expand * config.hidden_size),
        dt_rank=config.time_step_rank,
        dt_min=config.time_step_min,
        dt_max=config.time_step_max,
        dt_init=config.time_step_init_scheme,
        dt_scale=config.time_step_scale,
        dt_init_floor=config.time_step_floor,
        use_bias=config.use_bias,
        **options,
    )


class SambaModel(Decoder):
    """The stack without a head."""

    config_class = SambaConfig
    make_mixer = staticmethod(samba_mixer)
    block_class = SambaBlock
    checkpoint_names: ClassVar[dict[str, str]] = {"norm": "norm_f"}


class SambaForCausalLM(StateSpaceForCausalLM):
    """The language model."""

    model_class = SambaModel
