"""Building blocks with parameters, under FLA's names."""

from jla.nn.chain import Chain, low_rank
from jla.nn.conv import ShortConvolution, convolve, new_windows
from jla.nn.mlp import GatedMLP
from jla.nn.norm import GatedRMSNorm, RMSNorm

__all__ = [
    "Chain",
    "GatedMLP",
    "GatedRMSNorm",
    "RMSNorm",
    "ShortConvolution",
    "convolve",
    "low_rank",
    "new_windows",
]
