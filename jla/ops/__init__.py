"""Pure functions on arrays: one per recurrence, each with a reference and a chunk-parallel form."""

from jla.ops.constant_decay import lightning_attention, linear_attn, retention
from jla.ops.conv import causal_conv1d, token_shift
from jla.ops.delta import delta_rule, gated_delta_product, gated_delta_rule, gdn2, kda
from jla.ops.dispatch import Choice, ImplUnavailable, use_impl
from jla.ops.dplr import dplr_delta_rule, iplr_delta_rule, rwkv7
from jla.ops.fused_loss import fused_linear_cross_entropy, kl_divergence
from jla.ops.gated_sum import hgrn
from jla.ops.kinds import explain, linear_attention
from jla.ops.linear import gla, rwkv6, simple_gla
from jla.ops.loss import cross_entropy, l2_warp, shift_labels
from jla.ops.norm import l1_norm, l2_norm, layer_norm, rms_norm
from jla.ops.recurrence import Options
from jla.ops.rotary import rotate
from jla.ops.segments import (
    Ends,
    cu_seqlens_from_segment_ids,
    document_ends,
    segment_ids_from_cu_seqlens,
)
from jla.ops.slots import gsa
from jla.ops.softmax import attention
from jla.ops.ssm import selective_scan, ssd
from jla.ops.trapezoidal import Mamba3State, mamba3

__all__ = [
    "Choice",
    "Ends",
    "ImplUnavailable",
    "Mamba3State",
    "Options",
    "attention",
    "causal_conv1d",
    "cross_entropy",
    "cu_seqlens_from_segment_ids",
    "delta_rule",
    "document_ends",
    "dplr_delta_rule",
    "explain",
    "fused_linear_cross_entropy",
    "gated_delta_product",
    "gated_delta_rule",
    "gdn2",
    "gla",
    "gsa",
    "hgrn",
    "iplr_delta_rule",
    "kda",
    "kl_divergence",
    "l1_norm",
    "l2_norm",
    "l2_warp",
    "layer_norm",
    "lightning_attention",
    "linear_attention",
    "linear_attn",
    "retention",
    "mamba3",
    "rms_norm",
    "rotate",
    "rwkv6",
    "rwkv7",
    "segment_ids_from_cu_seqlens",
    "selective_scan",
    "shift_labels",
    "simple_gla",
    "ssd",
    "token_shift",
    "use_impl",
]
