"""Building blocks with parameters, under FLA's names."""

from jla.nn.chain import Chain, low_rank
from jla.nn.conv import ShortConvolution, convolve, new_windows, short_convolution
from jla.nn.lora import LerpLinear, LoRA
from jla.nn.mlp import GatedMLP
from jla.nn.norm import GatedRMSNorm, GroupNorm, LayerNorm, RMSNorm, head_norm

__all__ = [
    "Chain",
    "GatedMLP",
    "GatedRMSNorm",
    "GroupNorm",
    "LayerNorm",
    "LerpLinear",
    "LoRA",
    "RMSNorm",
    "ShortConvolution",
    "convolve",
    "head_norm",
    "low_rank",
    "new_windows",
    "short_convolution",
]
