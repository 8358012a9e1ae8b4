"""Gated linear attention (arXiv:2312.06635), FLA's ``GatedLinearAttention``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import init, low_rank, short_convolution
from jla.nn.check import check_choice
from jla.nn.feature_map import POINTWISE
from jla.ops import gla
from jla.ops.activation import ACTIVATIONS, identity
from jla.ops.chunking import repeat_heads


class GatedLinearAttention(TokenMixer):
    """A memory per head whose key channels fade by gates that depend on the token.

    With log decay ``g = log_sigmoid(gk_proj(x)) / gate_logit_normalizer`` (natural log, per key
    channel), :func:`jla.ops.gla` runs per head; its output is normalised, gated and projected back.

    Args:
        mode: FLA's ``"chunk"``, ``"fused_recurrent"`` or ``"fused_chunk"``, kept and without effect
            on the numbers.
        hidden_size: D.
        expand_k, expand_v: widths of all keys and of all values over D.
        num_heads: heads of q.
        num_kv_heads: heads of k, v and gates, a divisor of ``num_heads``; ``num_heads`` if None.
        feature_map: activation of q and k, a key of ``ACTIVATIONS``; none if None.
        use_short_conv: filter q, k, v over time first.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        use_output_gate: gate the output.
        gate_fn: activation of that gate.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: of the output norm.
        gate_logit_normalizer: divides the log decay: larger ones remember longer.
        gate_low_rank_dim: width of the gates' bottleneck.
        clamp_min: least log decay of a token; none if None.
        fuse_norm: FLA's switch; with it, ``gate_fn="swish"`` and an output gate, the norm is called
            ``g_norm_swish_gate``, else ``g_norm``.
        layer_idx: FLA's argument, not needed here.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; gates and the state
            ``[B, H, K, V]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gla`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode or activation.
    """

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_k: float = 0.5,
        expand_v: float = 1.0,
        num_heads: int = 4,
        num_kv_heads: int | None = None,
        feature_map: str | None = None,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        use_output_gate: bool = True,
        gate_fn: str = "swish",
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
        gate_logit_normalizer: int = 16,
        gate_low_rank_dim: int = 16,
        clamp_min: float | None = None,
        fuse_norm: bool = True,
        layer_idx: int | None = None,
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        check_choice("mode", mode, ("chunk", "fused_recurrent", "fused_chunk"))
        check_choice("feature_map", feature_map, (None, *ACTIVATIONS))
        check_choice("gate_fn", gate_fn, ACTIVATIONS)
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.feature_map = "identity" if feature_map is None else feature_map
        self.gate_logit_normalizer, self.clamp_min = gate_logit_normalizer, clamp_min
        self.dtype, self.param_dtype = dtype, param_dtype
        self.num_heads = self.num_v_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim, self.head_v_dim = heads.share_width(
            hidden_size, expand_k, expand_v, num_heads, self.num_kv_heads
        )

        widths = heads.grouped_widths(self)
        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        heads.add_qkv(self, widths, linear, conv if use_short_conv else None)
        rank = gate_low_rank_dim
        self.gk_proj = low_rank(linear, hidden_size, rank, widths["k"], use_bias=True)
        heads.add_gated_output(
            self,
            linear,
            gate_fn=gate_fn,
            use_output_gate=use_output_gate,
            fuse_norm=fuse_norm,
            norm_eps=norm_eps,
            elementwise_affine=elementwise_affine,
            param_dtype=param_dtype,
        )

    @property
    def checkpoint_names(self) -> dict[str, str]:
        """FLA's name of the output norm."""
        return heads.gated_output_names(self)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds the state and windows."""
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache, identity, identity)
        q, k = (POINTWISE[self.feature_map](y) for y in (q, k))
        k, v, g = (repeat_heads(y, self.num_heads) for y in (k, v, self._log_decay(x)))
        o, *states = gla(q, k, v, g, **carry.op_options(self, segment_ids, cache))
        return heads.read_out(self, x, o), carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, V]`` float32 (FLA's is ``[B, H, V, K]``) and windows of q, k, v."""
        return heads.new_cache(self, batch_size, dtype)

    def _log_decay(self, x):
        gates = rearrange(self.gk_proj(x), "b t (h k) -> b t h k", k=self.head_dim)
        g = jax.nn.log_sigmoid(gates.astype(jnp.float32)) / self.gate_logit_normalizer
        return g if self.clamp_min is None else jnp.maximum(g, self.clamp_min)


GLA = GatedLinearAttention
