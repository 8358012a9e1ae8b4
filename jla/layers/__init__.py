"""Token mixers, called like ``nnx.MultiHeadAttention``."""

from jla.layers.attn import Attention
from jla.layers.gated_deltanet import GatedDeltaNet
from jla.layers.mamba import Mamba
from jla.layers.mamba2 import Mamba2
from jla.layers.mamba3 import Mamba3
from jla.layers.mixer import TokenMixer

__all__ = ["Attention", "GatedDeltaNet", "Mamba", "Mamba2", "Mamba3", "TokenMixer"]
