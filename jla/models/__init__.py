"""Language models: a config, a mixer factory and a line per class each."""

from jla.models.auto import MODELS, AutoModelForCausalLM
from jla.models.causal_lm import CausalLM, CausalLMOutput
from jla.models.config import Config, HybridConfig
from jla.models.decoder import Decoder
from jla.models.delta_net import DeltaNetConfig, DeltaNetForCausalLM, DeltaNetModel
from jla.models.gated_deltanet import (
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GatedDeltaNetModel,
)
from jla.models.gated_deltaproduct import (
    GatedDeltaProductConfig,
    GatedDeltaProductForCausalLM,
    GatedDeltaProductModel,
)
from jla.models.gla import GLAConfig, GLAForCausalLM, GLAModel
from jla.models.gsa import GSAConfig, GSAForCausalLM, GSAModel
from jla.models.hgrn import HGRNConfig, HGRNForCausalLM, HGRNModel
from jla.models.hgrn2 import HGRN2Config, HGRN2ForCausalLM, HGRN2Model
from jla.models.kda import KDAConfig, KDAForCausalLM, KDAModel
from jla.models.linear_attn import (
    LinearAttentionConfig,
    LinearAttentionForCausalLM,
    LinearAttentionModel,
)
from jla.models.mamba import MambaConfig, MambaForCausalLM, MambaModel
from jla.models.mamba2 import Mamba2Config, Mamba2ForCausalLM, Mamba2Model
from jla.models.mamba3 import Mamba3Config, Mamba3ForCausalLM, Mamba3Model
from jla.models.retnet import RetNetConfig, RetNetForCausalLM, RetNetModel
from jla.models.rwkv6 import RWKV6Config, RWKV6ForCausalLM, RWKV6Model
from jla.models.rwkv7 import RWKV7Config, RWKV7ForCausalLM, RWKV7Model
from jla.models.samba import SambaConfig, SambaForCausalLM, SambaModel
from jla.models.transformer import TransformerConfig, TransformerForCausalLM, TransformerModel

__all__ = [
    "GLAConfig",
    "GLAForCausalLM",
    "GLAModel",
    "RetNetConfig",
    "RetNetForCausalLM",
    "RetNetModel",
    "HGRN2Config",
    "HGRN2ForCausalLM",
    "HGRN2Model",
    "HGRNConfig",
    "HGRNForCausalLM",
    "HGRNModel",
    "GSAConfig",
    "GSAForCausalLM",
    "GSAModel",
    "LinearAttentionConfig",
    "LinearAttentionForCausalLM",
    "LinearAttentionModel",
    "MODELS",
    "AutoModelForCausalLM",
    "CausalLM",
    "CausalLMOutput",
    "Config",
    "Decoder",
    "DeltaNetConfig",
    "DeltaNetForCausalLM",
    "DeltaNetModel",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "GatedDeltaProductConfig",
    "GatedDeltaProductForCausalLM",
    "GatedDeltaProductModel",
    "HybridConfig",
    "KDAConfig",
    "KDAForCausalLM",
    "KDAModel",
    "Mamba2Config",
    "Mamba2ForCausalLM",
    "Mamba2Model",
    "Mamba3Config",
    "Mamba3ForCausalLM",
    "Mamba3Model",
    "MambaConfig",
    "MambaForCausalLM",
    "MambaModel",
    "SambaConfig",
    "SambaForCausalLM",
    "SambaModel",
    "RWKV6Config",
    "RWKV6ForCausalLM",
    "RWKV6Model",
    "RWKV7Config",
    "RWKV7ForCausalLM",
    "RWKV7Model",
    "TransformerConfig",
    "TransformerForCausalLM",
    "TransformerModel",
]
