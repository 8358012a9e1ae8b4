"""The table of families, and the class that picks one by a checkpoint's ``model_type``."""

from __future__ import annotations

import os

from flax import nnx

from jla.models.causal_lm import CausalLM
from jla.models.config import Config
from jla.models.delta_net import DeltaNetForCausalLM
from jla.models.gated_deltanet import GatedDeltaNetForCausalLM
from jla.models.gated_deltaproduct import GatedDeltaProductForCausalLM
from jla.models.gla import GLAForCausalLM
from jla.models.gsa import GSAForCausalLM
from jla.models.hgrn import HGRNForCausalLM
from jla.models.hgrn2 import HGRN2ForCausalLM
from jla.models.kda import KDAForCausalLM
from jla.models.linear_attn import LinearAttentionForCausalLM
from jla.models.mamba import MambaForCausalLM
from jla.models.mamba2 import Mamba2ForCausalLM
from jla.models.mamba3 import Mamba3ForCausalLM
from jla.models.retnet import RetNetForCausalLM
from jla.models.rwkv6 import RWKV6ForCausalLM
from jla.models.rwkv7 import RWKV7ForCausalLM
from jla.models.samba import SambaForCausalLM
from jla.models.transformer import TransformerForCausalLM

MODELS: dict[str, type[CausalLM]] = {
    "delta_net": DeltaNetForCausalLM,
    "gated_deltanet": GatedDeltaNetForCausalLM,
    "gated_deltaproduct": GatedDeltaProductForCausalLM,
    "kda": KDAForCausalLM,
    "mamba": MambaForCausalLM,
    "mamba2": Mamba2ForCausalLM,
    "mamba3": Mamba3ForCausalLM,
    "samba": SambaForCausalLM,
    "rwkv6": RWKV6ForCausalLM,
    "rwkv7": RWKV7ForCausalLM,
    "gla": GLAForCausalLM,
    "retnet": RetNetForCausalLM,
    "hgrn2": HGRN2ForCausalLM,
    "hgrn": HGRNForCausalLM,
    "gsa": GSAForCausalLM,
    "linear_attn": LinearAttentionForCausalLM,
    "transformer": TransformerForCausalLM,
}
"""The language model of every ``model_type``."""


class AutoModelForCausalLM:
    """Makes the right language model for a checkpoint or a config; never instantiated itself."""

    def __init__(self):
        raise TypeError("use AutoModelForCausalLM.from_pretrained or .from_config")

    @staticmethod
    def from_pretrained(folder_or_repo_id: str | os.PathLike, **options) -> CausalLM:
        """Loads a checkpoint; see :func:`jla.convert.from_pretrained` for all options."""
        from jla.convert import from_pretrained

        return from_pretrained(None, folder_or_repo_id, **options)

    @staticmethod
    def from_config(config: Config, *, rngs: nnx.Rngs, **options) -> CausalLM:
        """A freshly initialised model of the config's family."""
        return lookup(config.model_type)(config, rngs=rngs, **options)


def lookup(model_type: str) -> type[CausalLM]:
    """The language model of a ``model_type``.

    Raises:
        ValueError: an unknown ``model_type``; the message lists the known ones.
    """
    if model_type not in MODELS:
        raise ValueError(f"model_type must be one of {sorted(MODELS)}, got {model_type!r}")
    return MODELS[model_type]
