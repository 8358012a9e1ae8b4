"""Token mixers, called like ``nnx.MultiHeadAttention``."""

from jla.layers.attn import Attention
from jla.layers.delta_net import DeltaNet
from jla.layers.gated_deltanet import GatedDeltaNet
from jla.layers.gated_deltaproduct import GatedDeltaProduct
from jla.layers.gdn2 import GatedDeltaNet2
from jla.layers.gla import GLA, GatedLinearAttention
from jla.layers.gsa import GatedSlotAttention
from jla.layers.hgrn import HGRNAttention
from jla.layers.hgrn2 import HGRN2Attention
from jla.layers.kda import KDA, KimiDeltaAttention
from jla.layers.linear_attn import LinearAttention
from jla.layers.mamba import Mamba
from jla.layers.mamba2 import Mamba2
from jla.layers.mamba3 import Mamba3
from jla.layers.mixer import TokenMixer
from jla.layers.multiscale_retention import MultiScaleRetention
from jla.layers.rnn import MixerCell
from jla.layers.rwkv6 import RWKV6Attention
from jla.layers.rwkv7 import RWKV7Attention

RWKV6, RWKV7 = RWKV6Attention, RWKV7Attention

__all__ = [
    "Attention",
    "DeltaNet",
    "GLA",
    "GatedDeltaNet",
    "GatedDeltaNet2",
    "GatedDeltaProduct",
    "GatedLinearAttention",
    "GatedSlotAttention",
    "HGRN2Attention",
    "HGRNAttention",
    "KDA",
    "KimiDeltaAttention",
    "LinearAttention",
    "Mamba",
    "Mamba2",
    "Mamba3",
    "MixerCell",
    "MultiScaleRetention",
    "RWKV6",
    "RWKV6Attention",
    "RWKV7",
    "RWKV7Attention",
    "TokenMixer",
]
