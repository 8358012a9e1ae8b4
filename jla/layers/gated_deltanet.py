"""Gated DeltaNet (arXiv:2412.06464), FLA's ``GatedDeltaNet``."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import head_norm, init, short_convolution
from jla.nn.param import float32_param
from jla.ops import gated_delta_rule
from jla.ops.gates import softplus_decay, write_strength


class GatedDeltaNet(TokenMixer):
    """A memory per head that decays, is corrected by the delta rule, and is read by queries.

    With ``q, k`` normalised, log decay ``g = -exp(A_log) * softplus(a_proj(x) + dt_bias)`` (natural
    log) and write strength ``beta = sigmoid(b_proj(x))``, :func:`jla.ops.gated_delta_rule` runs per
    head; its output is normalised, gated and projected back.

    Args:
        hidden_size: D.
        expand_v: value head size over key head size; ``head_dim * expand_v`` must be whole.
        head_dim: key head size K.
        num_heads: heads of q and k.
        num_v_heads: heads of v, a multiple of ``num_heads``; ``num_heads`` if None.
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        use_gate: gate the output.
        use_short_conv: filter q, k, v over time first; else only SiLU.
        allow_neg_eigval: double ``beta``, so that a write can flip a direction's sign.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        layer_idx: FLA's argument, not needed here.
        norm_eps: of the output norm.
        output_gate_activation: ``"swish"``, ``"silu"`` (the same) or ``"sigmoid"``.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; ``A_log [Hv]``,
            ``dt_bias [Hv]`` and the state ``[B, Hv, K, V]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gated_delta_rule`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode or activation.

    Example:
        >>> mixer = GatedDeltaNet(32, head_dim=16, num_heads=2, rngs=nnx.Rngs(0))
        >>> mixer(jnp.ones((2, 5, 32))).shape
        (2, 5, 32)
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 2,
        head_dim: int = 256,
        num_heads: int = 6,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_gate: bool = True,
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
        output_gate_activation: str = "swish",
        *,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init: init.Initializer | None = None,
        impl: str = "auto",
        rngs: nnx.Rngs,
    ):
        num_v_heads = num_heads if num_v_heads is None else num_v_heads
        heads.check_mode(mode)
        self.head_v_dim = heads.check_heads(head_dim, expand_v, num_heads, num_v_heads)
        self.hidden_size, self.head_dim, self.mode, self.impl = hidden_size, head_dim, mode, impl
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.allow_neg_eigval, self.use_gate = allow_neg_eigval, use_gate
        self.dtype, self.param_dtype = dtype, param_dtype
        key_dim, value_dim = num_heads * head_dim, num_v_heads * self.head_v_dim

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        widths = dict(q=key_dim, k=key_dim, v=value_dim)
        heads.add_qkv(self, widths, linear, conv if use_short_conv else None)
        self.a_proj = linear(hidden_size, num_v_heads)
        self.b_proj = linear(hidden_size, num_v_heads)
        self.A_log = float32_param(init.decay_rate(rngs.params(), (num_v_heads,)))
        self.dt_bias = float32_param(init.step_size_bias(rngs.params(), (num_v_heads,)))
        if use_gate:
            self.g_proj = linear(hidden_size, value_dim)
        activation = output_gate_activation if use_gate else None
        self.o_norm = head_norm(self.head_v_dim, activation, norm_eps, param_dtype)
        self.o_proj = linear(value_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds three windows and the state."""
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache)
        o, *states = gated_delta_rule(
            q,
            k,
            v,
            softplus_decay(self.a_proj(x), self.A_log[...], self.dt_bias[...]),
            write_strength(self.b_proj(x), self.allow_neg_eigval),
            use_qk_l2norm=True,
            **carry.op_options(self, segment_ids, cache),
        )
        return heads.read_out(self, x, o), carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, Hv, K, V]`` float32 and windows ``[B, W-1, D]`` of q, k, v."""
        return heads.new_cache(self, batch_size, dtype)
