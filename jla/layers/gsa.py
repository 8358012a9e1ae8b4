"""Gated slot attention (arXiv:2409.07146), FLA's ``GatedSlotAttention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import RMSNorm, init, short_convolution
from jla.nn.check import check_choice
from jla.nn.feature_map import feature_map as make_feature_map
from jla.ops import gsa
from jla.ops.activation import identity
from jla.ops.chunking import repeat_heads

# FLA's fused norm and projection takes its default here, whatever norm_eps says.
NORM_EPS = 1e-5


class GatedSlotAttention(TokenMixer):
    """Softmax attention over a few slots per head, which fade and are rewritten.

    With log decay ``g = log_sigmoid(f_proj(x)) / gate_logit_normalizer`` (natural log, per slot),
    :func:`jla.ops.gsa` runs per head with write strengths ``1 - e^g``; SiLU, a norm over all heads
    and a projection follow.

    Args:
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        hidden_size: D.
        expand_k: width of all keys over D.
        expand_v: width of all values over D; FLA's output norm leaves no choice but 1.
        num_heads: heads of q.
        num_kv_heads: heads of k, v and gates, a divisor of ``num_heads``; ``num_heads`` if None.
        use_short_conv: filter q, k, v over time first.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        num_slots: slots per head M; K if None.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: kept and without effect, as in FLA, where the output norm always adds 1e-5.
        gate_logit_normalizer: divides the log decay: larger ones remember longer.
        feature_map: of q and k: ``"swish"``, ``"relu"`` or ``"t2r"``.
        use_output_gate, use_norm: kept and without effect, as in FLA.
        layer_idx: FLA's argument, not needed here.
        scale: factor of the attention's logits, ``K**-0.5`` if None.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; gates and the state, keys
            ``[B, H, M, K]`` and values ``[B, H, M, V]`` of the slots, are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gsa`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode or feature map.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 1.0,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        num_slots: int | None = None,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 8,
        feature_map: str = "swish",
        use_output_gate: bool = False,
        use_norm: bool = True,
        layer_idx: int | None = None,
        scale: float | None = 1.0,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        heads.check_mode(mode)
        check_choice("feature_map", feature_map, ("swish", "relu", "t2r"))
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.gate_logit_normalizer, self.scale = gate_logit_normalizer, scale
        self.dtype, self.param_dtype = dtype, param_dtype
        self.num_heads = self.num_v_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim, self.head_v_dim = heads.share_width(
            hidden_size, expand_k, expand_v, num_heads, self.num_kv_heads
        )
        if num_heads * self.head_v_dim != hidden_size:
            raise ValueError(f"expand_v must be 1, the output norm has D channels, got {expand_v}")
        self.num_slots = self.head_dim if num_slots is None else num_slots

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        self.feature_map = make_feature_map(feature_map, self.head_dim, linear)
        heads.add_qkv(self, heads.grouped_widths(self), linear, conv if use_short_conv else None)
        self.f_proj = linear(hidden_size, self.num_kv_heads * self.num_slots)
        norm: dict[str, Any] = dict(eps=NORM_EPS, param_dtype=param_dtype)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine=bool(elementwise_affine), **norm)
        self.o_proj = linear(hidden_size, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the slots and windows."""
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache, identity, identity)
        f = rearrange(self.f_proj(x), "b t (h m) -> b t h m", m=self.num_slots)
        g = jax.nn.log_sigmoid(f.astype(jnp.float32)) / self.gate_logit_normalizer
        strength = -jnp.expm1(g).astype(v.dtype)
        shared = (self.feature_map(k), jax.nn.silu(v), strength, g)
        options: dict[str, Any] = {**carry.op_options(self, segment_ids, cache)}
        if cache is not None:
            slots = cache["recurrent_state"]
            options["initial_state"] = (slots["keys"], slots["values"])
        operands = (repeat_heads(y, self.num_heads) for y in shared)
        o, *states = gsa(self.feature_map(q), *operands, scale=self.scale, **options)
        y = self.o_proj(self.g_norm(jax.nn.silu(o.reshape(x.shape))))
        pairs = [pair and {"keys": pair[0], "values": pair[1]} for pair in states]
        return y, carry.cache_after(pairs, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """Slots, float32: ``keys [B, H, M, K]`` (FLA's are ``[B, H, K, M]``) and ``values
        [B, H, M, V]``, as FLA's; windows of q, k, v."""
        sizes = {"keys": self.head_dim, "values": self.head_v_dim}
        shape = (batch_size, self.num_heads, self.num_slots)
        slots = {name: jnp.zeros((*shape, size), jnp.float32) for name, size in sizes.items()}
        return carry.cache_after([slots], heads.empty_windows(self, batch_size, dtype)) or {}
