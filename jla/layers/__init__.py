"""Token mixers, called like ``nnx.MultiHeadAttention``."""

from jla.layers.attn import Attention
from jla.layers.delta_net import DeltaNet
from jla.layers.gated_deltanet import GatedDeltaNet
from jla.layers.gated_deltaproduct import GatedDeltaProduct
from jla.layers.gdn2 import GatedDeltaNet2
from jla.layers.kda import KDA, KimiDeltaAttention
from jla.layers.mamba import Mamba
from jla.layers.mamba2 import Mamba2
from jla.layers.mamba3 import Mamba3
from jla.layers.mixer import TokenMixer

__all__ = [
    "KDA",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "TokenMixer",
]
