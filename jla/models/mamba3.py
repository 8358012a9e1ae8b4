"""Mamba-3 models (FLA's ``mamba3``)."""

from __future__ import annotations

from jla.layers import Mamba3
from jla.models.mamba import StateSpaceConfig, StateSpaceForCausalLM, StateSpaceModel


class Mamba3Config(StateSpaceConfig):
    """FLA's config; see :class:`jla.layers.Mamba3` for the mixer's fields.

    ``hidden_act`` is kept and, as in FLA, without effect.
    """

    model_type = "mamba3"

    num_heads: int | None = None
    head_dim: int = 64
    state_size: int = 128
    n_groups: int = 1
    rope_fraction: float = 0.5
    A_floor: float = 1e-4
    is_outproj_norm: bool = False
    is_mimo: bool = False
    mimo_rank: int = 4
    chunk_size: int = 64

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.num_heads is None:
            self.num_heads = int(self.expand * self.hidden_size / self.head_dim)

    def problems(self) -> list[str]:
        found = super().problems()
        if self.rope_fraction not in (0.5, 1.0):
            found.append(f"rope_fraction must be 0.5 or 1.0, got {self.rope_fraction}")
        if self.A_floor <= 0:
            found.append(f"A_floor must be above 0, got {self.A_floor}")
        if self.is_mimo and self.mimo_rank < 1:
            found.append(f"mimo_rank must be at least 1, got {self.mimo_rank}")
        return found


def mamba3_mixer(config: Mamba3Config, layer_idx: int, **options) -> Mamba3:
    """The mixer of one layer."""
    return Mamba3(
        config.hidden_size,
        state_size=config.state_size,
        expand=config.expand,
        head_dim=config.head_dim,
        n_groups=config.n_groups,
        rope_fraction=config.rope_fraction,
        dt_min=config.dt_min,
        dt_max=config.dt_max,
        dt_init_floor=config.dt_init_floor,
        A_floor=config.A_floor,
        is_outproj_norm=config.is_outproj_norm,
        is_mimo=config.is_mimo,
        mimo_rank=config.mimo_rank,
        chunk_size=config.chunk_size,
        use_bias=config.use_bias,
        norm_eps=config.norm_eps,
        **config.initialisers(),
        **options,
    )


class Mamba3Model(StateSpaceModel):
    """The stack without a head."""

    config_class = Mamba3Config
    make_mixer = staticmethod(mamba3_mixer)


class Mamba3ForCausalLM(StateSpaceForCausalLM):
    """The language model."""

    model_class = Mamba3Model
