"""HGRN (arXiv:2311.04823), FLA's ``HGRNAttention``."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jla.layers import carry, heads
from jla.layers.mixer import Cache, TokenMixer
from jla.nn import GatedRMSNorm, init, short_convolution
from jla.nn.lower_bound import log_forget_gate
from jla.ops import hgrn


class HGRNAttention(TokenMixer):
    """A gated sum in every channel, which takes in as much of a token as it forgets for it.

    With forget gate ``f = sigmoid(f_proj(x))``, kept above a lower bound, :func:`jla.ops.hgrn` runs
    with log decay ``log f`` on ``silu(i_proj(x)) * (1 - f)``; its output is normalised, gated and
    projected back.

    Args:
        mode: FLA's ``"chunk"`` or ``"fused_recurrent"``, kept and without effect on the numbers.
        hidden_size: D.
        expand_ratio: channels over D.
        use_short_conv: filter i and f over time first, without activation.
        conv_size: taps of the convolutions.
        conv_bias: give them a bias.
        elementwise_affine: learn the scale of the output norm.
        norm_eps: of the output norm.
        layer_idx: FLA's argument, not needed here: its layer 0 takes no lower bound, ours one of 0.
        dtype, param_dtype, precision: as in :class:`flax.nnx.Linear`; gates and the state
            ``[B, D expand_ratio]`` are float32 always.
        kernel_init: initialiser of kernels; torch's defaults, as FLA's layer alone has, if None.
        impl: implementation of the recurrence, see :func:`jla.ops.hgrn`.
        rngs: ``params`` stream.

    A call takes ``lower_bound [D expand_ratio]`` besides, see
    :func:`jla.nn.lower_bound.lower_bounds`. Padding is an identity step wherever it stands; FLA's
    layer forgets at it.

    Raises:
        ValueError: an unknown mode, no channels.
    """

    takes = frozenset({"lower_bound"})

    def __init__(
        self,
        mode: str = "chunk",
        hidden_size: int = 1024,
        expand_ratio: int | None = 1,
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
        heads.check_mode(mode)
        if expand_ratio is None or int(hidden_size * expand_ratio) < 1:
            raise ValueError(
                f"expand_ratio times hidden_size={hidden_size} must be at least 1, "
                f"got expand_ratio={expand_ratio}"
            )
        self.mode, self.hidden_size, self.impl = mode, hidden_size, impl
        self.width = width = int(hidden_size * expand_ratio)
        self.dtype, self.param_dtype = dtype, param_dtype

        linear = init.linear(dtype, param_dtype, precision, kernel_init, rngs)
        conv = short_convolution(conv_size, conv_bias, param_dtype, kernel_init, rngs)
        streams = {"i": width, "f": width}
        heads.add_qkv(self, streams, linear, conv if use_short_conv else None, bare="if")
        self.g_proj = linear(hidden_size, width)
        norm: dict[str, Any] = dict(eps=norm_eps, param_dtype=param_dtype)
        self.g_norm = GatedRMSNorm(width, elementwise_affine=bool(elementwise_affine), **norm)
        self.o_proj = linear(width, hidden_size)

    def mix(self, x, *, segment_ids, positions, cache, lower_bound=None):
        """See :meth:`TokenMixer.mix`; the cache holds the state and windows."""
        streams, windows = heads.project(self, x, "if", segment_ids, cache)
        g = log_forget_gate(streams["f"], lower_bound)
        taken = (jax.nn.silu(streams["i"].astype(g.dtype)) * -jnp.expm1(g)).astype(x.dtype)
        o, *states = hgrn(taken, g, **carry.op_options(self, segment_ids, cache))
        y = self.o_proj(self.g_norm(o, self.g_proj(x)))
        return y, carry.cache_after(states, windows)

    def new_state(self, batch_size: int, max_length: int | None, dtype) -> Cache:
        """State ``[B, D expand_ratio]`` float32, as FLA's, and windows of i and f."""
        state = jnp.zeros((batch_size, self.width), jnp.float32)
        return carry.cache_after([state], heads.empty_windows(self, batch_size, dtype)) or {}
