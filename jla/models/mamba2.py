"""Mamba-2 models (FLA's ``mamba2``)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jla.layers import Mamba2
from jla.models.mamba import StateSpaceConfig, StateSpaceForCausalLM, StateSpaceModel


class Mamba2Config(StateSpaceConfig):
    """FLA's config; see :class:`jla.layers.Mamba2` for the mixer's fields."""

    model_type = "mamba2"

    num_heads: int | None = None
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 1
    conv_kernel: int = 4
    use_conv_bias: bool = True
    conv_init: float | None = None
    A_init_range: Sequence[float] = (1, 16)
    D_has_hdim: bool = False
    dt_limit: Sequence[float] = (0.0, math.inf)
    rmsnorm: bool = True
    norm_before_gate: bool = False
    chunk_size: int = 256

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.num_heads is None:
            self.num_heads = int(self.expand * self.hidden_size / self.head_dim)

    def problems(self) -> list[str]:
        found = super().problems()
        if len(self.A_init_range) != 2 or not 0 < self.A_init_range[0] <= self.A_init_range[1]:
            found.append(f"A_init_range must rise from above 0, got {self.A_init_range}")
        if len(self.dt_limit) != 2 or not 0 <= self.dt_limit[0] <= self.dt_limit[1]:
            found.append(f"dt_limit must rise from at least 0, got {self.dt_limit}")
        return found


def mamba2_mixer(config: Mamba2Config, layer_idx: int, **options) -> Mamba2:
    """The mixer of one layer."""
    return Mamba2(
        num_heads=config.num_heads,
        head_dim=config.head_dim,
        hidden_size=config.hidden_size,
        state_size=config.state_size,
        expand=config.expand,
        n_groups=config.n_groups,
        conv_kernel=config.conv_kernel,
        conv_init=config.conv_init,
        use_conv_bias=config.use_conv_bias,
        hidden_act=config.hidden_act,
        A_init_range=config.A_init_range,
        D_has_hdim=config.D_has_hdim,
        rmsnorm=config.rmsnorm,
        norm_before_gate=config.norm_before_gate,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        dt_init_floor=config.dt_init_floor,
        dt_limit=config.dt_limit,
        use_bias=config.use_bias,
        norm_eps=config.norm_eps,
        chunk_size=config.chunk_size,
        **config.initialisers(),
        **options,
    )


class Mamba2Model(StateSpaceModel):
    """The stack without a head."""

    config_class = Mamba2Config
    make_mixer = staticmethod(mamba2_mixer)


class Mamba2ForCausalLM(StateSpaceForCausalLM):
    """The language model."""

    model_class = Mamba2Model
