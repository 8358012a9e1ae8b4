"""Token mixers, called like ``nnx.MultiHeadAttention``."""

from jla.layers.attn import Attention
from jla.layers.gated_deltanet import GatedDeltaNet
from jla.layers.mixer import TokenMixer

__all__ = ["Attention", "GatedDeltaNet", "TokenMixer"]
