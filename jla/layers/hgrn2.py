"""HGRN2 (arXiv:2404.07904), FLA's ``HGRN2Attention``."""

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
from jla.nn.lower_bound import log_forget_gate
from jla.ops import gla

# FLA's fused norm and projection takes its default here, whatever norm_eps says.
NORM_EPS = 1e-5


class HGRN2Attention(TokenMixer):
    """A memory per head that takes in as much of a token as it forgets for it.

    With forget gate ``f = sigmoid(f_proj(x))`` per key channel, kept above a lower bound,
    :func:`jla.ops.gla` runs with log decay ``log f``, keys ``1 - f`` and values ``i_proj(x)``; its
    output is normalised over all heads and projected.

    Args:
        mode: FLA's ``"chunk"``, ``"fused_recurrent"`` or ``"fused_chunk"``, kept and without effect
            on the numbers.
        hidden_size: D, the width of all values.
        num_heads: heads, where ``expand_ratio`` is None.
        expand_ratio: key head size K; then there are ``D // K`` heads.
        use_short_conv: filter q, f and i over time first, without activation.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: kept and without effect, as in FLA, where the output norm always adds 1e-5.
        layer_idx: FLA's argument, not needed here: its layer 0 takes no lower bound, ours one of 0.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; gates and the state
            ``[B, H, K, D/H]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.gla`.
        rngs: ``params`` stream.

    A call takes ``lower_bound [H K]`` besides, see :func:`jla.nn.lower_bound.lower_bounds`.

    Raises:
        ValueError: sizes that do not divide or are not given, an unknown mode.
    """

    takes = frozenset({"lower_bound"})

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        num_heads: int | None = None,
        expand_ratio: int | None = 128,
        use_short_conv: bool = False,
        conv_size: int = 4,
        conv_bias: bool = False,
        elementwise_affine: bool | None = True,
        norm_eps: float = 1e-5,
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
        if expand_ratio is not None:
            num_heads = hidden_size // expand_ratio
        if not num_heads or hidden_size % num_heads:
            raise ValueError(
                f"hidden_size={hidden_size} must be a multiple of the heads that num_heads or "
                f"expand_ratio={expand_ratio} give, got {num_heads}"
            )
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.num_v_heads, self.head_v_dim = num_heads, hidden_size // num_heads
        self.head_dim = self.head_v_dim if expand_ratio is None else expand_ratio
        self.dtype, self.param_dtype = dtype, param_dtype

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        forget = num_heads * self.head_dim
        widths = {"q": forget, "f": forget, "i": hidden_size}
        heads.add_qkv(self, widths, linear, conv if use_short_conv else None, bare="qfi")
        norm: dict[str, Any] = dict(eps=NORM_EPS, param_dtype=param_dtype)
        self.g_norm = RMSNorm(hidden_size, elementwise_affine=bool(elementwise_affine), **norm)
        self.o_proj = linear(hidden_size, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache, lower_bound=None):
        """See :meth:`TokenMixer.mix`; the cache holds the state and windows."""
        streams, windows = heads.project(self, x, "qfi", segment_ids, cache)
        g = log_forget_gate(streams["f"], lower_bound)
        values = streams["i"]
        operands = (jax.nn.silu(streams["q"]), -jnp.expm1(g).astype(values.dtype), values, g)
        by_head = (rearrange(y, "b t (h d) -> b t h d", h=self.num_v_heads) for y in operands)
        o, *states = gla(*by_head, **carry.op_options(self, segment_ids, cache))
        y = self.o_proj(self.g_norm(o.reshape(x.shape)))
        return y, carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, H, K, D/H]`` float32 (FLA's is transposed) and windows of q, f, i."""
        return heads.new_cache(self, batch_size, dtype)
