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
from jla.layers.rwkv6 import RWKV6Attention
from jla.layers.rwkv7 import RWKV7Attention

RWKV6, RWKV7 = RWKV6Attention, RWKV7Attention

__all__ = [
    "KDA",
    "RWKV6",
    "RWKV7",
    "Attention",
    "DeltaNet",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "KimiDeltaAttention",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "RWKV6Attention",
    "RWKV7Attention",
    "TokenMixer",
]
