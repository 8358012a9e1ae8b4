"""Token mixers, called like ``nnx.MultiHeadAttention``."""

from jla.layers.attn import Attention
from jla.layers.delta_net import DeltaNet
from jla.layers.gated_deltanet import GatedDeltaNet
from jla.layers.gated_deltaproduct import GatedDeltaProduct
from jla.layers.gdn2 import GatedDeltaNet2
from jla.layers.kda import KDA, KimiDeltaAttention
from jla.layers.mixer import TokenMixer

__all__ = [
    "KDA",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "TokenMixer",
]
