"""Gated DeltaNet (arXiv:2412.06464), FLA's ``GatedDeltaNet``."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx

from jla.layers.mixer import Cache, TokenMixer
from jla.nn import GatedRMSNorm, RMSNorm, ShortConvolution, convolve, init, new_windows
from jla.nn.param import float32_param
from jla.ops import gated_delta_rule


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
        _check(head_dim, expand_v, num_heads, num_v_heads, mode)
        self.hidden_size, self.head_dim, self.mode, self.impl = hidden_size, head_dim, mode, impl
        self.num_heads, self.num_v_heads = num_heads, num_v_heads
        self.head_v_dim = round(head_dim * expand_v)
        self.allow_neg_eigval = allow_neg_eigval
        self.dtype, self.param_dtype = dtype, param_dtype
        widths = {"q": num_heads * head_dim, "k": num_heads * head_dim}
        widths["v"] = value_dim = num_v_heads * self.head_v_dim

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        self.q_proj = linear(hidden_size, widths["q"])
        self.k_proj = linear(hidden_size, widths["k"])
        self.v_proj = linear(hidden_size, value_dim)
        self.a_proj = linear(hidden_size, num_v_heads)
        self.b_proj = linear(hidden_size, num_v_heads)
        self.A_log = float32_param(init.decay_rate(rngs.params(), (num_v_heads,)))
        self.dt_bias = float32_param(init.step_size_bias(rngs.params(), (num_v_heads,)))
        self.use_short_conv = use_short_conv
        if use_short_conv:
            conv: dict[str, Any] = dict(param_dtype=param_dtype, kernel_init=kernel_init, rngs=rngs)
            self.q_conv1d = ShortConvolution(widths["q"], conv_size, conv_bias, **conv)
            self.k_conv1d = ShortConvolution(widths["k"], conv_size, conv_bias, **conv)
            self.v_conv1d = ShortConvolution(value_dim, conv_size, conv_bias, **conv)
        self.use_gate = use_gate
        norm: dict[str, Any] = dict(eps=norm_eps, param_dtype=param_dtype)
        if use_gate:
            self.g_proj = linear(hidden_size, value_dim)
            self.o_norm = GatedRMSNorm(self.head_v_dim, activation=output_gate_activation, **norm)
        else:
            self.o_norm = RMSNorm(self.head_v_dim, **norm)
        self.o_proj = linear(value_dim, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache):
        """See :meth:`TokenMixer.mix`; the cache holds three windows and the state."""
        windows = None if cache is None else cache.get("conv_state")
        heads, windows = self._project(x, segment_ids, windows)
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        o, state = gated_delta_rule(
            rearrange(heads["q"], "b t (h k) -> b t h k", k=self.head_dim),
            rearrange(heads["k"], "b t (h k) -> b t h k", k=self.head_dim),
            rearrange(heads["v"], "b t (h v) -> b t h v", v=self.head_v_dim),
            softplus_decay(self.a_proj(x), self.A_log[...], self.dt_bias[...]),
            beta * 2 if self.allow_neg_eigval else beta,
            initial_state=None if cache is None else cache["recurrent_state"],
            output_final_state=cache is not None,
            segment_ids=segment_ids,
            use_qk_l2norm=True,
            impl=self.impl,
        )
        if isinstance(self.o_norm, GatedRMSNorm):
            o = self.o_norm(o, self.g_proj(x).reshape(o.shape))
        else:
            o = self.o_norm(o)
        y = self.o_proj(o.reshape(*x.shape[:2], -1))
        if cache is None:
            return y, None
        return y, {"recurrent_state": state} | ({} if windows is None else {"conv_state": windows})

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, Hv, K, V]`` float32 and windows ``[B, W-1, D]`` of q, k, v."""
        shape = (batch_size, self.num_v_heads, self.head_dim, self.head_v_dim)
        state: Cache = {"recurrent_state": jnp.zeros(shape, jnp.float32)}
        if self.use_short_conv:
            state["conv_state"] = new_windows(self._convs(), batch_size, dtype)
        return state

    def _convs(self) -> dict[str, ShortConvolution]:
        return {"q": self.q_conv1d, "k": self.k_conv1d, "v": self.v_conv1d}

    def _project(self, x, segment_ids, windows):
        streams = {"q": self.q_proj(x), "k": self.k_proj(x), "v": self.v_proj(x)}
        if not self.use_short_conv:
            return jax.tree.map(jax.nn.silu, streams), None
        return convolve(self._convs(), streams, segment_ids=segment_ids, windows=windows)


def softplus_decay(a: jax.Array, a_log: jax.Array, dt_bias: jax.Array) -> jax.Array:
    """Log decay ``-exp(A_log) * softplus(a + dt_bias)``, natural log, float32 ``[..., H]``."""
    return -jnp.exp(a_log) * jax.nn.softplus(a.astype(jnp.float32) + dt_bias)


def _check(head_dim, expand_v, num_heads, num_v_heads, mode):
    if not math.isclose(head_dim * expand_v, round(head_dim * expand_v), rel_tol=1e-5):
        raise ValueError(
            f"expand_v={expand_v} times head_dim={head_dim} must be a whole number, "
            f"got {head_dim * expand_v}"
        )
    if num_v_heads % num_heads:
        raise ValueError(f"num_v_heads={num_v_heads} must be a multiple of num_heads={num_heads}")
    if mode not in ("chunk", "fused_recurrent"):
        raise ValueError(f"mode must be 'chunk' or 'fused_recurrent', got {mode!r}")
