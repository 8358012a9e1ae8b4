"""Kimi Delta Attention (arXiv:2510.26692), FLA's ``KimiDeltaAttention``."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import head_norm, init, low_rank, short_convolution
from jla.nn.param import float32_param
from jla.ops import kda
from jla.ops.gates import bounded_decay, softplus_decay, write_strength


class KimiDeltaAttention(TokenMixer):
    """:class:`GatedDeltaNet` whose memory decays per key channel.

    The log decay (natural log) is ``g = -exp(A_log) * softplus(f_proj(x) + dt_bias)`` or, with a
    lower bound, ``g = lower_bound * sigmoid(exp(A_log) * (f_proj(x) + dt_bias))``, and the write
    strength ``beta = sigmoid(b_proj(x))``. With ``q, k`` normalised, :func:`jla.ops.kda` runs per
    head; its output is normalised, gated by a sigmoid and projected back.

    Args:
        hidden_size: D.
        expand_v: value head size over key head size; ``head_dim * expand_v`` must be whole.
        head_dim: key head size K.
        num_heads: heads of q and k.
        num_v_heads: heads of v, a multiple of ``num_heads``; ``num_heads`` if None.
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        use_short_conv: filter q, k, v over time first; else only SiLU.
        allow_neg_eigval: double ``beta``, so that a write can flip a direction's sign.
        safe_gate: FLA's promise to its kernels that decays are bounded; needs a ``lower_bound``
            from -5 on, and starts ``A_log`` from 0.
        lower_bound: of the log decay, below 0; None takes the softplus form.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        layer_idx: FLA's argument, not needed here.
        norm_eps: of the output norm.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; ``A_log [Hv]``,
            ``dt_bias [Hv * K]`` and the state ``[B, Hv, K, V]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gated_delta_rule`.
        rngs: ``params`` stream.

    Raises:
        ValueError: sizes that do not divide, an unknown mode, an impossible bound.

    Example:
        >>> mixer = KimiDeltaAttention(32, head_dim=16, num_heads=2, rngs=nnx.Rngs(0))
        >>> mixer(jnp.ones((2, 5, 32))).shape
        (2, 5, 32)
    """

    def __init__(
        self,
        hidden_size: int = 2048,
        expand_v: float = 1,
        head_dim: int = 128,
        num_heads: int = 16,
        num_v_heads: int | None = None,
        mode: str = "chunk",
        use_short_conv: bool = True,
        allow_neg_eigval: bool = False,
        safe_gate: bool = False,
        lower_bound: float | None = None,
        conv_size: int = 4,
        conv_bias: bool = False,
        layer_idx: int | None = None,
        norm_eps: float = 1e-5,
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
        if problem := bound_problem(safe_gate, lower_bound):
            raise ValueError(problem)
        self.head_v_dim = heads.check_heads(head_dim, expand_v, num_heads, num_v_heads)
        self.hidden_size, self.head_dim, self.mode, self.impl = hidden_size, head_dim, mode, impl
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.allow_neg_eigval = allow_neg_eigval
        self.safe_gate, self.lower_bound = safe_gate, lower_bound
        self.dtype, self.param_dtype = dtype, param_dtype
        key_dim, value_dim = num_heads * head_dim, num_v_heads * self.head_v_dim

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        widths = dict(q=key_dim, k=key_dim, v=value_dim)
        heads.add_qkv(self, widths, linear, conv if use_short_conv else None)
        gate_dim = num_v_heads * head_dim
        self.f_proj = low_rank(linear, hidden_size, self.head_v_dim, gate_dim)
        self.b_proj = linear(hidden_size, num_v_heads)
        a_log = init.decay_rate(rngs.params(), (num_v_heads,), low=1.0)
        self.A_log = float32_param(jnp.zeros_like(a_log) if safe_gate else a_log)
        self.dt_bias = float32_param(init.step_size_bias(rngs.params(), (gate_dim,)))
        self.g_proj = low_rank(linear, hidden_size, self.head_v_dim, value_dim, use_bias=True)
        self.o_norm = head_norm(self.head_v_dim, "sigmoid", norm_eps, param_dtype)
        self.o_proj = linear(value_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds three windows and the state."""
        q, k, v, windows = heads.project_qkv(self, x, segment_ids, cache)
        o, *states = kda(
            q,
            k,
            v,
            self._decay(x),
            write_strength(self.b_proj(x), self.allow_neg_eigval),
            use_qk_l2norm=True,
            **carry.op_options(self, segment_ids, cache),
        )
        return heads.read_out(self, x, o), carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, Hv, K, V]`` float32 and windows ``[B, W-1, D]`` of q, k, v."""
        return heads.new_cache(self, batch_size, dtype)

    def _decay(self, x):
        channels = (self.num_v_heads, self.head_dim)
        a, a_log = self.f_proj(x).reshape(*x.shape[:2], *channels), self.A_log[...][:, None]
        dt_bias = self.dt_bias[...].reshape(channels)
        if self.lower_bound is None:
            return softplus_decay(a, a_log, dt_bias)
        return bounded_decay(a, a_log, dt_bias, self.lower_bound)


KDA = KimiDeltaAttention


def bound_problem(safe_gate: bool, lower_bound: float | None) -> str | None:
    """What is wrong with a bound: it is negative and, for a safe gate, given and at least -5."""
    if safe_gate and (lower_bound is None or not -5 <= lower_bound < 0):
        return f"safe_gate=True needs a lower_bound in [-5, 0), got {lower_bound}"
    if lower_bound is not None and not lower_bound < 0:
        return f"lower_bound must be below 0 (a log decay) or None, got {lower_bound}"
    return None
