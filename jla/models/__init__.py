"""Language models: a config, a mixer factory and a line per class each."""

from jla.models.auto import MODELS, AutoModelForCausalLM
from jla.models.causal_lm import CausalLM, CausalLMOutput
from jla.models.config import Config, HybridConfig
from jla.models.decoder import Decoder
from jla.models.gated_deltanet import (
    GatedDeltaNetConfig,
    GatedDeltaNetForCausalLM,
    GatedDeltaNetModel,
)
from jla.models.transformer import TransformerConfig, TransformerForCausalLM, TransformerModel

__all__ = [
    "MODELS",
    "AutoModelForCausalLM",
    "CausalLM",
    "CausalLMOutput",
    "Config",
    "Decoder",
    "GatedDeltaNetConfig",
    "GatedDeltaNetForCausalLM",
    "GatedDeltaNetModel",
    "HybridConfig",
    "TransformerConfig",
    "TransformerForCausalLM",
    "TransformerModel",
]
