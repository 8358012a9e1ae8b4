"""Mamba models (FLA's ``mamba``), and what all Mamba models share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from jla.layers import Mamba
from jla.models.block import MixerBlock
from jla.models.causal_lm import CausalLM
from jla.models.config import Config
from jla.models.decoder import Decoder
from jla.nn import init


class StateSpaceConfig(Config):
    """Fields that the configs of Mamba, Mamba-2 and Mamba-3 share.

    ``rescale_prenorm_residual`` starts ``out_proj`` from torch's default over the root of the
    depth. ``residual_in_fp32`` keeps the residual in the parameters' dtype.
    """

    lacking: ClassVar[frozenset[str]] = frozenset(
        {
            "hidden_ratio",
            "intermediate_size",
            "max_position_embeddings",
            "fuse_swiglu",
            "attnres_block_size",
        }
    )

    num_hidden_layers: int = 48
    norm_eps: float = 1e-5
    hidden_act: str = "silu"
    pad_token_id: int | None = 0
    state_size: int = 16
    expand: int | float = 2
    use_bias: bool = False
    residual_in_fp32: bool = True
    dt_min: float = 0.001
    dt_max: float = 0.1
    dt_init_floor: float = 1e-4
    rescale_prenorm_residual: bool = True

    def problems(self) -> list[str]:
        found = super().problems()
        if not 0 < self.dt_min <= self.dt_max:
            found.append(f"dt_min, dt_max must rise from above 0, got {self.dt_min, self.dt_max}")
        if self.dt_init_floor <= 0:
            found.append(f"dt_init_floor must be above 0, got {self.dt_init_floor}")
        if self.attnres_block_size is not None:
            found.append("attnres_block_size must be None: these models have no MLPs to mix with")
        return found

    def initialisers(self) -> dict[str, Any]:
        """Of a mixer, further keyword arguments."""
        rescaled = self.rescale_prenorm_residual
        return {"out_init": init.into_residual(self.num_hidden_layers)} if rescaled else {}


class MambaConfig(StateSpaceConfig):
    """FLA's config; see :class:`jla.layers.Mamba` for the mixer's fields."""

    model_type = "mamba"
    lacking: ClassVar[frozenset[str]] = StateSpaceConfig.lacking - {"intermediate_size"}

    conv_kernel: int = 4
    use_conv_bias: bool = True
    dt_rank: int | str = "auto"
    dt_scale: float = 1.0
    dt_init_scheme: str = "random"
    residual_in_fp32: bool = False
    rescale_prenorm_residual: bool = False

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.intermediate_size is None:
            self.intermediate_size = int(self.expand * self.hidden_size)
        if self.dt_rank == "auto":
            self.dt_rank = math.ceil(self.hidden_size / 16)

    def problems(self) -> list[str]:
        found = super().problems()
        if isinstance(self.dt_rank, str) and self.dt_rank != "auto":
            found.append(f"dt_rank must be int or 'auto', got {self.dt_rank!r}")
        return found


class StateSpaceModel(Decoder):
    """A stack of mixers without MLPs, under the names of Mamba's checkpoints."""

    block_class = MixerBlock
    checkpoint_names: ClassVar[dict[str, str]] = {"norm": "norm_f"}


class StateSpaceForCausalLM(CausalLM):
    """A language model under the names of Mamba's checkpoints."""

    checkpoint_names: ClassVar[dict[str, str]] = {"model": "backbone"}


def mamba_mixer(config: MambaConfig, layer_idx: int, **options) -> Mamba:
    """The mixer of one layer."""
    return Mamba(
        config.hidden_size,
        state_size=config.state_size,
        conv_kernel=config.conv_kernel,
        use_conv_bias=config.use_conv_bias,
        intermediate_size=config.intermediate_size or int(config.expand * config.hidden_size),
        dt_rank=config.dt_rank,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        dt_init=config.dt_init_scheme,
        dt_scale=config.dt_scale,
        dt_init_floor=config.dt_init_floor,
        use_bias=config.use_bias,
        hidden_act=config.hidden_act,
        **config.initialisers(),
        **options,
    )


class MambaModel(StateSpaceModel):
    """The stack without a head."""

    config_class = MambaConfig
    make_mixer = staticmethod(mamba_mixer)


class MambaForCausalLM(StateSpaceForCausalLM):
    """The language model."""

    model_class = MambaModel
